"""Gives shared data the same order on all workers; checks order and length.

Every worker iterates over the whole dataset, and takes its replicas' parts of
each batch. If workers shuffled differently, an epoch would miss some rows, and
use others more than once. With different numbers of batches, workers would wait
for each other forever.
"""

import collections
import functools
import pickle
import random
import secrets
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import plain_variable
from tf_optimizers.workers._compat.distribution import tensorflow_seed
from tf_optimizers.workers.agreement.statements import (
    gather_statements,
    raise_together,
)
from tf_optimizers.workers.data.batch_splits import is_split
from tf_optimizers.workers.data.shuffles import (
    replace_shuffles,
    seeds_of_shuffles,
)

_POLICIES = tf.data.experimental.AutoShardPolicy
_BATCHES = {
    tf.data.INFINITE_CARDINALITY: "infinitely many",
    tf.data.UNKNOWN_CARDINALITY: "an unknown number",
}


class _ShuffleSeed:
    """Seeds unseeded shuffles, unless the user has seeded TensorFlow."""

    _seed: int | None = None

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        # The seed and epoch of arrays that `fit` is about to distribute.
        self._of_arrays: tf.Variable | None = None

    def set(self, seed: int) -> None:
        """Derive the seeds of later shuffles from `seed`.

        If `fit` is about to distribute arrays, their seed becomes `seed`
        itself. Their earlier seed from `next` may differ between workers, since
        it depends on the calling line and on earlier shuffles there.
        """
        _shuffle_in_one_order()
        self._seed = seed
        self._counts.clear()
        if self._of_arrays is not None:
            self._of_arrays.assign([seed, 0])
            self._of_arrays = None

    def next(self) -> int | None:
        """Return a new seed, or None if the user has seeded TensorFlow.

        Each shuffle gets a different seed. With one seed, two datasets of equal
        length would have the same order.
        """
        if self._seed is None or tensorflow_seed() is not None:
            return None
        # Count the shuffles of each line of code separately, since one worker
        # may shuffle additional data on another line.
        place = _line_of_user()
        self._counts[place] += 1
        text = f"{self._seed} {place} {self._counts[place]}"
        return zlib.crc32(text.encode()) % 2**31

    def shuffle_of_arrays(self) -> Callable | None:
        """Return a function that shuffles rows differently in every epoch.

        Returns:
            None if the user has seeded TensorFlow.
        """
        seed = self.next()
        if seed is None:
            return None
        with tf.device("CPU:0"):
            start = tf.constant([seed, 0], tf.int64)
            state = self._of_arrays = plain_variable(start)

        def shuffle(rows: tf.Tensor) -> tf.Tensor:
            seed_and_epoch = state.assign_add(tf.constant([0, 1], tf.int64))
            return tf.random.experimental.stateless_shuffle(
                rows, tf.convert_to_tensor(seed_and_epoch)
            )

        return shuffle


def _line_of_user() -> str:
    """Return the innermost function and line of the user's code."""
    for frame, line in traceback.walk_stack(None):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("tensorflow", "keras", "tf_optimizers"):
            return f"{frame.f_code.co_name} {line}"
    return ""


_shuffle_seed = _ShuffleSeed()


@functools.cache
def _shuffle_in_one_order() -> None:
    """Make TensorFlow and Keras shuffle with `_shuffle_seed`, permanently."""
    replace_shuffles(_shuffle_seed.next, _shuffle_seed.shuffle_of_arrays)


def propose_seeds() -> list[int]:
    """Return a random seed for shuffles, followed by `generator_digests()`."""
    return [secrets.randbelow(2**31), *generator_digests()]


def generator_digests() -> list[int]:
    """Return digests of Python's and NumPy's random number generators."""
    states = (random.getstate(), np.random.get_state())
    return [zlib.crc32(pickle.dumps(state)) for state in states]


def adopt_seeds(proposals: Sequence[Sequence[int]]) -> None:
    """Use the first worker's seeds, unless the user has seeded TensorFlow.

    Args:
        proposals: The results of `propose_seeds` on all workers.
    """
    _shuffle_seed.set(proposals[0][0])
    align_generators([digests for _, *digests in proposals])


def align_generators(digests: Sequence[Sequence[int]]) -> None:
    """Reseed Python's and NumPy's generators if they differ between workers.

    The user's code may shuffle data with these generators, for example in a
    `PyDataset`. If the user has seeded TensorFlow, nothing is reseeded.

    Args:
        digests: The results of `generator_digests` on all workers.
    """
    if tensorflow_seed() is not None:
        return
    reseed_all: list[Callable[[int], None]] = [random.seed, np.random.seed]
    for i, reseed in enumerate(reseed_all):
        if any(other[i] != digests[0][i] for other in digests):
            reseed(digests[0][i])


def in_one_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a shared dataset with a deterministic order.

    With `options.deterministic=False`, parallel calls yield elements as soon as
    they are ready, in an order that may differ between workers.
    """
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def agree_on_data(
    strategy: Any, dataset: Any, batches: int, rows: int | None = None
) -> int | None:
    """Raise if workers have different numbers of batches.

    If workers share the data, also raise if their shuffles have different
    seeds, and otherwise adopt common seeds. With one worker, or without eager
    execution, do nothing.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        dataset: The dataset that workers share, or None if each worker makes
            its own data.
        batches: This worker's number of batches, or TensorFlow's constant for
            an infinite or unknown number.
        rows: The number of rows of each batch on this worker; None if it
            varies or is unknown.

    Returns:
        The number of rows of each batch on all workers together; None if it
        varies or is unknown, or if nothing was compared.
    """
    if strategy.extended.workers == 1 or not tf.executing_eagerly():
        return None
    seeds = [] if dataset is None else seeds_of_shuffles(dataset)
    state = strategy.common_state
    received = gather_statements(
        strategy,
        "the distribution of a dataset",
        [int(batches), seeds, propose_seeds(), rows, state.take_set()],
        "Call `fit`, `evaluate` and `predict` on every worker.",
    )
    lengths, shuffles, proposals, counts, has_set = zip(*received, strict=True)
    state.adopt_set(has_set)
    if len(set(lengths)) > 1:
        shown = [_BATCHES.get(length, length) for length in lengths]
        raise_together(
            "All workers must have the same number of batches. "
            f"Received: {_by_worker(shown)}. Use `.take(n)` with the same n on "
            "every worker; or `.repeat()`, with `steps_per_epoch` in `fit`."
        )
    if any(other != shuffles[0] for other in shuffles):
        raise_together(
            "All workers must shuffle shared data in the same way. "
            f"Received: the seeds {_by_worker(shuffles)}. Set the same seeds "
            "on every worker, for example with `keras.utils.set_random_seed` "
            "before `keras.utils.image_dataset_from_directory`, and make the "
            "same datasets. Without a seed, `Dataset.shuffle` depends on the "
            "line that calls it: shuffle on the same line on all workers, not "
            "in different branches. If each worker should "
            "read its own files, or has its own data, set "
            "`options.experimental_distribute.auto_shard_policy` to `FILE` or "
            "`OFF`, respectively."
        )
    # Workers that do not share data may use different seeds.
    if dataset is not None:
        adopt_seeds(proposals)
    return None if None in counts else sum(counts)


def is_shared(dataset: tf.data.Dataset) -> bool:
    """Return whether workers share a dataset, and split each of its batches."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_by_rows = policy in (_POLICIES.AUTO, _POLICIES.DATA)
    return is_by_rows and is_split(dataset.element_spec)


def _by_worker(values: Sequence[Any]) -> str:
    return ", ".join(f"{v} on worker {i}" for i, v in enumerate(values))
