"""Sets the SIGTERM handler in forked processes."""

import os
import signal
import threading
from collections.abc import Callable

# The signal masks that each thread had before it forked.
_masks = threading.local()


def restore_in_forks(restore: Callable[[], None]) -> None:
    """Call `restore` in every process that this process forks.

    `restore` sets the child's SIGTERM handler. The parent may send SIGTERM
    earlier, so the child blocks SIGTERM until `restore` returns.
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
