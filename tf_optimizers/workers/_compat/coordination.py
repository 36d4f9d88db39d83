"""Wraps TensorFlow's coordination service, which has no public name.

Processes exchange strings through the service's key-value store. This module
also finds the cluster that the process has joined, and aborts the collectives
of the process.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def has_tensorflow_started() -> bool:
    """Return whether TensorFlow has initialized its devices.

    After that, a process cannot join a cluster, and TensorFlow's own error does
    not suggest a remedy.
    """
    return context.context()._context_handle is not None


def joined_cluster() -> tuple[dict[str, Any], str, int] | None:
    """Return this process's cluster, task type and task index.

    Return None if the process has not joined a cluster. TensorFlow has no
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
    """Return the string of a key, or None if no string arrives in time.

    `timeout` is the longest wait, in seconds: at least 0.001, since TensorFlow
    waits without a limit if the timeout is 0 ms.
    """
    try:
        return context.context().get_config_key_value(key, int(1000 * timeout))
    except tf.errors.DeadlineExceededError:
        return None


def delete(key: str) -> None:
    """Delete the strings of a key and of keys under it, such as `key/0`."""
    context.context().delete_config_key_value(key)


def check_alive(task: str, timeout: float) -> None:
    """Raise a `tf.errors.OpError` if a task does not answer or has restarted.

    Args:
        task: The name of the task, such as "/job:worker/replica:0/task:1".
        timeout: The longest wait for an answer, in seconds.
    """
    context.context().check_collective_ops_peer_health(
        task, int(1000 * timeout)
    )


def meet(key: str, timeout: float) -> None:
    """Wait until every process has called this function with the same key.

    Raise TensorFlow's error after `timeout` seconds, or if a process has died.
    """
    context.context().wait_at_barrier(key, int(1000 * timeout))


def abort(message: str) -> None:
    """End all current and later collectives of this process with an error."""
    context.context().abort_collective_ops(tf.errors.INVALID_ARGUMENT, message)
