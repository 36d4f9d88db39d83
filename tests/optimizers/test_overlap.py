"""SparseLoCo whose entries travel while the next round runs."""

import functools
import itertools
import threading
import time

import devices
import dgc
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import error, needs_groups, with_long
from dgc import around
from local import copies
from test_local_steps import (
    Look,
    Rounds,
    X,
    Y,
    check_that_accumulated_gradients_make_one_step,
    check_that_an_embedding_moves_by_half,
    check_that_an_overflow_is_no_step,
    fit,
    make_model,
    step_of,
)
from test_sparse_loco import SETTINGS, gradients_of

import tf_optimizers as tfo
from tf_optimizers.callbacks.backup.archive import Archive
from tf_optimizers.callbacks.backup.files import Folder
from tf_optimizers.callbacks.backup.state import State
from tf_optimizers.replicas import replicas_of

EVERY = 3


@pytest.fixture(scope="module")
def ours():
    """Two replicas in this process."""
    return devices.on_cpus()


class Overlapped(Rounds):
    """A run whose entries arrive before its state is read."""

    def __init__(self, strategy, settings):
        super().__init__(strategy, settings, sync_every=EVERY, overlap=True)

    def error(self):
        self.run.optimizer.finish_exchange()
        return super().error()


@pytest.mark.parametrize(
    "name",
    with_long(
        ["adamw", "decay, outer rate", "warm-up", "too small"],
        ["adamw", "warm-up"],
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
            assert not differing(rounds.run.optimizer)
    first, second = rounds.local()
    assert error(first, second) > 1e-3


def differing(optimizer):
    """Return the paths of common variables that differ between replicas."""
    own = tf.VariableSynchronization.ON_READ
    return [
        variable.path
        for variable in optimizer.variables
        if getattr(variable.value, "synchronization", own) != own
        and not np.array_equal(*map(np.array, variable.value.values))
    ]


def test_eager_matches_reference(ours):
    rounds = Overlapped(ours, SETTINGS["adamw"])
    for _ in range(7):
        rounds.step(eager=True)
        assert rounds.error() < 1e-4


def make(strategy, **kwargs):
    settings = {"sparsity": (0.9,), "sync_every": EVERY, "overlap": True}
    inner = around(keras.optimizers.SGD)
    return dgc.Run(strategy, dgc.zeros(), 1.0, inner, **settings | kwargs)


@pytest.mark.parametrize("cools_down", with_long([False, True], [False]))
def test_nothing_is_lost(ours, cools_down):
    """Sent entries and residuals add up to the movement of all workers."""
    end = {"rampdown_begin_step": EVERY, "rampdown_step": 2 * EVERY}
    run = make(ours, **end if cools_down else {})
    moved = [np.zeros(shape) for shape in dgc.SHAPES.values()]
    for step in range(4 * EVERY + 1):
        gradients = gradients_of(step, 2)
        run.step(gradients)
        for total, *own in zip(moved, *gradients, strict=True):
            total += np.sum(own, 0)
    run.optimizer.finish_exchange()
    held = run.memory("residual")
    assert (min(np.abs(parts).max() for parts in held) > 0.1) != cools_down
    run.optimizer.synchronize()
    for i, parts in enumerate(run.memory("residual")):
        lost = moved[i] + run.weights()[i] - np.sum(parts, 0, "float64")
        assert np.abs(lost).max() < 1e-5
        assert np.any(parts) != cools_down


def delay_exchange(run):
    """Delay the exchange until the returned event is set."""
    event, call = threading.Event(), run.optimizer._overlapped._call
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
        run.optimizer._overlapped._call._function = functools.partial(
            int, "no number"
        )
        run.step(gradients_of(step, 2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="in the exchange"):
        if wait == "synchronize":
            run.optimizer.synchronize()
        for step in range(EVERY):
            run.step(gradients_of(step, 2))


def test_entries_on_their_way_do_not_change_a_loaded_state(ours, tmp_path):
    model = make_model(ours, overlap=True, sync_every=EVERY)
    step, state = tf.function(step_of(model)), State(model)
    step()
    model.optimizer.synchronize()
    file = tmp_path / "a.weights.h5"
    model.save_weights(file)
    archive = Archive(Folder(str(tmp_path)), state, replicas_of(ours), 1)
    archive.save({"epoch": 1, "batch": 1})
    content = archive.newest()
    checkpoint = tf.train.Checkpoint(model=model)
    alone = tf.train.Checkpoint(model.optimizer)
    weights = tf.train.Checkpoint(layers=model.layers)
    path = checkpoint.save(tmp_path / "all")
    paths = [alone.write(tmp_path / "alone"), weights.write(tmp_path / "w")]

    def read_parts():
        weights.read(paths[1])
        alone.read(paths[0])

    ways = {
        "load": lambda: model.load_weights(file),
        "restore": lambda: archive.restore(content, "lasting"),
        "checkpoint": lambda: checkpoint.restore(path),
        "parts of a checkpoint": read_parts,
    }
    before = state.values()
    for name, load in ways.items():
        event = delay_exchange(model)
        for _ in range(EVERY):
            step()
        threading.Timer(0.3, event.set).start()
        load()
        assert event.is_set(), name
        for key, found in state.values().items():
            # Loading divides a sum evenly.
            np.testing.assert_allclose(
                *(np.sum(found, 0), np.sum(before[key], 0)),
                rtol=1e-6,
                err_msg=f"{name}: {key}",
            )


def test_constraint_holds_without_a_gradient_in_the_last_step(ours):
    with ours.scope():
        weights, other = keras.Variable([1.0, 1.0]), keras.Variable([1.0])
        weights.constraint = keras.constraints.NonNeg()
        optimizer = tfo.SparseLoCo(
            keras.optimizers.SGD(1.0),
            sync_every=2,
            sparsity=(0.5,),
            min_compress_size=2,
            overlap=True,
        )
        optimizer.build([weights, other])
    # A worker's gradient is twice its share.
    for gradients in ([[0.25, 0.0], [0.5, 0.0]], [[0.25, 0.0], [0.0, 0.0]]):
        dgc.apply_own(ours, optimizer, weights, tf.constant(gradients))
        dgc.apply_own(ours, optimizer, other, tf.zeros([2, 1]))
    # Without the constraint, the first replica would be at -0.25.
    np.testing.assert_array_equal(copies(ours, weights), [[0, 1], [0.25, 1]])


class Stop(keras.callbacks.Callback):
    """Raises an error, or ends the training, after some batches."""

    def __init__(self, batches, raises):
        super().__init__()
        self.batches, self.raises = batches, raises

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.batches:
            if self.raises:
                raise InterruptedError
            self.model.stop_training = True


def test_interrupted_fit_goes_on_with_what_travels(ours):
    """Like steps of the same batches, one by one."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    weights = []
    for interrupts in (True, False):
        model = make_model(ours, batch_norm=True, overlap=True)
        if interrupts:
            with pytest.raises(InterruptedError):
                stop = [Stop(5, True)]
                model.fit(data, shuffle=False, verbose=0, callbacks=stop)
        else:
            for x, y in data.take(5):
                model.train_on_batch(x, y)
        assert not model.optimizer.is_synchronized
        model.fit(data, shuffle=False, verbose=0)
        assert model.optimizer.is_synchronized
        weights.append(model.get_weights())
    np.testing.assert_equal(*weights)


@pytest.mark.long
def test_stopped_training_ends_synchronized(ours):
    model, look = make_model(ours, overlap=True), Look()
    fit(model, Stop(5, False), look, epochs=3)
    assert look.seen["step"] == [False] * 5
    assert (look.seen["epoch"], look.seen["train"]) == ([True], [True])


@pytest.mark.long
@pytest.mark.parametrize(
    "kwargs",
    [{"run_eagerly": True}, {"steps_per_execution": 3}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_modes_of_fit_agree(ours, kwargs):
    found = []
    for each in ({}, kwargs):
        model = make_model(ours, batch_norm=True, overlap=True)
        with ours.scope():
            model.compile(model.optimizer, "mse", **each)
        history = fit(model).history
        found.append([*model.get_weights(), np.array(history["loss"])])
    assert error(*found) < 1e-5


@pytest.mark.long
def test_frozen_variables_stay(ours):
    model = make_model(ours, overlap=True)
    for trainable in (True, False, True):
        model.layers[0].trainable = trainable
        with ours.scope():
            model.compile(model.optimizer, "mse")
        before = model.get_weights()
        if not trainable:
            held = copies(ours, model.optimizer._compressor.residuals[0])
        fit(model, epochs=1)
        after = model.get_weights()
        assert error(before[2:], after[2:]) > 1e-3
        assert (error(before[:2], after[:2]) > 1e-3) == trainable
        if not trainable:
            np.testing.assert_array_equal(after[0], before[0])
            now = copies(ours, model.optimizer._compressor.residuals[0])
            np.testing.assert_array_equal(now, held)


@pytest.mark.long
def test_accumulated_gradients_make_one_local_step(ours):
    check_that_accumulated_gradients_make_one_step(
        ours, overlap=True, sparsity=(0.5,)
    )


@pytest.mark.long
def test_overflow_on_one_replica_is_no_local_step(ours):
    check_that_an_overflow_is_no_step(ours, overlap=True)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_float32(ours, dtype):
    def make_around_sgd():
        inner = keras.optimizers.SGD(1e-4)
        return tfo.SparseLoCo(inner, sync_every=EVERY, overlap=True)

    dgc.check_twin(ours, dtype, make_around_sgd, [0.5, 1.0])


@pytest.mark.long
def test_embedding_touched_by_one_replica_moves_by_half(ours):
    check_that_an_embedding_moves_by_half(ours, steps=5, overlap=True)


@needs_groups
@pytest.mark.long
def test_rounds_of_two_optimizers_travel_at_once(ours):
    model, look = make_model(ours), Look()
    first = {id(v) for v in model.layers[0].variables}
    with ours.scope():
        parts = [
            tfo.SparseLoCo(
                keras.optimizers.Adam(0.01),
                sync_every=every,
                overlap=True,
                sparsity=(0.5,),
                min_compress_size=10,
            )
            for every in (EVERY, EVERY + 1)
        ]
        optimizer = keras.optimizers.MultiOptimizer(
            lambda variable: parts[id(variable) not in first]
        )
        model.compile(optimizer, "mse")
    before = model.get_weights()
    fit(model, look)
    assert (look.seen["epoch"], look.seen["train"]) == ([True] * 2, [True])
    for kernel in (0, 2):
        assert error(*([w[kernel]] for w in (model.get_weights(), before))) > (
            1e-3
        )


def test_other_strategies_cannot_overlap(mirrored):
    with pytest.raises(ValueError, match="under MirroredStrategy"):
        make(mirrored)


@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic:UserWarning")
def test_files_load_without_a_strategy_to_predict(ours, tmp_path):
    model = make_model(ours, overlap=True)
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    found, expected = (each.predict(X, verbose=0) for each in (loaded, model))
    assert error([found], [expected]) < 1e-6
    loaded.evaluate(X, Y, verbose=0)
    with pytest.raises(ValueError, match="`overlap` needs a `tfo.Sparse"):
        fit(loaded)
