"""Begins each epoch with the same order of data on all workers.

By default, a shuffle draws a new order for each iterator. If one worker alone
makes an iterator, for example to look at a batch, this worker's shuffle is one
order ahead. So workers compare how many orders their shuffles have drawn, and
the workers that are behind catch up.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.workers.agreement.statements import gather_statements
from tf_optimizers.workers.data.generators import SynchronizedGenerator
from tf_optimizers.workers.data.order import (
    align_generators,
    generator_digests,
)
from tf_optimizers.workers.data.shuffle_draws import ShuffleDraws, draws_of
from tf_optimizers.workers.data.shuffles import comes_from_python

_SUBJECT = "the beginning of an epoch"
_HINT = "Iterate over the dataset on every worker."


class EpochStart:
    """Makes an iterator for each epoch of data that workers share.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        dataset: The dataset, the same on all workers.
        generator: The generator from which Keras has made the dataset, or None.
    """

    def __init__(
        self,
        strategy: Any,
        dataset: tf.data.Dataset,
        generator: SynchronizedGenerator | None = None,
    ) -> None:
        self._strategy = strategy
        self._generator = generator
        # `_draws` and `_is_python` decide whether workers exchange states. So
        # all workers must have equally many `_draws`, and equal `_is_python`.
        is_alone = strategy.extended.workers == 1
        self._draws = [] if is_alone else draws_of(dataset)
        self._is_python = not is_alone and comes_from_python(dataset)

    def __call__(self, make: Callable[[], Any]) -> Any:
        """Return an iterator from `make`; align its order between workers."""
        if self._generator:
            self._generator.begin(self._strategy)
        iterator = make()
        if not self._draws and not self._is_python:
            return iterator
        generators = generator_digests() if self._is_python else []
        # No shuffle can be set to 0 draws. So compare after `make()`, when most
        # shuffles have drawn at least once.
        states = [zlib.crc32(draws.state()) for draws in self._draws]
        received = self._gather([generators, states])
        if self._is_python:
            align_generators([generators for generators, _ in received])
        if all(states == received[0][1] for _, states in received):
            return iterator
        return self._catch_up(iterator, make)

    def _gather(self, statement: Any) -> list[Any]:
        return gather_statements(self._strategy, _SUBJECT, statement, _HINT)

    def _catch_up(self, iterator: Any, make: Callable[[], Any]) -> Any:
        """Make shuffles catch up with other workers; return an iterator."""
        received = self._gather([draws.count() for draws in self._draws])
        most = [max(numbers) for numbers in zip(*received, strict=True)]
        if any(number < 0 for numbers in received for number in numbers):
            # A shuffle has drawn too often to be counted. So only the
            # comparison of batches can detect that the orders differ.
            return iterator
        if any(numbers != received[0] for numbers in received):
            iterator = self._iterate_from(most, make)
        else:
            _set(self._draws, most)
        return iterator

    def _iterate_from(self, most: Sequence[int], make: Callable) -> Any:
        """Return a new iterator, after equally many draws on all workers.

        `most` lists, for each shuffle, the largest number of draws on any
        worker.
        """
        _set(self._draws, most)
        make()
        steps = [
            draws.count() - number
            for draws, number in zip(self._draws, most, strict=True)
        ]
        before = [n - step for n, step in zip(most, steps, strict=True)]
        # No shuffle can be set to 0 draws. If one would need 0, skip the orders
        # up to `most`.
        _set(self._draws, before if min(before) > 0 else most)
        iterator = make()
        for draws in self._draws:
            draws.count()
        return iterator


def _set(every: Sequence[ShuffleDraws], numbers: Sequence[int]) -> None:
    for draws, number in zip(every, numbers, strict=True):
        draws.set(number)
