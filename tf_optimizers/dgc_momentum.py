"""DGCMomentum: momentum SGD that exchanges a thousandth of the gradient."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras import (
    add_replica_variable,
    is_overwritten,
    strategy_of,
)
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.base.precision import state_dtype
from tf_optimizers.base.replicas import backend_variable, own_component
from tf_optimizers.checks import (
    check_boolean,
    check_decay_rate,
    check_unused,
)
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.compression.residual import subtract_entries
from tf_optimizers.compression.schedule import SparsitySchedule
from tf_optimizers.dgc.momentum import Momentum, Rule, penalty_of

_UNUSED = {
    "clipvalue": "Use `clipnorm`, which is applied to each replica's gradient.",
    "global_clipnorm": "Use `clipnorm`, which is applied per variable.",
    "weight_decay": "Use `regularizer=keras.regularizers.L2(...)`.",
}


@keras.saving.register_keras_serializable(package="tf_optimizers")
class DGCMomentum(Optimizer):
    """Deep Gradient Compression: momentum SGD over a slow network.

    For variable w on N replicas, where g_i is replica i's gradient of its
    share of the loss (so that the sum of g_i is the mean), at step s from 0:

        g_i <- g_i min(1, clipnorm N^-1/2 / |g_i|)
        g_i <- g_i + regularizer's gradient / N
        u_i <- momentum u_i + g_i
        v_i <- v_i + u_i
        send the k entries of largest |v_i|; v_i and u_i become 0 there
        w   <- w - learning_rate (sum of what all replicas sent)

    k = max(1, floor((1 - sparsity) size)) follows the warm-up: dense momentum
    SGD while s < rampup_begin_step, then sparsity[min(floor((s -
    rampup_begin_step) len(sparsity) / rampup_step), len(sparsity) - 1)]. While
    it is dense, `clipnorm` limits the sum of g_i. With `nesterov`, u_i <-
    momentum (u_i + g_i) and v_i <- v_i + u_i + g_i. Nothing is lost: what is
    not sent stays in v_i and is sent when it has grown. The selection is exact,
    of equal entries the first; zeros are not sent.

    A variable is exchanged densely, with clipping of the sum and the same
    momentum, if it has fewer than `min_compress_size` elements, is not
    float32, or has sparse gradients (embeddings).

    Runs under any `tf.distribute.Strategy`, or none;
    `tfo.SparseMultiWorkerMirroredStrategy` sends all variables at once. Where
    it has several workers of several devices each, N is the number of workers:
    the devices of a worker sum their gradients first, and are one replica.

    State: u_i and v_i on each replica, of the shape of w, 8 bytes per float32
    parameter; u_i only, 4 bytes, where w is small or not float32. v_i of a
    large embedding takes no memory until a dense gradient needs it; files hold
    its zeros. Several devices of a worker hold equal parts of u_i and v_i, of
    that shape. Outside of replicas they read as the sum over i, which is what
    checkpoints hold.
    Traffic: from every worker to every other, per sent entry, a value of
    `value_dtype` and 2 bytes for its position, and 4 per 65,536 elements of a
    variable. Under TensorFlow's own strategies a position takes 4. If that,
    times N, is more than twice the dense tensor, as it may be while the warm-up
    holds little back, all entries travel in one; the sum is the same. See
    `communication_summary`.
    Many replicas, of large models, under
    `tfo.SparseMultiWorkerMirroredStrategy`: each sums a shard, an N-th of every
    variable, and sends the k / N largest sums of each to all, if that halves
    this traffic, a message counting 32 KiB: at 99.9 % from 5 replicas on for
    100 million parameters, from 23 on for 20 million. What is not among these
    sums stays in v_i and u_i, on every replica.
    Sparse gradients: exchanged as they are, and made dense after it; duplicate
    rows are summed.
    Not finite: a NaN or inf is always among what is sent, and seen in w.
    Differs from the paper and from
    `paddle.fluid.optimizer.DGCMomentumOptimizer`: k is exact in decimal, and
    the selection exact, not by a sampled threshold; with `nesterov` the switch
    from dense to sparse is continuous, where Paddle carries over a momentum
    that is 1 / momentum too large; `clipnorm` holds from the first step on,
    where Paddle's leaves large variables alone before `rampup_begin_step`; of
    entries that are summed by shards, only the k largest sums are applied; one
    replica is taken, with a warning.
    Differs from `keras.optimizers.SGD`: the learning rate multiplies the
    momentum, and is not part of it.

    Args:
        learning_rate: float >= 0, `LearningRateSchedule`, or callable without
            arguments.
        momentum: float in [0, 1). Decay of u_i, per step. Defaults to `0.9`.
        rampup_begin_step: int >= 0. Steps of dense exchange before compression
            starts. Defaults to `0`.
        rampup_step: int >= 1. Steps over which `sparsity` is walked through.
            Defaults to `1`.
        sparsity: Sequence of floats in [0, 1), not decreasing. The share of
            entries held back, stage by stage. The paper's warm-up is (0.75,
            0.9375, 0.984375, 0.996, 0.999). Defaults to `(0.999,)`.
        nesterov: bool. Defaults to `False`.
        regularizer: None or `keras.regularizers.L1`, `L2` or `L1L2`. Its
            gradient is added to that of each variable without a regularizer
            of its own. Defaults to `None`.
        min_compress_size: int >= 1. Elements of the smallest variable that is
            compressed. Defaults to `16384`.
        momentum_masking: bool. Whether u_i, too, becomes 0 where v_i is sent.
            Defaults to `True`.
        value_dtype: "float32", "float16" or "bfloat16". What sent values are
            rounded to; v_i keeps the rest. Of float16, what exceeds 65504 is
            sent in parts, and what is below 3e-8 not before it has grown.
            TensorFlow's own strategies carry bfloat16 as float32. Defaults to
            `"float32"`.
        **kwargs: `clipnorm`, `use_ema`, `gradient_accumulation_steps`, ...; see
            `keras.optimizers.Optimizer`. `clipvalue`, `global_clipnorm` and
            `weight_decay` are refused.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is outside its range, or refused.
        RuntimeError: If a step is compiled by XLA.

    Example:
        >>> import tf_optimizers as tfo
        >>> optimizer = tfo.DGCMomentum(
        ...     0.1,
        ...     rampup_begin_step=500,
        ...     rampup_step=1000,
        ...     sparsity=(0.75, 0.9375, 0.984375, 0.996, 0.999),
        ... )

    Reference:
        Lin et al., 2018, "Deep Gradient Compression: Reducing the
        Communication Bandwidth for Distributed Training", arXiv:1712.01887.
    """

    def __init__(
        self,
        learning_rate: Any,
        momentum: float = 0.9,
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        nesterov: bool = False,
        regularizer: Any = None,
        min_compress_size: int = 16384,
        momentum_masking: bool = True,
        value_dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        momentum = check_decay_rate("momentum", momentum)
        schedule = SparsitySchedule(rampup_begin_step, rampup_step, sparsity)
        compressor = Compressor(
            "DGCMomentum", schedule, min_compress_size, value_dtype
        )
        nesterov = check_boolean("nesterov", nesterov)
        penalty = penalty_of(regularizer)
        momentum_masking = check_boolean("momentum_masking", momentum_masking)
        check_unused("DGCMomentum", kwargs, _UNUSED)
        super().__init__(learning_rate, **kwargs)
        self.momentum = momentum
        self.rampup_begin_step = schedule.begin_step
        self.rampup_step = schedule.rampup_step
        self.sparsity = schedule.sparsity
        self.nesterov = nesterov
        self.regularizer = regularizer
        self.min_compress_size = min_compress_size
        self.momentum_masking = momentum_masking
        self.value_dtype = value_dtype
        self._compressor = compressor
        self._penalty = penalty

    def build(self, variables: Sequence[Any]) -> None:
        """Create u of each variable, and v of those that are compressed."""
        if self.built:
            return
        super().build(variables)
        if strategy_of(self).num_replicas_in_sync == 1:
            warnings.warn(
                "DGCMomentum saves traffic between replicas. Received: one "
                "replica, which has none. Use `keras.optimizers.SGD` with "
                "`momentum` there.",
                stacklevel=2,
            )
        self._compressor.build(strategy_of(self))
        for variable in variables:
            if not is_overwritten(self, variable):
                self._add_state(variable)

    def _update(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Update the variables by what all send at the stage of this step."""

        def update(sparsity: float | None, gradients: list[Gradient]) -> None:
            weights = [
                self._full_precision(own_component(v)) for v in variables
            ]
            updates = self._compressor.exchange(
                self, sparsity, gradients, variables, weights
            )
            self._step(updates, variables)

        self._compressor.at_stage(self, gradients, variables, update)

    def update_step(
        self, gradient: Gradient, variable: Any, learning_rate: Any
    ) -> None:
        """Subtract what was received from a variable, or its component.

        Args:
            gradient: Dense, or `tf.IndexedSlices` of the flattened variable.
            variable: A variable that the optimizer was built with.
            learning_rate: Scalar.
        """
        variable = backend_variable(variable)
        weight = self._full_precision(variable)
        rate = tf.cast(learning_rate, weight.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            subtract_entries(weight, gradient, rate)
        else:
            weight.assign_sub(rate * gradient)
        self._store_weight(variable, weight)

    def communication_summary(self, step: int | None = None) -> dict[str, Any]:
        """Return what one replica sends at a step, in bytes.

        That is what it hands over; in a ring of N devices entries are passed on
        N - 1 times, and dense tensors, which are summed, 2 (N - 1) / N times.
        Of sparse gradients it is what the last step sent, whatever `step` is;
        before the first one they count like any others.

        Args:
            step: int >= 0, from 0. Defaults to the next step.

        Returns:
            {"step": step, "sparsity": share held back, 0 while all is dense,
            "variables": {path: traffic}, "total": traffic}, where traffic is
            {"dense_bytes": of the gradient, "sent_bytes": of what is sent
            instead, "ratio": dense_bytes / sent_bytes}.

        Raises:
            RuntimeError: If the optimizer is not built.
        """
        return self._compressor.traffic_summary(self, step)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return super().get_config() | {
            "momentum": self.momentum,
            "rampup_begin_step": self.rampup_begin_step,
            "rampup_step": self.rampup_step,
            "sparsity": list(self.sparsity),
            "nesterov": self.nesterov,
            "regularizer": keras.regularizers.serialize(self.regularizer)
            if self.regularizer
            else None,
            "min_compress_size": self.min_compress_size,
            "momentum_masking": self.momentum_masking,
            "value_dtype": self.value_dtype,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "DGCMomentum":
        """Return an optimizer of what `get_config` returned."""
        regularizer = config.get("regularizer")
        if isinstance(regularizer, dict):
            regularizer = keras.regularizers.deserialize(regularizer)
        return super().from_config(
            config | {"regularizer": regularizer}, custom_objects
        )

    def _add_state(self, variable: Any) -> None:
        u = add_replica_variable(
            self, variable, "momentum", state_dtype(variable.dtype)
        )
        # A regularizer of its own is part of the loss already.
        is_regularized = getattr(variable, "regularizer", None) is not None
        penalty = None if is_regularized else self._penalty
        wire = self._compressor.wire
        rule = Rule(self.momentum, self.nesterov, penalty, wire.replicas)
        momentum = Momentum(
            rule, self.clipnorm, self.momentum_masking, wire.devices, u
        )
        self._compressor.add(self, variable, momentum)
