"""Counts how often shuffles have drawn their seeds.

Each iterator over a shuffled dataset draws a pair of seeds, so one that only
a single worker has made gives all later epochs another order there. TensorFlow
does not tell how often that was, but saves it with an iterator.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.patches import replace
from tf_optimizers.workers._compat.distribution import ShuffleDataset

# A shuffle that has drawn more often than this is not followed.
_MOST = 2000


class _Probe:
    """An iterator over nothing, which draws from a generator of seeds."""

    def __init__(self, seeds: dict[str, Any], generator: Any) -> None:
        # It lives as long as what deletes it.
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
        """Draw once, and return what is saved after it."""
        tf.raw_ops.MakeIterator(dataset=self._dataset, iterator=self._iterator)
        return self.save()

    def save(self) -> bytes:
        """Return what tells how often anybody has drawn."""
        state = tf.raw_ops.SerializeIterator(resource_handle=self._iterator)
        return tf.io.serialize_tensor(state).numpy()

    def load(self, saved: bytes) -> None:
        """Go on as if nothing had been drawn since this was saved."""
        tf.raw_ops.DeserializeIterator(
            resource_handle=self._iterator,
            serialized=tf.io.parse_tensor(saved, tf.variant),
        )


class Draws:
    """How often a shuffle has drawn seeds; it can be set, but not to 0.

    Attributes:
        seeds: Of its generator of seeds.
        generator: Its handle, and what deletes it.
    """

    def __init__(self, seed: tf.Tensor, seed2: tf.Tensor) -> None:
        self.seeds = {"seed": seed, "seed2": seed2}
        self.generator = self._make_generator()
        self._saved: list[bytes] = []
        self._numbers: dict[bytes, int] = {}

    def _make_generator(self) -> tuple[Any, Any]:
        """Return a handle, and what deletes it."""
        return tf.raw_ops.AnonymousSeedGenerator(**self.seeds, reshuffle=True)

    @functools.cached_property
    def _own(self) -> _Probe:
        return _Probe(self.seeds, self.generator)

    @functools.cached_property
    def _counted(self) -> _Probe:
        """What draws the same seeds from a generator of its own."""
        return _Probe(self.seeds, self._make_generator())

    def state(self) -> bytes:
        """Return what is alike on all workers that have drawn equally often.

        It is, too, if they have since all have last set one number.
        """
        if not self._saved:
            self.count()
        return self._own.save()

    def count(self) -> int:
        """Return how often it has drawn, -1 if too often to tell.

        What has never drawn counts as having drawn once, and has, then.
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
            if len(self._saved) > _MOST:
                return None
            self._draw_counted()
        return self._numbers[saved]

    def _draw_counted(self) -> None:
        saved = self._counted.draw()
        self._saved.append(saved)
        self._numbers[saved] = len(self._saved)

    def set(self, number: int) -> None:
        """Go on as if it had drawn so often, at least once."""
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
    """Return a shuffled dataset that tells its draws: see `draws_of`.

    Args:
        dataset: What `Dataset.shuffle` has returned. It keeps the generator of
            its seeds to itself; this gives it another with the same seeds.
        source: What is shuffled.
        size: Of the buffer.
        reshuffles: Whether each iteration has another order; None means so.
        chosen: The seed, where the user has given none.
    """
    if not isinstance(dataset, ShuffleDataset) or reshuffles is False:
        return dataset
    with tf.device("CPU:0"):
        is_eager = tf.executing_eagerly()
        draws = (
            Draws(dataset._seed, dataset._seed2)
            if is_eager
            else _of_function(chosen)
        )
        if draws is None:
            return dataset
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=tf.data.experimental.to_variant(source),
            buffer_size=tf.cast(size, tf.int64),
            **draws.seeds,
            seed_generator=draws.generator[0],
            **dataset._common_args,
        )
    # A function may hold on to this only, and still needs the generator.
    variant.draws = dataset.draws = draws
    dataset._variant_tensor_attr = variant
    return dataset


def _of_function(chosen: int | None) -> Draws | None:
    """Return the draws of a shuffle in a function, None if the user's alone.

    Such as that of `flat_map`, which makes a dataset of each file. Each has its
    own generator of seeds there, and with one seed all would have one order, in
    all epochs. So they draw from one generator, which the function captures.
    """
    graph = tf.compat.v1.get_default_graph()
    with tf.init_scope(), tf.device("CPU:0"):
        if chosen is None or not tf.executing_eagerly():
            return None
        seeds = tf.constant([chosen, chosen + 1], tf.int64)
        draws = Draws(*tf.unstack(seeds))
    while hasattr(graph, "outer_graph"):
        # It lives as long as any of them, and is found there.
        graph.draws = [*getattr(graph, "draws", []), draws]
        graph = graph.outer_graph
    return draws


def draws_of(dataset: tf.data.Dataset) -> list[Draws]:
    """Return the draws of all shuffles in a dataset, in a fixed order.

    Of those in functions, the ones that the user gives no seed. TensorFlow has
    no public way to list the parts of a dataset.
    """
    own = [dataset.draws] if hasattr(dataset, "draws") else []
    for function in dataset._functions():
        own += getattr(function.function.graph, "draws", [])
    for part in dataset._inputs():
        own += [draws for draws in draws_of(part) if draws not in own]
    return own


@functools.cache
def share_generators(peek: Callable[[Callable, Any], Any]) -> None:
    """Let a function peek at the generators that Keras draws from.

    From now on in this process.

    Args:
        peek: Called with Keras's own, and a generator. Returns the first
            batches, and what makes an iterator that begins with these.
    """
    replace(
        "generator_data_adapter.peek_and_restore",
        lambda original: functools.wraps(original)(
            functools.partial(peek, original)
        ),
    )
