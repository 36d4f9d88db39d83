"""Impossible clusters are rejected before TensorFlow waits for workers."""

import json
import socket
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.workers.agreement.cluster import (
    check_cluster,
    wait_for_first,
)

WORKER = {"type": "worker", "index": 0}
TWO = {"worker": ["a:1", "b:2"]}
SimpleResolver = tf.distribute.cluster_resolver.SimpleClusterResolver


def config(cluster, task=WORKER):
    return json.dumps({"cluster": cluster, "task": task})


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{}",
        config(TWO),
        config(TWO, {"type": "worker", "index": "1"}),
        config({"chief": ["a:1"], "worker": ["b:2"]}),
        config({"worker": ["[::1]:5", "b.example.org:65535"]}),
    ],
)
def test_well_formed_cluster_is_taken(monkeypatch, text):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    resolver = check_cluster(None)
    expected = json.loads(text or "{}").get("cluster", {})
    assert resolver.cluster_spec().as_dict() == expected


@pytest.mark.parametrize("others", [{}, {"evaluator": ["c:3"]}])
def test_evaluator_is_alone(monkeypatch, others):
    """The evaluator need not be in the cluster, as TensorFlow documents."""
    text = config(TWO | others, {"type": "evaluator", "index": 0})
    monkeypatch.setenv("TF_CONFIG", text)
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    assert strategy.extended.workers == 1
    assert strategy.cluster_resolver.task_type == "evaluator"
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert model.predict(np.ones((5, 3)), verbose=0).shape == (5, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("[]", "must be JSON objects"),
        ("3", "must be JSON objects"),
        (config(TWO, []), "must be JSON objects"),
        (config(TWO, {"type": "worker", "index": "x"}), "must be an int"),
        (config(TWO, {"type": "worker", "index": -1}), "must be an int"),
        (config(TWO, {"type": "worker", "index": True}), "must be an int"),
        (config({"ps": ["a:1"], **TWO}), "must be among"),
        (config({"worker": ["a"]}), "host:port"),
        (config({"worker": ["a:"]}), "host:port"),
        (config({"worker": [":1"]}), "host:port"),
        (config({"worker": ["a:0"]}), "host:port"),
        (config({"worker": ["a:65536"]}), "host:port"),
        (config({"worker": ["a:1", "a:1"]}), "its own address"),
    ],
)
def test_malformed_tf_config_is_rejected(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message) as error:
        tfo.SparseMultiWorkerMirroredStrategy()
    assert "Received: " in str(error.value)
    assert "An example of a `TF_CONFIG`" in str(error.value)


def test_cluster_of_a_resolver_is_checked():
    cluster = tf.train.ClusterSpec({"worker": ["a:1", "b"]})
    resolver = SimpleResolver(cluster, task_type="worker", task_id=1)
    with pytest.raises(ValueError, match="host:port"):
        tfo.SparseMultiWorkerMirroredStrategy(resolver)
    resolver = SimpleResolver(
        tf.train.ClusterSpec(TWO), task_type="worker", task_id=1
    )
    assert check_cluster(resolver) is resolver


@pytest.mark.parametrize("value", ["TF_CONFIG", {}, 2])
def test_other_resolvers_and_options_are_rejected(monkeypatch, value):
    with pytest.raises(TypeError, match="`cluster_resolver` must be None"):
        tfo.SparseMultiWorkerMirroredStrategy(cluster_resolver=value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(TypeError, match="`communication_options` must be"):
        tfo.SparseMultiWorkerMirroredStrategy(communication_options=value)


def test_variable_may_be_called_dynamic_scale(monkeypatch):
    """Keras's loss scaling uses this name, but a user may use it as well."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = keras.Variable([1.0], name="dynamic_scale")
    assert len(strategy.experimental_local_results(variable.value)) == 2


def all_reduce():
    replica = tf.distribute.get_replica_context()
    return replica.all_reduce("SUM", tf.constant(1.0))


@pytest.mark.parametrize(
    "step",
    [
        lambda s: tf.function(lambda: s.run(all_reduce), jit_compile=True),
        lambda s: lambda: s.run(tf.function(all_reduce, jit_compile=True)),
        lambda s: tf.function(
            lambda: s.reduce("SUM", s.run(lambda: tf.constant(1.0)), None),
            jit_compile=True,
        ),
    ],
    ids=["step", "replica", "reduce"],
)
def test_xla_is_rejected_with_the_way_out(monkeypatch, step):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    step = step(tfo.SparseMultiWorkerMirroredStrategy())
    with pytest.raises(RuntimeError, match="`jit_compile=False` to `compile`"):
        step()


@pytest.fixture
def port():
    """A port that nothing listens on until the test calls `listen`."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        yield port


def second_worker(port, first="worker"):
    """Return the resolver of a worker that is not the first."""
    address = "{}:{}".format(*port.getsockname())
    others = {"worker": [address, "a:1"]}
    if first == "chief":
        others = {"chief": [address], "worker": ["b:1", "a:1"]}
    return SimpleResolver(tf.train.ClusterSpec(others), "", "worker", 1)


@pytest.mark.parametrize("first", ["worker", "chief"])
def test_worker_waits_until_the_first_worker_listens(port, first):
    """Otherwise TensorFlow tries again after a second, or much later."""
    waiting = threading.Thread(
        target=wait_for_first, args=(second_worker(port, first),), daemon=True
    )
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    port.listen()
    waiting.join(100)
    assert not waiting.is_alive()


def test_worker_leaves_a_first_worker_that_never_listens_to_tensorflow(port):
    began = time.monotonic()
    wait_for_first(second_worker(port), seconds=0.2)
    assert time.monotonic() - began < 100


@pytest.mark.parametrize(
    ("cluster", "kind", "index"),
    [
        ({}, None, None),
        (TWO, "worker", 0),
        ({"chief": ["a:1"], "worker": ["b:2"]}, "chief", 0),
    ],
    ids=str,
)
def test_first_worker_waits_for_none(cluster, kind, index):
    spec = tf.train.ClusterSpec(cluster)
    wait_for_first(SimpleResolver(spec, "", kind, index), seconds=1e9)
