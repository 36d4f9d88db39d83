"""Checks that shared data have one order, and one length, on all workers.

Under TensorFlow, every worker goes through all of a dataset, and keeps its
share of each batch. If workers shuffle differently, an epoch misses some rows
and sees others twice. If they count different numbers of batches, they wait for
each other forever.
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
from tf_optimizers.workers.agreement.statements import (
    gather_statements,
    raise_together,
)
from tf_optimizers.workers.data.batch_splits import is_split
from tf_optimizers.workers.data.shuffles import (
    replace_shuffles,
    seeds_of_shuffles,
    tensorflow_seed,
)

_POLICIES = tf.data.experimental.AutoShardPolicy
_BATCHES = {
    tf.data.INFINITE_CARDINALITY: "infinitely many",
    tf.data.UNKNOWN_CARDINALITY: "an unknown number",
}


class _ShuffleSeed:
    """The seed to shuffle data by, unless the user has seeded TensorFlow."""

    _seed: int | None = None

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        # Seed and epoch of the arrays that will be distributed next.
        self._of_arrays: tf.Variable | None = None

    def set(self, seed: int) -> None:
        """Shuffle by a seed from now on.

        So do arrays that were waiting for it. Workers may have come to `fit` on
        different lines, after others that one has trained alone.
        """
        _shuffle_alike()
        self._seed = seed
        self._counts.clear()
        if self._of_arrays is not None:
            self._of_arrays.assign([seed, 0])
            self._of_arrays = None

    def next(self) -> int | None:
        """Return a seed that no other shuffle has, unless the user has one.

        Rows of two datasets that are shuffled alike would come in pairs.
        """
        if self._seed is None or tensorflow_seed() is not None:
            return None
        # One worker may make shuffles that others do not, elsewhere.
        place = _line_of_user()
        self._counts[place] += 1
        text = f"{self._seed} {place} {self._counts[place]}"
        return zlib.crc32(text.encode()) % 2**31

    def shuffle_of_arrays(self) -> Callable | None:
        """Return a function that shuffles differently in every epoch."""
        seed = self.next()
        if seed is None:
            return None
        with tf.device("CPU:0"):
            start = tf.constant([seed, 0], tf.int64)
            state = self._of_arrays = plain_variable(start, trainable=False)

        def shuffle(rows: tf.Tensor) -> tf.Tensor:
            seed_and_epoch = state.assign_add(tf.constant([0, 1], tf.int64))
            return tf.random.experimental.stateless_shuffle(
                rows, tf.convert_to_tensor(seed_and_epoch)
            )

        return shuffle


def _line_of_user() -> str:
    """Return the function and line that call a package of those used here."""
    for frame, line in traceback.walk_stack(None):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("tensorflow", "keras", "tf_optimizers"):
            return f"{frame.f_code.co_name} {line}"
    return ""


_shuffle_seed = _ShuffleSeed()


@functools.cache
def _shuffle_alike() -> None:
    """Let data be shuffled by the seed, once."""
    replace_shuffles(_shuffle_seed.next, _shuffle_seed.shuffle_of_arrays)


def propose_seeds() -> list[int]:
    """Return a seed to shuffle by, and digests of this host's generators."""
    return [secrets.randbelow(2**31), *generators_of_host()]


def generators_of_host() -> list[int]:
    """Return digests of the states of Python's and NumPy's generators."""
    states = (random.getstate(), np.random.get_state())
    return [zlib.crc32(pickle.dumps(state)) for state in states]


def adopt_seeds(proposals: Sequence[Sequence[int]]) -> None:
    """Shuffle by the first worker's seed, unless the user has set one."""
    _shuffle_seed.set(proposals[0][0])
    align_generators([digests for _, *digests in proposals])


def align_generators(digests: Sequence[Sequence[int]]) -> None:
    """Seed those of this host's generators that differ between workers.

    A `PyDataset` or a generator may shuffle by Python's or NumPy's random
    numbers. These are left alone where they are alike on all workers, or where
    the user has seeded TensorFlow.
    """
    if tensorflow_seed() is not None:
        return
    reseed_all: list[Callable[[int], None]] = [random.seed, np.random.seed]
    for i, reseed in enumerate(reseed_all):
        if any(other[i] != digests[0][i] for other in digests):
            reseed(digests[0][i])


def in_one_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset whose order is the same on all who share it.

    The order in which parallel parts are done, which
    `options.deterministic=False` allows, differs between workers.
    """
    if not is_shared(dataset):
        return dataset
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def agree_on_data(strategy: Any, dataset: Any, batches: int) -> None:
    """Raise unless all workers distribute data of one length and order.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        dataset: The dataset that workers share, or None if each has its own.
        batches: This worker's number of batches, or TensorFlow's constant for
            an infinite or unknown one.
    """
    is_same = is_shared(dataset)
    seeds = seeds_of_shuffles(dataset) if is_same else []
    received = gather_statements(
        strategy,
        "the distribution of data",
        [int(batches), seeds, propose_seeds()],
        "`fit`, `evaluate` and `predict` must be called on every worker.",
    )
    lengths, shuffles, proposals = zip(*received, strict=True)
    if len(set(lengths)) > 1:
        told = [_BATCHES.get(length, length) for length in lengths]
        raise_together(
            "All workers must have the same number of batches. "
            f"Received: {_by_worker(told)}. Use `.take(n)` with one n on every "
            "worker; or `.repeat()`, with `steps_per_epoch` in `fit`."
        )
    if any(other != shuffles[0] for other in shuffles):
        raise_together(
            "All workers must shuffle shared data alike. "
            f"Received: the seeds {_by_worker(shuffles)}. Set the same seeds "
            "on every worker, and let all make the same datasets. Without a "
            "seed, the order follows the line that shuffles: let all workers "
            "shuffle there, not each in a branch of its own. Or, if "
            "workers share files or nothing, set "
            "`options.experimental_distribute.auto_shard_policy` to `FILE` or "
            "`OFF`."
        )
    # Workers with data of their own may use seeds of their own.
    if is_same:
        adopt_seeds(proposals)


def is_shared(dataset: Any) -> bool:
    """Return whether every worker goes through the whole dataset."""
    if dataset is None:
        return False
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_by_rows = policy in (_POLICIES.AUTO, _POLICIES.DATA)
    return is_by_rows and is_split(dataset.element_spec)


def _by_worker(values: Sequence[Any]) -> str:
    return ", ".join(f"{v} on worker {i}" for i, v in enumerate(values))
