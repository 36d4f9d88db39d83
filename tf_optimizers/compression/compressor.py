"""Compresses the gradients of a step, and keeps unsent values.

local gradient ── compressed? ── yes: sum on the worker, add to v,
                      │               select the largest ─────────┐
                      └───────── no: unchanged ───────────────────┤
                                                           exchange (SUM)
common update ◄── compressed? ◄─ yes: as received; remove sent ◄──┤
                      ▲               entries from v              │
                      └───────── no: the optimizer computes the ◄─┘
                                     update from the sum

Here v is the variable's residual: the values that have not been sent yet. At
sparsity 0, nothing is selected or rounded: all of v is sent as a dense tensor.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient, map_values
from tf_optimizers._compat.keras_internals import (
    add_replica_variable,
    built_variables,
    path_of,
    strategy_of,
    unchanged_in_cond,
    variable_index,
)
from tf_optimizers._compat.tensorflow_internals import (
    in_xla,
    lazy_zeros,
    switch_across_replicas,
)
from tf_optimizers.base.components import own_component
from tf_optimizers.base.gradients import as_dense
from tf_optimizers.compression.exchanges import (
    GatheredExchange,
    choose_exchange,
)
from tf_optimizers.compression.residual import Residual
from tf_optimizers.compression.sharded_exchange import ShardedExchange
from tf_optimizers.compression.sparsity_schedule import (
    SparsitySchedule,
    sent_count,
)
from tf_optimizers.compression.traffic import SentRows
from tf_optimizers.compression.wire import Wire
from tf_optimizers.replicas import replicas_of


class Compressor:
    """Sends the largest entries of gradients, and keeps the others for later.

    Call `add` for each variable.

    Args:
        optimizer: The optimizer of the variables, a `CompressedOptimizer`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.schedule: SparsitySchedule = optimizer._schedule
        self.strategy = strategy_of(optimizer)
        self.wire = Wire.under(self.strategy, optimizer.value_dtype)
        self.rows = SentRows(self.wire)
        self._residuals: dict[int, Residual] = {}
        self._unmasked: dict[int, keras.Variable] = {}
        # The indices of variables that steps may have compressed. Only these
        # may have nonzero residuals.
        self._ever_compressed: set[int] = set()
        self._is_begun = False
        # The step count when nonzero residuals were loaded, if the cool-down
        # was over by then. The next exchange sends all residuals.
        self._flush_step: int | None = None
        self.momentums: dict[int, keras.Variable] = {}

    def add(
        self,
        variable: Any,
        momentum: keras.Variable | None = None,
        masking: bool = True,
    ) -> None:
        """Create a variable's residual, if the variable may be compressed.

        Args:
            variable: The variable.
            momentum: The variable's momentum, which may differ between
                replicas. Defaults to `None`.
            masking: Whether the momentum becomes 0 wherever entries of the
                residual are sent. If not, a step that sends the whole residual
                also gives all replicas the mean of their momentums, because
                dense steps need equal momentums. Defaults to `True`.
        """
        optimizer = self._optimizer
        index = variable_index(optimizer, variable)
        if momentum is not None:
            self.momentums[index] = momentum
        dtype = keras.backend.standardize_dtype(variable.dtype)
        shape = tf.TensorShape(variable.shape)
        is_large = shape.num_elements() >= optimizer.min_compress_size
        if dtype == "float32" and shape.rank > 0 and is_large:
            with lazy_zeros(variable.shape):
                v = add_replica_variable(optimizer, variable, "residual", dtype)
            masked = momentum if masking else None
            self._residuals[index] = Residual(v, self.wire, masked)
            if momentum is not None and not masking:
                self._unmasked[index] = momentum

    @property
    def residuals(self) -> list[keras.Variable]:
        """The variables that hold the residuals."""
        return [residual.variable for residual in self._residuals.values()]

    def own_residual(self, index: int) -> tf.Variable:
        """Return this replica's residual of the variable at `index`."""
        return own_component(self._residuals[index].variable)

    def unsent_updates(self, index: int) -> tf.Tensor | None:
        """Return this worker's unsent updates of the variable at `index`.

        They are N e_i in the formula of `SparseLoCo`. Returns None if the
        variable is not compressed.
        """
        if index not in self.compressed:
            return None
        residual = self.own_residual(index)
        with tf.device(residual.device):
            return self.wire.replicas * residual.read_value()

    @property
    def compressed(self) -> list[int]:
        """The indices of compressed variables.

        A variable is not compressed if its first gradient was sparse, unless a
        nonzero residual was loaded. If the first gradient was dense, `prepare`
        makes later gradients dense.
        """
        return [i for i in self._residuals if i not in self.rows]

    def places(
        self, indices: Sequence[int], sparsity: float | None = 0.0
    ) -> tuple[list[int], list[int]]:
        """Return the places in `indices` of compressed and of other variables.

        With `sparsity=None`, nothing is compressed.
        """
        compressed = [] if sparsity is None else self.compressed
        chosen = [i for i, index in enumerate(indices) if index in compressed]
        return chosen, [i for i in range(len(indices)) if i not in chosen]

    def prepare(
        self, gradients: Sequence[Gradient], variables: Sequence[tf.Variable]
    ) -> list[Gradient]:
        """Prepare for a step; return its gradients, made dense where needed.

        A sparse gradient is not compressed, and replicas compute the same
        update from it only if they have the same momentum. But compression
        makes a variable's momentum differ between replicas. So the gradients of
        variables that have been compressed are made dense.

        Raises:
            ValueError: If a compressed variable has two gradients, or lacks a
                gradient that it needs.
            RuntimeError: If XLA compiles a step that compresses gradients, or
                if workers do not reach the first step together.
        """
        self._begin()
        indices = [variable_index(self._optimizer, v) for v in variables]
        prepared, compressed = [], []
        for i, gradient, v in zip(indices, gradients, variables, strict=True):
            if i in self._ever_compressed:
                gradient = as_dense(gradient, v)
            if i in self._residuals and not self.rows.is_sparse(i, gradient):
                compressed.append(i)
            prepared.append(gradient)
        self._check(compressed)
        self.allocate(compressed)
        self._ever_compressed.update(compressed)
        for each in zip(indices, prepared, variables, strict=True):
            self.rows.count(*each)
        return prepared

    def _begin(self) -> None:
        """Find the nonzero residuals of a loaded state, before the first step.

        These residuals must be sent even after the cool-down, and even if their
        variables have sparse gradients now. Also warn if there is one replica.
        """
        if self._is_begun:
            return
        if self.wire.replicas == 1:
            warnings.warn(self._optimizer._single_replica_warning, stacklevel=2)
        with tf.init_scope():
            if tf.executing_eagerly():
                own = [i for i, v in self._residuals.items() if v.is_nonzero()]
                group = replicas_of(self.strategy)
                nonzero = set().union(*group.agree("the first step", own))
                self._ever_compressed |= nonzero
                step = int(tf.convert_to_tensor(self._optimizer.iterations))
                if nonzero and self.schedule.is_over(step):
                    self._flush_step = step
        self._is_begun = True

    def _check(self, indices: list[int]) -> None:
        """Check the indices of the variables that a step compresses.

        No variable may occur twice. With a cool-down, each variable that has
        been compressed needs a gradient in every step, except with local steps,
        which exchange variables without a gradient, too.
        """
        variables = built_variables(self._optimizer)
        if len(set(indices)) < len(indices):
            twice = variables[max(indices, key=indices.count)]
            raise ValueError(
                f"`{type(self._optimizer).__name__}` needs one gradient per "
                "compressed variable. Received: several for "
                f"{path_of(twice)}. Pass their sum."
            )
        missing = self._ever_compressed.difference(indices)
        has_cool_down = self.schedule.rampdown_begin_step is not None
        if missing and has_cool_down and self.schedule.sync_every == 1:
            raise ValueError(
                "With a cool-down (`rampdown_begin_step`), every compressed "
                "variable must have a gradient in every step. Received: no "
                f"gradient for {path_of(variables[min(missing)])}, which had "
                "one in an earlier step. Pass `rampdown_begin_step=None` and "
                "`rampdown_step=1`, or use a separate optimizer for variables "
                "that do not get a gradient in every step."
            )

    def allocate(self, indices: Sequence[int]) -> None:
        """Allocate the residuals of the variables at `indices`."""
        if in_xla() and indices:
            raise unchanged_in_cond(
                RuntimeError(
                    f"`{type(self._optimizer).__name__}` cannot run under XLA. "
                    "Received: a step that XLA compiles. Pass "
                    "`jit_compile=False` to `compile` or `tf.function`."
                )
            )
        for i in indices:
            self._residuals[i].allocate()

    def at_stage(
        self,
        updates: Any,
        gradients: list[Gradient],
        function: Callable,
        is_due: tf.Tensor | None = None,
    ) -> None:
        """Call `function(sparsity, gradients)` with the sparsity of this step.

        In a step, call `prepare` first.

        Args:
            updates: The optimizer's `iterations`.
            gradients: Passed to `function`.
            function: In a graph, traced once per stage of the schedule. It may
                exchange values and change variables.
            is_due: bool scalar, equal on all replicas. Whether to call
                `function`. Defaults to `None`, which means True.
        """
        calls: list[Callable] = [
            functools.partial(function, s) for s in self.schedule.stages
        ]
        stage = self._stage(tf.cast(updates, tf.int64))
        if is_due is not None:
            stage = tf.where(is_due, stage, len(calls))
            calls.append(lambda gradients: None)
        switch_across_replicas(stage, calls, gradients)

    def _stage(self, step: tf.Tensor) -> tf.Tensor:
        stage = self.schedule.stage(step)
        if self._flush_step is None:
            return stage
        since = step - self._flush_step
        is_flush = (since >= 0) & (since < self.schedule.sync_every)
        sends_all = tf.cast(self.schedule.stages.index(0.0), stage.dtype)
        return tf.where(is_flush, sends_all, stage)

    def send(
        self,
        updates: Any,
        sparsity: float | None,
        compressed: Sequence[int],
        others: Sequence[Gradient],
        rate: tf.Tensor,
    ) -> list[Gradient]:
        """Sum residuals, or their largest entries, and other gradients.

        Args:
            updates: The optimizer's `iterations`.
            sparsity: Fraction of entries that are not sent; 0 or None sends
                all entries.
            compressed: Indices of the variables whose residuals are sent.
            others: Gradients that are sent whole.
            rate: Scalar to which residuals are proportional, such as the
                learning rate; see `Wire.unit`.

        Returns:
            The sums over all replicas, first of the residuals, then of
            `others`.
        """
        if not sparsity:
            return self._flush(compressed, others)
        residuals = [self._residuals[i] for i in compressed]
        exchange = self._choose(residuals, sparsity)
        step = tf.cast(updates, tf.int32)
        unit = self.wire.unit(rate)
        one = 1.0 if unit is None else unit
        selections = [
            residual.select(count, tf.stack([step, i]), one)
            for i, (residual, count) in enumerate(
                zip(residuals, exchange.counts, strict=True)
            )
        ]
        sent, sums = exchange.sum(selections, others)
        for i, residual in enumerate(residuals):
            residual.clear(selections[i], sent[i], one)
        if unit is None:
            return sums
        end = len(residuals)

        def multiply(values: tf.Tensor) -> tf.Tensor:
            return unit * tf.cast(values, unit.dtype)

        return [*(map_values(multiply, s) for s in sums[:end]), *sums[end:]]

    def _flush(
        self, compressed: Sequence[int], others: Sequence[Gradient]
    ) -> list[Gradient]:
        """Sum whole residuals and other gradients; set the residuals to 0.

        Momentums without masking become their means over replicas; see `add`.
        """
        residuals = [self._residuals[i] for i in compressed]
        unmasked = [
            own_component(self._unmasked[i])
            for i in compressed
            if i in self._unmasked
        ]
        whole = [residual.everything() for residual in residuals]
        whole += [tf.identity(variable) for variable in unmasked]
        sums = replicas_of().gather_and_sum([*whole, *others])
        for residual in residuals:
            residual.empty()
        count, end = len(residuals), len(whole)
        for variable, total in zip(unmasked, sums[count:end], strict=True):
            variable.assign(total / self.wire.replicas)
        return [*sums[:count], *sums[end:]]

    def sent_bytes(self, sparsity: float | None) -> dict[int, int]:
        """Return the bytes that a replica sends, by index of the variable.

        Variables that are not in the result are sent as dense gradients.
        """
        sent = self.rows.sent() if self._optimizer._sends_rows else {}
        if sparsity == 0:
            both = 2 * tf.float32.size
            unmasked = [i for i in self.compressed if i in self._unmasked]
            sent |= {i: both * self._residuals[i].size for i in unmasked}
        elif sparsity is not None:
            residuals = [self._residuals[i] for i in self.compressed]
            taken = self._choose(residuals, sparsity).sent_bytes()
            sent |= dict(zip(self.compressed, taken, strict=True))
        return sent

    def _choose(
        self, residuals: Sequence[Residual], sparsity: float
    ) -> GatheredExchange | ShardedExchange:
        sizes = [residual.size for residual in residuals]
        counts = [sent_count(size, sparsity) for size in sizes]
        return choose_exchange(self.wire, sizes, counts)

    def sum_on_worker(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of gradients over replicas that share a residual."""
        if self.wire.devices == 1 or not gradients:
            return gradients
        return replicas_of().sum_on_worker(gradients)

    def mean_on_worker(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the mean gradients over this worker's part of the batch.

        Keras divides the loss by the number of all replicas. So the mean is the
        sum over this worker's replicas times the number of workers. Unless
        replicas share residuals, each replica counts as a worker.
        """
        workers = self.wire.replicas // self.wire.devices
        if workers == 1:
            return gradients
        return [workers * total for total in self.sum_on_worker(gradients)]
