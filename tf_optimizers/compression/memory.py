"""What a replica keeps of a gradient: momentum u, and v that is still unsent.

The functions change the variables in place, through their handles.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers.clipping import clip_factor
from tf_optimizers.compression.penalty import Penalty
from tf_optimizers.compression.top_k import top_k
from tf_optimizers.distribute.sparse_all_reduce import UniformSlices
from tf_optimizers.kernels import assign, compiled, read
from tf_optimizers.norms import norm
from tf_optimizers.replicas import own_component


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
    """The memory of one variable: each replica has its own u and v.

    Args:
        rule: How gradients are accumulated.
        momentum: u, a variable of the shape of w.
        residual: v, likewise; None if the variable is never compressed.
    """

    rule: Momentum
    momentum: Any
    residual: Any

    def accumulate(
        self, gradient: tf.Tensor, weight: tf.Variable, clipnorm: float | None
    ) -> None:
        """Add a replica's gradient to its u and v, in one pass."""
        scale = tf.ones([], gradient.dtype)
        if clipnorm:
            # The sum of N gradients of this norm, at right angles, has the
            # norm `clipnorm`.
            limit = clipnorm / self.rule.replicas**0.5
            scale = clip_factor(norm(gradient), limit)
        compiled(_accumulate, gradient.shape, gradient.dtype, self.rule)(
            weight.handle, *self._handles(), gradient, scale
        )

    def compress(
        self, like: tf.Tensor, k: int, masking: bool, seed: tf.Tensor
    ) -> UniformSlices:
        """Take the k largest entries out of a replica's v.

        Args:
            like: Tensor of the shape and dtype of v.
            k: Entries to send.
            masking: Whether u becomes 0 where v does.
            seed: int32 [2].

        Returns:
            k values of the flattened variable; at the end zeros at position 0,
            if v has fewer entries but 0.
        """
        kernel = compiled(
            _compress, like.shape, like.dtype, k, masking, xla=False
        )
        values, positions = kernel(*self._handles(), like, seed)
        return UniformSlices(
            values, positions, tf.constant([like.shape.num_elements()])
        )

    def accumulate_mean(
        self, gradient: tf.Tensor, weight: tf.Variable
    ) -> tf.Tensor:
        """Add a share of the summed gradient to u; return the step of all.

        All replicas do the same, so that their u are equal, and N times what
        one adds is what all of them send.
        """
        kernel = compiled(
            _accumulate_mean, gradient.shape, gradient.dtype, self.rule
        )
        momentum = own_component(self.momentum)
        return kernel(weight.handle, momentum.handle, gradient)

    def _handles(self) -> tuple[tf.Tensor, tf.Tensor]:
        return (
            own_component(self.momentum).handle,
            own_component(self.residual).handle,
        )


def multi_index(positions: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Return [n, rank] indices of positions in the flattened variable."""
    positions = tf.cast(positions, tf.int64)
    return tf.transpose(tf.unravel_index(positions, tf.cast(shape, tf.int64)))


def position_dtype(size: int) -> tf.DType:
    """Return the integers that positions are sent as."""
    return tf.int32 if size <= tf.int32.max else tf.int64


def _accumulate(
    rule: Momentum,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    residual: tf.Tensor,
    gradient: tf.Tensor,
    scale: tf.Tensor,
) -> None:
    gradient = rule.regularize(gradient * scale, read(weight, gradient))
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


def _compress(
    k: int,
    masking: bool,
    momentum: tf.Tensor,
    residual: tf.Tensor,
    like: tf.Tensor,
    seed: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    v = tf.reshape(read(residual, like), [-1])
    positions = top_k(v, k, seed)
    values = tf.gather(v, positions)
    with tf.control_dependencies([values]):
        # All reads of v lie behind, so that it need not be copied to change.
        where = multi_index(positions, like.shape)
    for handle in (residual, momentum) if masking else (residual,):
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=handle, indices=where, updates=tf.zeros_like(values)
        )
    missing = [[0, k - tf.size(positions)]]
    positions = tf.cast(positions, position_dtype(v.shape[0]))
    return (
        tf.ensure_shape(tf.pad(values, missing), [k]),
        tf.ensure_shape(tf.pad(positions, missing), [k]),
    )
