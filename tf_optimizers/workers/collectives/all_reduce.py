"""Reduces and gathers values of replicas, packed into few messages.

    worker 0                          worker 1
    a: 2 entries, b: 1 row, c         a: 2 entries, b: 3 rows, c
        │ pack: as 32-bit words, rows padded
        ▼                                 ▼
    [a b.values b.indices c]          one int32 buffer each
        └───────────── all-gather ────────┘
        ▼ unpack: the same on both
    a: 4 entries, b: up to 4 rows, worker 0 first; common rows are added
    c: dense and small, the sum of both

Rows are padded to the largest number of rows on any replica. If there are
`IndexedSlices`, a small all-gather first exchanges the numbers of rows. Dense
values that are not gathered are summed separately for each dtype; see
`is_gathered`.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import map_values
from tf_optimizers._compat.tensorflow_internals import in_xla
from tf_optimizers.codes.entries import Entries
from tf_optimizers.workers._compat.distribution import CollectiveAllReduce
from tf_optimizers.workers.collectives.launcher import KeyedLauncher
from tf_optimizers.workers.collectives.message import (
    Content,
    is_gathered,
    layout,
    pack,
    sum_duplicates,
    unpack,
)


class SparseCollectiveAllReduce(CollectiveAllReduce):
    """Packs sparse and dense values of several dtypes into few collectives.

    TensorFlow's own collectives need three all-gathers per `IndexedSlices`, and
    cannot pack different dtypes. If several replicas have gradients of the same
    row, for example of a position embedding, TensorFlow returns this row
    several times. Keras's optimizers would then square the gradients
    separately, instead of their sum. So with several replicas, this class
    returns each row once, with the sum.
    """

    launcher = KeyedLauncher

    def __init__(
        self,
        devices: Sequence[str],
        group_size: int,
        options: Any,
        collective_keys: Any,
        ranks: Sequence[int],
        first_replica: int,
    ) -> None:
        super().__init__(devices, group_size, options, collective_keys)
        group_key = collective_keys.get_group_key(self._devices)
        # The parent's constructor has no argument for its launchers.
        self._launchers = [
            self.launcher(
                group_key,
                group_size,
                collective_keys,
                device,
                options,
                local_replicas=len(devices),
                ranks=ranks,
                replica=first_replica + place,
            )
            for place, device in enumerate(self._devices)
        ]

    def _all_reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value: Any,
        replica_id: int,
        options: Any,
    ) -> Any:
        reduced = self.gather_and_reduce(
            tf.nest.flatten(value), replica_id, options, reduce_op
        )
        return tf.nest.pack_sequence_as(value, reduced)

    def _batch_all_gather(self, *args: Any) -> Any:
        # TensorFlow gathers in a `tf.function`, and raises an error if this
        # function runs eagerly.
        are_eager = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(False)
        try:
            return super()._batch_all_gather(*args)
        finally:
            tf.config.run_functions_eagerly(are_eager)

    def gather_and_reduce(
        self,
        values: Sequence[Any],
        replica_id: int,
        options: Any = None,
        reduce_op: Any = tf.distribute.ReduceOp.SUM,
    ) -> list[Any]:
        """Gather `Entries` from all replicas, and reduce other values.

        Args:
            values: This replica's tensors, `IndexedSlices`, and `Entries`, such
                as compressed gradients.
            replica_id: The replica's local rank.
            options: Communication options that override this object's. Defaults
                to `None`.
            reduce_op: The `tf.distribute.ReduceOp` for `values`. Defaults to
                `SUM`.

        Returns:
            The result of each value. The result of `Entries` is
            `IndexedSlices`.

        Raises:
            RuntimeError: If there are several replicas, and XLA compiles the
                step.
        """
        if self._group_size == 1:
            return [v.slices() if isinstance(v, Entries) else v for v in values]
        if in_xla():
            # XLA compiles for one device, and has no collectives for CPUs.
            raise RuntimeError(
                "`SparseMultiWorkerMirroredStrategy` cannot exchange values "
                "under XLA. Received: a step that XLA compiles. Pass "
                "`jit_compile=False` to `compile` or `tf.function`."
            )
        options = self._options.merge(options)
        groups: dict[Any, list[Any]] = {}
        for value in values:
            groups.setdefault(_kind(value), []).append(value)
        reduced = self._gather_all(groups, replica_id, options)
        for kind, group in groups.items():
            if kind not in reduced:
                reduced[kind] = super()._all_reduce(
                    tf.distribute.ReduceOp.SUM, group, replica_id, options
                )
        remaining = {kind: iter(group) for kind, group in reduced.items()}
        results = [next(remaining[_kind(value)]) for value in values]
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            count = self._group_size
            results = [map_values(lambda v: v / count, r) for r in results]
        return results

    def _gather_all(
        self, groups: dict[Any, list[Any]], replica_id: int, options: Any
    ) -> dict[Any, list[Any]]:
        """Gather entries, slices and small values in one message.

        Sum small values, and rows of slices with the same index. `groups` and
        the results are keyed by `_kind`. Dense values for which `is_gathered`
        is False have no result.
        """
        entries, slices = (groups.get(kind, []) for kind in _SPARSE)
        small = {
            kind: group
            for kind, group in groups.items()
            if kind not in _SPARSE and is_gathered(group, self._group_size)
        }
        if not (entries or slices or small):
            return {}
        with tf.device(self._devices[replica_id]):
            rows = []
            if slices:
                local = tf.stack([tf.shape(s.indices)[0] for s in slices])
                every = self.all_gather(local[tf.newaxis], replica_id, options)
                rows = tf.unstack(every, num=len(slices), axis=1)
            own = Content(entries, slices, list(small.values()), rows)
            words = self.all_gather(pack(own), replica_id, options, layout(own))
            gathered, joined, sums = unpack(words, own, self._group_size)
            return dict(zip(small, sums, strict=True)) | {
                Entries: [each.slices() for each in gathered],
                tf.IndexedSlices: list(map(sum_duplicates, joined)),
            }

    def all_gather(
        self,
        tensor: tf.Tensor,
        replica_id: int,
        options: Any = None,
        layout: int = 0,
    ) -> tf.Tensor:
        """Concatenate the tensors of all replicas along the first axis.

        The tensors must have the same shape. TensorFlow's public `all_gather`
        also takes tensors of different shapes, but needs two collectives. All
        replicas must pass the same `layout`: a number from `message.layout`, or
        0 for a tensor that is not packed.
        """
        return self._launchers[replica_id].gather(tensor, options, layout)

    def all_to_all(self, tensor: tf.Tensor, replica_id: int) -> tf.Tensor:
        """Send row i of a tensor to replica i; return the received rows."""
        return self._launchers[replica_id].all_to_all(tensor)

    def progress(self) -> list[list[int]]:
        """Return the progress of each local replica; see `Progress`."""
        return [own.progress.numpy() for own in self._launchers]

    def enter(self) -> None:
        """Record that a run of a step begins on all local replicas."""
        for own in self._launchers:
            own.progress.enter()

    def leave(self) -> None:
        """Record that a run of a step has ended on all local replicas."""
        for own in self._launchers:
            own.progress.leave()


_SPARSE = Entries, tf.IndexedSlices


def _kind(value: Any) -> Any:
    """Return a value's class if it is in `_SPARSE`, else the value's dtype."""
    is_sparse = isinstance(value, _SPARSE)
    return type(value) if is_sparse else tf.as_dtype(value.dtype)
