"""Keras's methods in real processes under our strategy.

N workers compute the same as one on the same global batch, and workers are
bitwise equal.
"""

import functools
import warnings

import numpy as np
import pytest
import real_workers
import tensorflow as tf
from cases import error
from scripts import training

pytestmark = pytest.mark.slow

# Scenarios without compression.
LIKE_ONE = [
    *("sgd", "adam", "lamb", "lans", "adam_offload"),
    *("accumulated adam", "accumulated offload"),
    *("class_weight", "sample_weight", "uneven adam", "compiled"),
]
# For float32 sums in another order, over 12 steps that move each variable by
# more than 1e-2 of its largest element.
TOLERANCE = 3e-5
# Scenarios that overflow once, with gradients that are exact in float16.
HALF = ["half", "half eager", "half dgc", "half offload"]

OFFLOADED = ["adam_offload", "accumulated offload", "half offload"]
# Other tests of workers cover custom loops, compression and rounds.
REPRESENTATIVE = ["uneven adam"]
# `tox -e oldest` tries these, too.
USUAL = ["sgd", "loco", "custom_loop"]
# The workers, the devices of each, and the scenarios.
GROUPS = [
    pytest.param((2, 1, REPRESENTATIVE), id="2 workers"),
    pytest.param((2, 1, USUAL), id="2 workers, usual", marks=pytest.mark.long),
    pytest.param(
        (1, 1, ["half", "compiled", "dgc"]),
        id="1 worker",
        marks=pytest.mark.long,
    ),
    pytest.param(
        (
            2,
            1,
            [
                name
                for name in training.SCENARIOS
                if name not in REPRESENTATIVE + USUAL
            ],
        ),
        id="2 workers, the rest",
        marks=pytest.mark.long,
    ),
    pytest.param(
        (2, 2, [*OFFLOADED, "dgc", "loco", "custom_loop"]),
        id="2 workers of 2 devices",
        marks=pytest.mark.long,
    ),
    pytest.param(
        (3, 1, ["sgd", "adam", "dgc", "uneven", "accumulated"]),
        id="3 workers",
        marks=pytest.mark.long,
    ),
]


@functools.cache
def alone(name):
    """Return the result of one process without a strategy."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DGCMomentum saves traffic")
        return training.run(tf.distribute.get_strategy(), [name])[name]


@pytest.fixture(scope="module", params=GROUPS)
def group(request, tmp_path_factory):
    """Return the reports of workers, by scenario."""
    count, devices, names = request.param
    results = real_workers.results(
        "training",
        tmp_path_factory.mktemp("group"),
        count,
        *names,
        devices=devices,
        optimized=True,  # As in users' programs.
    )
    return {name: [result[name] for result in results] for name in names}


def test_workers_report_the_same(group):
    """Compare weights after every epoch, history, losses and predictions."""
    for name, (first, *others) in group.items():
        for other in others:
            assert other == first, name


def test_workers_equal_one_process(group):
    found = set(group) & set(LIKE_ONE)
    assert found
    start = training.make_model().get_weights()
    for name in found:
        actual, expected = group[name][0], alone(name)
        assert (
            min(
                error([a], [b])
                for a, b in zip(start, expected["weights"], strict=True)
            )
            > 1e-2
        )
        assert error(actual["weights"], expected["weights"]) < TOLERANCE, name
        for result in {"evaluate", "predict"} & set(expected):
            assert error([actual[result]], [expected[result]]) < TOLERANCE, name
        for key, values in expected["history"].items():
            assert error([actual["history"][key]], [values]) < TOLERANCE, name


def test_workers_skip_an_overflow_together(group):
    """Weights are bitwise equal to those of one process."""
    for name in set(group) & set(HALF):
        for actual in group[name]:
            assert actual["weights"] == alone(name)["weights"], name
            history = actual["history"]
            assert history["scale"] == [2.0**14] * 2, name
            updates = [1, 2] if "offload" in name else [2, 5]
            assert history["updates"] == updates, name


def test_training_learns(group):
    """A model that does not move would also pass the tests above."""
    for name, (result, *_) in group.items():
        losses = result.get("losses") or result["history"]["loss"]
        assert losses[-1] < losses[0], name
        if "hashes" in result:
            assert len(set(result["hashes"])) == 3, name


def test_one_worker_writes_the_common_measurements(group):
    for result in group.get("monitored", []):
        assert result["event_files"] == 1
        assert result["history"]["residual_norm"][-1] > 0


def test_predictions_are_in_the_order_of_the_rows(group):
    for name, (result, *_) in group.items():
        if "predict" in result:
            model = training.make_model(normalized=name == "normalized")
            model.set_weights([np.array(w) for w in result["weights"]])
            expected = model.predict(training.ROWS, verbose=0)
            assert error([result["predict"]], [expected]) < 1e-5, name
