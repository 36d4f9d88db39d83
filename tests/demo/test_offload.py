"""The demo's offload part: equal losses, and bytes off the device."""

import re

import pytest
from progress import Progress

from tf_optimizers.demo.__main__ import main
from tf_optimizers.demo.link import NONE
from tf_optimizers.demo.offload import offload_report, offload_study
from tf_optimizers.demo.parts import Settings

# For `build_model`: (64 + 1) 128 + (128 + 1) 128 + (128 + 1) 10.
PARAMETERS = 26_122


@pytest.fixture(scope="module")
def result(data_dir):
    settings = Settings(2, 0, NONE, True, data_dir, data_dir)
    progress = Progress()
    result = offload_study.run(settings, progress)
    assert progress.count == progress.total
    return result


def test_losses_are_equal_and_fall(result):
    first, second = result["losses"].values()
    assert len(first) == len(second) == offload_study.QUICK_STEPS
    for losses in (first, second):
        assert losses[-1] < 0.5 * losses[0]
    # Float32 rounding, and Keras's rounding of Adam's early steps by 1e-5.
    assert 0 < result["largest_difference"] < 2e-4


def test_device_holds_the_weights_only(result):
    assert result["device"] == "CPU:1"
    ours = result["memory"]["AdamOffload"]
    theirs = result["memory"]["keras.optimizers.Adam"]
    assert ours["device"] == {
        "weights": 4 * PARAMETERS,
        "state": 0,
        "master_weights": 0,
    }
    assert ours["host"]["state"] == 8 * PARAMETERS
    assert theirs["device"]["state"] == 8 * PARAMETERS


def test_largest_difference_is_relative():
    assert offload_study.largest_difference([1.0, 3.0], [1.0, 2.0]) == 0.5


def test_section_shows_the_numbers(result, tmp_path):
    text = offload_report.section(result, tmp_path)
    (device,) = re.findall(
        r"\| keras.optimizers.Adam \| on the device .*", text
    )
    # Weights, state, no master weights, sum; in kB.
    assert device.endswith("| 104.5 | 209.0 | 0.0 | 313.5 |")
    (device,) = re.findall(r"\| AdamOffload \| on the device .*", text)
    assert device.endswith("| 104.5 | 0.0 | 0.0 | 104.5 |")
    assert "second logical CPU device stands in for it" in text
    last = result["losses"]["tfo.AdamOffload"][-1]
    assert f"| {last:.6f} |" in text
    assert list(tmp_path.iterdir()) == []


def test_part_runs_alone(data_dir, tmp_path, capsys):
    folder = tmp_path / "report"
    arguments = ["--quick", "--parts", "offload", "--report-dir", str(folder)]
    assert main([*arguments, "--data-dir", str(data_dir)]) == 0
    assert "master" in capsys.readouterr().out
    assert "## Offload" in (folder / "report.md").read_text()
