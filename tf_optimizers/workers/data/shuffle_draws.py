"""Counts how often shuffles have drawn their seeds.

A shuffled dataset has a generator, from which each iterator draws a pair of
seeds. If only one worker makes an iterator, this worker has a different order
in all later epochs. TensorFlow has no API for the number of draws, but the
saved state of an iterator depends on this number. So this module makes a second
generator with the same seeds, draws from it until both generators have the same
state, and counts these draws.
"""

import functools
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import add_to_graphs
from tf_optimizers.workers._compat.datasets import (
    arguments_of,
    graphs_of,
    inputs_of,
    seeds_of,
    set_variant,
)

# The largest number of draws that is counted.
_MOST_DRAWS = 2000


class _Probe:
    """An empty iterator that draws from a seed generator."""

    def __init__(self, seeds: dict[str, Any], generator: Any) -> None:
        # Keep the deleter: the generator is deleted together with it.
        handle, self._deleter = generator
        kind = {"output_types": [tf.int64], "output_shapes": [[]]}
        self._dataset = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=tf.data.experimental.to_variant(
                tf.data.Dataset.range(0)
            ),
            buffer_size=1,
            seed_generator=handle,
            **seeds,
            **kind,
        )
        self._iterator = tf.raw_ops.AnonymousIteratorV3(**kind)

    def draw(self) -> bytes:
        """Draw a pair of seeds; return the new state of the iterator."""
        tf.raw_ops.MakeIterator(dataset=self._dataset, iterator=self._iterator)
        return self.save()

    def save(self) -> bytes:
        """Return the iterator's state, which depends on the number of draws."""
        state = tf.raw_ops.SerializeIterator(resource_handle=self._iterator)
        return tf.io.serialize_tensor(state).numpy()

    def load(self, saved: bytes) -> None:
        """Set the generator to a state from `save`."""
        tf.raw_ops.DeserializeIterator(
            resource_handle=self._iterator,
            serialized=tf.io.parse_tensor(saved, tf.variant),
        )


class ShuffleDraws:
    """Counts how often a shuffle has drawn its seeds, and can set this number.

    Attributes:
        seeds: The two seeds of the shuffle's generator.
        generator: The handle of the generator, and its deleter.
    """

    def __init__(self, seed: tf.Tensor, seed2: tf.Tensor) -> None:
        self.seeds = {"seed": seed, "seed2": seed2}
        self.generator = self._make_generator()
        self._saved: list[bytes] = []
        self._numbers: dict[bytes, int] = {}

    def _make_generator(self) -> tuple[Any, Any]:
        return tf.raw_ops.AnonymousSeedGenerator(**self.seeds, reshuffle=True)

    @functools.cached_property
    def _own(self) -> _Probe:
        return _Probe(self.seeds, self.generator)

    @functools.cached_property
    def _counted(self) -> _Probe:
        """A probe of a second generator with the same seeds."""
        return _Probe(self.seeds, self._make_generator())

    def state(self) -> bytes:
        """Return the generator's state, to compare between workers.

        Workers with equal bytes have drawn equally often. But workers that have
        drawn equally often may have different bytes until all of them have
        called `set` with the same number.
        """
        if not self._saved:
            self.count()
        return self._own.save()

    def count(self) -> int:
        """Return the number of draws, or -1 for more than `_MOST_DRAWS`.

        If nothing was drawn yet, this method draws once and returns 1. If it
        returns -1, the shuffle has drawn once more.
        """
        with tf.device("CPU:0"):
            found = self._find(self._own.draw())
        if found is None:
            return -1
        number = max(found - 1, 1)
        self.set(number)
        return number

    def _find(self, saved: bytes) -> int | None:
        while saved not in self._numbers:
            if len(self._saved) > _MOST_DRAWS:
                return None
            self._draw_counted()
        return self._numbers[saved]

    def _draw_counted(self) -> None:
        saved = self._counted.draw()
        self._saved.append(saved)
        self._numbers[saved] = len(self._saved)

    def set(self, number: int) -> None:
        """Continue as if the shuffle had drawn `number` >= 1 times."""
        with tf.device("CPU:0"):
            while len(self._saved) < number:
                self._draw_counted()
            self._own.load(self._saved[number - 1])


def count_draws(
    dataset: Any,
    source: tf.data.Dataset,
    size: Any,
    reshuffles: bool | None,
    chosen: int | None,
) -> Any:
    """Make a dataset's draws countable where possible; see `draws_of`.

    Args:
        dataset: The result of `Dataset.shuffle`. Its seed generator is private,
            so the dataset gets another generator.
        source: The dataset before the shuffle.
        size: The number of elements in the shuffle buffer.
        reshuffles: Whether each iteration has a different order. None means
            True.
        chosen: The seed that this package has chosen, or None if the user has
            set a seed.
    """
    own = seeds_of(dataset)
    if not own or reshuffles is False:
        return dataset
    with tf.device("CPU:0"):
        is_eager = tf.executing_eagerly()
        draws = ShuffleDraws(*own) if is_eager else _draws_in_function(chosen)
        if draws is None:
            return dataset
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=tf.data.experimental.to_variant(source),
            buffer_size=tf.cast(size, tf.int64),
            **draws.seeds,
            seed_generator=draws.generator[0],
            **arguments_of(dataset),
        )
    # A `tf.function` might refer to the variant alone, so let the variant keep
    # the generator alive.
    variant.draws = dataset.draws = draws
    set_variant(dataset, variant)
    return dataset


def _draws_in_function(chosen: int | None) -> ShuffleDraws | None:
    """Return the `ShuffleDraws` of a shuffle that a traced function makes.

    For example, the function of a `flat_map` may make a shuffled dataset for
    each file. TensorFlow gives each of these datasets its own generator. With
    one seed, all datasets would have the same order in all epochs. So make a
    single generator, which the traced function captures.

    Returns:
        None if the user has set a seed, or without eager execution.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        if chosen is None or not tf.executing_eagerly():
            return None
        seeds = tf.constant([chosen, chosen + 1], tf.int64)
        draws = ShuffleDraws(*tf.unstack(seeds))
    add_to_graphs("draws", draws)  # `draws_of` reads this attribute.
    return draws


def draws_of(dataset: tf.data.Dataset) -> list[ShuffleDraws]:
    """Return the `ShuffleDraws` of a dataset's shuffles, in a fixed order.

    A shuffle has none if each iteration has the same order, or if a function
    makes the shuffle with the user's seed.
    """
    own = [dataset.draws] if hasattr(dataset, "draws") else []
    for graph in graphs_of(dataset):
        own += getattr(graph, "draws", [])
    for source in inputs_of(dataset):
        own += [draws for draws in draws_of(source) if draws not in own]
    return own
