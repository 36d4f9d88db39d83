"""Variables that one replica has, and all others read as zeros."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values

from tf_optimizers._compat.replicas import LazyZeros, plain_variable


# TensorFlow's class of variables that are reduced when read has no public
# name, and divides what it restores where it sums what it saves.
class OwnedVariable(values.SyncOnReadVariable):
    """A variable of a strategy with a value on one replica only.

    Outside of replicas, it has that value on all workers: reading it is a sum
    over replicas, of which all but one have zeros, and what is assigned or
    restored is kept by the owner alone.
    """

    @property
    def aggregation(self) -> tf.VariableAggregation:
        """What those see who assign: that nothing is to be divided."""
        return tf.VariableAggregation.MEAN


class _NotOwned(LazyZeros):
    """A replica's component of what another owns: always zeros, no memory."""

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Assign nothing."""
        del value, use_locking, name
        if tf.executing_eagerly():
            return self if read_value else None
        return tf.zeros(self.shape, self.dtype) if read_value else tf.no_op()


def owned_variable(
    strategy: tf.distribute.Strategy,
    owner: int | None,
    value: tf.Tensor,
    name: str,
) -> OwnedVariable:
    """Return a variable that one of the strategy's replicas has.

    Args:
        strategy: The strategy.
        owner: The local rank of the replica, None if another worker has it.
        value: What it begins with.
        name: Its name.
    """
    components: Sequence[tf.Variable] = [
        _component(strategy, rank, rank == owner, value, name)
        for rank in range(len(strategy.extended.worker_devices))
    ]
    return OwnedVariable(strategy, components, tf.VariableAggregation.SUM)


def _component(
    strategy: Any, rank: int, is_owned: bool, value: tf.Tensor, name: str
) -> tf.Variable:
    options = {
        "trainable": False,
        "dtype": value.dtype,
        "name": f"{name}/replica_{rank}" if rank else name,
        "distribute_strategy": strategy,
    }
    with tf.device(strategy.extended.worker_devices[rank]):
        if is_owned:
            return plain_variable(value, **options)
        return _NotOwned(shape=value.shape, **options)
