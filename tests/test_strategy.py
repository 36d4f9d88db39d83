"""Real worker processes under `SparseMultiWorkerMirroredStrategy`.

What N workers compute equals what one computes on the same global batch,
workers agree to the bit, and no gradient is lost.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys

import dgc
import numpy as np
import pytest
import tensorflow as tf
import workers
from programs import training, transport

from tf_optimizers.launch.group import environment, reserve_addresses

pytestmark = pytest.mark.slow

# Those without compression.
LIKE_ONE = [
    *("sgd", "adam", "lamb", "lans", "adam_offload"),
    *("accumulated adam", "accumulated offload"),
    *("class_weight", "sample_weight"),
]
# Float32 sums in another order, over 12 steps that move each variable by more
# than 1e-2 of its largest element.
TOLERANCE = 3e-5
PROGRAM = workers.TESTS / "programs" / "faults.py"

GROUPS = {
    "1 worker": (1, 1, ["sgd", "dgc"]),
    "2 workers": (2, 1, [*training.SCENARIOS]),
    "2 workers of 2 devices": (
        2,
        2,
        ["adam_offload", "accumulated offload", "dgc", "custom_loop"],
    ),
    "3 workers": (3, 1, ["adam", "dgc", "uneven", "accumulated"]),
    "4 workers": (4, 1, ["sgd", "dgc"]),
}


@pytest.fixture(scope="module")
def alone():
    """What one process without a strategy does."""
    return training.run(tf.distribute.get_strategy(), LIKE_ONE)


@pytest.fixture(scope="module", params=GROUPS.values(), ids=GROUPS.keys())
def group(request, tmp_path_factory):
    """What the workers of a group report, by scenario."""
    count, devices, names = request.param
    results = workers.results(
        "training",
        tmp_path_factory.mktemp("group"),
        count,
        "sparse",
        *names,
        devices=devices,
    )
    return {name: [result[name] for result in results] for name in names}


def error(actual, expected):
    return max(
        np.max(np.abs(np.array(a) - np.array(b))) / np.max(np.abs(np.array(b)))
        for a, b in zip(actual, expected, strict=True)
    )


def test_workers_report_the_same(group):
    """Weights to the bit after every epoch, history, losses, predictions."""
    for name, (first, *others) in group.items():
        for other in others:
            assert other == first, name


def test_workers_equal_one_process(group, alone):
    found = set(group) & set(LIKE_ONE)
    assert found
    start = training.make_model().get_weights()
    for name in found:
        actual, expected = group[name][0], alone[name]
        assert (
            min(
                error([a], [b])
                for a, b in zip(start, expected["weights"], strict=True)
            )
            > 1e-2
        )
        assert error(actual["weights"], expected["weights"]) < TOLERANCE, name
        for result in ("evaluate", "predict"):
            assert error([actual[result]], [expected[result]]) < TOLERANCE, name
        for key, values in expected["history"].items():
            assert error([actual["history"][key]], [values]) < TOLERANCE, name


def test_training_learns(group):
    """A model that does not move would agree with itself as well."""
    for name, (result, *_) in group.items():
        losses = (
            result.get("losses")
            or result.get("history", {}).get("loss")
            or [log[0] for log in result["logs"]]
        )
        assert losses[-1] < losses[0], name
        if "hashes" in result:
            assert len(set(result["hashes"])) == 3, name


def test_predictions_are_in_the_order_of_the_rows(group):
    for name, (result, *_) in group.items():
        if "predict" in result:
            model = training.make_model(normalized=name == "normalized")
            model.set_weights([np.array(w) for w in result["weights"]])
            expected = model.predict(training.ROWS, verbose=0)
            assert error([result["predict"]], [expected]) < 1e-5, name


@pytest.fixture(scope="module")
def transports(tmp_path_factory):
    """The same run of DGCMomentum under each kind of strategy, by name."""
    return {
        kind: workers.results(
            "transport",
            tmp_path_factory.mktemp("transport"),
            2,
            kind.split()[0],
            devices=devices,
        )
        for kind, devices in (("sparse", 1), ("stock", 1), ("sparse of 2", 2))
    }


@pytest.fixture(scope="module")
def expected(mirrored):
    """The same without any transport, by kind.

    The devices of a host are one replica with the sum of their gradients.
    """
    one = transport.train_all(mirrored)
    two = transport.train_all(mirrored, drawn=4)
    # Other gradients give other weights.
    assert error(two["weights"], one["weights"]) > 0.1
    return {"sparse": one, "stock": one, "sparse of 2": two}


def test_transport_never_changes_the_mathematics(transports, expected):
    for kind, results in transports.items():
        for result in results:
            for way in ("weights", "eager"):
                found = error(result[way], expected[kind][way])
                assert found < 1e-6, (kind, way)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_transport_rounds(transports, expected, dtype):
    """The optimizer does; what TensorFlow cannot gather travels as float32."""
    for kind, results in transports.items():
        half = expected[kind]["half"]
        for result in results:
            assert error(result["half"][dtype], half[dtype]) < 1e-6, kind
        assert error(half["float16"], half["bfloat16"]) > 1e-4


def test_much_is_sent_densely(transports, expected):
    for kind, results in transports.items():
        for result in results:
            collectives = result["collectives of most"]
            assert set(collectives) == {"CollectiveReduceV2"}, kind
            assert error(result["most"], expected[kind]["most"]) < 1e-6, kind


@pytest.mark.parametrize("settings", ["plain", "rounded, not masked"])
def test_nothing_is_lost_by_any_transport(transports, mirrored, settings):
    """Sum of everything sent + sum of v = sum of everything accumulated."""
    without = [{"balance": transport.balances(mirrored)}]
    for kind, results in [*transports.items(), ("none", without)]:
        balances = [result["balance"][settings] for result in results]
        dgc.assert_nothing_is_lost(balances, atol=2e-4, err_msg=kind)


def test_replicas_of_a_host_hold_the_same(transports):
    """To the bit, or they would not select the same."""
    for kind, results in transports.items():
        for result in results:
            for balance in result["balance"].values():
                assert balance["alike"], kind
    first, second = (r["balance"]["plain"] for r in transports["sparse of 2"])
    assert error(first["unsent"], second["unsent"]) > 0.1


def test_devices_of_a_host_send_together_what_one_would(transports):
    """Each half of the entries, rounded up, and a count of its own."""
    sent = {}
    for kind in ("sparse", "sparse of 2"):
        for result in transports[kind]:
            said = result["bytes"]["said"]
            sent[kind] = result["bytes"]["sent"]["CollectiveGatherV2"]
            # A word may be half empty, on each of two devices.
            assert said <= sent[kind] <= said + 4, kind
    assert sent["sparse"] == 1480
    assert sent["sparse of 2"] == 2 * 748


def test_a_step_is_one_all_gather_and_one_all_reduce(transports):
    """Two compressed variables, and a small one; TensorFlow's needs more.

    And, if a host has several devices, one sum there.
    """
    for kind, reduces, devices in (("sparse", 1, 1), ("sparse of 2", 2, 2)):
        for result in transports[kind]:
            assert result["collectives"] == {
                "CollectiveGatherV2": devices,
                "CollectiveReduceV2": devices * reduces,
            }
    assert transports["stock"][0]["collectives"]["CollectiveGatherV2"] >= 6


@pytest.mark.parametrize(
    ("kind", "means", "total", "devices"),
    [
        ("sparse", [0.5, 5.0, 7.0], 10.0, 1),
        ("sparse of 2", [1.5, 15.0, 7.0], 60.0, 2),
    ],
    ids=["2 replicas", "4 replicas"],
)
def test_logs_of_a_step_are_reduced_together(
    transports, kind, means, total, devices
):
    """The means in one collective of each replica, the sum in another."""
    for result in transports[kind]:
        assert result["logs"] == {
            "values": [*means, total],
            "collectives": {"CollectiveReduceV2": 2 * devices},
        }


def test_steps_leave_no_threads_behind(transports):
    """A collective with a timeout leaves one, until the timeout is over."""
    for result in transports["sparse"]:
        assert result["new_threads"] < transport.STEPS / 4


def test_golden_of_four_replicas(tmp_path):
    """In one process, where each has a memory of its own."""
    (errors,) = workers.results("transport", tmp_path, 1, "golden", devices=4)
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("model", ["Shape mismatch", "task:1", "[8,9]", "[8,8]"]),
        ("settings", ["momentum=0.9 on worker 0", "momentum=0.8 on worker 1"]),
        ("step", ["step=0 on worker 0, step=7 on worker 1"]),
        ("devices", ["devices=1 on worker 0, devices=2 on worker 1"]),
        ("absent", ["Received nothing from worker 1 in 5 s"]),
        ("silent", ["Collective", "timed out"]),
        ("killed", ["Worker 1 was killed by signal 9"]),
        ("too late", ["must be created before any tensor"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fault_is_an_error_that_says_what(tmp_path, case, messages):
    outcome = workers.run("faults", tmp_path, 2, case, timeout=120)
    assert outcome.exit_code != 0
    assert "trained to the end" not in outcome.output
    for message in messages:
        assert message in outcome.output


def test_worker_that_saves_alone_is_told_so(tmp_path):
    """The other has gone on; it ends too, with nobody there to end it."""
    with contextlib.ExitStack() as stack:
        addresses = reserve_addresses("127.0.0.1", 2, stack)
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, PROGRAM, "saves alone"],
                    env=environment(addresses, place)
                    | workers.environment(tmp_path),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for place in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        outputs = [p.communicate(timeout=120)[0] for p in processes]
    assert all(process.returncode for process in processes), outputs
    for way in ("save", "save_weights", "checkpoint"):
        absent = "Received nothing from worker 1 in 2 s"
        assert re.search(f"^{way}: .* {absent}", outputs[0], re.M), outputs
    assert "nothing could be saved" in outputs[0]
    assert "trained to the end" not in outputs[1]


def test_taken_port_is_an_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        addresses = [f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:1"]
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": 0},
        }
        result = subprocess.run(
            [sys.executable, PROGRAM, "port"],
            env=workers.environment(tmp_path)
            | {"TF_CONFIG": json.dumps(config)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode != 0
    assert "Could not start gRPC server" in result.stderr
