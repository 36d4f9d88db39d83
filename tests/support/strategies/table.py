"""A table of behaviours, values by replica, and their JSON."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf


class Behaviour(NamedTuple):
    """A function to run under both strategies.

    Args:
        function: Takes the strategy to test, and the other strategy.
        error: The error of both; with `instead`, of TensorFlow's strategy only.
        instead: The function with which TensorFlow's strategy gives our result.
        reason: The reason for an intended difference.
    """

    function: Callable
    error: str | None = None
    instead: Callable | None = None
    reason: str = ""


class Table(dict):
    """Behaviours by name."""

    def add(self, name, function, error=None, instead=None, reason=""):
        assert name not in self
        self[name] = Behaviour(function, error, instead, reason)

    def behaviour(self, function):
        """Add a behaviour that needs only one strategy."""
        name = function.__name__.replace("_", " ")
        self.add(name, lambda strategy, other: function(strategy))
        return function

    def in_replica(self, name, function, **kwargs):
        """Add the result of a function on replicas, eagerly and in a graph."""
        self.add(f"{name}, eager", lambda s, other: s.run(function), **kwargs)
        self.add(
            f"{name}, graph", lambda s, other: in_graph(s, function), **kwargs
        )


def in_graph(strategy, function):
    """Run a function on all replicas, in a graph."""
    return tf.function(lambda: strategy.run(function))()


def context():
    return tf.distribute.get_replica_context()


def replica_number():
    """Return the number of this replica, as an int."""
    return int(tf.get_static_value(context().replica_id_in_sync_group))


def matrix(replica, rows=2, dtype="float32"):
    """Return numbers that differ between replicas."""
    start = 10 * (replica + 1) ** 2
    return tf.cast(
        tf.reshape(tf.range(start, start + 3 * rows), [rows, 3]), dtype
    )


def as_json(strategy, value):
    """Return the values, dtypes and shapes of a nest."""
    if isinstance(value, tf.IndexedSlices):
        parts = [value.values, value.indices, value.dense_shape]
        return {"slices": as_json(strategy, parts)}
    if isinstance(value, dict):
        return {key: as_json(strategy, v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(strategy, v) for v in value]
    if isinstance(value, tf.distribute.DistributedValues):
        local = strategy.experimental_local_results(value)
        kind = next(  # Our classes are subclasses of TensorFlow's.
            each
            for each in type(value).__mro__
            if each.__module__.startswith("tensorflow")
        )
        return {kind.__name__: as_json(strategy, local)}
    if tf.is_tensor(value):
        return _tensor_as_json(value)
    return value


def _tensor_as_json(value):
    dtype, shape = value.dtype, value.shape.as_list()
    if dtype == tf.string:
        value = [text.decode() for text in value.numpy().ravel()]
    elif dtype.is_floating:  # float64 holds all values exactly.
        value = tf.cast(value, tf.float64).numpy().tolist()
    else:
        value = value.numpy().tolist()
    return [dtype.name, shape, value]
