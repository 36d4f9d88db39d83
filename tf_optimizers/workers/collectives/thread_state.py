"""Holds values that are separate for each thread."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ThreadState(threading.local):
    """An object whose attributes have separate values in each thread.

    A subclass's class attributes are the values in a new thread.
    """

    @contextlib.contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Set attributes in a context, and restore them afterwards."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(before)
