"""SparseLoCo whose entries travel while the next round runs."""

import functools
import itertools
import threading
import time

import dgc
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import error, with_long
from dgc import around
from test_local_steps import Rounds
from test_sparse_loco import SETTINGS, gradients_of

import tf_optimizers as tfo

EVERY = 3


@pytest.fixture(scope="module")
def ours():
    """Two replicas in this process."""
    return tfo.SparseMultiWorkerMirroredStrategy()


class Overlapped(Rounds):
    """A run whose entries arrive before its state is read."""

    def __init__(self, strategy, settings):
        super().__init__(strategy, settings, sync_every=EVERY, overlap=True)

    def error(self):
        self.run.optimizer._finish_travel()
        return super().error()


@pytest.mark.parametrize(
    "name",
    with_long(
        ["adamw", "decay, outer rate", "warm-up", "too small"], ["adamw"]
    ),
)
def test_replicas_match_reference(ours, name):
    rounds = Overlapped(ours, SETTINGS[name])
    for step in range(1, 14):
        rounds.step()
        if step % 2:  # Some rounds have no read between them.
            assert rounds.error() < 1e-4, step
        assert not rounds.run.optimizer.is_synchronized
        if step == 8:
            rounds.synchronize()
            first, second = rounds.local()
            np.testing.assert_equal(first, second)
            assert rounds.error() < 1e-4
            assert rounds.run.optimizer.is_synchronized
    first, second = rounds.local()
    assert error(first, second) > 1e-3


def test_eager_matches_reference(ours):
    rounds = Overlapped(ours, SETTINGS["adamw"])
    for _ in range(7):
        rounds.step(eager=True)
        assert rounds.error() < 1e-4


def make(strategy, **kwargs):
    settings = {"sparsity": (0.9,), "sync_every": EVERY, "overlap": True}
    inner = around(keras.optimizers.SGD)
    return dgc.Run(strategy, dgc.zeros(), 1.0, inner, **settings | kwargs)


def test_nothing_is_lost(ours):
    """Sent entries and residuals add up to the movement of all workers."""
    run = make(ours)
    moved = [np.zeros(shape) for shape in dgc.SHAPES.values()]
    for step in range(4 * EVERY + 1):
        gradients = gradients_of(step, 2)
        run.step(gradients)
        for total, *own in zip(moved, *gradients, strict=True):
            total += np.sum(own, 0)
    held = run.memory("residual")
    assert min(np.abs(parts).max() for parts in held) > 0.1
    run.optimizer.synchronize()
    for i, parts in enumerate(run.memory("residual")):
        lost = moved[i] + run.weights()[i] - np.sum(parts, 0, "float64")
        assert np.abs(lost).max() < 1e-5


def delay_exchange(run):
    """Delay the exchange until the returned event is set."""
    event, call = threading.Event(), run.optimizer._travel._call
    function = call._function

    def wait(argument):
        assert event.wait(60.0)
        function(argument)

    call._function = wait
    return event


def test_only_the_end_of_the_next_round_waits(ours):
    run = make(ours)
    event = delay_exchange(run)
    weights = []
    for step in range(2 * EVERY - 1):
        run.step(gradients_of(step, 2))
        weights.append(run.weights()[0])
    for before, after in itertools.pairwise(weights):
        assert error(before, after) > 1e-3
    threading.Timer(0.5, event.set).start()
    start = time.monotonic()
    run.step(gradients_of(step + 1, 2))
    assert event.is_set() and time.monotonic() - start > 0.3


@pytest.mark.parametrize("wait", with_long(["step", "synchronize"], ["step"]))
def test_error_on_the_way_is_raised_later(ours, wait):
    run = make(ours)
    for step in range(EVERY):
        run.optimizer._travel._call._function = functools.partial(
            int, "no number"
        )
        run.step(gradients_of(step, 2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="in the exchange"):
        if wait == "synchronize":
            run.optimizer.synchronize()
        for step in range(EVERY):
            run.step(gradients_of(step, 2))


WRONG = {
    "no rounds": ({"overlap": True}, ValueError, "Pass `sync_every` of"),
    "no bool": ({"overlap": 1, "sync_every": 2}, TypeError, "`overlap` must"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_overlap(name):
    kwargs, kind, match = WRONG[name]
    with pytest.raises(kind, match=match):
        tfo.SparseLoCo(keras.optimizers.SGD(), **kwargs)


def test_other_strategies_cannot_overlap(mirrored):
    with pytest.raises(ValueError, match="under MirroredStrategy"):
        make(mirrored)


def test_config_keeps_overlap():
    optimizer = tfo.SparseLoCo(
        keras.optimizers.SGD(), sync_every=2, overlap=True
    )
    assert tfo.SparseLoCo.from_config(optimizer.get_config()).overlap
