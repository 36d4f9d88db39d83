"""Keras's own callbacks, LoRA and KerasHub, on two workers with each optimizer.

Also runs the rows of the page on Horovod that train.
"""

import re

import pytest
import real_workers
from arrays import assert_close
from scripts import keras_tools, moved

pytestmark = [pytest.mark.slow, pytest.mark.long]
each = pytest.mark.parametrize("name", keras_tools.OPTIMIZERS)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    parts = ["every callbacks", "every lora", "every moved", "orbax", "hub"]
    return real_workers.results("guide", folder, 2, *parts)


def of_both(results, part, name, why=None):
    """Return the report of both workers, which must agree."""
    if results[0][part] is None:
        pytest.skip(f"{why} is not installed")
    first, second = (result[part][name] for result in results)
    assert first == second
    return first


@each
def test_callbacks_that_read_weights_work_or_raise_advice(results, name):
    found = of_both(results, "every callbacks", name)
    if name == "AdamOffload":
        assert "Use `ema_overwrite_frequency`, or " in found["error"]
        return
    # Averages improve, and the file holds the best ones.
    losses = found["history"]["val_loss"]
    assert losses == sorted(losses, reverse=True)
    assert found["best"] < losses[0]
    assert found["logs"] > 1000
    if name in keras_tools.AS_ONE_PROCESS:
        weights, history = keras_tools.with_averages(name)
        assert_close(found["weights"], weights, atol=1e-5)
        assert found["history"]["loss"] == pytest.approx(history["loss"], 1e-4)


@each
def test_lora_in_bfloat16_and_with_int8_trains(results, name):
    found = of_both(results, "every lora", name)
    assert found["loss"][-1] < found["loss"][0]
    assert {"bfloat16", "int8"} <= set(found["dtypes"])
    # Two adapters with two matrices each, and two biases.
    assert found["trainable"] == 6


@each
def test_orbax_saves_the_trained_model(results, name):
    trained, saved = of_both(results, "orbax", name, "orbax-checkpoint")
    assert saved == pytest.approx(trained, 1e-5)


def test_page_on_fine_tuning_runs(results):
    found = {
        part: of_both(results, "hub", part, "keras-hub")
        for part in ("loss", "weights", "has_file")
    }
    assert found["loss"][-1] < found["loss"][0]
    assert found["has_file"]


def test_preset_of_the_page_exists():
    models = pytest.importorskip("keras_hub").models
    text = keras_tools.PAGE.read_text()
    (preset,) = re.findall(r'^preset = "(.+)"$', text, re.M)
    names = re.findall(r"models\.(\w+)\.from_preset\(preset", text)
    assert len(names) == 2
    for name in names:
        assert preset in getattr(models, name).presets


@each
def test_model_of_keras_hub_trains(results, name):
    first, last = of_both(results, "hub", name, "keras-hub")
    assert last < first


def test_code_of_the_page_on_horovod_has_the_documented_effect(results):
    moved.check(results, "every moved", set(moved.EFFECTS))
