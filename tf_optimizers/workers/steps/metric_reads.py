"""Reads variables of metrics, as sums over the replicas of all workers."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.strategies import bring_in
from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers.agreement.same_training import (
    check_same_training,
    compared_weights,
    statement_of,
)
from tf_optimizers.workers.agreement.statements import (
    check_equal,
    gather_statements,
)

_SUBJECT = "a read of a variable"
_SAVING = (
    "A read of this variable combines the values of all workers: read it on "
    "every worker. Saving reads it, too: save on every worker, each to its own "
    "path, or use `tfo.callbacks.BackupAndRestore`."
)
_METRICS = (
    "Metrics count rows of all workers: read and reset them on every worker."
)


class MetricReader:
    """Reads the variables of metrics as sums over all workers' replicas.

    All workers must read together. Keras reads the variables of a model's
    metrics one by one, for example at the end of an epoch. So the first read
    also sums the others of the same dtype, and compares weights, learning rates
    and step counts between workers. The sums stay valid until a step or a
    collective begins, or a metric's variable changes on this worker.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        # The models, in the order of the calls to `watch`. All workers make
        # these calls in the same order.
        self._models: weakref.WeakKeyDictionary[keras.Model, None] = (
            weakref.WeakKeyDictionary()
        )
        self._assignments = 0
        self._known: list[tuple[tf.Variable, tf.Tensor, bytes]] = []
        self._known_at: Any = None

    def watch(self, model: keras.Model) -> None:
        """From now on, sum the variables of a model's metrics together.

        Metrics' variables that were created outside of the strategy's scope are
        moved into the strategy. Otherwise, they would count only this worker's
        rows.
        """
        bring_in(self._strategy, model.metrics_variables)
        self._models[model] = None

    def on_assign(self) -> None:
        """Record that this worker sets an `on_read` variable outside a step."""
        self._assignments += 1

    def read(self, variable: tf.Variable) -> tf.Tensor | None:
        """Return the sum of a watched metric's variable, None for others.

        Raises:
            RuntimeError: If only some workers read a variable; if workers read
                variables of different dtypes or shapes; if workers have set
                metrics' variables different numbers of times; or if workers
                have different weights, learning rates or step counts.
        """
        if self._known_at == self._now():
            own = self._own(variable)
            for known, value, own_then in self._known:
                if known is variable and own == own_then:
                    return value
        for model in self._models:
            variables = _summed(model)
            if any(each is variable for each in variables):
                self._agree(variable, model)
                self._read_together(variable, variables)
                return self.read(variable)
        self._agree(variable, None)
        return None

    def _now(self) -> tuple[Any, int]:
        return self._strategy.extended.channel.progress(), self._assignments

    def _own(self, variable: tf.Variable) -> bytes:
        """Return a variable's values on this worker's replicas, as bytes."""
        copies = self._strategy.experimental_local_results(variable)
        return b"".join(copy.numpy().tobytes() for copy in copies)

    def _agree(self, variable: tf.Variable, model: keras.Model | None) -> None:
        statement = {
            "dtype": variable.dtype.name,
            "shape": variable.shape.as_list(),
        }
        weights, training = [], {}
        if model is not None:
            statement["assignments"] = self._assignments
            weights = compared_weights(model)
            training = statement_of(self._strategy, model, weights)
        rule = f"All workers must read `{variable.name}` together."
        hint = _SAVING if model is None else _METRICS
        received = gather_statements(
            self._strategy, _SUBJECT, [statement, training], hint, rule
        )
        check_equal(_SUBJECT, [own for own, _ in received], hint, rule)
        state = self._strategy.common_state
        assigned = [weight for weight in weights if state.is_assigned(weight)]
        check_same_training(
            [training for _, training in received], weights, assigned
        )

    def _read_together(
        self, variable: tf.Variable, variables: Sequence[tf.Variable]
    ) -> None:
        """Sum the `variables` of the dtype of `variable`; store the sums."""
        variables = [v for v in variables if v.dtype == variable.dtype]
        values = replicas_of(self._strategy).reduce_together(variables)
        self._known = [
            (v, value, self._own(v))
            for v, value in zip(variables, values, strict=True)
        ]
        self._known_at = self._now()


def _summed(model: keras.Model) -> list[tf.Variable]:
    """Return a model's metric variables that are summed over replicas."""
    values = [variable.value for variable in model.metrics_variables]
    return [
        value
        for value in values
        if value.synchronization == tf.VariableSynchronization.ON_READ
        and value.aggregation == tf.VariableAggregation.SUM
    ]
