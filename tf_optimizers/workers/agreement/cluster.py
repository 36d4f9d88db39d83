"""Checks a cluster's description and versions, before workers wait."""

import json
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers.workers._compat.coordination import (
    has_tensorflow_started,
    joined_cluster,
)
from tf_optimizers.workers.agreement.statements import check_alike

_JOBS = ("chief", "worker", "evaluator")
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


def check_cluster(resolver: Any) -> Any:
    """Return a well-formed resolver; None reads `TF_CONFIG`.

    That of an evaluator has no cluster: it takes no part in what workers
    exchange, and TensorFlow documents a `TF_CONFIG` whose cluster lacks it.
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
        _check_task(cluster, resolver.task_type, resolver.task_id)
    if cluster and resolver.task_type == "evaluator":
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({}), "", "evaluator", resolver.task_id
        )
    return resolver


def check_in_time(resolver: Any) -> None:
    """Raise if TensorFlow has started without this cluster, or in another.

    Once it has started, only strategies of its own cluster can be created.
    """
    cluster = resolver.cluster_spec().as_dict()
    joined = joined_cluster()
    if joined is None:
        if cluster and has_tensorflow_started():
            raise RuntimeError(
                "`SparseMultiWorkerMirroredStrategy()` must be created before "
                "any tensor or variable. Received a call after TensorFlow had "
                "started. Move it to the top of the script, below the imports."
            )
    elif joined != (cluster, resolver.task_type, resolver.task_id):
        raise RuntimeError(
            "All strategies of a process must have the same cluster and task. "
            f"Received: cluster={cluster}, type={resolver.task_type!r}, "
            f"index={resolver.task_id!r}, after {joined}. Pass the "
            "`cluster_resolver` of the first, or start another process."
        )


def end_when_asked() -> None:
    """Let SIGTERM end this process and its children, or do what Python knows.

    A server of TensorFlow (2.21) takes the signal for a notice that a machine
    will go, of which it only takes note, and forked processes inherit that.
    What waits in a collective would not end, nor would a child.
    """
    if threading.current_thread() is threading.main_thread():
        _restore_handler()
    else:  # Where Python sets no handlers, but a child of it does.
        os.register_at_fork(after_in_child=_restore_handler)


def _restore_handler() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:  # Of a program in which Python is embedded.
        signal.signal(signal.SIGTERM, handler)


def check_options(options: Any) -> Any:
    """Return the options, or TensorFlow's default ones for None."""
    if options is None:
        return tf.distribute.experimental.CommunicationOptions()
    # The constructor of that name returns an object of another class.
    if not hasattr(options, "timeout_seconds"):
        raise TypeError(
            "`communication_options` must be None or a "
            "`tf.distribute.experimental.CommunicationOptions`. "
            f"Received: communication_options={options!r}."
        )
    return options


def _check_tf_config(text: str) -> None:
    """Check what TensorFlow's resolver takes for granted."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _malformed(
            "`TF_CONFIG` must be JSON", f"{text!r} ({error})"
        ) from error
    parts = [config]
    if isinstance(config, dict):
        parts += [config.get("cluster", {}), config.get("task", {})]
    if not all(isinstance(part, dict) for part in parts):
        raise _malformed("`TF_CONFIG` must be an object of objects", repr(text))
    _, cluster, task = parts
    for job, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(
            isinstance(address, str) for address in addresses
        ):
            raise _malformed(
                "A job of a cluster must be a list of host:port",
                f"{job}={addresses!r}",
            )
    index = task.get("index", 0)
    if isinstance(index, bool) or not str(index).isdecimal():
        raise _malformed("The index of a task must be an int", repr(index))


def _check_jobs(cluster: dict[str, Any]) -> None:
    unknown = sorted(set(cluster) - set(_JOBS))
    if unknown:
        raise _malformed(
            f"The jobs of a cluster must be among {_JOBS}", f"{unknown}"
        )
    addresses: list[str] = []
    for job in cluster.values():
        addresses += job.values() if isinstance(job, dict) else job
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise _malformed(
                "An address must be host:port, with a port in [1, 65535]",
                repr(address),
            )
        if addresses.count(address) > 1:
            raise _malformed(
                "Every worker must have an address of its own",
                f"{address!r} more than once",
            )
    if len(cluster.get("chief", [])) > 1:
        raise _malformed(
            "A cluster must have at most one chief", f"{cluster['chief']}"
        )


def _check_task(cluster: dict[str, Any], job: Any, index: Any) -> None:
    if job is None or index is None:
        raise _malformed(
            "A cluster must come with the type and index of this task",
            f"type={job!r}, index={index!r}",
        )
    if job == "evaluator":
        return
    if job not in cluster:
        raise _malformed(
            "The type of the task must be a job of the cluster",
            f"type={job!r}, jobs={sorted(cluster)}",
        )
    if not 0 <= index < len(cluster[job]):
        raise _malformed(
            f"The index of a {job} must be in [0, {len(cluster[job])})",
            f"index={index}",
        )


def _malformed(rule: str, received: str) -> ValueError:
    return ValueError(
        f"{rule}. Received: {received}. An example of a `TF_CONFIG`: "
        f"{_EXAMPLE}. `python -m tf_optimizers.launch` sets it for you."
    )


def versions() -> dict[str, str]:
    """Return a part of a statement, which is that of `check_versions`."""
    # It imports this module, which so must not import it.
    package = sys.modules[__name__.partition(".")[0]]
    # Of Python, the third number stands for mends only.
    return {
        "tf_optimizers": package.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def check_versions(statements: Sequence[dict[str, Any]]) -> None:
    """Raise on every worker unless all run the same versions."""
    names = versions()
    check_alike(
        "versions",
        [{name: each.get(name) for name in names} for each in statements],
        "Install the same versions on every machine.",
        "All workers must have the same versions of packages.",
    )


def hash_of_a_text() -> int:
    """Return what differs between workers that hash by seeds of their own."""
    return hash("tf_optimizers")


def check_hashes(hashes: Sequence[int], is_first: bool) -> None:
    """Warn unless all workers hash alike; few scripts depend on that."""
    if is_first and len(set(hashes)) > 1:
        warnings.warn(
            "All workers should hash texts alike: the elements of a set have "
            "another order on each, and so would a vocabulary that is made of "
            "one. Received: a different hash of one text on some workers. Set "
            "the environment variable PYTHONHASHSEED to one number, such as 0, "
            "on all of them, before Python starts.",
            stacklevel=4,  # Who makes the strategy.
        )
