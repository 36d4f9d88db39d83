"""DGCMomentum: momentum SGD that exchanges only the largest entries."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras_internals import (
    VARIABLES,
    add_replica_variable,
    built_variables,
    is_overwritten,
)
from tf_optimizers.base.components import own_component
from tf_optimizers.base.gradients import as_dense, clip_factor, clip_norm
from tf_optimizers.base.precision import state_dtype
from tf_optimizers.checks import (
    Fixed,
    check_boolean,
    check_decay_rate,
    check_unsupported,
)
from tf_optimizers.compression.compressed_optimizer import CompressedOptimizer
from tf_optimizers.compression.sparsity_schedule import (
    SparsitySchedule,
    recommended,
)
from tf_optimizers.kernels import (
    assign,
    compiled,
    norm,
    read,
    scalar,
    scaled,
)

_UNSUPPORTED = {
    "clipvalue": "Use `clipnorm`, which limits the norm of each gradient.",
    "global_clipnorm": "Use `clipnorm`, which limits each gradient's norm.",
    "weight_decay": "Use `regularizer=keras.regularizers.L2(...)`.",
}
# A saved file has this key if its u and v include the learning rate.
_RATE_KEY = "rate_in_momentum"
# In a checkpoint, the name of the list of variables shows whether u and v
# include the learning rate.
_INCLUDES_RATE = {VARIABLES: False, "variables_with_rate": True}


class MomentumHyperparameters(NamedTuple):
    """The hyperparameters for one variable's step.

    Inside a kernel, each float is a float64 scalar; see `compiled`.
    """

    momentum: float
    nesterov: bool
    penalty: tuple[float, float] | None  # (l1, l2) in l1 |w| + l2 w^2.
    replicas: int


@keras.saving.register_keras_serializable(package="tf_optimizers")
class DGCMomentum(CompressedOptimizer):
    """Deep Gradient Compression: momentum SGD over a slow network.

    For variable w on N replicas at step s, counted from 0, where g_i is the
    gradient of replica i's part of the loss:

        g_i <- g_i min(1, clipnorm / (sqrt(N) |g_i|))
        g_i <- g_i + regularizer's gradient / N
        u_i <- momentum u_i + learning_rate g_i
        v_i <- v_i + u_i
        send the k entries of largest |v_i|; subtract them; u_i becomes 0 there
        w   <- w - (sum of all replicas' sent entries)

    The sum of all g_i is the gradient of the mean loss. Each gradient is
    multiplied by the learning rate of the step that computes it, as in
    `keras.optimizers.SGD`. Without `rate_in_momentum`, each entry is multiplied
    by the rate of the step that sends it: u_i <- momentum u_i + g_i, and
    w <- w - learning_rate (sum of all replicas' sent entries). With `nesterov`,
    u_i <- momentum (u_i + learning_rate g_i), and v_i <- v_i + u_i +
    learning_rate g_i.

    k = max(1, floor((1 - sparsity) size)), and the sparsity follows a schedule.
    With n = len(sparsity), b = rampup_begin_step, r = rampup_step, d =
    rampdown_begin_step and e = rampdown_step, the sparsity is

        s < b                 none: dense momentum SGD
        b <= s < d            sparsity[min(floor((s - b) n / r), n - 1)]
        d <= s < d + e - 1    sparsity[n - 2 - floor((s - d) (n - 1) / (e - 1))]
        s = d + e - 1         0: all v_i are sent, in float32, and become 0
        s >= d + e            none, as before b

    With a single stage, the sparsity is sparsity[0] up to s = d + e - 2. While
    the exchange is dense, `clipnorm` limits the norm of the sum of g_i. Entries
    that are not sent accumulate in v_i until they are large enough. Among
    entries of equal magnitude, the first are selected. Zeros are never
    selected.

    A variable is not compressed if it has fewer than `min_compress_size`
    elements, is a scalar, is not float32, or has sparse gradients (embeddings).
    Such a variable has the same momentum on all replicas, and `clipnorm` limits
    the norm of the sum of g_i.

    `DGCMomentum` runs without a strategy, under TensorFlow's mirrored
    strategies, and under `tfo.SparseMultiWorkerMirroredStrategy`, which sends
    all variables together. If the latter has several workers with several
    devices each, N is the number of workers: the devices of a worker sum their
    gradients first, and act as one replica.

    State: u_i and v_i on each replica, with the shape of w, 8 bytes per float32
    parameter; only u_i if w is small or not float32; a float32 master weight if
    w is float16 or bfloat16. The v_i of a large embedding takes no memory, and
    is saved as zeros, unless a dense gradient needs v_i. If N is the number of
    workers, each of a worker's M devices has u_i / M and v_i / M. Outside of
    `strategy.run`, and in checkpoints, u is the sum of all u_i, and v is the
    sum of all v_i.
    Traffic: for each selected entry, a replica sends a value of `value_dtype`
    and a position to every other replica. A position takes 12 bits at a
    sparsity of 99.9%, 8 bits at 98.4%, and 1 / (1 - sparsity) bits at 75% or
    less. Under TensorFlow's own strategies, a position takes 4 bytes. Entries
    that would take more than 2 / N of the bytes of a dense tensor are sent as a
    dense tensor, with the same result up to rounding. This may happen at the
    start of the warm-up.
    See `communication_summary`.
    Many replicas: under `tfo.SparseMultiWorkerMirroredStrategy`, each replica
    can sum one shard, an equal part of every variable. The replica then sends
    the shard's largest sums to all replicas, in float32: about k sums from all
    shards together. An entry whose sum is not sent stays in v_i. Shards are
    used if they more than halve the traffic, counting 32 KiB for each message.
    With float32 values at a sparsity of 99.9%, this is the case from 5
    replicas on for 100 million parameters, and from 41 replicas on for 20
    million.
    Sparse gradients: exchanged, and then made dense; duplicate rows are summed.
    With `gradient_accumulation_steps` or `loss_scale_factor`, they are made
    dense first, so their variables may be compressed.
    NaN and inf: count as the largest entries, and reach w when they are sent.
    With "int4" and "int2", the finite values in the same group of 64 are sent
    in a later step.
    Differs from the paper and from
    `paddle.fluid.optimizer.DGCMomentumOptimizer`: k is computed in exact
    decimal arithmetic. The selection is exact, not by a sampled threshold. With
    `nesterov`, the switch from dense to sparse is continuous; Paddle carries
    over a momentum that is too large by a factor of 1 / momentum. `clipnorm`
    applies from the first step; Paddle does not clip large variables before
    `rampup_begin_step`. If shards are used, only their largest sums are
    applied. A single replica works, with a warning. Paddle multiplies entries
    by the learning rate when they are sent, as with `rate_in_momentum=False`.
    On one replica, or if nothing is clipped, a dense exchange gives the result
    of `keras.optimizers.SGD`, up to rounding. This is also the case at sparsity
    0 with `momentum_masking=False` and without `clipnorm`. With
    `rate_in_momentum=False`, both require a constant learning rate.

    Args:
        learning_rate: float >= 0, `LearningRateSchedule`, or callable without
            arguments.
        momentum: float in [0, 1). Decay of u_i, per step. Defaults to `0.9`.
        rampup_begin_step: int >= 0. Steps of dense exchange before compression
            starts. Defaults to `0`.
        rampup_step: int >= 1. Steps of the warm-up, split evenly among the
            stages of `sparsity`. Defaults to `1`.
        sparsity: Sequence of floats in [0, 1), not decreasing. Fraction of
            entries that are not sent, stage by stage. The paper's warm-up is
            (0.75, 0.9375, 0.984375, 0.996, 0.999). Defaults to `(0.999,)`.
        nesterov: bool. Whether to use Nesterov's momentum.
            Defaults to `False`.
        regularizer: None or `keras.regularizers.L1`, `L2` or `L1L2`. Its
            gradient is added to the gradient of each variable that does not
            have its own regularizer. Defaults to `None`.
        min_compress_size: int >= 1. Variables with fewer elements are not
            compressed. Defaults to `16384`.
        momentum_masking: bool. Whether u_i also becomes 0 where v_i is sent.
            Defaults to `True`.
        value_dtype: "float32", "float16", "bfloat16", "int4" or "int2". The
            format of sent values; the rounding error stays in v_i. "int4" takes
            4 bits per value, and a 2-byte scale per 64 values. A value has a
            sign and one of eight equally spaced magnitudes, from 0 to the
            largest of the 64. "int2" takes 2 bits per value, and two 2-byte
            scales per 64 values. A value has a sign and one of two magnitudes:
            the mean of the magnitudes below the mean magnitude of the 64, and
            the mean of the others. In float16, values above 65504 take several
            steps to send, and values below 3e-8 are not sent until they grow.
            With `rate_in_momentum`, these bounds apply to values divided by the
            largest power of two up to the learning rate. TensorFlow's own
            strategies send float16 as float16, and all other formats as
            float32. Defaults to `"float32"`.
        rate_in_momentum: bool. Whether gradients are multiplied by the learning
            rate when they are added to u_i. If not, entries are multiplied by
            the rate when they are sent. Saved state can be loaded only with the
            same `rate_in_momentum`. Defaults to `True`.
        rampdown_begin_step: None, or int >= rampup_begin_step + rampup_step.
            First step of the cool-down, which runs the stages in reverse.
            Defaults to `None`.
        rampdown_step: int >= 1. Steps of the cool-down, after which the
            exchange is dense. Defaults to `1`.
        **kwargs: `clipnorm`, `use_ema`, `gradient_accumulation_steps`, ...; see
            `keras.optimizers.Optimizer`. `clipvalue`, `global_clipnorm` and
            `weight_decay` raise an error.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range, or not supported; if
            loaded state was saved with a different `rate_in_momentum`; if a
            compressed variable has two gradients in a step or, with a
            cool-down, has none.
        RuntimeError: If XLA compiles a step with compressed variables.

    Example:
        >>> import tf_optimizers as tfo
        >>> optimizer = tfo.DGCMomentum.for_steps(10_000, 0.1)

    Reference:
        Lin et al., 2018, "Deep Gradient Compression: Reducing the
        Communication Bandwidth for Distributed Training", arXiv:1712.01887.
    """

    _single_replica_warning = (
        "DGCMomentum saves traffic between replicas. Received: one replica, "
        "which has no traffic. Use `keras.optimizers.SGD` with `momentum`."
    )
    regularizer, momentum_masking, rate_in_momentum = Fixed(), Fixed(), Fixed()
    # Keras's constructor sets these to None.
    clipvalue, global_clipnorm, weight_decay = Fixed(), Fixed(), Fixed()

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
        rate_in_momentum: bool = True,
        rampdown_begin_step: int | None = None,
        rampdown_step: int = 1,
        **kwargs: Any,
    ) -> None:
        schedule = SparsitySchedule(
            sparsity=sparsity,
            rampup_begin_step=rampup_begin_step,
            rampup_step=rampup_step,
            rampdown_begin_step=rampdown_begin_step,
            rampdown_step=rampdown_step,
        )
        check_unsupported("DGCMomentum", kwargs, _UNSUPPORTED)
        super().__init__(
            learning_rate, schedule, min_compress_size, value_dtype, **kwargs
        )
        self.momentum = check_decay_rate("momentum", momentum)
        self.nesterov = check_boolean("nesterov", nesterov)
        self.regularizer, self._penalty = regularizer, _penalty_of(regularizer)
        self.momentum_masking = check_boolean(
            "momentum_masking", momentum_masking
        )
        self.rate_in_momentum = check_boolean(
            "rate_in_momentum", rate_in_momentum
        )
        if self.rate_in_momentum:
            self._variables_name = "variables_with_rate"

    @classmethod
    def for_steps(
        cls, steps: int, learning_rate: Any, **kwargs: Any
    ) -> "DGCMomentum":
        """Return an optimizer with recommended settings for a whole run.

        The stages are the paper's without the first: 0.9375, 0.984375, 0.996
        and 0.999. Each takes a sixteenth of the steps, except that the last
        stage lasts until the cool-down. A stage is left out unless
        steps (1 - sparsity) >= 2, so that a replica can send every entry twice
        during the run. For example, the stage 0.999 needs 2,000 steps. In a run
        of fewer than 32 steps, the only stage is 0.75. The run ends with a
        cool-down, which repeats the earlier stages in reverse. Its last step
        sends all residuals. Values have 4 bits: `value_dtype="int4"`.

        In a run of T >= 2,000 steps, two replicas send as many bytes as in
        0.0038 T + 1 dense steps.

        Args:
            steps: int >= 2. Updates in the run. For `fit`, batches per epoch
                times epochs, divided by `gradient_accumulation_steps`.
            learning_rate: See the class.
            **kwargs: Other arguments of the class; they override the settings.

        Raises:
            TypeError, ValueError: As the class does.
        """
        return cls(learning_rate, **recommended(steps) | kwargs)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        given = self.regularizer
        return super().get_config() | {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "regularizer": given and keras.regularizers.serialize(given),
            "momentum_masking": self.momentum_masking,
            "rate_in_momentum": self.rate_in_momentum,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "DGCMomentum":
        """Return an optimizer from its config."""
        # Configs of older versions lack this key.
        config = {"rate_in_momentum": False} | config
        regularizer = config.get("regularizer")
        if isinstance(regularizer, dict):
            config["regularizer"] = keras.regularizers.deserialize(regularizer)
        return super().from_config(config, custom_objects)

    def save_own_variables(self, store: Any) -> None:
        """Save all variables, and whether u and v include the learning rate."""
        super().save_own_variables(store)
        if self.rate_in_momentum:
            store[_RATE_KEY] = np.array(True)

    def load_own_variables(self, store: Any) -> None:
        """Load all variables; raise if the saved `rate_in_momentum` differs."""
        names = list(store.keys())
        self._check_same_rate_key(_RATE_KEY in names)
        super().load_own_variables(
            {name: store[name] for name in names if name != _RATE_KEY}
        )

    def _check_name(self, name: str) -> None:
        if name in _INCLUDES_RATE:
            self._check_same_rate_key(_INCLUDES_RATE[name])

    def _check_same_rate_key(self, saved: bool) -> None:
        here = self.rate_in_momentum
        if here != saved:
            raise ValueError(
                "`rate_in_momentum` must be the same as when the state was "
                f"saved. Received: {_RATE_KEY}={here}, and state saved with "
                f"{_RATE_KEY}={saved}. Pass `{_RATE_KEY}={saved}`, or "
                "load only the weights."
            )

    def build(self, variables: Sequence[Any]) -> None:
        """Create u for each variable, and v for compressible variables."""
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            if is_overwritten(self, variable):
                continue
            dtype = state_dtype(variable.dtype)
            u = add_replica_variable(self, variable, "momentum", dtype)
            if self.rate_in_momentum:
                # `BackupAndRestore` raises if a backup has another `meaning`.
                u.meaning = f"{_RATE_KEY}=True"
            self._compressor.add(variable, u, self.momentum_masking)

    def _update(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Exchange gradients at the sparsity of this step; update variables."""

        def update(sparsity: float | None, gradients: list[Gradient]) -> None:
            rates = tf.convert_to_tensor(self.learning_rate), tf.constant(1.0)
            if not self.rate_in_momentum:
                rates = rates[::-1]
            self._send(variables, sparsity, gradients, *rates)

        gradients = self._compressor.prepare(gradients, variables)
        self._compressor.at_stage(self.iterations, gradients, update)

    def _accumulate_residual(
        self, index: int, gradient: Any, weight: tf.Variable, rate: tf.Tensor
    ) -> None:
        """Add a gradient to u, and the resulting change to v, in one kernel."""
        wire = self._compressor.wire
        u = own_component(self._compressor.momentums[index])
        v = self._compressor.own_residual(index)
        # A worker's u and v are the sums over its devices, so each device adds
        # a fraction of the gradient.
        scale = tf.constant(1 / wire.devices, tf.float64)
        if self.clipnorm:
            # If the gradients of all workers have the norm `limit` and are
            # orthogonal, the norm of their sum is `clipnorm`.
            limit = self.clipnorm / math.sqrt(wire.replicas // wire.devices)
            scale *= clip_factor(norm(gradient), limit)
        add = compiled(_add_to_both, v, self._hyperparameters(index))
        with tf.device(v.device):
            add(u.handle, v.handle, weight.handle, gradient, scale, rate)

    def _dense_update(
        self, index: int, total: Gradient, weight: tf.Variable, rate: tf.Tensor
    ) -> tf.Tensor:
        """Add the mean gradient to u; return the update of the variable.

        All replicas have the same u, and compute the same change. The update is
        N times this change, as if each of N replicas had sent it.
        """
        total = as_dense(total, weight)
        if self.clipnorm:
            total = clip_norm(total, self.clipnorm)
        u = own_component(self._compressor.momentums[index])
        add = compiled(_add_mean_to_u, total, self._hyperparameters(index))
        with tf.device(u.device):
            return add(u.handle, weight.handle, total, rate)

    def _hyperparameters(self, index: int) -> MomentumHyperparameters:
        variable = built_variables(self)[index]
        # Keras adds the penalty of a variable's own regularizer to the loss.
        is_regularized = getattr(variable, "regularizer", None) is not None
        return MomentumHyperparameters(
            self.momentum,
            self.nesterov,
            None if is_regularized else self._penalty,
            self._compressor.wire.replicas,
        )


def _add_to_both(
    hyperparameters: MomentumHyperparameters,
    u: tf.Tensor,
    v: tf.Tensor,
    weight: tf.Tensor,
    gradient: tf.Tensor,
    scale: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    """Add a replica's gradient to u, and the resulting change to v.

    `u`, `v` and `weight` are handles of variables.
    """
    old = read(v, gradient)
    gradient = scaled(gradient, scale)
    assign(v, old + _add_to_u(hyperparameters, u, weight, gradient, rate))


def _add_mean_to_u(
    hyperparameters: MomentumHyperparameters,
    u: tf.Tensor,
    weight: tf.Tensor,
    total: tf.Tensor,
    rate: tf.Tensor,
) -> tf.Tensor:
    """Add the mean gradient to u; return the sum of changes over replicas."""
    replicas = hyperparameters.replicas
    mean = total / replicas
    return replicas * _add_to_u(hyperparameters, u, weight, mean, rate)


def _add_to_u(
    hyperparameters: MomentumHyperparameters,
    u: tf.Tensor,
    weight: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> tf.Tensor:
    """Add a gradient to u; return the change to add to v."""
    w = read(weight, gradient) if hyperparameters.penalty else None
    old = read(u, gradient)
    new, change = dgc_momentum(hyperparameters, w, gradient, old, rate)
    assign(u, new)
    return change


def dgc_momentum(
    hyperparameters: MomentumHyperparameters,
    weight: tf.Tensor,
    gradient: tf.Tensor,
    u: tf.Tensor,
    learning_rate: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the new u_i of `DGCMomentum`'s formula, and the change of v_i.

    `gradient` is already clipped. `weight` is used only with a penalty.
    """
    momentum, nesterov, penalty, replicas = hyperparameters
    if penalty:
        l1, l2 = (scalar(number, u) for number in penalty)
        gradient += (l1 * tf.sign(weight) + 2 * l2 * weight) / replicas
    gradient *= tf.cast(learning_rate, gradient.dtype)
    momentum = scalar(momentum, u)
    u = momentum * (u + gradient) if nesterov else momentum * u + gradient
    return u, u + gradient if nesterov else u


def _penalty_of(regularizer: Any) -> tuple[float, float] | None:
    """Return the factors (l1, l2) of a Keras regularizer, or None for None."""
    if regularizer is None:
        return None
    # Reject subclasses, too, since they may compute a different penalty.
    if type(regularizer) not in (
        keras.regularizers.L1,
        keras.regularizers.L2,
        keras.regularizers.L1L2,
    ):
        raise TypeError(
            "`regularizer` must be None or an instance of "
            "`keras.regularizers.L1`, `L2` or `L1L2`, but not of a subclass. "
            f"Received: {regularizer!r}. Pass `keras.regularizers.L2(1e-4)`."
        )
    l1, l2 = (float(getattr(regularizer, key, 0.0)) for key in ("l1", "l2"))
    return l1, l2
