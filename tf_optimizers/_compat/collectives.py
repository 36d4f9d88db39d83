"""Private names of TensorFlow's collectives, which the strategy depends on.

They stand apart, for the optimizers to do without these modules.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, cross_device_utils
from tensorflow.python.ops import resource_variable_ops


class CountingLauncher(cross_device_utils.CollectiveReplicaLauncher):
    """Numbers a replica's collectives by a variable, as they are run.

    Workers find each other in a collective by its number. TensorFlow's own
    takes the numbers when a `tf.function` is called, one for each collective
    in it, and cannot if that function is called inside a `tf.cond` (2.21: "You
    must feed a value for placeholder"), as Keras does for
    `steps_per_execution`.
    """

    # Far from the numbers that TensorFlow takes for its own purposes.
    _first_key = 1 << 24

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counter: Any = None

    def _next_instance_key(self) -> Any:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            # A graph of TensorFlow 1 takes no variable of eager mode. It is
            # built once, and alike on all workers: numbers may be constants.
            return super()._next_instance_key()
        if self._counter is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._counter = resource_variable_ops.ResourceVariable(
                    self._first_key, trainable=False
                )
        with tf.device("CPU:0"):
            return tf.identity(self._counter.assign_add(1))

    def all_to_all(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Send every replica a row; return the rows that came.

        TensorFlow has the collective, but no launcher or strategy uses it.
        """
        options = self._options.merge(options)
        with tf.device(self._device):
            return tf.raw_ops.CollectiveAllToAllV2(
                input=tensor,
                group_size=self._group_size,
                group_key=self._group_key,
                instance_key=self._next_instance_key(),
                ordering_token=[self._get_ordering_token()],
                communication_hint=options.implementation.value.lower(),
                timeout_seconds=options.timeout_seconds,
            )


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
    ) -> None:
        super().__init__(devices, group_size, options, collective_keys)
        group_key = collective_keys.get_group_key(self._devices)
        # There is no argument for them.
        self._launchers = [
            CountingLauncher(
                group_key, group_size, collective_keys, device, options
            )
            for device in self._devices
        ]

    def _all_reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value: Any,
        replica_id: int,
        options: Any,
    ) -> Any:
        # All ways into the collectives lead through here: those of replicas
        # in a graph, and those of `merge_call` and of eager mode. In the first
        # TensorFlow leaves the strategy's options out (2.21).
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
        self, tensor: tf.Tensor, replica_id: int, options: Any
    ) -> tf.Tensor:
        """Concatenate tensors of one shape along the first axis.

        The public `all_gather` is for tensors of different shapes, and needs
        two collectives.
        """
        return self._launchers[replica_id]._all_gather(tensor, options)

    def all_to_all(
        self, tensor: tf.Tensor, replica_id: int, options: Any
    ) -> tf.Tensor:
        """Send every replica a row of [N, ...]; return those that came."""
        return self._launchers[replica_id].all_to_all(tensor, options)

    def device(self, replica_id: int) -> str:
        """The device of a local replica; no public accessor."""
        return self._devices[replica_id]

    @property
    def replicas(self) -> int:
        """The number of replicas of all workers; no public accessor."""
        return self._group_size
