"""Wraps TensorFlow's coordination service, which has no public name.

Processes exchange strings through the service's key-value store. Unlike
collectives, the store needs no graph, and its reads have a timeout.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def has_tensorflow_started() -> bool:
    """Return whether TensorFlow has initialized its devices.

    A strategy created after that cannot configure collectives, and TensorFlow's
    own error does not suggest a remedy.
    """
    return context.context()._context_handle is not None


def joined_cluster() -> tuple[dict[str, Any], str, int] | None:
    """Return this process's cluster, and the type and index of its task.

    Return None if no strategy has joined a cluster yet. TensorFlow has no
    public accessor.
    """
    server = context.context()._collective_ops_server_def
    if server is None:
        return None
    cluster = tf.train.ClusterSpec(server.cluster).as_dict()
    return cluster, server.job_name, server.task_index


def write(key: str, text: str) -> None:
    """Store a string under a key, so that all processes can read it.

    Use a key only once. This call has no timeout.
    """
    context.context().set_config_key_value(key, text)


def read(key: str, timeout: float) -> str | None:
    """Return the string of a key, or None if it does not arrive in time.

    Args:
        key: The key.
        timeout: The longest wait for the string, in seconds.
    """
    try:
        return context.context().get_config_key_value(key, int(1000 * timeout))
    except tf.errors.DeadlineExceededError:
        return None


def delete(key: str) -> None:
    """Delete the string of a key."""
    context.context().delete_config_key_value(key)


def check_alive(task: str, timeout: float) -> None:
    """Raise TensorFlow's error unless a task answers in `timeout` seconds."""
    context.context().check_collective_ops_peer_health(
        task, int(1000 * timeout)
    )


def meet(key: str, timeout: float) -> None:
    """Wait until every process has called this function with the same key.

    Raise TensorFlow's error after `timeout` seconds.
    """
    context.context().wait_at_barrier(key, int(1000 * timeout))


def abort(message: str) -> None:
    """End all current and later collectives of this process with an error."""
    context.context().abort_collective_ops(tf.errors.INVALID_ARGUMENT, message)
