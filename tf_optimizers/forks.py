"""Sets the handler of SIGTERM in forked processes."""

import os
import signal
import threading
from collections.abc import Callable

_masks = threading.local()  # Holds the thread's masks before the fork.


def restore_in_forks(restore: Callable[[], None]) -> None:
    """Call `restore`, which sets the handler, in every process forked later.

    A parent can end a child before the child has called anything. So SIGTERM is
    blocked from before the fork until after the call, and then arrives.
    """

    def block() -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        vars(_masks).setdefault("saved", []).append(mask)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.saved.pop())

    def restore_and_unblock() -> None:
        restore()
        unblock()

    os.register_at_fork(
        before=block,
        after_in_parent=unblock,
        after_in_child=restore_and_unblock,
    )
