"""Keeps the residual of a variable: the values that are not sent yet."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.tensorflow_internals import LazyZeros
from tf_optimizers.base.components import components, own_component
from tf_optimizers.codes.positions import position_dtype
from tf_optimizers.compression.top_k import top_k
from tf_optimizers.compression.wire import Selection, Wire
from tf_optimizers.kernels import assign, compiled, on_gpu, read


class Residual:
    """The residual v of a variable: values that a replica has not sent yet.

    Each replica has its own v, unless the replicas of a worker share v. Then
    each of these replicas has an equal fraction of v.

    Args:
        variable: The variable v. Until `allocate` is called or nonzero values
            are loaded, v takes no memory and reads as zeros.
        wire: How entries of v are sent.
        masked: A variable, such as the momentum, that becomes 0 wherever
            entries of v are sent. Defaults to `None`.
    """

    def __init__(
        self,
        variable: keras.Variable,
        wire: Wire,
        masked: keras.Variable | None = None,
    ) -> None:
        self.variable = variable
        self._wire, self._masked = wire, masked
        self._like = tf.TensorSpec(variable.shape, variable.dtype)

    @property
    def size(self) -> int:
        """The number of elements of v."""
        return self._like.shape.num_elements()

    def allocate(self) -> None:
        """Allocate this replica's v, before the step runs."""
        own = own_component(self.variable)
        if isinstance(own, LazyZeros):
            with tf.init_scope():
                own.allocate()

    def is_nonzero(self) -> bool:
        """Return whether v is nonzero on any replica of this process."""
        return any(
            not (isinstance(part, LazyZeros) and not part.has_value())
            and bool(tf.reduce_any(part.read_value() != 0))
            for part in components(self.variable)
        )

    def select(
        self, count: int, seed: tf.Tensor, unit: tf.Tensor | float
    ) -> Selection:
        """Return the `count` entries of v with the largest magnitude.

        Args:
            count: int in [1, size].
            seed: int32 [2], see `top_k`.
            unit: The returned values are divided by this number.
        """
        like, devices = self._like, self._wire.devices
        with tf.device(own_component(self.variable).device):
            gpu = on_gpu()
        select = compiled(_select, like, like, count, devices, gpu, xla=gpu)
        values, positions = self._call(select, seed, unit)
        return Selection(values, positions, like.shape)

    def everything(self) -> tf.Tensor:
        """Return all of v."""
        return self._call(read, self._like)

    def empty(self) -> None:
        """Set v, and the masked variable if there is one, to 0."""
        zeros = tf.zeros(self._like.shape, self._like.dtype)
        self._call(assign, zeros)
        for handle in self._masked_handles():
            assign(handle, zeros)

    def clear(
        self, selection: Selection, sent: tf.Tensor, unit: tf.Tensor | float
    ) -> None:
        """Subtract sent values from v.

        Also set the masked variable to 0 at their positions. If values were
        rounded before they were sent, the rounding errors stay in v. Where a
        NaN or inf was sent, v becomes 0.
        """
        clear = compiled(_clear, self._like, self._like, self._wire.devices)
        # Assign to v after all reads of v, so that TensorFlow needs no copy.
        with tf.control_dependencies([selection.values]):
            self._call(
                clear, *selection[:2], sent, unit, *self._masked_handles()
            )

    def _masked_handles(self) -> list[tf.Tensor]:
        masked = self._masked
        return [] if masked is None else [own_component(masked).handle]

    def _call(self, function: Callable, *args: Any) -> Any:
        """Call `function(handle of v, *args)` on v's device."""
        own = own_component(self.variable)
        with tf.device(own.device):
            return function(own.handle, *args)


def _select(
    like: tf.TensorSpec,
    count: int,
    devices: int,
    gpu: bool,
    residual: tf.Tensor,
    seed: tf.Tensor,
    unit: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    v = tf.reshape(read(residual, like), [-1])
    found = top_k(v, count, seed, gpu)
    values = tf.where(found < 0, 0.0, tf.gather(v, tf.maximum(found, 0)))
    # Each device of a worker has an equal part of an entry, but one device
    # sends the whole entry.
    values = devices * values / unit
    return values, tf.cast(found, position_dtype(v.shape[0]))


def _clear(
    like: tf.TensorSpec,
    devices: int,
    residual: tf.Tensor,
    values: tf.Tensor,
    positions: tf.Tensor,
    sent: tf.Tensor,
    unit: tf.Tensor,
    *masked: tf.Tensor,
) -> None:
    # Entries that were not sent get a position beyond the end, so that `_set`
    # drops them.
    end = tf.constant(like.shape.num_elements(), positions.dtype)
    sent_at = tf.where(sent == 0, end, positions)
    rest = (values - sent) * unit / devices
    rest = tf.where(tf.math.is_finite(rest), rest, 0.0)
    _set(like, residual, sent_at, rest)
    for handle in masked:
        _set(like, handle, sent_at, tf.zeros_like(rest))


def subtract(
    variable: tf.Variable, update: Gradient, rate: tf.Tensor, replicas: int
) -> None:
    """Subtract `rate` times an update from a variable.

    Args:
        variable: This replica's component of a variable.
        update: Dense, or entries of the flattened variable from all replicas,
            ordered by replica. Each replica has the same number of entries, and
            repeats no position, except for entries of value 0.
        rate: Scalar of the variable's dtype.
        replicas: The number of replicas that have sent entries.
    """
    if not isinstance(update, tf.IndexedSlices):
        variable.assign_sub(rate * update)
        return
    like = tf.TensorSpec(variable.shape, variable.dtype)
    take = compiled(_subtract, like, like, replicas)
    take(variable.handle, update.indices, update.values, rate)


def _subtract(
    like: tf.TensorSpec,
    replicas: int,
    handle: tf.Tensor,
    positions: tf.Tensor,
    values: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    changes = tf.reshape(rate * tf.cast(values, rate.dtype), [replicas, -1])
    positions = tf.reshape(positions, [replicas, -1, 1])
    subtract_at = tf.tensor_scatter_nd_sub
    # Subtract one replica's entries at a time. A GPU would add several changes
    # at the same position in any order, so weights could differ between
    # replicas.
    _, flat = tf.while_loop(
        lambda i, _: i < replicas,
        lambda i, flat: (i + 1, subtract_at(flat, positions[i], changes[i])),
        (0, tf.reshape(read(handle, like), [-1])),
    )
    assign(handle, tf.reshape(flat, like.shape))


def _set(
    like: tf.TensorSpec,
    handle: tf.Tensor,
    positions: tf.Tensor,
    values: tf.Tensor,
) -> None:
    """Set entries of a flattened variable; drop positions beyond its end.

    TensorFlow's `ResourceScatterNd...` ops are not used: after such an op,
    every read would copy the variable.
    """
    flat = tf.reshape(read(handle, like), [-1])
    flat = tf.tensor_scatter_nd_update(flat, positions[:, tf.newaxis], values)
    assign(handle, tf.reshape(flat, like.shape))
