"""What a replica keeps of a gradient: momentum u, and v that is still unsent.

The functions change the variables in place, through their handles.
"""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.lazy import LazyZeros
from tf_optimizers.base.clipping import clip, clip_factor
from tf_optimizers.base.gradients import as_dense
from tf_optimizers.base.replicas import own_component
from tf_optimizers.compression.scatter import set_entries
from tf_optimizers.compression.schedule import sent_count
from tf_optimizers.compression.selection import Selection
from tf_optimizers.compression.top_k import top_k
from tf_optimizers.compression.wire import Wire, position_dtype, rounded
from tf_optimizers.dgc.penalty import Penalty
from tf_optimizers.kernels.compiled import assign, compiled, read
from tf_optimizers.kernels.norms import norm, scaled


class Momentum(NamedTuple):
    """How gradients are accumulated; equal ones share a kernel."""

    momentum: float
    nesterov: bool
    penalty: Penalty | None
    replicas: int

    def regularize(self, gradient: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Add a replica's share of the penalty's gradient."""
        if self.penalty is None:
            return gradient
        return gradient + self.penalty.gradient(weight) / self.replicas

    def compensate(
        self, u: tf.Tensor, gradient: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the next u, and what it adds to v."""
        if self.nesterov:
            u = self.momentum * (u + gradient)
            return u, u + gradient
        u = self.momentum * u + gradient
        return u, u


class Memory(NamedTuple):
    """The memory of one variable: every replica has a u and a v.

    Those of one host's replicas are equal, if these share a memory; their sum
    is what one replica alone would have.

    Args:
        rule: How gradients are accumulated.
        clipnorm: None, or the limit of a gradient's norm.
        masking: Whether u becomes 0 where v is sent.
        wire: How v is sent.
        momentum: u, a variable of the shape of w.
        residual: v, likewise; None if the variable is never compressed. It has
            no value before `allocate`, and reads as zeros.
    """

    rule: Momentum
    clipnorm: float | None
    masking: bool
    wire: Wire
    momentum: Any
    residual: Any

    def is_compressed(self, gradient: Gradient) -> bool:
        """Tell whether a replica sends only entries of this gradient."""
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return self.residual is not None and not is_sparse

    def allocate(self) -> None:
        """Give v of the replica that asks a value, before its step runs."""
        residual = own_component(self.residual)
        if isinstance(residual, LazyZeros):
            with tf.init_scope():
                residual.allocate()

    def select(
        self,
        gradient: tf.Tensor,
        weight: tf.Variable,
        sparsity: float,
        seed: tf.Tensor,
    ) -> Selection:
        """Add a share of a gradient to u and v; find what is to be sent.

        Args:
            gradient: Dense; the sum of those replicas' that share a memory.
            weight: The replica's w.
            sparsity: The share to hold back.
            seed: int32 [2]; has no effect on the result.
        """
        scale = tf.constant(1 / self.wire.devices, tf.float64)
        if self.clipnorm:
            # So many gradients of this norm, at right angles, have a sum of
            # the norm `clipnorm`.
            limit = self.clipnorm / math.sqrt(self.wire.residuals)
            scale *= clip_factor(norm(gradient), limit)
        shape, dtype = gradient.shape, gradient.dtype
        u = own_component(self.momentum).handle
        v = own_component(self.residual).handle
        accumulate = compiled(_accumulate, shape, dtype, self.rule)
        accumulate(weight.handle, u, v, gradient, scale)
        k = sent_count(shape.num_elements(), sparsity)
        select = compiled(_select, shape, dtype, k, self.wire, xla=False)
        values, positions, rest = select(v, gradient, seed)
        return Selection(values, positions, rest, shape)

    def clear(self, selection: Selection, weight: tf.Variable) -> None:
        """Take what is sent out of v, and out of u if that is masked.

        Args:
            selection: Of what `select` has found, what is sent.
            weight: The replica's w.
        """
        shape, dtype = weight.shape, weight.dtype
        # Nothing is kept beyond the end.
        end = tf.cast(shape.num_elements(), selection.positions.dtype)
        kept_at = tf.where(selection.values == 0, end, selection.positions)
        like = tf.TensorSpec(shape, dtype)
        keep = compiled(_keep, shape, dtype, like, self.masking)
        # All reads of v lie behind, so that it need not be copied to change.
        with tf.control_dependencies([selection.values]):
            keep(
                own_component(self.momentum).handle,
                own_component(self.residual).handle,
                kept_at,
                selection.rest,
            )

    def accumulate_mean(
        self, gradient: Gradient, weight: tf.Variable
    ) -> tf.Tensor:
        """Add a share of the summed gradient to u; return the step of all.

        All replicas do the same, so that their u are equal, and N times what
        one adds is what all of them would send.

        Args:
            gradient: The sum over replicas, dense or sparse.
            weight: The replica's w.
        """
        dense = as_dense(gradient, weight)
        (dense,) = clip([dense], self.clipnorm, None, None)
        kernel = compiled(_accumulate_mean, dense.shape, dense.dtype, self.rule)
        return kernel(weight.handle, own_component(self.momentum).handle, dense)


def _accumulate(
    rule: Momentum,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    residual: tf.Tensor,
    gradient: tf.Tensor,
    scale: tf.Tensor,
) -> None:
    gradient = scaled(gradient, scale)
    gradient = rule.regularize(gradient, read(weight, gradient))
    u, increment = rule.compensate(read(momentum, gradient), gradient)
    assign(momentum, u)
    assign(residual, read(residual, gradient) + increment)


def _accumulate_mean(
    rule: Momentum,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    gradient: tf.Tensor,
) -> tf.Tensor:
    share = rule.regularize(gradient / rule.replicas, read(weight, gradient))
    u, increment = rule.compensate(read(momentum, gradient), share)
    assign(momentum, u)
    return rule.replicas * increment


def _select(
    k: int,
    wire: Wire,
    residual: tf.Tensor,
    like: tf.Tensor,
    seed: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    v = tf.reshape(read(residual, like), [-1])
    positions = top_k(v, k, seed)
    places = tf.maximum(positions, 0)
    values = tf.where(positions < 0, 0.0, tf.gather(v, places))
    # One copy of the memory is sent, and for all.
    sent, rest = rounded(wire.devices * values, wire.value_dtype)
    places = tf.cast(places, position_dtype(v.shape[0]))
    return sent, places, rest / wire.devices


def _keep(
    like: tf.TensorSpec,
    masking: bool,
    momentum: tf.Tensor,
    residual: tf.Tensor,
    positions: tf.Tensor,
    rest: tf.Tensor,
) -> None:
    set_entries(residual, like, positions, rest)
    if masking:
        set_entries(momentum, like, positions, tf.zeros_like(rest))
