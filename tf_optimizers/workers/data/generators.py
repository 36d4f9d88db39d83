"""Draws from Python generators equally often on all workers.

TensorFlow reads ahead, in threads. When Keras drops an iterator, for example at
the end of `fit`, some workers may have read further than others. The next
iterators would then begin at different batches. So before the next iterator
begins, workers that are behind draw and discard batches to catch up.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.patches import hook
from tf_optimizers.workers.agreement.statements import gather_statements

_SUBJECT = "an epoch of a generator"
_HINT = "Pass generators to Keras on every worker."


class _State:
    """The state that all iterators over a generator share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turn: object = None  # The token of the iterator that may draw.
        self.count = 0  # The number of batches drawn.


_states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()


class SynchronizedGenerator:
    """A generator from which only the latest iterator may draw.

    Attributes:
        peeked: The batches that Keras has drawn to find their type. Every
            iterator that Keras makes yields these batches first.
        is_read: Whether Keras has begun to read the batches.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._state = _states.setdefault(generator, _State())
        self._is_used = self._state.count > 0
        self._has_begun = False
        self.peeked: list[Any] = []
        self.is_read = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches until another iterator begins."""
        state, turn = self._state, object()
        with state.lock:
            state.turn = turn
        return self._draw(turn)

    def _draw(self, turn: object) -> Iterator[Any]:
        while True:
            with self._state.lock:
                if self._state.turn is not turn:
                    return
                try:
                    batch = self._next()
                except StopIteration:
                    return
            yield batch

    def _next(self) -> Any:
        batch = next(self._generator)
        self._state.count += 1
        return batch

    def begin(self, strategy: tf.distribute.Strategy) -> None:
        """Make the next iterator begin at the same batch on all workers."""
        if self._is_used:
            self._catch_up(strategy)
        self._is_used = self._has_begun = True

    def _catch_up(self, strategy: tf.distribute.Strategy) -> None:
        """End all iterators, and draw until no other worker is ahead."""
        state = self._state
        with state.lock:
            state.turn = None
        counts = gather_statements(strategy, _SUBJECT, state.count, _HINT)
        if min(counts) == max(counts):
            return
        self._draw_some(max(counts) - state.count)
        if not self._has_begun:
            # Peek again, so that all workers begin with the same batches.
            self.peeked[:] = self._draw_some(len(self.peeked))

    def _draw_some(self, number: int) -> list[Any]:
        """Draw `number` batches, or fewer at the end of the generator."""
        found: list[Any] = []
        with contextlib.suppress(StopIteration):
            while len(found) < number:
                found.append(self._next())
        return found


class _PendingGenerator(threading.local):
    """The generator of the dataset that Keras is about to distribute."""

    generator: SynchronizedGenerator | None = None


_pending = _PendingGenerator()


@functools.cache
def watch_generators() -> None:
    """Make Keras use `peek_at_generator` for generators, permanently."""
    hook("generator_data_adapter.peek_and_restore", peek_at_generator)


def peek_at_generator(peek: Callable, generator: Generator) -> Any:
    """Peek at a generator through a `SynchronizedGenerator`.

    Args:
        peek: Keras's own function.
        generator: The generator that the user has passed.
    """
    shared = _pending.generator = SynchronizedGenerator(generator)
    shared.peeked, iterate = peek(shared)

    def begin() -> Iterator[Any]:
        shared.is_read = True
        return iterate()

    return shared.peeked, begin


def take_generator() -> SynchronizedGenerator | None:
    """Return and forget the generator of the data to distribute, if any.

    A generator that Keras already reads belongs to other data: a model without
    a strategy reads its generators without distributing them.
    """
    found, _pending.generator = _pending.generator, None
    return None if found is None or found.is_read else found
