"""AdamOffload: Adam with its state and arithmetic on the host."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_optimizers._compat.hooks import check_swaps, choose_xla
from tf_optimizers._compat.keras_internals import (
    accumulator,
    average,
    stepped_variables,
    strategy_of,
    variable_index,
)
from tf_optimizers.base.components import components, value_of
from tf_optimizers.base.exclusions import check_exclusions, check_weight_decay
from tf_optimizers.base.precision import refreshed
from tf_optimizers.checks import (
    check_boolean,
    check_built,
    check_decay_rate,
    check_epsilon,
)
from tf_optimizers.kernels import (
    Betas,
    assign,
    betas,
    bias_correction,
    compiled,
    read,
    scalar,
    update_moments,
)
from tf_optimizers.offload.host import in_place, is_on_host
from tf_optimizers.offload.host_optimizer import (
    HostOptimizer,
    Summary,
    bytes_by_device,
    check_averages,
)
from tf_optimizers.wrapped import cannot_use_xla


class AdamHyperparameters(NamedTuple):
    """The hyperparameters for one variable's step.

    Inside a kernel, each float is a float64 scalar; see `compiled`.
    """

    betas: Betas
    epsilon: float
    nesterov: bool
    weight_decay: float | None


@keras.saving.register_keras_serializable(package="tf_optimizers")
class AdamOffload(HostOptimizer):
    """Adam with its state and arithmetic on the host, for larger models.

    For variable w with gradient g at step t, counted from 1:

        g <- g / loss_scale_factor + weight_decay w
        m <- beta_1 m + (1 - beta_1) g
        v <- beta_2 v + (1 - beta_2) g^2
        a <- learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t)
        w <- w - a m / (sqrt(v) + epsilon)

    and with `nesterov`:

        w <- w - a (beta_1 m + (1 - beta_1) g) / (sqrt(v) + epsilon)

    State: m and v, each with the shape of w: together 8 bytes per parameter in
    float32, or 16 in float64 if w is float64. Float16 and bfloat16 variables
    also get float32 master weights, 4 bytes more. This state, averages and
    accumulators are on `/CPU:0` of the worker process, in one copy for all of
    its replicas. Only the weights, `iterations` and the learning rate are on
    the model's devices.
    Traffic: each step copies gradients to the host, and changes of the weights
    to every replica. With one replica, dense gradients and no `use_ema`, a
    float32 parameter takes 8 bytes, and 4 more if it is decayed; a
    half-precision parameter takes 6 bytes. Each further replica of the worker
    adds the size of the weights. With several replicas, half-precision
    gradients are copied as float32, after the strategy's all-reduce.
    Sparse gradients: sent as rows, and made dense on the host. With several
    replicas, `gradient_accumulation_steps` or `loss_scale_factor` makes them
    dense before the exchange. Duplicate rows are summed. The update is dense.
    NaN and inf: a NaN or inf in g makes the same element of w not finite.
    XLA: a train step that XLA compiles for a GPU cannot use the host. `compile`
    turns XLA off unless you pass `jit_compile=True`. In a custom loop, do not
    compile the `tf.function` with XLA.
    Differs from `mindspore.nn.AdamOffload`: v stays at the largest float
    instead of overflowing; excluded variables are never decayed, while
    MindSpore decays excluded variables in parameter groups; float64,
    half-precision and scalar variables are accepted.
    Differs from `keras.optimizers.Adam`: weight decay is L2, added to the
    gradient; bias corrections are computed in full precision; gradients are
    summed over replicas before they are clipped; the state of half-precision
    variables is float32; `epsilon` has a different default.

    Args:
        learning_rate: float >= 0, `LearningRateSchedule`, or callable without
            arguments. Defaults to `1e-3`.
        beta_1: float in [0, 1). Decay of m, per step. Defaults to `0.9`.
        beta_2: float in [0, 1). Decay of v, per step. Defaults to `0.999`.
        epsilon: float > 0. Added to the root of v, before bias correction.
            Defaults to `1e-8`.
        nesterov: bool. Whether to use Nesterov's momentum.
            Defaults to `False`.
        weight_decay: float >= 0. L2, added to the gradient; None means 0.
            Defaults to `0.0`.
        exclude_from_weight_decay: None or a sequence of regular expressions,
            which match anywhere in `variable.path`, with and without the
            model's name.
            "beta" also matches "alphabeta". `tfo.BIAS_AND_NORM` matches names
            that end in "bias", and the names "beta", "gamma" and "scale".
            Defaults to `("beta", "gamma")`.
        **kwargs: `clipnorm`, `use_ema`, `loss_scale_factor`, ...; see
            `keras.optimizers.Optimizer`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range.

    Example:
        >>> import tf_optimizers as tfo
        >>> optimizer = tfo.AdamOffload(1e-3, weight_decay=0.01)

    Reference:
        Kingma and Ba, 2015, "Adam: A Method for Stochastic Optimization",
        arXiv:1412.6980, the variant before Section 2.1; Ren et al., 2021,
        "ZeRO-Offload", arXiv:2101.06840.
    """

    is_elementwise = True  # See `ShardedState.is_elementwise`.
    _supports_jit = False  # A step uses two devices; XLA compiles for one.

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        weight_decay: float | None = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = ("beta", "gamma"),
        **kwargs: Any,
    ) -> None:
        exclusions = check_exclusions(exclude_from_weight_decay, kwargs)
        weight_decay = check_weight_decay(weight_decay)
        super().__init__(learning_rate, weight_decay=weight_decay, **kwargs)
        choose_xla(cannot_use_xla)
        if self.use_ema:
            check_swaps(check_averages)
        self._exclusions = exclusions
        self.beta_1 = check_decay_rate("beta_1", beta_1)
        self.beta_2 = check_decay_rate("beta_2", beta_2)
        self.epsilon = check_epsilon("epsilon", epsilon)
        self.nesterov = check_boolean("nesterov", nesterov)

    def build(self, variables: Sequence[Any]) -> None:
        """Create m and v for each variable, on the host."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def memory_summary(self) -> Summary:
        """Return the bytes of weights and state, compared with Keras's Adam.

        The bytes are sums over all replicas in this worker process. The step
        count and the learning rate are not included.

        Returns:
            A dict {optimizer: {"device" or "host": {kind: bytes}}}. The keys
            are the name of this optimizer's class and, for comparison,
            `"keras.optimizers.Adam"`, with two moments for each weight but no
            averages or accumulators. The kinds are `"weights"`, `"state"` and
            `"master_weights"`.

        Raises:
            RuntimeError: If the optimizer is not built yet.
        """
        check_built(self, "memory_summary")
        weights = stepped_variables(self)
        state = [*self._momentums, *self._velocities]
        if self.use_ema:
            state += [average(self, v) for v in weights]
        if self.gradient_accumulation_steps:
            state += [accumulator(self, v) for v in weights]
        with strategy_of(self).scope():
            return bytes_by_device(
                type(self).__name__,
                weights,
                [v for v in state if v is not None],
                self._masters,
            )

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return super().get_config() | {
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "nesterov": self.nesterov,
            **self._exclusions.config(self._excluded),
        }

    def _rate(self, learning_rate: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return step_size(betas(self.beta_1, self.beta_2), learning_rate, step)

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: Any
    ) -> tf.Tensor | None:
        """Update m and v, and the variable itself if it `is_on_host`.

        Also update the master weight of a half-precision variable.

        Args:
            gradient: Dense, of the variable's shape, in the dtype of the
                variable or of its state.
            variable: A variable that the optimizer was built with.
            learning_rate: Scalar that includes the bias corrections.

        Returns:
            None if the variable itself was updated. Otherwise, the change to
            subtract or, for a half-precision variable, the new value.
        """
        index = variable_index(self, variable)
        constants = AdamHyperparameters(
            betas(self.beta_1, self.beta_2),
            self.epsilon,
            self.nesterov,
            self._decay_of(index) or None,
        )
        slots = self._momentums[index], self._velocities[index]
        state = *(slot.value.handle for slot in slots), learning_rate
        if is_on_host(variable):
            step = compiled(_move, gradient, constants)
            return step(gradient, *state, components(variable)[0].handle)
        master = self._masters[index]
        # If the variable has several gradients in this step, the results of the
        # previous gradients have not been sent to the device yet.
        ready = self._placement.unsent.get(id(variable), [])
        if master is not None:
            value = ready[-1] if ready else value_of(variable)
            others = *state, gradient, master.handle
            return in_place(_move_master, constants, value, *others)
        if self._decay_of(index):
            state += (functools.reduce(tf.subtract, ready, value_of(variable)),)
        return in_place(_change, constants, gradient, *state)


