"""The results of the latency benchmark, with distant workers."""

import json
import subprocess
import sys

import against
import latency
import overlap
import pytest
import tables


def test_round_trips_are_the_added_delay():
    step_ms = {"0": [9.0, 10.0, 50.0], "20": [50.0], "80": [170.0, 170.0]}
    assert latency.round_trips_of(step_ms) == {"20": 2.0, "80": 2.0}


def test_quick_run_is_printed_and_written_only_where_it_is_asked_to(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(sys, "argv", ["latency.py", "--quick"])
    own = latency.parse().output
    latency.results.record(own, "2 workers", {}, lambda name, _: name)
    assert capsys.readouterr().out == "2 workers\n\n"
    path = tmp_path / "quick.json"
    sys.argv += ["--output", str(path)]
    assert latency.parse().output == path
    assert own is None


def test_hidden_is_the_share_of_the_exchange_that_takes_no_time():
    seconds = {
        "waits": {"none": [4.0, 5.0], "near": [5.0, 9.0], "link": [10.0, 11.0]},
        "overlaps": {
            "none": [5.0, 5.0],
            "near": [5.0, 6.0],
            "link": [5.0, 8.0],
        },
    }
    assert overlap.hidden(seconds, "none") == [1.0, 0.5]
    assert overlap.hidden(seconds, "near") == [1.0, pytest.approx(3 / 7)]


def test_ratio_has_its_interval_over_starts():
    # The t distribution with 3 degrees of freedom: 3.182 standard errors.
    interval = against.seeds.interval([0.9, 1.1, 0.9, 1.1], 3)
    assert interval == "+1.000 (+0.816 to +1.184)"


@pytest.mark.long
def test_benchmark_runs(tmp_path):
    path = tmp_path / "latency.json"
    contender = "dense, custom loop"
    subprocess.run(
        [
            *(sys.executable, latency.__file__, "--quick", "--workers", "2"),
            *("--contenders", contender, "--output", str(path)),
        ],
        check=True,
        timeout=600,
    )
    result = json.loads(path.read_text())["models"]["2 workers"]
    times = result["contenders"][contender]["step_ms"]
    assert set(times) == {"0", "20"}
    # Summing gradients takes at least one round trip.
    assert min(times["20"]) > 20
    assert contender in tables.latency("2 workers", result)
