"""Starts TensorFlow without its messages about the machine."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from types import ModuleType

from tf_optimizers.demo.parts import load_part

Parts = dict[str, tuple[ModuleType, ModuleType]]


def load_parts(names: Iterable[str]) -> Parts:
    """Import parts of the demo, and start TensorFlow's devices."""
    # Once TensorFlow has read this level, it prints only errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with hidden_unless_it_fails():
        parts = {name: load_part(name) for name in names}
        import tensorflow as tf

        tf.config.list_logical_devices()
    return parts


@contextlib.contextmanager
def hidden_unless_it_fails() -> Iterator[None]:
    """Hide output to stderr, but print it if an exception is raised.

    TensorFlow's libraries write to file descriptor 2 directly, and write some
    messages before they have read a log level.
    """
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        own = os.dup(2)
        stack.callback(os.close, own)
        stack.callback(os.dup2, own, 2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            said.seek(0)
            with open(own, "wb", closefd=False) as stderr:
                shutil.copyfileobj(said, stderr)
            raise
        sys.stderr.flush()
