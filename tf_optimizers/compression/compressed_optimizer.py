"""The base class of `DGCMomentum` and `SparseLoCo`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.hooks import choose_xla
from tf_optimizers._compat.keras_internals import variable_index
from tf_optimizers.base.components import backend_variable, own_component
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.checks import Fixed, check_choice, check_integer
from tf_optimizers.codes.values import CODES
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.compression.residual import subtract
from tf_optimizers.compression.sparsity_schedule import SparsitySchedule
from tf_optimizers.compression.traffic import traffic_summary
from tf_optimizers.wrapped import cannot_use_xla


class CompressedOptimizer(Optimizer):
    """An optimizer that compresses gradients before replicas exchange them.

    The residual of a variable accumulates values until they are sent: gradients
    with momentum in `DGCMomentum`, changes of weights in `SparseLoCo`. A
    subclass's `_update` calls `_send`, which calls `_accumulate_residual` for
    each variable that is compressed in this step, and `_dense_update` for the
    others. With `overlap`, `SparseLoCo._update` uses
    `OverlappedExchange` instead.

    Args:
        learning_rate: See `Optimizer`.
        schedule: The sparsity of each step.
        min_compress_size: int >= 1. Variables with fewer elements are not
            compressed.
        value_dtype: The format of sent values, a key of `CODES`.
        **kwargs: See `keras.optimizers.Optimizer`.
    """

    # Under XLA, replicas cannot exchange entries. On a CPU, XLA cannot compile
    # the search for many entries either.
    _supports_jit = False
    # The `Compressor` issues it when the first step begins.
    _single_replica_warning: str
    # Whether gradients that are `tf.IndexedSlices` are sent as rows. If not,
    # the optimizer makes them dense.
    _sends_rows = True
    _compressor: Compressor  # Set by `build`.
    sparsity, value_dtype, min_compress_size = Fixed(), Fixed(), Fixed()
    rampup_begin_step, rampup_step = Fixed(), Fixed()
    rampdown_begin_step, rampdown_step = Fixed(), Fixed()

    def __init__(
        self,
        learning_rate: Any,
        schedule: SparsitySchedule,
        min_compress_size: int,
        value_dtype: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, **kwargs)
        choose_xla(cannot_use_xla)
        self._schedule = schedule
        self.sparsity = schedule.sparsity
        self.rampup_begin_step = schedule.rampup_begin_step
        self.rampup_step = schedule.rampup_step
        self.rampdown_begin_step = schedule.rampdown_begin_step
        self.rampdown_step = schedule.rampdown_step
        self.min_compress_size = check_integer(
            "min_compress_size", min_compress_size, 1
        )
        self.value_dtype = check_choice("value_dtype", value_dtype, list(CODES))

    def build(self, variables: Sequence[Any]) -> None:
        """Prepare to create residuals; a subclass's `build` creates them."""
        super().build(variables)
        self._compressor = Compressor(self)

    def _accumulate_residual(
        self, index: int, gradient: Any, weight: tf.Variable, rate: tf.Tensor
    ) -> None:
        """Add a gradient to a variable's residual.

        `gradient` is the sum over the replicas that share the residual.
        """
        raise NotImplementedError

    def _dense_update(
        self, index: int, total: Any, weight: tf.Variable, rate: tf.Tensor
    ) -> tf.Tensor:
        """Return the update of a variable whose gradient is not compressed.

        `total` is the sum of the gradients of all replicas.
        """
        raise NotImplementedError

    def _weights(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Return this replica's weights, in full precision."""
        return [self._full_precision(own_component(v)) for v in variables]

    def _send(
        self,
        variables: list[tf.Variable],
        sparsity: float | None,
        gradients: list[Gradient],
        rate: tf.Tensor,
        received_rate: Any,
    ) -> None:
        """Sum gradients or entries over replicas, and update variables.

        With `sparsity=None`, nothing is compressed. `rate` multiplies gradients
        when they are accumulated, and `received_rate` multiplies the sums.
        """
        compressor, weights = self._compressor, self._weights(variables)
        indices = [variable_index(self, variable) for variable in variables]
        chosen, whole = compressor.places(indices, sparsity)
        totals = compressor.sum_on_worker([gradients[i] for i in chosen])
        for i, total in zip(chosen, totals, strict=True):
            self._accumulate_residual(indices[i], total, weights[i], rate)
        sent = [indices[i] for i in chosen]
        others = [gradients[i] for i in whole]
        sums = compressor.send(self.iterations, sparsity, sent, others, rate)
        updates = dict(zip([*chosen, *whole], sums, strict=True))
        for i in whole:
            updates[i] = self._dense_update(
                indices[i], updates[i], weights[i], rate
            )
        in_order = [updates[i] for i in range(len(variables))]
        self._step_at(received_rate, in_order, variables)

    def update_step(
        self, gradient: Gradient, variable: Any, learning_rate: Any
    ) -> None:
        """Subtract `learning_rate` times an update from a variable.

        Args:
            gradient: The update, summed over replicas: a dense tensor, or
                entries of the flattened variable as `tf.IndexedSlices`.
            variable: A variable that the optimizer was built with, or this
                replica's component of such a variable.
            learning_rate: Scalar.
        """
        variable = backend_variable(variable)
        weight = self._full_precision(variable)
        rate = tf.cast(learning_rate, weight.dtype)
        subtract(weight, gradient, rate, self._compressor.wire.replicas)
        self._store_weight(variable, weight)

    def communication_summary(self, step: int | None = None) -> dict[str, Any]:
        """Return the bytes that one replica sends in a step with an exchange.

        Each byte counts once, even if it passes through several replicas. In a
        ring of N replicas, each byte of entries is sent N - 1 times. Dense
        tensors are summed on the way, so each of their bytes is sent only
        2 (N - 1) / N times.

        The sizes of sparse gradients can change from step to step.
        `DGCMomentum` counts their sizes in the last step, whatever `step` is.
        Before the first step, sparse gradients count as dense gradients, which
        may be compressed. `SparseLoCo` makes sparse gradients dense, and does
        not compress them.

        Args:
            step: int >= 0, counted from 0. Defaults to `None`, the next step.

        Returns:
            A dict of `"step"`; `"sparsity"`, the fraction of entries that are
            not sent (0 while the exchange is dense); `"variables"`, the traffic
            of each variable by path; and `"total"`, the traffic of all
            variables. Traffic is a dict of `"dense_bytes"`, the size of the
            gradient; `"sent_bytes"`; and `"ratio"`, dense_bytes / sent_bytes.
            If two variables have the same path, the second is named "path (2)".

        Raises:
            RuntimeError: If the optimizer is not built.
            TypeError, ValueError: If `step` is not an int >= 0.
        """
        return traffic_summary(self, step)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        config = super().get_config() | self._schedule.get_config()
        return config | {
            "min_compress_size": self.min_compress_size,
            "value_dtype": self.value_dtype,
        }
