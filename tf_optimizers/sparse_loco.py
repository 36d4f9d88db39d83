"""SparseLoCo: compresses the updates of any optimizer."""

from collections.abc import Sequence
from typing import Any

import keras

from tf_optimizers._compat.keras import strategy_of
from tf_optimizers.checks import check_integer, check_number, check_positive
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.compression.schedule import SparsitySchedule, recommended
from tf_optimizers.dgc_momentum import DGCMomentum
from tf_optimizers.local_updates.checks import (
    check_averaged,
    check_inner,
    check_outside,
    check_saved,
)
from tf_optimizers.local_updates.common_weights import watch_models
from tf_optimizers.local_updates.optimizer import LocalOptimizer
from tf_optimizers.local_updates.rounds import average
from tf_optimizers.sharded_state import ShardedState


@keras.saving.register_keras_serializable(package="tf_optimizers")
class SparseLoCo(LocalOptimizer):
    """Compresses the updates of any optimizer, for slow networks.

    For variable w on N workers, each with a residual e_i and an inner
    optimizer that has its own state:

        w_i <- w
        sync_every times: w_i <- inner step from w_i by worker i's own gradient
        e_i <- residual_decay e_i + (w - w_i) / N
        send the k entries of largest |e_i|; e_i becomes 0 there
        w   <- w - outer_learning_rate (sum of what all workers sent)

    Worker i's gradient is the mean over its share of the batch. k follows
    `sparsity` as in `DGCMomentum`; before `rampup_begin_step` everything is
    sent. Entries that are not sent stay in e_i until they have grown.

    A variable's updates are averaged densely if it has fewer than
    `min_compress_size` elements, is not float32, or has sparse gradients
    (embeddings). For half-precision variables the inner optimizer updates
    float32 master weights.

    With `sync_every` > 1, the weights of a model are each worker's own between
    two synchronizations. `fit`, `evaluate` and `predict` synchronize before
    weights are read, and average the statistics of `BatchNormalization`; in a
    custom training loop, call `synchronize`.

    The inner optimizer may be `tfo.Lamb`, `tfo.LANS`, any of Keras but `Ftrl`
    and `ScheduleFreeAdamW`, or, if the process has one replica,
    `tfo.AdamOffload`. Its learning rate, schedule, weight decay and clipping
    apply to each worker separately; constraints apply to w. The mean of N
    noisy steps of `tfo.Lamb` or `tfo.LANS` is up to sqrt(N) times shorter than
    one: begin with sqrt(N) times the learning rate. Runs under the same
    strategies as `DGCMomentum`.

    State: on each replica e_i, 4 bytes per compressed parameter, and the inner
    optimizer's state. During a step also a copy of w, and the update; with
    `sync_every` > 1 the copy is kept. Read outside of replicas, e_i is the sum
    over i and the inner state is the mean; checkpoints hold these. With
    `tfo.AdamOffload`, all of it is on the host, the copy too, but for master
    weights of half-precision variables and accumulated gradients.
    Traffic: as `DGCMomentum`'s, in one of `sync_every` steps; dense for
    variables with sparse gradients.
    Sparse gradients: made dense; duplicate rows are summed. Under
    `gradient_accumulation_steps` and `loss_scale_factor` they count as dense.
    Not finite: a NaN or inf is always sent, and reaches w.
    Differs from the paper: workers exchange after every step by default; k is
    per variable, not per block; values have 32 bits by default; e_i does not
    decay by default.

    Args:
        inner_optimizer: A new `keras.optimizers.Optimizer`. Pass `use_ema`,
            `loss_scale_factor` and `gradient_accumulation_steps` to
            `SparseLoCo` instead. `tfo.DGCMomentum` exchanges gradients itself
            and is refused. So are `LossScaleOptimizer`, which belongs outside,
            and `Ftrl` and `ScheduleFreeAdamW`, which do not step from the
            weights that they are given.
        sync_every: int >= 1. Local steps per exchange. Above 1, `use_ema` is
            refused. Defaults to `1`.
        sparsity: Sequence of floats in [0, 1), not decreasing. The share of
            entries held back, stage by stage. Defaults to `(0.999,)`.
        rampup_begin_step: int >= 0. Steps of dense exchange before compression
            starts. Defaults to `0`.
        rampup_step: int >= 1. Steps of the warm-up, split evenly among the
            stages of `sparsity`. Defaults to `1`.
        rampdown_begin_step: None, or int >= rampup_begin_step + rampup_step.
            Where the cool-down begins: the stages return in reverse. Defaults
            to `None`: no cool-down.
        rampdown_step: int >= 1. Steps of the cool-down, from there to dense
            exchange. In the last of them, or at the next synchronization, all
            that is left is sent. Defaults to `1`.
        residual_decay: float in [0, 1]. Multiplies e_i in every exchange. Below
            1, updates are lost. Defaults to `1.0`.
        outer_learning_rate: float > 0. Multiplies the sum of the sent entries.
            Defaults to `1.0`.
        min_compress_size: int >= 1. Elements of the smallest variable that is
            compressed. Defaults to `16384`.
        value_dtype: "float32", "float16", "bfloat16", "int4" or "int2". What
            sent values are rounded to; e_i keeps the rest. See `DGCMomentum`.
            Defaults to `"float32"`.
        **kwargs: `use_ema`, `loss_scale_factor`,
            `gradient_accumulation_steps`, `name`; see
            `keras.optimizers.Optimizer`. Its other arguments are refused: they
            belong to the inner optimizer.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is outside its range, or refused.
        RuntimeError: If a step is compiled by XLA; if a model is saved in the
            middle of local steps.

    Example:
        >>> import keras
        >>> import tf_optimizers as tfo
        >>> optimizer = tfo.SparseLoCo(
        ...     keras.optimizers.AdamW(1e-3), sparsity=(0.996,)
        ... )

    Reference:
        Sarfi et al., 2025, "Communication Efficient LLM Pre-training with
        SparseLoCo", arXiv:2508.15706.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        sync_every: int = 1,
        sparsity: Sequence[float] = (0.999,),
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        rampdown_begin_step: int | None = None,
        rampdown_step: int = 1,
        residual_decay: float = 1.0,
        outer_learning_rate: float = 1.0,
        min_compress_size: int = 16384,
        value_dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        check_inner(inner_optimizer, self._refused)
        sync_every = check_integer("sync_every", sync_every, 1)
        schedule = SparsitySchedule(
            sparsity,
            rampup_begin_step,
            rampup_step,
            rampdown_begin_step,
            rampdown_step,
            sync_every,
        )
        residual_decay = check_number(
            "residual_decay",
            residual_decay,
            "a number in [0, 1]",
            lambda x: 0 <= x <= 1,
        )
        outer_rate = check_positive("outer_learning_rate", outer_learning_rate)
        compressor = Compressor(
            *("SparseLoCo", schedule, min_compress_size, value_dtype),
            sends_rows=False,
        )
        super().__init__(inner_optimizer, **kwargs)
        check_averaged(sync_every, self.use_ema)
        watch_models()
        self.sync_every = sync_every
        self.sparsity = schedule.sparsity
        self.rampup_begin_step = schedule.rampup_begin_step
        self.rampup_step = schedule.rampup_step
        self.rampdown_begin_step = schedule.rampdown_begin_step
        self.rampdown_step = schedule.rampdown_step
        self.residual_decay = residual_decay
        self.outer_learning_rate = outer_rate
        self.min_compress_size = min_compress_size
        self.value_dtype = value_dtype
        self._compressor = compressor

    @classmethod
    def for_steps(
        cls,
        steps: int,
        inner_optimizer: keras.optimizers.Optimizer,
        **kwargs: Any,
    ) -> "SparseLoCo":
        """Return an optimizer with the settings we recommend, for a whole run.

        They are those of `DGCMomentum.for_steps`, which holds less back the
        fewer exchanges there are.

        Args:
            steps: int >= 2. Updates of the run: of `fit`, the batches of an
                epoch times epochs, divided by `gradient_accumulation_steps`.
            inner_optimizer: See the class.
            **kwargs: Other arguments of the class; they override these.

        Raises:
            TypeError, ValueError: As the class.
        """
        every = check_integer("sync_every", kwargs.get("sync_every", 1), 1)
        return cls(inner_optimizer, **recommended(steps, every) | kwargs)

    def communication_summary(self, step: int | None = None) -> dict[str, Any]:
        """Return what one replica sends at a step that exchanges, in bytes.

        The result is that of `DGCMomentum.communication_summary`. Which
        variables have sparse gradients is known after the first step only.

        Args:
            step: int >= 0, from 0. Defaults to the next step.

        Raises:
            RuntimeError: If the optimizer is not built.
        """
        return self._compressor.traffic_summary(self, step)

    @property
    def is_synchronized(self) -> bool:
        """Whether all replicas have the same weights now."""
        return self._rounds is None or self._rounds.taken == 0

    def synchronize(self, statistics: Sequence[Any] = ()) -> None:
        """Give all replicas the same weights, also in the middle of a round.

        As at the end of a round, the largest entries are sent and the others
        kept; a new round begins. `fit`, `evaluate` and `predict` call it
        wherever weights are read. In a custom training loop, call it on every
        worker before you evaluate or save a model.

        Args:
            statistics: Variables that replicas update without an optimizer,
                such as the `non_trainable_variables` of a
                `BatchNormalization`. They become their mean over replicas.

        Raises:
            RuntimeError: If called inside of `strategy.run` or `tf.function`.
        """
        check_outside()
        strategy = strategy_of(self)
        with strategy.scope():
            average(strategy, statistics)
            rounds = self._rounds
            if rounds is not None and not self.is_synchronized:
                sparse = self._compressor.rows.indices
                rounds.end_early(
                    strategy,
                    lambda choice: self._end_round(rounds, [(choice, None)]),
                    None if sparse is None else tuple(sparse),
                )

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Give all replicas the same weights, as `fit` does at its end."""
        self.synchronize()
        super().finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Save the state, as Keras does, if the weights are common."""
        check_saved(self)
        super().save_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        config = super().get_config() | self._compressor.schedule.get_config()
        return config | {
            "sync_every": self.sync_every,
            "residual_decay": self.residual_decay,
            "outer_learning_rate": self.outer_learning_rate,
            "min_compress_size": self.min_compress_size,
            "value_dtype": self.value_dtype,
        }


SparseLoCo._refused = (DGCMomentum, ShardedState, SparseLoCo)
