"""Asks other workers beside a step, where steps are called eagerly.

A function does this by itself: nothing in it waits for the answer. Between
functions a thread asks, and the next question waits for it, so that all
workers ask in one order.
"""

import threading
import weakref
from collections.abc import Callable

from tf_optimizers._compat import coordination

# All workers have begun to ask, unless one has failed.
_ENDING_SECONDS = 2.0
_ABORTED_SECONDS = 1.0


class Beside:
    """Calls functions beside what the program does, one at a time.

    Args:
        owner: For what it does so: an object that ends with it, or with Python.
        is_at_once: Whether there is no other worker. It can be set later,
            where functions may come in between without any notice here.
    """

    def __init__(self, owner: object, is_at_once: bool = False) -> None:
        self.is_at_once = is_at_once
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        weakref.finalize(owner, self._end)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in a thread, after the one before has ended."""
        self.wait()
        if self.is_at_once:
            function()
            return

        def call() -> None:
            try:
                function()
            except Exception as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the function that has been called, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._errors:
            raise self._errors.pop()

    def _end(self) -> None:
        """End a thread that is left; TensorFlow does not survive one."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_ENDING_SECONDS)
        if thread.is_alive():
            coordination.abort("This worker ends before the others.")
            thread.join(_ABORTED_SECONDS)
