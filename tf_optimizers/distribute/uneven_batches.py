"""How much of the loss of a global batch a replica's rows make up.

Keras divides the mean over a replica's rows by the number of replicas. That is
the mean over the global batch only if all replicas have equally many rows: of
3 rows on 2 replicas, the third would count twice. Under our strategy, a
replica's loss is weighted by its share instead:

    rows of the replica / rows of all     usually
    divisor here / divisor everywhere     where a loss divides by something
                                          else: what a mask leaves, or the sum
                                          of the sample weights

A replica without any row, as of a last batch of 1, adds nothing.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.batches import hook_batches, merge_mask
from tf_optimizers.distribute.kind import is_sparse_multi_worker

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")


class BatchSize:
    """How many rows a replica has of a global batch."""

    def __init__(self, local: Any, total: Any) -> None:
        self.is_static = isinstance(local, int)
        self.local = tf.cast(local, tf.float32)
        self.graph = tf.compat.v1.get_default_graph()
        self._total = None if total is None else tf.cast(total, tf.float32)

    @property
    def total(self) -> tf.Tensor:
        """The rows of all replicas, exchanged if they are not known."""
        if self._total is None:
            self._total = _sum_over_replicas(self.local)
        return self._total


class _Replica(threading.local):
    """What a replica, which is a thread, is about to weigh."""

    size: BatchSize | None = None
    share: tf.Tensor | None = None
    is_in_compiled_loss: bool = False

    @contextlib.contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Set attributes for a while."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def batch_size(self) -> BatchSize | None:
        """Return the size of its batch, if it was counted in this graph.

        A function within may be traced once, and called for other rows.
        """
        graph = tf.compat.v1.get_default_graph()
        return self.size if self.size and self.size.graph is graph else None


_replica = _Replica()


def with_batch_size(step: Callable, total: Any) -> Callable:
    """Return a Keras model's step that knows the rows of its batch.

    Args:
        step: Called with one argument, a batch, if it is `Model.train_step`;
            of any others, rows are not known.
        total: The rows of all replicas, or None where they are to be asked.
    """

    def sized_step(*args: Any, **kwargs: Any) -> Any:
        local = None if kwargs or len(args) != 1 else count_rows(args[0])
        if local is None:
            return step(*args, **kwargs)
        size = BatchSize(local, total)
        if tf.executing_eagerly():
            # Replicas take turns then, and one that waits in the middle of its
            # step finds the `losses` of another in the model's layers.
            _ = size.total
        with _replica.set(size=size):
            return step(*args)

    return sized_step


@functools.cache
def weigh_uneven_batches() -> None:
    """Let Keras weigh rows like this under our strategy, once."""
    hook_batches(
        scale=_scale,
        unscale=_unscale,
        reduce=_reduce,
        sum_up=_sum_up,
        moments=_moments,
    )


def _scale(keras_scale: Callable, loss: tf.Tensor) -> tf.Tensor:
    """Return a replica's part of the loss of the global batch."""
    share, size = _replica.share, _replica.batch_size()
    if share is None and size is not None:
        share = tf.math.divide_no_nan(size.local, size.total)
    if share is None:
        return keras_scale(loss)
    return loss * tf.cast(share, loss.dtype)


def _unscale(keras_unscale: Callable, loss: tf.Tensor) -> tf.Tensor:
    """Return what has the loss as its mean over replicas, for metrics."""
    size = _replica.batch_size()
    # Keras weighs the loss of each output by rows only if it knows them now.
    if size is None or (_replica.is_in_compiled_loss and not size.is_static):
        return keras_unscale(loss)
    inverse = tf.math.divide_no_nan(size.total, size.local)
    unscaled = loss * tf.cast(inverse, loss.dtype)
    return tf.where(size.local > 0, unscaled, tf.zeros_like(loss))


def _reduce(
    keras_reduce: Callable,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> tf.Tensor:
    """Reduce the losses of a replica's elements to its part of the whole."""
    arguments = (values, sample_weight, mask, reduction, dtype)
    if reduction not in _MEANS or not _is_replica_of_ours():
        return keras_reduce(*arguments)
    if tuple(values.shape) == () and sample_weight is None and mask is None:
        return _share_of_mean(keras_reduce(*arguments))
    by_weight = reduction == "mean_with_sample_weight"
    is_plain = mask is None and not (by_weight and sample_weight is not None)
    if is_plain and _replica.batch_size() is not None:
        return keras_reduce(*arguments)
    if is_plain:
        counted = tf.ones_like(values)
    elif by_weight:
        counted = merge_mask(sample_weight, mask, reduction)
    else:
        counted = mask
    if tf.executing_eagerly():
        _check_alone()
    divisor = tf.reduce_sum(tf.cast(counted, tf.float32))
    total = _sum_over_replicas(tf.stop_gradient(divisor))
    with _replica.set(share=tf.math.divide_no_nan(divisor, total)):
        return keras_reduce(*arguments)


def _share_of_mean(mean: tf.Tensor) -> tf.Tensor:
    """Return a replica's part of a loss that the user has averaged.

    Keras takes what is one number for what is to be summed.
    """
    size = _replica.batch_size()
    if size is not None:
        mean = tf.where(size.local > 0, mean, tf.zeros_like(mean))
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return _scale(lambda loss: loss / replicas, mean)


def _sum_up(keras_sum_up: Callable, *args: Any, **kwargs: Any) -> Any:
    with _replica.set(is_in_compiled_loss=True):
        return keras_sum_up(*args, **kwargs)


def _moments(
    keras_moments: Callable, layer: Any, inputs: tf.Tensor, *args: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a batch's mean and variance; without rows, the moving ones.

    Those of nothing are NaN, as then are the weights of all replicas.
    """
    moments = keras_moments(layer, inputs, *args)
    if layer.synchronized or not _is_replica_of_ours():
        return moments
    is_empty = tf.equal(tf.size(inputs), 0)
    moving = layer.moving_mean, layer.moving_variance
    return tuple(
        tf.where(is_empty, tf.cast(old, new.dtype), new)
        for old, new in zip(moving, moments, strict=True)
    )


def _check_alone() -> None:
    """Refuse to wait for another replica of this process, eagerly.

    See `with_batch_size`: but what a mask leaves is not known before.
    """
    if len(tf.distribute.get_strategy().extended.worker_devices) > 1:
        raise RuntimeError(
            "A loss that is divided by a sum over all replicas, such as of "
            "a mask, must be traced where a worker has several devices. "
            "Received: a step that runs eagerly. Pass `run_eagerly=False` to "
            "`compile`, or call the loss in a `tf.function`."
        )


def _is_replica_of_ours() -> bool:
    """Tell whether this is one of several replicas of our strategy."""
    strategy = tf.distribute.get_strategy()
    return (
        is_sparse_multi_worker(strategy)
        and strategy.num_replicas_in_sync > 1
        and not tf.distribute.in_cross_replica_context()
    )


def _sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, value
    )


def count_rows(data: Any) -> Any:
    """Return the rows of a batch, an int if they are known; None without."""
    inputs = data[:1] if isinstance(data, list | tuple) else data
    for tensor in keras.tree.flatten(inputs):
        if isinstance(tensor, tf.SparseTensor):
            return tensor.dense_shape[0]
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.nrows()
        if tf.is_tensor(tensor) and tensor.shape.rank:
            rows = tensor.shape[0]
            return tf.shape(tensor)[0] if rows is None else rows
    return None