def _move(
    hyperparameters: AdamHyperparameters,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    size: tf.Tensor,
    weight: tf.Tensor,
) -> None:
    """Update m, v and the weight in place, given their handles."""
    old = read(weight, gradient)
    assign(weight, old - _change(hyperparameters, gradient, m, v, size, old))


def _move_master(
    hyperparameters: AdamHyperparameters,
    value: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    size: tf.Tensor,
    gradient: tf.Tensor,
    master: tf.Tensor,
) -> tf.Tensor:
    """Update m, v and the master weight; return the variable's new value.

    `value` is the variable's old value. `gradient` has the dtype of the
    variable or float32. `m`, `v` and `master` are handles.
    """
    gradient = tf.cast(gradient, tf.float32)
    old = refreshed(read(master, gradient), value)
    new = old - _change(hyperparameters, gradient, m, v, size, old)
    assign(master, new)
    return tf.cast(new, value.dtype)


def _change(
    hyperparameters: AdamHyperparameters,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    size: tf.Tensor,
    weight: Any = None,
) -> tf.Tensor:
    """Update m and v in place; return the change to subtract from the weight.

    `m` and `v` are handles. `weight` is a value, needed only for weight decay.
    """
    old = read(m, gradient), read(v, gradient)
    change, new_m, new_v = adam(hyperparameters, gradient, *old, size, weight)
    assign(m, new_m)
    assign(v, new_v)
    return change


def step_size(
    betas: Betas, learning_rate: tf.Tensor, step: tf.Tensor
) -> tf.Tensor:
    """Return learning_rate sqrt(1 - beta_2^step) / (1 - beta_1^step)."""
    correction = tf.sqrt(bias_correction(betas.log_of_v, step))
    return learning_rate * correction / bias_correction(betas.log_of_m, step)


def adam(
    hyperparameters: AdamHyperparameters,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    size: tf.Tensor,
    weight: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the change to subtract from the weight, the new m, and the new v.

    `size` is the step size a in the formula of `AdamOffload`. `weight` is
    needed only for weight decay.
    """
    betas, epsilon, nesterov, weight_decay = hyperparameters
    if weight_decay is not None:
        gradient += scalar(weight_decay, weight) * weight
    m, v = update_moments(betas, gradient, m, v)
    ahead = m
    if nesterov:
        ahead = scalar(betas.of_m, m) * m + scalar(betas.new_m, m) * gradient
    # The bias corrections are part of `size`, and apply after epsilon is added.
    return size * ahead / (tf.sqrt(v) + scalar(epsilon, v)), m, v
