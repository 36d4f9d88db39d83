"""Several workers make one run of a tracker, if one is installed."""

import importlib.util

import pytest
import real_workers

TRACKERS = ["wandb", "mlflow"]


@pytest.mark.long
def test_trackers_have_one_run_with_the_figures_of_monitors(
    tmp_path, monkeypatch
):
    found = [name for name in TRACKERS if importlib.util.find_spec(name)]
    if not found:
        pytest.skip("needs wandb or mlflow")
    monkeypatch.setenv("TRACKERS", " ".join(found))
    outcome = real_workers.run("trackers", tmp_path, 2)
    assert outcome.exit_code == 0, outcome.output[-5000:]
    assert outcome.results == [len(found), 0]
    if "wandb" in found:
        (run,) = tmp_path.glob("wandb/offline-run-*")
        assert b"trust_ratio_median" in next(run.glob("*.wandb")).read_bytes()
    if "mlflow" in found:
        metrics = tmp_path.glob("mlruns/*/*/metrics/trust_ratio_median")
        assert len(list(metrics)) == 1
