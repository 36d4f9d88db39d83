"""Weights & Biases and MLflow get one run of two workers, with all figures."""

import json
import struct

import pytest
import real_workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def place(tmp_path):
    """Return the address of MLflow's runs."""
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def client(place, tmp_path, monkeypatch):
    """Return a client of MLflow; both trackers report nothing home."""
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.chdir(tmp_path)  # For MLflow's files.
    return mlflow.MlflowClient(place)


def test_trackers_hold_one_run_with_the_history_of_fit(client, tmp_path):
    experiments = {}
    for name in ("all", "chief"):
        place = tmp_path / name
        place.mkdir()
        experiments[name] = client.create_experiment(name, place.as_uri())
    first, second = real_workers.results("trackers", tmp_path, 2, timeout=500)
    assert first == second
    for name, count in (("all", 2), ("chief", 1)):
        history = first[name]
        assert {"val_loss", "sparsity", "sent_bytes"} < set(history)
        paths = list(tmp_path.glob(f"{name}/wandb/offline-run-*/*.wandb"))
        runs = client.search_runs([experiments[name]])
        assert len(paths) == len(runs) == count
        for rows in map(rows_of_wandb, paths):
            logged = {
                key: [row[f"epoch/{key}"] for row in rows] for key in history
            }
            assert logged == history
        for run in runs:
            logged = {
                key: [
                    metric.value
                    for metric in client.get_metric_history(
                        run.info.run_id, key
                    )
                ]
                for key in history
            }
            assert logged == history


def test_restarted_script_continues_its_runs(
    client, place, tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    outcome = real_workers.run("resumed_trackers", tmp_path, 2, restarts=1)
    assert outcome.exit_code == 0, outcome.output[-5000:]
    assert "[launcher] Restart 1 of 1" in outcome.output
    (run,) = client.search_runs(["0"])
    metrics = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in metrics] == [0, 1, 2]
    losses = [metric.value for metric in metrics]
    assert losses == sorted(losses, reverse=True)
    # Offline, each attempt has a file, with the name of the run. A killed
    # attempt may lack values that were not written yet.
    paths = sorted(tmp_path.glob("wandb/offline-run-*/run-run-1.wandb"))
    assert len(paths) == 2
    rows = rows_of_wandb(paths[-1])
    assert rows
    assert [row["epoch/loss"] for row in rows] == losses[-len(rows) :]
    assert rows[-1]["epoch/epoch"] == 2


def rows_of_wandb(path):
    """Return what a run has logged, from its file.

    The file has LevelDB's log format: blocks of records, which may be cut.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record, rows = path.read_bytes(), 7, b"", []
    block, header = 32768, struct.Struct("<IHB")
    while position + header.size <= len(data):
        if block - position % block < header.size:
            position += block - position % block
            continue
        _, length, kind = header.unpack_from(data, position)
        position += header.size
        record += data[position : position + length]
        position += length
        if kind in (1, 4):  # The whole of a record, or its last part.
            items = Record.FromString(record).history.item
            rows.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(
                        item.value_json
                    )
                    for item in items
                }
            )
            record = b""
    return [row for row in rows if row]
