"""ShardedState: distributes the state of an optimizer among replicas."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient, distinct
from tf_optimizers._compat.hooks import agree_on_overflow
from tf_optimizers._compat.keras_internals import (
    is_overwritten,
    micro_steps,
    path_of,
    raw_iterations,
    strategy_of,
    variable_index,
)
from tf_optimizers._compat.shown_averages import InnerAverages
from tf_optimizers._compat.strategies import replaced, unconstrained
from tf_optimizers.base.components import own_component
from tf_optimizers.base.exclusions import ENTRY, PATTERNS
from tf_optimizers.base.gradients import densify
from tf_optimizers.base.inner import Wrapper, check_new, check_wrapped
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.checks import check_built
from tf_optimizers.compression.compressed_optimizer import CompressedOptimizer
from tf_optimizers.offload.host import HOST
from tf_optimizers.offload.host_optimizer import HostOptimizer
from tf_optimizers.replicas import replicas_of
from tf_optimizers.sharding.ownership import (
    assign_owners,
    bytes_of,
    is_elementwise,
    loads_of,
    warn_of_uneven,
)
from tf_optimizers.sharding.sharded_steps import ShardedSteps
from tf_optimizers.sharding.slots import Slots
from tf_optimizers.wrapped import is_wrapper


@keras.saving.register_keras_serializable(package="tf_optimizers")
class ShardedState(Wrapper):
    """Distributes another optimizer's state among all replicas (ZeRO-1).

    Each variable w (or, if w is split, each range of its rows) has one owner
    among N replicas. Only the owner has the state s of w, and updates w:

        g    <- sum of the replicas' gradients, at the owner of w
        w, s <- inner step(w, s, g), at the owner of w
        w    <- the owner's w, on all replicas

    Variables are assigned from the largest to the smallest, each to the replica
    that owns the fewest bytes so far. If the inner optimizer is elementwise
    (see `is_elementwise`), variables with more than half of the mean number of
    bytes per replica are split by rows. Other optimizers update whole
    variables, so that trust ratios and factored moments are exact. With one
    replica, `ShardedState` does the same as the inner optimizer.

    Gradients are clipped after they are summed; `global_clipnorm` limits the
    norm over all owners. Weight decay, schedules, `loss_scale_factor` and
    constraints work as in the inner optimizer. With `use_ema`, the averages are
    at the owners. With `gradient_accumulation_steps`, each replica accumulates
    its own gradients, 4 bytes per float32 parameter, and exchanges them once
    per update.
    `ShardedState` runs under `MirroredStrategy` and
    `tfo.SparseMultiWorkerMirroredStrategy`.

    State: on each replica, the inner optimizer's state for about 1 / N of the
    parameters. If variables are not split, one replica has at least the state
    of the largest variable. State that belongs to no variable is on every
    replica. Outside of steps, and in files, the state is whole, as the inner
    optimizer alone would save it. Reading the whole state takes an exchange, so
    all workers must save together.
    Traffic: under `tfo.SparseMultiWorkerMirroredStrategy`, an all-to-all of
    gradients and an all-gather of weights for every 16 MiB. If all weights are
    float32, and all replicas own the same number of bytes, both together move
    as many bytes as a dense all-reduce. `global_clipnorm` takes one more round
    trip, as does `clipnorm` if variables are split.
    Sparse gradients: made dense with several replicas or a `loss_scale_factor`,
    otherwise as with the inner optimizer; duplicate rows are summed.
    NaN and inf: as with the inner optimizer.

    Args:
        inner_optimizer: A new `keras.optimizers.Optimizer` that creates its
            state variable by variable, such as `AdamW`, `tfo.Lamb` or
            `tfo.AdamOffload`. The state of `tfo.AdamOffload` is distributed
            among the hosts. Optimizers that exchange gradients themselves
            (`tfo.DGCMomentum`, `tfo.SparseLoCo`) are not supported. Wrappers
            (`LossScaleOptimizer`, `MultiOptimizer`) are not supported either:
            put `ShardedState` inside them. With several replicas,
            `gradient_accumulation_steps` is supported neither for
            `tfo.AdamOffload` nor, with `use_ema`, for Keras's optimizers.
        name: str or None. The optimizer's name. Defaults to `None`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `inner_optimizer` is already built or not supported, or
            if the strategy is not supported.

    Example:
        >>> import keras
        >>> import tf_optimizers as tfo
        >>> optimizer = tfo.ShardedState(keras.optimizers.AdamW(1e-3))

    Reference:
        Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training
        Trillion Parameter Models", arXiv:1910.02054.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        name: str | None = None,
    ) -> None:
        _check_inner(inner_optimizer)
        super().__init__(inner_optimizer, name=name)
        # Keras divides gradients by this factor before the exchange. So the
        # inner optimizer must not divide them again.
        self.loss_scale_factor = inner_optimizer.loss_scale_factor
        self._slots: Slots | None = None  # None with one replica.
        self._ema = InnerAverages(inner_optimizer)

    @staticmethod
    def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
        """Return whether an optimizer may update a variable's rows separately.

        The update of an entry must not depend on other entries. Keras's `SGD`,
        `RMSprop`, `Adam`, `AdamW`, `Adadelta`, `Adagrad`, `Adamax`, `Nadam`,
        `Ftrl`, `Lion` and `ScheduleFreeAdamW` are elementwise, and so is
        `tfo.AdamOffload`. Any other elementwise class, including a subclass,
        must set the attribute `is_elementwise = True`.
        """
        return is_elementwise(optimizer)

    def __dir__(self) -> list[str]:
        """Return the attributes that Keras saves: all but the inner optimizer.

        `variables` already contains the inner optimizer's state.
        """
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    @property
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's state."""
        return self.inner_optimizer.variables

    @property
    def iterations(self) -> Any:
        """The number of updates that the inner optimizer has made."""
        return self.inner_optimizer.iterations

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set the values of `variables`."""
        self.inner_optimizer.set_weights(weights)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """With `use_ema`, overwrite weights with averages after training."""
        inner = self.inner_optimizer
        if self._slots is None or not inner.use_ema:
            inner.finalize_variable_values(var_list)
            return
        # Reading an average gathers its rows from all replicas.
        with strategy_of(self).scope():
            self._steps.overwrite(var_list)

    def build(self, variables: Sequence[Any]) -> None:
        """Choose owners, and create the inner optimizer's state on them."""
        if self.built:
            return
        inner, variables = self.inner_optimizer, distinct(variables)
        self._adopt(variables)
        strategy = strategy_of(self)
        replicas = strategy.num_replicas_in_sync
        self._excluded = self._exclusions.find(self, variables, {})
        self._exclude(variables, variables)
        if replicas == 1:
            inner.build(variables)
        else:
            _check_distributed(inner, strategy, variables)
            agree_on_overflow(strategy)
            # Keras may call `build` while a step is traced.
            with tf.init_scope():
                self._distribute(strategy, variables)
        self._exclude(variables, variables)
        # Skip `Optimizer.build`: master weights belong to the inner optimizer.
        super(Optimizer, self).build(variables)
        # Set this last, or Keras would create averages here.
        self.use_ema = inner.use_ema

    def _distribute(
        self, strategy: tf.distribute.Strategy, variables: list[Any]
    ) -> None:
        inner, replicas = self.inner_optimizer, strategy.num_replicas_in_sync
        pieces = assign_owners(variables, replicas, is_elementwise(inner))
        owned = [(variables[piece.index], piece) for piece in pieces]
        warn_of_uneven(variables, loads_of(owned, replicas))
        devices = replicas_of(strategy).devices
        if isinstance(inner, HostOptimizer):
            devices = [HOST] * len(devices)
        self._slots = Slots(strategy, variables, pieces, devices)
        with self._slots.of(inner) as watched:
            inner.build(watched)
        self._steps = ShardedSteps(inner, self._slots)

    def _cast(
        self, gradients: list[Gradient | None], variables: list[Any]
    ) -> list[Any]:
        """Cast gradients if the inner optimizer is from this package.

        If Keras will divide the gradients by `loss_scale_factor`, also make
        them dense.
        """
        if isinstance(self.inner_optimizer, Optimizer):
            return super()._cast(gradients, variables)
        if self.loss_scale_factor:  # Keras cannot divide `IndexedSlices`.
            gradients = densify(gradients, variables)
        return gradients

    def _accumulate(
        self, gradients: list[Gradient], variables: list[Any]
    ) -> None:
        """Accumulate gradients, or update each weight at its owner."""
        inner = self.inner_optimizer
        unscaled = (inner, "loss_scale_factor", None)
        if self._slots is None:
            # Keras applies the constraints itself, after this step.
            with replaced([unscaled, *unconstrained(variables)]):
                inner.apply(gradients, variables)
            return
        count = tf.identity(micro_steps(inner))
        super()._accumulate(densify(gradients, variables), variables)
        # Count the step on every replica, even if the replica owns no variable.
        own_component(raw_iterations(inner)).assign(count + 1)

    def _update(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        indices = [variable_index(self, variable) for variable in variables]
        self._steps.update(gradients, indices)

    def memory_summary(self) -> dict[str, Any]:
        """Return how many bytes of the state each replica stores.

        Returns:
            A dict with three keys. `"owned"` is a list: for each replica, the
            number of bytes that only this replica stores. `"shared"` is the
            number of bytes that every replica stores. `"whole"` is the number
            of bytes that each replica would store without `ShardedState`. With
            one replica, all bytes are shared. The dict is the same on all
            workers.

        Raises:
            RuntimeError: If the optimizer is not built.
        """
        check_built(self, "memory_summary")
        whole = sum(map(bytes_of, self.variables))
        slots = [] if self._slots is None else self._slots.owned
        owned = loads_of(slots, strategy_of(self).num_replicas_in_sync)
        return {"owned": owned, "shared": whole - sum(owned), "whole": whole}

    def _state_owner(self) -> Any:
        return self.inner_optimizer

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, and the exclusions."""
        config = super().get_config()
        keys = "name", "inner_optimizer", ENTRY, PATTERNS
        return {key: config[key] for key in keys if key in config}


def _check_inner(value: Any) -> None:
    """Raise unless `value` is a new optimizer that `ShardedState` can wrap."""
    refused = (CompressedOptimizer, ShardedState)

    def check(inner: Any) -> None:
        instead = "keras.optimizers.AdamW(1e-3)"
        check_wrapped(inner, "ShardedState", refused, instead)
        if is_wrapper(inner) or hasattr(inner, "optimizers"):
            raise ValueError(
                "`inner_optimizer` must not wrap optimizers. Received: "
                f"`{type(inner).__name__}`. Instead, wrap those in "
                f"`ShardedState`, and pass them to `{type(inner).__name__}`."
            )

    check_new(value, check)


def _check_distributed(
    inner: Any, strategy: tf.distribute.Strategy, variables: list[Any]
) -> None:
    """Raise if the state cannot be distributed among several replicas."""
    if not replicas_of(strategy).has_owners:
        raise ValueError(
            "State can be distributed only under `MirroredStrategy` or "
            "`tfo.SparseMultiWorkerMirroredStrategy`. Received: "
            f"{type(strategy).__name__}. Create the model and the optimizer in "
            "the scope of one of these strategies."
        )
    given = inner.gradient_accumulation_steps
    if given and isinstance(inner, HostOptimizer):
        raise ValueError(
            "`inner_optimizer` must accumulate gradients on the devices. "
            f"Received: `{type(inner).__name__}`, which accumulates gradients "
            f"on the host, with gradient_accumulation_steps={given}. Leave out "
            "`gradient_accumulation_steps`, or pass `keras.optimizers.Adam`."
        )
    if given and inner.use_ema and not isinstance(inner, Optimizer):
        raise ValueError(
            "`ShardedState` cannot combine `use_ema` with "
            "`gradient_accumulation_steps` if the inner optimizer updates "
            f"averages after every batch. Received: `{type(inner).__name__}` "
            f"with use_ema=True and gradient_accumulation_steps={given}. Leave "
            "one of the two arguments out."
        )
    for variable in variables:
        if is_overwritten(inner, variable):
            raise ValueError(
                "`ShardedState` cannot update variables that gradients "
                "overwrite, such as float8 scales. Received: "
                f"{path_of(variable)}. "
                f"Use `{type(inner).__name__}` without `ShardedState`."
            )
