"""Private names of TensorFlow's collectives, which the strategy depends on.

They are kept apart, so that the optimizers do not need these modules.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops

from tf_optimizers._compat.launcher import KeyedLauncher


class CollectiveAllReduceHooks(cross_device_ops.CollectiveAllReduce):
    """TensorFlow's collectives between replicas, under public names.

    Subclasses implement `all_reduce`, and find the stock one in
    `all_reduce_dense`.
    """

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
        # There is no argument for them.
        self._launchers = [
            KeyedLauncher(
                *(group_key, group_size, collective_keys, device, options),
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
        # Every call comes through here: from replicas in a graph, from
        # `merge_call`, and from eager mode. In a graph, TensorFlow (2.21)
        # leaves out the strategy's options.
        options = self._options.merge(options)
        return self.all_reduce(reduce_op, value, replica_id, options)

    def all_reduce(
        self, reduce_op: Any, value: Any, replica_id: int, options: Any
    ) -> Any:
        """Reduce a nest of tensors and `IndexedSlices` over all replicas."""
        raise NotImplementedError

    def all_reduce_dense(
        self, reduce_op: Any, value: Any, replica_id: int, options: Any
    ) -> Any:
        """Reduce a list of tensors of one dtype, packed."""
        return super()._all_reduce(reduce_op, value, replica_id, options)

    def all_gather(
        self,
        tensor: tf.Tensor,
        replica_id: int,
        options: Any,
        layout: int = 0,
    ) -> tf.Tensor:
        """Concatenate tensors of one shape along the first axis, by ranks.

        The public `all_gather` allows tensors of different shapes, and takes
        two collectives for that. Replicas that pass another `layout`, of 32
        bits, do not meet in it.
        """
        launcher = self._launchers[replica_id]
        return launcher.gather(tensor, options, layout)

    def all_to_all(
        self, tensor: tf.Tensor, replica_id: int, options: Any
    ) -> tf.Tensor:
        """Send every replica a row of [N, ...]; return those that came.

        Rows are in the order of ranks, as in `all_gather`.
        """
        return self._launchers[replica_id].all_to_all(tensor, options)

    def progress(self) -> list[list[int]]:
        """Return the progress of each local replica; see `Progress`."""
        return [own.progress.numpy() for own in self._launchers]

    def enter(self) -> None:
        """Note that a run begins on all local replicas; see `Progress`."""
        for own in self._launchers:
            own.progress.enter()

    def leave(self) -> None:
        """Note that it has ended."""
        for own in self._launchers:
            own.progress.leave()

    def device(self, replica_id: int) -> str:
        """The device of a local replica; no public accessor."""
        return self._devices[replica_id]

    @property
    def replicas(self) -> int:
        """The number of replicas of all workers; no public accessor."""
        return self._group_size
