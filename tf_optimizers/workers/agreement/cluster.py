"""Checks a new strategy's cluster, options, versions and hash seeds.

Also waits for the first worker, and restores the SIGTERM handler.
"""

import json
import os
import platform
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers.forks import restore_in_forks
from tf_optimizers.workers._compat.coordination import (
    has_tensorflow_started,
    joined_cluster,
)

_JOBS = ("chief", "worker", "evaluator")
# The longest wait until the first worker accepts connections, and the pauses
# between two attempts to connect, in seconds.
_FIRST_SECONDS = 600.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


def check_cluster(resolver: Any) -> Any:
    """Check and return a cluster resolver, by default that of `TF_CONFIG`.

    An evaluator exchanges nothing with workers. So for an evaluator, this
    function returns a resolver without a cluster. An evaluator's `TF_CONFIG`
    may list only the workers, as in TensorFlow's documentation.

    Raises:
        TypeError: If `resolver` is neither None nor a `ClusterResolver`, or if
            a part of the cluster in `TF_CONFIG` has the wrong type.
        ValueError: If `TF_CONFIG` or the cluster is malformed.
    """
    if resolver is None:
        _check_tf_config(os.environ.get("TF_CONFIG", "{}"))
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if not isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        raise TypeError(
            "`cluster_resolver` must be None or a "
            "`tf.distribute.cluster_resolver.ClusterResolver`. "
            f"Received: cluster_resolver={resolver!r}."
        )
    cluster = resolver.cluster_spec().as_dict()
    if cluster:
        _check_jobs(cluster)
    if cluster and resolver.task_type == "evaluator":
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({}), "", "evaluator", resolver.task_id
        )
    return resolver


def check_in_time(resolver: Any) -> None:
    """Raise if TensorFlow has already started without this cluster.

    Once TensorFlow has started, a process can neither join nor change a
    cluster.
    """
    cluster = resolver.cluster_spec().as_dict()
    joined = joined_cluster()
    if joined is None:
        if cluster and has_tensorflow_started():
            raise RuntimeError(
                "`SparseMultiWorkerMirroredStrategy()` must be created before "
                "any tensor or variable. Received: a call after TensorFlow had "
                "started. Move the call to the top of the script, below the "
                "imports."
            )
    elif joined != (cluster, resolver.task_type, resolver.task_id):
        raise RuntimeError(
            "All strategies of a process must have the same cluster and task. "
            f"Received: cluster={cluster}, type={resolver.task_type!r}, "
            f"index={resolver.task_id!r}, after a strategy with {joined}. Pass "
            "the `cluster_resolver` of the first strategy, or start another "
            "process."
        )


def wait_for_first(resolver: Any, seconds: float = _FIRST_SECONDS) -> None:
    """Wait until the first worker accepts connections, at most `seconds`.

    If TensorFlow (2.21) cannot connect to the first worker, it tries again
    after a second, and then after longer and longer pauses, up to two minutes.
    So a worker that starts a moment too early would lose a second. After
    `seconds`, leave further attempts, and the error, to TensorFlow.
    """
    cluster = resolver.cluster_spec()
    first = "chief" if "chief" in cluster.jobs else "worker"
    is_first = (resolver.task_type, resolver.task_id) == (first, 0)
    if not cluster.jobs or is_first or joined_cluster() is not None:
        return
    until, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
    while not _accepts(cluster.task_address(first, 0)):
        if time.monotonic() + pause > until:
            return
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
    except OSError:
        return False
    return True


def restore_sigterm() -> None:
    """Restore the SIGTERM handler that TensorFlow's server has replaced.

    The server (TensorFlow 2.21) treats SIGTERM as a notice that the machine
    will be shut down, and only records the notice. Forked processes inherit the
    server's handler. So SIGTERM would end neither a worker nor its children.
    """
    if threading.current_thread() is threading.main_thread():
        _restore_handler()
    else:
        # Only the main thread can set handlers. So restore the handler only in
        # forked processes, where the only thread is the main thread.
        restore_in_forks(_restore_handler)


def _restore_handler() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:  # None means that Python did not set the handler.
        signal.signal(signal.SIGTERM, handler)


def check_options(options: Any) -> Any:
    """Check and return the options; None means TensorFlow's defaults."""
    if options is None:
        return tf.distribute.experimental.CommunicationOptions()
    # `CommunicationOptions()` returns an instance of a private class, so check
    # for an attribute instead.
    if not hasattr(options, "timeout_seconds"):
        raise TypeError(
            "`communication_options` must be None or a "
            "`tf.distribute.experimental.CommunicationOptions`. "
            f"Received: communication_options={options!r}."
        )
    return options


def _check_tf_config(text: str) -> None:
    """Raise if `TF_CONFIG` is not JSON, or its `task` is malformed.

    `check_cluster` checks the `cluster` later.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _malformed(
            "`TF_CONFIG` must be JSON", f"{text!r} ({error})"
        ) from error
    task: Any = config.get("task", {}) if isinstance(config, dict) else None
    _require(
        isinstance(task, dict),
        "`TF_CONFIG` and its `task` must be JSON objects",
        repr(text),
    )
    index = task.get("index", 0)
    is_number = not isinstance(index, bool) and str(index).isdecimal()
    _require(is_number, "The index of a task must be an int >= 0", repr(index))


def _check_jobs(cluster: dict[str, Any]) -> None:
    """Raise if a job is unknown, or an address is malformed or repeated."""
    unknown = sorted(set(cluster) - set(_JOBS))
    _require(
        not unknown, f"The jobs of a cluster must be among {_JOBS}", unknown
    )
    addresses: list[str] = []
    for job in cluster.values():
        addresses += job.values() if isinstance(job, dict) else job
    for address in addresses:
        host, _, port = address.rpartition(":")
        _require(
            host and port.isdecimal() and 0 < int(port) < 65536,
            "An address must be host:port, with a port in [1, 65535]",
            repr(address),
        )
        _require(
            addresses.count(address) == 1,
            "Every task must have its own address",
            f"{address!r} more than once",
        )


def _require(holds: Any, rule: str, received: Any) -> None:
    if not holds:
        raise _malformed(rule, received)


def _malformed(rule: str, received: Any) -> ValueError:
    return ValueError(
        f"{rule}. Received: {received}. An example of a `TF_CONFIG`: "
        f"{_EXAMPLE}. `python -m tf_optimizers.launch` sets `TF_CONFIG`."
    )


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all workers, by name."""
    # An import of the package here would be circular.
    package = sys.modules[__name__.partition(".")[0]]
    # Leave out Python's patch version, since patch releases only fix bugs.
    return {
        "tf_optimizers": package.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def text_hash() -> int:
    """Return a hash that depends on this process's hash seed."""
    return hash("tf_optimizers")


def check_hashes(hashes: Sequence[int], is_first: bool) -> None:
    """Warn, on the first worker, if workers have different hash seeds.

    Different seeds are not an error, since few scripts depend on the seed.
    """
    if is_first and len(set(hashes)) > 1:
        warnings.warn(
            "All workers should have the same hash seed: otherwise a set of "
            "strings, or a vocabulary made from a set, may be in a different "
            "order on each worker. Received: different hash seeds. Set the "
            "environment variable PYTHONHASHSEED to the same number, such as "
            "0, on all workers, before Python starts.",
            stacklevel=4,  # The line that creates the strategy.
        )
