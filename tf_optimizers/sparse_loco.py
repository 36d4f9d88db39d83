"""SparseLoCo: compresses the updates of another optimizer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient, distinct
from tf_optimizers._compat.keras_internals import (
    is_overwritten,
    micro_steps,
    strategy_of,
    variable_index,
)
from tf_optimizers._compat.shown_averages import show_averages
from tf_optimizers._compat.strategies import is_adopted
from tf_optimizers.base.gradients import densify
from tf_optimizers.base.inner import Wrapper
from tf_optimizers.base.precision import store_weights
from tf_optimizers.checks import (
    Fixed,
    check_boolean,
    check_fraction,
    check_integer,
    check_positive,
)
from tf_optimizers.compression.compressed_optimizer import CompressedOptimizer
from tf_optimizers.compression.sparsity_schedule import (
    SparsitySchedule,
    recommended_updates,
)
from tf_optimizers.kernels import assign, compiled, read, scalar
from tf_optimizers.local_updates import sparse_loco_checks
from tf_optimizers.local_updates.common_weights import watch_models
from tf_optimizers.local_updates.local_steps import LocalSteps
from tf_optimizers.local_updates.overlap import OverlappedExchange
from tf_optimizers.local_updates.rounds import Choice, Rounds
from tf_optimizers.replicas import replicas_of
from tf_optimizers.sharded_state import ShardedState
from tf_optimizers.wrapped import note_local_steps


@keras.saving.register_keras_serializable(package="tf_optimizers")
class SparseLoCo(Wrapper, CompressedOptimizer):
    """Compresses the updates of another optimizer, for slow networks.

    For variable w on N workers, where worker i has its own residual e_i and its
    own state of the inner optimizer:

        w_i <- w
        sync_every times: w_i <- inner step from w_i by worker i's gradient
        e_i <- residual_decay e_i + (w - w_i) / N
        send the k entries of largest |e_i|; subtract them from e_i
        w   <- w - outer_learning_rate (sum of all workers' sent entries)

    The `sync_every` local steps before an exchange are a round. Each replica
    counts as a worker. But if `tfo.SparseMultiWorkerMirroredStrategy` runs
    several processes, each process is a worker. Worker i's gradient is the mean
    over its part of the batch. If `fit` under this strategy splits a batch
    unevenly, the mean is weighted by the part's number of rows.

    With `step_ahead`, local steps begin from weights that include a fraction of
    the worker's unsent updates. After the first gradient of a round has been
    computed at w, worker i sets

        w_i <- w - step_ahead N e_i

    The round's change of w_i is measured from this value.

    k follows `sparsity` as in `DGCMomentum`. Before `rampup_begin_step`,
    updates are sent uncompressed, and averaged. Entries that are not sent
    accumulate in e_i until they are large enough.

    The updates of a variable are not compressed if the variable has fewer than
    `min_compress_size` elements, is a scalar, is not float32, or has sparse
    gradients (embeddings). For half-precision variables, the inner optimizer
    updates float32 master weights.

    With `sync_every` > 1, workers have different weights within a round. In a
    custom training loop, call `synchronize` before you evaluate or save the
    model.

    With `overlap`, workers exchange entries while the next sync_every steps
    run. Worker i has a copy of w, its own weights w_i, and b_i, the value of
    w_i at the start of the round. At the end of a round, worker i waits for the
    entries of the previous round, and then computes

        w   <- w - outer_learning_rate (sum of the entries that have arrived)
        e_i <- residual_decay e_i + (b_i - w_i) / N
        w_i <- w - N e_i
        b_i <- w_i
        begin to send the k entries of largest |e_i|; subtract them from e_i

    So the next round starts from w plus worker i's updates that w does not
    include yet. All workers have the same w, bit for bit. `synchronize` waits
    until all entries have arrived, exchanges once more without overlap, and
    sets all w_i to the new w.

    The inner optimizer may be `tfo.Lamb`, `tfo.LANS` or, if each process has
    one replica, `tfo.AdamOffload`. It may also be any Keras optimizer except
    `Ftrl`, `ScheduleFreeAdamW` and `LossScaleOptimizer`. Its learning rate,
    schedule, weight decay and clipping apply to each worker separately.
    Constraints are applied to the model's weights after every exchange and,
    with `sync_every` > 1, after every local step. The mean of N noisy steps of
    `tfo.Lamb` or `tfo.LANS` is up to sqrt(N) times shorter than a single step.
    So start with sqrt(N) times the usual learning rate. `SparseLoCo` runs under
    the same strategies as `DGCMomentum`.

    State: e_i, 4 bytes per compressed parameter, and the inner optimizer's
    state, on each replica. During a step, the update and a copy of w also take
    memory. With `sync_every` > 1, the copy stays between steps; `overlap` or
    `step_ahead` adds a copy of w_i. Outside of `strategy.run`, and in
    checkpoints, e is the sum of all e_i, and the inner state is the mean over
    replicas. With `tfo.AdamOffload`, all state is on the host, except for
    master weights, moving averages and accumulated gradients.
    Traffic: as with `DGCMomentum`, but only at the end of a round; dense for
    variables with sparse gradients.
    Sparse gradients: made dense; duplicate rows are summed. With
    `gradient_accumulation_steps` or `loss_scale_factor`, such gradients count
    as dense, so their variables may be compressed.
    NaN and inf: count as the largest entries, and reach w when they are sent.
    Differs from the paper: by default, workers exchange after every step,
    values have 32 bits, and e_i does not decay; k is per variable, not per
    block.

    Args:
        inner_optimizer: A new `keras.optimizers.Optimizer`. Pass `use_ema`,
            `loss_scale_factor` and `gradient_accumulation_steps` to
            `SparseLoCo` instead. Not supported: `tfo.DGCMomentum`,
            `tfo.SparseLoCo` and `tfo.ShardedState`, which exchange gradients
            themselves; `LossScaleOptimizer`, which must wrap `SparseLoCo`
            instead; `Ftrl` and `ScheduleFreeAdamW`, which compute new weights
            from their own state.
        sync_every: int >= 1. Local steps per exchange. Must be 1 with
            `use_ema`. Defaults to `1`.
        sparsity: Sequence of floats in [0, 1), not decreasing. Fraction of
            entries that are not sent, stage by stage. Defaults to `(0.999,)`.
        rampup_begin_step: int >= 0. Steps of dense exchange before compression
            starts. Defaults to `0`.
        rampup_step: int >= 1. Steps of the warm-up, split evenly among the
            stages of `sparsity`. Defaults to `1`.
        rampdown_begin_step: None, or int >= rampup_begin_step + rampup_step.
            First step of the cool-down, which runs the stages in reverse.
            Defaults to `None`.
        rampdown_step: int >= 1. Steps of the cool-down, after which the
            exchange is dense. The residuals of all trainable variables are sent
            in the last step of the cool-down or, if no round ends there, in the
            next exchange. Defaults to `1`.
        residual_decay: float in [0, 1]. Multiplies e_i in every exchange. Below
            1, parts of the updates are lost. Defaults to `1.0`.
        outer_learning_rate: float > 0. Multiplies the sums of sent entries, and
            the means of uncompressed updates. Defaults to `1.0`.
        min_compress_size: int >= 1. Updates of variables with fewer elements
            are not compressed. Defaults to `16384`.
        value_dtype: "float32", "float16", "bfloat16", "int4" or "int2". The
            format of sent values; see `DGCMomentum`. Defaults to
            `"float32"`.
        overlap: bool. Whether workers exchange entries while the next local
            steps run. Needs `sync_every` > 1 and a
            `tfo.SparseMultiWorkerMirroredStrategy`. Defaults to `False`.
        step_ahead: float in [0, 1]. The fraction of a worker's unsent updates
            that is applied to its weights when a round begins. Values above 0
            need `sync_every` > 1 and `overlap=False`. Defaults to `0.0`.
        **kwargs: `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps`, `name`; see
            `keras.optimizers.Optimizer`. Pass other arguments to the inner
            optimizer.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range, or not supported; if a
            compressed variable has two gradients in a step or, with
            `sync_every=1` and a cool-down, has none.
        RuntimeError: If XLA compiles a step with compressed variables, or if a
            model is saved while its weights differ between workers.

    Example:
        >>> import keras
        >>> import tf_optimizers as tfo
        >>> optimizer = tfo.SparseLoCo(keras.optimizers.AdamW(1e-3))

    Reference:
        Sarfi et al., 2025, "Communication Efficient LLM Pre-training with
        SparseLoCo", arXiv:2508.15706. `step_ahead`: Xu et al., 2020,
        "Step-Ahead Error Feedback for Distributed Training with Compressed
        Gradient", arXiv:2008.05823; with a fraction: Redie et al., 2026,
        arXiv:2601.20738.
    """

    _single_replica_warning = (
        "SparseLoCo saves traffic between replicas. Received: one replica, "
        "which has no traffic. Use the inner optimizer alone."
    )
    _sends_rows = False
    # Not inner optimizers, because they exchange gradients themselves.
    _refused = (CompressedOptimizer, ShardedState)
    _rounds: Rounds | None = None  # Set by `build` if `sync_every` > 1.
    _overlapped: OverlappedExchange | None = None  # Set if rounds overlap.
    sync_every, overlap, step_ahead = Fixed(), Fixed(), Fixed()
    residual_decay, outer_learning_rate = Fixed(), Fixed()

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
        overlap: bool = False,
        step_ahead: float = 0.0,
        **kwargs: Any,
    ) -> None:
        sparse_loco_checks.check_inner(inner_optimizer, self._refused)
        sparse_loco_checks.check_arguments(kwargs)
        schedule = SparsitySchedule(
            sparsity=sparsity,
            rampup_begin_step=rampup_begin_step,
            rampup_step=rampup_step,
            rampdown_begin_step=rampdown_begin_step,
            rampdown_step=rampdown_step,
            sync_every=check_integer("sync_every", sync_every, 1),
        )
        super().__init__(
            inner_optimizer,
            schedule=schedule,
            min_compress_size=min_compress_size,
            value_dtype=value_dtype,
            **kwargs,
        )
        self.sync_every = schedule.sync_every
        self.residual_decay = check_fraction("residual_decay", residual_decay)
        self.outer_learning_rate = check_positive(
            "outer_learning_rate", outer_learning_rate
        )
        self.overlap = check_boolean("overlap", overlap)
        self.step_ahead = check_fraction("step_ahead", step_ahead)
        sparse_loco_checks.check_rounds(self)
        watch_models()

    @classmethod
    def for_steps(
        cls,
        steps: int,
        inner_optimizer: keras.optimizers.Optimizer,
        **kwargs: Any,
    ) -> "SparseLoCo":
        """Return an optimizer with recommended settings for a whole run.

        With `sync_every=1`, the settings are those of `DGCMomentum.for_steps`.
        Also, in runs of fewer than 500 steps, `residual_decay` is 0.7 instead
        of 1: the inner optimizer does not take the residuals into account, and
        would otherwise move the weights too far.

        With `sync_every` > 1, there is neither warm-up nor cool-down:

            sparsity              1 - min(1 / 2, max(s, 10 sync_every / steps))
            outer_learning_rate   1.4
            value_dtype           "int2"
            step_ahead            0.25, or 0 with `overlap`

        Here, s is the fraction of entries with which N workers send 2,000 / N
        times fewer bytes than with dense float32 gradients in every step. In
        short runs, the fraction is raised, to at most 1 / 2, so that every
        entry is sent ten times on average. With `sync_every=8`, these are runs
        of fewer than about 3,000 steps.

        Args:
            steps: int >= 2. Updates in the run. For `fit`, batches per epoch
                times epochs, divided by `gradient_accumulation_steps`.
            inner_optimizer: See the class.
            **kwargs: Other arguments of the class; they override the settings.

        Raises:
            TypeError, ValueError: As the class does.
        """
        settings = recommended_updates(
            steps, kwargs.get("sync_every", 1), kwargs.get("overlap", False)
        )
        return cls(inner_optimizer, **settings | kwargs)

    @property
    def variables(self) -> list[keras.Variable]:
        """This optimizer's own state, followed by the inner optimizer's."""
        return [*super().variables, *self.inner_optimizer.variables]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set `variables`, including the inner optimizer's."""
        self.finish_exchange()
        own = len(super().variables)
        super().set_weights(weights[:own])
        self.inner_optimizer.set_weights(weights[own:])

    @property
    def is_synchronized(self) -> bool:
        """Whether all replicas have the same weights now."""
        return self._rounds is None or self._rounds.taken == 0

    def synchronize(self, statistics: Sequence[Any] = ()) -> None:
        """Give all replicas the same weights, even in the middle of a round.

        If weights differ, replicas send their largest entries, as at the end of
        a round. The next step begins a new round of `sync_every` local steps.

        With `sync_every` > 1, `fit`, `evaluate` and `predict` call
        `synchronize` at the end of each epoch, and before each evaluation and
        prediction. They pass the statistics of `BatchNormalization`, unless the
        strategy averages these itself. In a custom training loop, call
        `synchronize` on every worker before you evaluate or save a model.

        Args:
            statistics: Variables that replicas update without an optimizer,
                such as the `non_trainable_variables` of a
                `BatchNormalization`. Each becomes its mean over replicas.
                Defaults to `()`.

        Raises:
            RuntimeError: If called inside of `strategy.run` or `tf.function`.
            tf.errors.InvalidArgumentError: If an exchange with `overlap` has
                failed.
        """
        sparse_loco_checks.check_between_steps()
        with strategy_of(self).scope():
            replicas_of().average(statistics)
            rounds = self._rounds
            self.finish_exchange()
            if rounds is not None and rounds.taken:
                rounds.end_early(
                    strategy_of(self).run,
                    lambda choice: self._end_round(rounds, [(choice, None)]),
                    self.sparse_gradients,
                )

    @property
    def sparse_gradients(self) -> Sequence[int] | None:
        """The indices of variables with sparse gradients; None if unknown."""
        return self._compressor.rows.indices

    def expect_sparse_gradients(self, indices: Sequence[int]) -> None:
        """Treat the gradients of these variables as sparse.

        For each variable, this ends when a step that updates it is traced, or
        runs in eager mode.
        """
        self._compressor.rows.expect(indices)

    def finish_exchange(self) -> None:
        """Wait until all entries have arrived; call this between steps."""
        if self._overlapped is not None:
            self._overlapped.finish()

    def batches_left(self) -> tf.Tensor:
        """Return the number of batches left in the round, an int64 scalar."""
        each = self.gradient_accumulation_steps or 1
        left = self._rounds.left() if self._rounds else tf.constant(1, tf.int64)
        return left * each - micro_steps(self) % each

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """After `fit`, synchronize; with `use_ema`, set weights to averages."""
        self.synchronize()
        super().finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Save the state; raise if weights differ between replicas."""
        sparse_loco_checks.check_synchronized(self)
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the state, after all entries have arrived."""
        self.finish_exchange()
        super().load_own_variables(store)

    def _check_name(self, name: str) -> None:
        """Wait for all entries to arrive before a checkpoint is restored."""
        super()._check_name(name)
        self.finish_exchange()

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        config = super().get_config()
        for name in sparse_loco_checks.INNER_ARGUMENTS:
            del config[name]
        names = ["sync_every", "residual_decay", "outer_learning_rate"]
        names += ["overlap", "step_ahead"]
        return config | {name: getattr(self, name) for name in names}

    def build(self, variables: Sequence[Any]) -> None:
        """Create the residuals and the inner optimizer's state."""
        if self.built:
            return
        self._adopt(variables)
        sparse_loco_checks.check_strategy(self, variables)
        if is_adopted(self):
            sparse_loco_checks.check_can_overlap(self)
        super().build(variables)
        inner, masters = self.inner_optimizer, self._masters
        weights = masters.in_place_of(variables)
        if self.use_ema:
            show_averages(self, inner)
        self._exclude(variables, weights)
        self._steps = LocalSteps(inner, weights, variables)
        self._steps.build(strategy_of(self))
        # Repeat these calls, because a callable in `MultiOptimizer` may have
        # chosen optimizers during `build`.
        sparse_loco_checks.check_strategy(self, variables)
        self._exclude(variables, weights)
        with self._steps.variable_scope():
            for variable in variables:
                if not is_overwritten(self, variable):
                    self._compressor.add(variable)
            if self.sync_every > 1:
                note_local_steps(self)
                self._rounds = Rounds(self, variables, weights)
                group = replicas_of(strategy_of(self))
                if self.overlap and group.exchanges_later:
                    self._overlapped = OverlappedExchange(self, self._rounds)

    def _update(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Take a local step; at the end of a round, exchange pseudo-gradients.

        A pseudo-gradient is a weight at the start of the round minus the same
        weight now. The local step applies no constraints: Keras applies them
        after this method.
        """
        compressor, rounds = self._compressor, self._rounds
        gradients = compressor.prepare(gradients, variables)
        means = compressor.mean_on_worker(densify(gradients, variables))
        weights = self._weights(variables)
        indices = [variable_index(self, variable) for variable in variables]
        inputs = means, weights, indices, tf.convert_to_tensor(self.iterations)
        step = functools.partial(self._steps.step, *inputs)
        if rounds is None:
            self._exchange_step(step, variables, weights)
            return
        every = self._weights(rounds.variables)
        rounds.begin(every, variables)
        step()
        store_weights(variables, weights)
        due = rounds.due(variables, rounds.count())
        if self._overlapped is not None:
            self._overlapped.start(due, variables, self.iterations)
        else:
            self._end_round(rounds, due, variables)

    def _exchange_step(
        self, step: Callable, variables: list[Any], weights: list[Any]
    ) -> None:
        """Take a step, undo it, and exchange the changes of weights."""
        place = self._steps.tensor_scope
        # A variable with two gradients is updated twice, but exchanged once.
        variables, weights = distinct(variables), distinct(weights)
        with place():
            before = [weight.read_value() for weight in weights]
        step()
        pairs = list(zip(weights, before, strict=True))
        with place():
            moved = [old - weight.read_value() for weight, old in pairs]
        for weight, old in pairs:
            weight.assign(old)
        send = functools.partial(self._send_moved, variables)
        self._compressor.at_stage(self.iterations, moved, send)

    def _end_round(
        self,
        rounds: Rounds,
        due: Sequence[tuple[Choice, tf.Tensor | None]],
        stepped: Sequence[tf.Variable] = (),
    ) -> None:
        """Exchange the changes of weights in a round, if the round is over.

        `due` lists sets of variables, each with a bool tensor: whether to
        exchange the set now. None means True. At most one set is exchanged.
        `stepped` are the variables of the step that ends the round.
        """
        sparse_loco_checks.check_can_overlap(self)
        compressor = self._compressor
        compressor.allocate(compressor.compressed)
        is_known = compressor.rows.indices is not None

        def end(
            choice: Choice, sparsity: float | None, _: list[Gradient]
        ) -> None:
            variables = rounds.chosen(choice)
            weights = self._weights(variables)
            moved = rounds.end(weights, choice)
            store_weights(variables, weights)
            # Do not compress until it is known which gradients are sparse.
            self._send_moved(variables, sparsity if is_known else None, moved)
            rounds.constrain(stepped, choice)

        for choice, is_due in due:
            exchange = functools.partial(end, choice)
            compressor.at_stage(self.iterations, [], exchange, is_due)

    def _send_moved(
        self, variables: list[Any], sparsity: float | None, moved: list[Any]
    ) -> None:
        rate = tf.constant(self.outer_learning_rate, tf.float64)
        self._send(variables, sparsity, moved, tf.constant(1.0), rate)

    def _accumulate_residual(
        self, index: int, moved: tf.Tensor, weight: Any, rate: tf.Tensor
    ) -> None:
        """Decay a weight's residual, and add the weight's change."""
        wire, decay = self._compressor.wire, self.residual_decay
        residual = self._compressor.own_residual(index)
        # Each of a worker's M devices holds e_i / M; see `sparse_loco`.
        copies = wire.devices * wire.replicas
        add = compiled(_add_to_residual, residual, decay, copies)
        with tf.device(residual.device):
            add(residual.handle, moved)

    def _dense_update(
        self, index: int, moved: tf.Tensor, weight: Any, rate: tf.Tensor
    ) -> tf.Tensor:
        """Return the mean over replicas of a weight's change in a round."""
        return moved / self._compressor.wire.replicas


def _add_to_residual(
    residual_decay: float, copies: int, residual: tf.Tensor, moved: tf.Tensor
) -> None:
    """Update e_i, given the handle of its variable."""
    old = read(residual, moved)
    assign(residual, sparse_loco(residual_decay, copies, old, moved))


def sparse_loco(
    residual_decay: float, copies: int, residual: tf.Tensor, moved: tf.Tensor
) -> tf.Tensor:
    """Return the new residual e_i of `SparseLoCo`, or a device's part of it.

    `moved` is w_i at the start of the round minus w_i now, and `copies` is N.
    If each of a worker's M devices holds e_i / M, `moved` is the sum of these
    differences over the devices, and `copies` is M^2 N: M for the mean, M for
    the device's part, and N for the workers.
    """
    return scalar(residual_decay, residual) * residual + moved / copies
