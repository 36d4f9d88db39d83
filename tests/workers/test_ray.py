"""Ray Train starts the workers of the example in docs/launch.md."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
import real_workers

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "launch.md"
REPORT = """
    import json, os, pathlib
    place = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    result = {
        "replicas": strategy.num_replicas_in_sync,
        "loss": history.history["loss"],
        "weights": [weight.tolist() for weight in model.get_weights()],
        "hash seed": os.environ["PYTHONHASHSEED"],
    }
    path = pathlib.Path(os.environ["FOLDER"]) / f"{place}.json"
    path.write_text(json.dumps(result))

"""


@pytest.mark.slow
@pytest.mark.long
def test_example_trains_on_two_workers_of_ray(tmp_path):
    if not importlib.util.find_spec("ray"):
        pytest.skip("Ray is not installed")
    code = re.search(r"<!-- ray -->\n```py\n(.*?)```", PAGE.read_text(), re.S)[
        1
    ]
    before, after = code.split("    model.fit(")
    training, start = after.split("\n\nray.init(")
    script = tmp_path / "train.py"
    script.write_text(
        f"{before}    history = model.fit({training}\n{REPORT}ray.init({start}"
    )
    own = {
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        # The workers have no GPU in common.
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    run = subprocess.run(
        [sys.executable, str(script)],
        env=real_workers.environment(tmp_path) | own,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert "should have the same hash seed" not in run.stdout
    first, second = (
        json.loads((tmp_path / f"{place}.json").read_text())
        for place in range(2)
    )
    assert first == second
    assert first["replicas"] == 2
    assert first["hash seed"] == "0"
    assert first["loss"][-1] < first["loss"][0]
