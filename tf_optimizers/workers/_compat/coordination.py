"""Lets processes find and inform each other, by private names of TensorFlow.

They do so through a key-value store. Unlike a collective, it is not part of a
graph, and reading from it has a timeout.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def has_tensorflow_started() -> bool:
    """Tell whether it is too late to configure collectives.

    TensorFlow itself raises an error, but in its own jargon.
    """
    return context.context()._context_handle is not None


def joined_cluster() -> tuple[dict[str, Any], str, int] | None:
    """Return the cluster that a strategy has started, and which task this is.

    TensorFlow keeps it in private. None if there is none yet.
    """
    server = context.context()._collective_ops_server_def
    if server is None:
        return None
    cluster = tf.train.ClusterSpec(server.cluster).as_dict()
    return cluster, server.job_name, server.task_index


def write(key: str, text: str) -> None:
    """Write what every process can read, once per key."""
    context.context().set_config_key_value(key, text)


def read(key: str, timeout: float) -> str | None:
    """Return what was written, or None after `timeout` seconds."""
    try:
        return context.context().get_config_key_value(key, int(1000 * timeout))
    except tf.errors.DeadlineExceededError:
        return None


def delete(key: str) -> None:
    """Forget what was written."""
    context.context().delete_config_key_value(key)


def check_alive(task: str, timeout: float) -> None:
    """Raise TensorFlow's error unless a process answers in time."""
    context.context().check_collective_ops_peer_health(
        task, int(1000 * timeout)
    )


def meet(key: str, timeout: float) -> None:
    """Wait until every process of the cluster has arrived here."""
    context.context().wait_at_barrier(key, int(1000 * timeout))


def abort(message: str) -> None:
    """End all collectives of this process with an error, for good."""
    context.context().abort_collective_ops(tf.errors.INVALID_ARGUMENT, message)
