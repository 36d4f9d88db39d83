"""Exchanges what replicas accumulate in a step, and keeps residuals.

local gradient ── compressed? ── yes: sum on the worker, add to v,
                      │               select the largest ─────────┐
                      └───────── no: as it is ────────────────────┤
                                                           exchange (SUM)
update of all ─── compressed? ── yes: as received; clear what ────┤
                      │               was sent out of v           │
                      └───────── no: what the optimizer makes ────┘
                                     of the sum

At sparsity 0 nothing is selected or rounded: all of v is sent, densely.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras_internals import (
    add_replica_variable,
    built_variables,
    path_of,
    variable_index,
    whole,
)
from tf_optimizers._compat.tensorflow_internals import (
    in_xla,
    lazy_zeros,
    switch_across_replicas,
)
from tf_optimizers.base.components import own_component
from tf_optimizers.checks import check_choice, check_integer
from tf_optimizers.codes.entries import CODES
from tf_optimizers.compression.compression_history import CompressionHistory
from tf_optimizers.compression.exchanges import (
    choose_exchange,
    send_all,
    send_largest,
)
from tf_optimizers.compression.residual import Residual
from tf_optimizers.compression.sparsity_schedule import (
    SparsitySchedule,
    sent_count,
)
from tf_optimizers.compression.traffic import SentRows
from tf_optimizers.compression.wire import Exchange, Wire
from tf_optimizers.replicas import replicas_of


class Compressor:
    """Sends the largest entries of large gradients, and holds back the rest.

    Args:
        name: The optimizer's class, for error messages.
        schedule: The share that is held back at each step.
        min_compress_size: int >= 1. Variables with fewer elements are not
            compressed.
        value_dtype: The dtype that sent values are rounded to.
        sends_rows: Whether gradients that are `tf.IndexedSlices` are sent as
            such, or what the optimizer makes of them.
    """

    # Forces one kind of exchange; see `choose_exchange`.
    exchange_kind: str | None = None

    def __init__(
        self,
        name: str,
        schedule: SparsitySchedule,
        min_compress_size: Any,
        value_dtype: Any,
        sends_rows: bool = True,
    ) -> None:
        self._name = name
        self._sends_rows = sends_rows
        self._min_size = check_integer(
            "min_compress_size", min_compress_size, 1
        )
        self._value_dtype = check_choice(
            "value_dtype", value_dtype, list(CODES)
        )
        self.schedule = schedule

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Prepare for the variables of a strategy."""
        self.wire = Wire.under(strategy, self._value_dtype)
        self.rows = SentRows(self.wire)
        self._residuals: dict[int, Residual] = {}
        self._shared: dict[int, keras.Variable] = {}
        self._history = CompressionHistory(self._name, self.schedule, strategy)
        self.momentums: dict[int, keras.Variable] = {}

    def add(
        self,
        optimizer: Any,
        variable: Any,
        momentum: keras.Variable | None = None,
        masking: bool = True,
    ) -> None:
        """Create the residual of a variable if it may be compressed.

        Args:
            optimizer: Owns the variable.
            variable: The one to compress.
            momentum: Its u, which every replica has its own of.
            masking: Whether u becomes 0 wherever v is sent. If not, u must
                be equal on all replicas once gradients are dense again: when
                all of v is sent, each gets an N-th of the sum of theirs.
        """
        index = variable_index(optimizer, variable)
        if momentum is not None:
            self.momentums[index] = momentum
        dtype = keras.backend.standardize_dtype(variable.dtype)
        shape = tf.TensorShape(variable.shape)
        is_large = shape.num_elements() >= self._min_size
        if dtype == "float32" and shape.rank > 0 and is_large:
            with lazy_zeros(variable.shape):
                v = add_replica_variable(optimizer, variable, "residual", dtype)
            masked = momentum if masking else None
            self._residuals[index] = Residual(v, self.wire, masked)
            if momentum is not None and not masking:
                self._shared[index] = momentum

    @property
    def residuals(self) -> list[keras.Variable]:
        """The v of every variable that has one."""
        return [residual.variable for residual in self._residuals.values()]

    def own_residual(self, index: int) -> tf.Variable:
        """Return this replica's v of the variable at a position."""
        return own_component(self._residuals[index].variable)

    @property
    def compressed(self) -> list[int]:
        """Indices of compressed variables, as far as steps have shown.

        Variables whose gradients came as rows are not among them.
        """
        return [i for i in self._residuals if i not in self.rows]

    def prepare(
        self,
        optimizer: Any,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        sends_all: bool = False,
    ) -> list[Gradient]:
        """Prepare for a step, or refuse it; return its gradients.

        `sends_all` says that it exchanges all variables, not these alone.
        """
        self._history.begin(optimizer, self._residuals)
        indices = [variable_index(optimizer, v) for v in variables]
        gradients = self._history.densify(indices, gradients, variables)
        compressed = [
            i
            for i, gradient in zip(indices, gradients, strict=True)
            if self._is_compressed(i, gradient)
        ]
        paths = list(map(path_of, built_variables(optimizer)))
        self._history.check(compressed, paths, sends_all)
        self._allocate([self._residuals[i] for i in compressed])
        for each in zip(indices, gradients, variables, strict=True):
            self.rows.count(*each)
        return gradients

    def _allocate(self, residuals: Sequence[Residual]) -> None:
        if in_xla() and residuals:
            raise whole(
                RuntimeError(
                    f"`{self._name}` cannot run under XLA, which cannot "
                    "compile a selection by value. Received: a step that is "
                    "compiled by XLA. Pass `jit_compile=False` to `compile` or "
                    "`tf.function`."
                )
            )
        for residual in residuals:
            residual.allocate()

    def allocate(self) -> None:
        """Prepare to exchange all variables, with or without a gradient."""
        self._allocate([self._residuals[i] for i in self.compressed])

    def at_stage(
        self,
        optimizer: Any,
        gradients: list[Gradient],
        function: Callable,
        is_due: tf.Tensor | None = None,
    ) -> None:
        """Call `function(sparsity, gradients)` at the stage of this step.

        The function is traced once per stage of the schedule, and may
        exchange and change variables. Call `prepare` first.

        Args:
            optimizer: Whose step it is.
            gradients: Passed on to the function.
            function: See above.
            is_due: bool, equal on all replicas. If False, nothing is called.
        """
        calls: list[Callable] = [
            functools.partial(function, s) for s in self.schedule.stages
        ]
        stage = self._history.stage(optimizer)
        if is_due is not None:
            stage = tf.where(is_due, stage, len(calls))
            calls.append(lambda gradients: None)
        switch_across_replicas(stage, calls, gradients)

    def exchange(
        self,
        optimizer: Any,
        sparsity: float | None,
        compressed: Sequence[int],
        others: Sequence[Gradient],
        rate: tf.Tensor | None,
    ) -> list[Gradient]:
        """Send what residuals hold; return the sums over all replicas.

        Args:
            optimizer: Whose step it is.
            sparsity: The share held back; 0 or None sends all.
            compressed: Positions of the variables whose residuals are sent.
            others: Gradients that are sent whole.
            rate: The step's learning rate, if residuals scale with it.

        Returns:
            The updates of the compressed variables, then the other sums.
        """
        residuals = [self._residuals[i] for i in compressed]
        if not sparsity:
            shared = [self._shared[i] for i in compressed if i in self._shared]
            return send_all(self.wire, residuals, others, shared)
        exchange = self._choose(residuals, sparsity)
        step = tf.cast(optimizer.iterations, tf.int32)
        unit = None if rate is None else self.wire.unit(rate)
        return send_largest(exchange, residuals, others, step, unit)

    def sent_bytes(self, sparsity: float | None) -> dict[int, int]:
        """Return what one replica sends of variables that are not dense."""
        sent = self.rows.sent() if self._sends_rows else {}
        if sparsity == 0:
            both = 2 * tf.float32.size
            shared = [i for i in self.compressed if i in self._shared]
            sent |= {i: both * self._residuals[i].size for i in shared}
        elif sparsity is not None:
            residuals = [self._residuals[i] for i in self.compressed]
            taken = self._choose(residuals, sparsity).sent_bytes()
            sent |= dict(zip(self.compressed, taken, strict=True))
        return sent

    def _is_compressed(self, index: int, gradient: Gradient) -> bool:
        """Tell whether replicas send only entries of this gradient."""
        has_residual = index in self._residuals
        return has_residual and not self.rows.is_sparse(index, gradient)

    def _choose(
        self, residuals: Sequence[Residual], sparsity: float
    ) -> Exchange:
        """Return the exchange for the entries of some residuals."""
        sizes = [residual.size for residual in residuals]
        counts = [sent_count(size, sparsity) for size in sizes]
        return choose_exchange(self.wire, sizes, counts, self.exchange_kind)

    def sum_on_worker(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum gradients over the replicas that share a residual."""
        if self.wire.devices == 1 or not gradients:
            return gradients
        return replicas_of().sum_on_worker(gradients)
