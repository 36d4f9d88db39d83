"""Parts of the benchmarks whose mistakes nothing else would reveal."""

import importlib
import json
import os
import shutil
import subprocess
import sys

import cost_model
import hosts
import messages
import numpy as np
import pytest
import results
import step_time
import study
import tables
import tasks
import traffic

from tf_optimizers.compression.sharded_exchange import ShardedExchange
from tf_optimizers.compression.wire import Wire


def can_build_networks():
    """Root is not enough: containers may forbid namespaces."""
    if os.name != "posix" or os.geteuid() or not shutil.which("tc"):
        return False
    try:
        with hosts.network(1) as net:
            net.shape("1 Gbit/s")
    except RuntimeError:
        return False
    return True


def namespaces():
    command = ["ip", "netns", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


needs_networks = pytest.mark.skipif(
    not can_build_networks(), reason="no right to build network namespaces"
)

RECEIVE = """
import socket, sys
listener = socket.create_server(("", 5000))
print("ready", flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 16):
    pass
"""
SEND = """
import socket, sys, time
start = time.perf_counter()
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(2_500_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # The other end closes when it has everything.
print(time.perf_counter() - start)
"""


@needs_networks
def test_link_has_the_speed_in_its_name():
    with hosts.network(2) as net:
        net.shape("100 Mbit/s")
        first, second = net.hosts
        receiver = subprocess.Popen(
            [*net.enter(second), sys.executable, "-c", RECEIVE],
            stdout=subprocess.PIPE,
            text=True,
        )
        with receiver:
            assert receiver.stdout.readline() == "ready\n"
            sender = [sys.executable, "-c", SEND, net.addresses[1]]
            done = subprocess.run(
                [*net.enter(first), *sender],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=60,
            )
    # 2.5 MB are 0.2 s. A burst passes at once; the machine may be busy.
    assert 0.19 < float(done.stdout) < 1.0


@needs_networks
def test_network_is_gone_after_an_error():
    with pytest.raises(KeyError), hosts.network(2) as net:
        built = {net.switch, *net.hosts}
        assert built <= namespaces()
        net.shape("2 Gbit/s")
    assert not built & namespaces()


@pytest.mark.parametrize("read", [tasks.manual, tasks.sources])
def test_every_windows_target_is_the_next_character(read):
    splits = tasks.load_text(read)
    manual = read()
    decode = np.array(list(tasks.characters(read)))
    x, y = (np.concatenate([s[i] for s in splits.values()]) for i in (0, 1))
    length = x.size
    assert "".join(decode[x.ravel()]) == manual[:length]
    assert "".join(decode[y.ravel()]) == manual[1 : length + 1]
    assert len(manual) - length <= tasks.CONTEXT


def test_epoch_of_the_sources_is_ten_thousand_steps():
    assert tasks.TASKS["code"].steps == 10_000


def test_networks_are_of_the_documented_size():
    assert tasks.make_convolutional().count_params() == 548_746
    assert 220_000 < tasks.make_transformer().count_params() < 240_000


@pytest.mark.parametrize(
    ("exchange", "density", "messages", "sent", "rounds"),
    [
        (traffic.dense(4), 1, 6, 2 * 3 / 4 * 4e6, 6),
        (traffic.dense(4, at_once=True), 1, 6, 2 * 3 / 4 * 4e6, 2),
        # Positions take 10 bits each, and a bit for each of 1,954 blocks.
        (
            traffic.all_gather("float32"),
            *(0.001, 3, 3 * (1000 * 4 + (1000 * 10 + 1954) / 8), 1),
        ),
        (traffic.all_gather("float32"), 0.9, 6, 2 * 3 / 4 * 4e6, 2),
        # A shard receives at most 297 float16 values, and sends 250 float32
        # ones. Both times, positions take 10 bits each, and one bit for each of
        # 489 blocks.
        (
            traffic.reduce_scatter("float16"),
            *(0.001, 6, 3 * (297 * 2 + 250 * 4 + (547 * 10 + 2 * 489) / 8), 2),
        ),
    ],
    ids=[
        *("dense", "dense, at once"),
        *("all-gather", "all-gather, too much", "reduce-scatter"),
    ],
)
def test_traffic_of_four_workers(exchange, density, messages, sent, rounds):
    found = exchange.traffic(1e6, density, 4)
    assert found == pytest.approx((messages, sent, rounds), rel=2e-3)
    assert exchange.traffic(1e6, density, 1)[::2] == (0, 0)


def test_many_workers_gather_in_two_levels():
    for workers, sent, rounds in ((32, 31, 1), (64, 14, 2), (1024, 62, 2)):
        found = traffic.all_gather("float16").traffic(1e6, 1e-6, workers)
        assert found[::2] == (sent, rounds)
        found = traffic.reduce_scatter("int4").traffic(1e6, 0.001, workers)
        assert found[::2] == (workers - 1 + sent, 1 + rounds)


def test_message_time_is_that_of_another_worker():
    workers = {
        str(n): {"0": {"processor_ms": 3 + 0.25 * (n - 1)}} for n in (2, 4, 16)
    }
    found = messages.message_ms({messages.ONE: workers})
    assert found == pytest.approx(0.25)


@pytest.mark.parametrize("workers", [8, 64, 1024])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int4"])
def test_traffic_of_shards_equals_the_optimizer_s(workers, dtype):
    n, k = 100_000_000, 100_000
    wire = Wire(workers, dtype, is_packed=True)
    exchange = ShardedExchange(wire, [n], [k])
    said = (workers - 1) * exchange.peer_bytes
    found = traffic.reduce_scatter(dtype).traffic(n, k / n, workers)
    assert found.bytes == pytest.approx(said, rel=0.05)


def test_fit_finds_the_coefficients_that_made_the_steps():
    truth = np.array([2e-4, 1e-3, 1.07, 2e-9, 4e-9, 5e-3])
    seen = [
        cost_model.Observation("", "", "", 0.02, 0.02 + float(row @ truth), row)
        for exchange in cost_model.MEASURED.values()
        for n in (4e6, 2e7)
        for workers in (2, 3, 4)
        for speed in cost_model.SPEEDS.values()
        for row in [
            cost_model.crowded(
                cost_model.features(exchange, n, 0.001, workers, speed), workers
            )
        ]
    ]
    found = cost_model.fit(seen, message=2e-4)
    np.testing.assert_allclose(found, truth, rtol=1e-6)


def test_round_trip_is_waited_for_in_every_round():
    links = {
        "near": cost_model.Link(1e8, 0.0),
        "far": cost_model.Link(1e8, 0.02),
    }
    steps = cost_model.predict(1e6, 0.01, np.full(6, 1e-9), 0.001, links)
    four = cost_model.WORKERS.index(4)
    rounds = {
        name: (steps["far"][name][four] - times[four]) / 20
        for name, times in steps["near"].items()
    }
    assert rounds["dense, float32"] == pytest.approx(6)
    assert rounds["dense, float32, at once"] == pytest.approx(2)
    assert rounds["DGC, float16 values"] == pytest.approx(1)
    many = cost_model.WORKERS.index(64)
    near, far = (steps[link]["DGC, float16 values"][many] for link in links)
    assert (far - near) / 20 == pytest.approx(2)


def test_rate_of_lowest_mean_validation_loss_is_chosen():
    def trial(rate, bits):
        return {"learning_rate": rate, "validation": {"bits": bits}}

    trials = [trial(0.1, 0.2), trial(0.1, 0.6), trial(0.2, 0.3)]
    assert study.tuned_rate([*trials, trial(0.2, 0.4)]) == 0.2
    assert study.tuned_rate([*trials, trial(0.2, 0.6)]) == 0.1


def test_interrupted_study_resumes(tmp_path):
    path, dense = tmp_path / "accuracy.json", study.DENSE
    variants = {dense: study.Variant(1, None, seeds=3)}
    family = study.Family("digits", [0.1, 0.2], [7], variants)
    first = study.Study(path, "one", family)
    assert first.missing_trials() == [(0.1, 7), (0.2, 7)]
    assert first.missing_seeds(dense, 8) == [0, 1, 2]
    first.add(first.result["trials"], {"learning_rate": 0.2, "seed": 7})
    first.add(first.result["runs"].setdefault(dense, []), {"seed": 1})
    again = study.Study(path, "one", family)
    assert again.missing_trials() == [(0.1, 7)]
    assert again.missing_seeds(dense, 8) == [0, 2]
    assert study.Study(path, "other", family).missing_seeds(dense, 1) == [0]
    assert json.loads(path.read_text())["models"]["one"]["runs"]


@pytest.mark.parametrize(
    ("script", "option", "model"),
    [
        ("exchange", "--model", "4 M in 2 tensors"),
        ("growth", None, "variables, 1"),
        ("local_work", "--models", "20 M in 1"),
        ("memory", "--models", "bert-base"),
        ("monitors", None, "4 M"),
        ("step_time", "--models", "small"),
    ],
)
def test_run_for_one_model_keeps_the_others(
    monkeypatch, tmp_path, script, option, model
):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")  # as memory.py sets it
    module = importlib.import_module(script)
    for measuring in (step_time, module):
        monkeypatch.setattr(
            measuring, "measure", lambda *_: {"seen": 1}, raising=False
        )
    for table in tables.TABLES:
        monkeypatch.setattr(tables, table, lambda *_: "", raising=False)
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"models": {"other": {"seen": 0}}}))
    own = [option, model] if option else []
    monkeypatch.setattr(sys, "argv", [script, *own, "--output", str(path)])
    module.main()
    models = json.loads(path.read_text())["models"]
    assert models["other"] == {"seen": 0}
    assert models[model]["date"]
    assert models[model]["commit"] == results.commit()


def test_results_name_the_commit_of_the_measured_code(tmp_path):
    def git(*arguments):
        return subprocess.check_output(
            ["git", "-C", tmp_path, *arguments], text=True
        ).strip()

    commit = results.commit.__wrapped__  # without a cache
    assert commit(tmp_path) is None
    code, result = tmp_path / "tf_optimizers", tmp_path / "benchmarks/results"
    for folder in (code, result):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    git("init", "--quiet")
    git("add", ".")
    author = "-c", "user.name=A", "-c", "user.email=a@example.org"
    git(*author, "commit", "--quiet", "--message", "first")
    head = git("rev-parse", "--short=12", "HEAD")
    (result / "file").write_text("a new result")
    assert commit(tmp_path) == head
    (code / "file").write_text("changed")
    assert commit(tmp_path) == f"{head}+"
