"""The cool-down from entries to dense tensors, without residuals after it."""

import dgc
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import with_long
from local import assert_copies_agree

import tf_optimizers as tfo
from tf_optimizers.compression.sparsity_schedule import SparsitySchedule

SHAPES = {"kernel": (40, 50), "bias": (7,)}
STAGES = (0.75, 0.9, 0.99)
# Stages of one step up; down from step 6; step 10 sends all residuals.
BACK = {"sparsity": STAGES, "rampup_step": 3}
BACK |= {"rampdown_begin_step": 6, "rampdown_step": 5}


def train(strategy, steps, **kwargs):
    zeros = dgc.zeros(SHAPES)
    run = dgc.Run(strategy, zeros, **kwargs)
    for step in range(steps):
        run.step(dgc.make_gradients(step, SHAPES.values(), 2))
    return run


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("down", [None, 1, 2, 3, 5, 8, 21])
@pytest.mark.parametrize("sparsity", [(0.9,), (0.5, 0.9), STAGES, (0.0, 0.9)])
def test_stages_follow_the_formula(begin, down, sparsity):
    n, r, d, e = len(sparsity), 7, begin + 9, down
    back = (d, e) if down else ()
    schedule = SparsitySchedule(sparsity, begin, r, *back)

    def expected(s):
        if s < begin or down and s >= d + e:
            return None
        if s < d or not down:
            return sparsity[min((s - begin) * n // r, n - 1)]
        if s == d + e - 1:
            return 0.0
        return sparsity[max(n - 2 - (s - d) * (n - 1) // (e - 1), 0)]

    for step in range(60):
        stage = schedule.stage(step)
        assert schedule.stages[stage] == expected(step)
        assert int(schedule.stage(tf.constant(step, tf.int64))) == stage
    for late in (2**31 - 1, 2**62):  # As int32 and int64.
        stage = int(schedule.stage(tf.constant(late)))
        assert schedule.stages[stage] == expected(late)
    assert len(schedule.stages) == len(set(schedule.stages))


# `tox` tests pairs of these settings; `-m long`, all three.
@pytest.mark.parametrize(
    ("dtype", "masking", "rule"),
    [
        ("float32", True, True),
        ("float32", False, False),
        ("float16", True, False),
        ("float16", False, True),
        pytest.param("float32", True, False, marks=pytest.mark.long),
        pytest.param("float32", False, True, marks=pytest.mark.long),
        pytest.param("float16", True, True, marks=pytest.mark.long),
        pytest.param("float16", False, False, marks=pytest.mark.long),
    ],
)
def test_there_is_no_residual_once_all_is_sent(mirrored, dtype, masking, rule):
    settings = BACK | {"value_dtype": dtype, "momentum_masking": masking}
    # Every stage is traced, so one must be enough.
    settings |= {"sparsity": (0.9,), "rate_in_momentum": rule}
    run = train(mirrored, 10, **settings)
    waiting = [v.copy() for v in map(sum, run.memory("residual"))]
    assert min(np.abs(v).max() for v in waiting) > 0.05
    for step in (10, 11, 12):
        run.step(dgc.make_gradients(step, SHAPES.values(), 2))
        for replicas in run.memory("residual"):
            np.testing.assert_array_equal(replicas, np.zeros_like(replicas))
        # Otherwise replicas would diverge.
        for first, second in run.memory("momentum"):
            np.testing.assert_array_equal(first, second)
    assert_copies_agree(mirrored, run.variables)


@pytest.mark.parametrize("masking", with_long([True, False], [True]))
def test_sent_and_unsent_entries_sum_to_the_accumulated(mirrored, masking):
    zeros = dgc.zeros(SHAPES)
    # Two stages up and one down; each is traced.
    settings = BACK | {"sparsity": STAGES[::2], "momentum_masking": masking}
    run = dgc.Run(mirrored, zeros, **settings)
    accumulated = [np.zeros(shape) for shape in SHAPES.values()]
    for step in range(14):
        gradients = dgc.make_gradients(step, SHAPES.values(), 2)
        run.step_and_add_up(gradients, accumulated)
        held = [sum(v).astype("float64") for v in run.memory("residual")]
        for sent, kept, total in zip(
            run.weights(), held, accumulated, strict=True
        ):
            np.testing.assert_allclose(kept - sent, total, atol=2e-6)


def test_dense_momentum_continues_without_masking(mirrored):
    """The sum of effects is that of a run without compression."""
    steps, zero = 200, [[np.zeros(s, "float32") for s in SHAPES.values()]] * 2
    totals = {}
    for name, begin in (("compressed", 0), ("dense", 100)):
        settings = {"sparsity": (0.9,), "momentum_masking": False}
        settings |= {"rampup_begin_step": begin}
        settings |= {} if begin else {"rampdown_begin_step": 8}
        run = train(mirrored, 10, **settings)
        for _ in range(steps):
            run.step(zero)
        totals[name] = run.weights()
    assert dgc.worst(*totals.values()) < 1e-5


def test_summary_follows_warm_up_and_cool_down(mirrored):
    # 2000 and 7 elements; entries of 8 bytes under TensorFlow's strategy.
    def sent(step):
        return run.optimizer.communication_summary(step)["total"]["sent_bytes"]

    run = train(mirrored, 0, **BACK)
    dense, entries = 4 * 2007, [8 * 501, 8 * 201, 8 * 21]
    assert [sent(step) for step in (0, 1, 2, 5)] == [*entries, entries[2]]
    assert [sent(step) for step in (6, 8)] == entries[1::-1]
    assert [sent(step) for step in (10, 11, 99)] == 3 * [dense]
    # Without masking, u is sent once as well.
    run = train(mirrored, 0, **BACK, momentum_masking=False)
    assert [sent(step) for step in (10, 11)] == [2 * dense, dense]


@pytest.mark.parametrize("steps", [2, 3, 9, 40, 127, 4000])
def test_recommended_settings_end_with_the_run(steps):
    optimizer = tfo.DGCMomentum.for_steps(steps, 0.1)
    schedule = optimizer._schedule
    shares = [schedule.stages[schedule.stage(s)] for s in range(steps + 1)]
    assert shares[0] == (0.9375 if steps >= 32 else 0.75)
    assert shares[-2:] == [0.0, None]
    assert None not in shares[:-1]
    if steps == 4000:
        # The cool-down has 749 steps, in three parts.
        counts = [shares.count(share) for share in schedule.sparsity]
        assert counts == [499, 500, 500, 2500]
    assert optimizer.value_dtype == "int4"


@pytest.mark.parametrize(
    ("first", "sparsity"),
    [(32, 0.9375), (128, 0.984375), (500, 0.996), (2000, 0.999)],
)
def test_a_short_run_defers_less(first, sparsity):
    """Otherwise residuals would be stale. Entries are sent at least twice."""
    made = [tfo.DGCMomentum.for_steps(s, 0.1) for s in (first - 1, first)]
    assert made[0].sparsity == (made[1].sparsity[:-1] or (0.75,))
    assert made[1].sparsity[-1] == sparsity


def test_recommended_settings_may_be_overruled():
    optimizer = tfo.DGCMomentum.for_steps(
        *(100, 0.1),
        sparsity=(0.99,),
        rampdown_begin_step=50,
        value_dtype="float32",
    )
    assert optimizer.sparsity == (0.99,)
    assert optimizer.rampdown_begin_step == 50
    assert optimizer.value_dtype == "float32"
    for steps, error in ((1, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match="`steps` must be an integer >= 2"):
            tfo.DGCMomentum.for_steps(steps, 0.1)


def test_any_optimizer_has_the_same_recommended_settings():
    inner = keras.optimizers.AdamW(0.1)
    loco = tfo.SparseLoCo.for_steps(4000, inner, min_compress_size=10)
    assert (loco.inner_optimizer, loco.min_compress_size) == (inner, 10)
    config, dgc = (
        optimizer.get_config()
        for optimizer in (loco, tfo.DGCMomentum.for_steps(4000, 0.1))
    )
    starts = ("ramp", "spars", "value")
    ours = [name for name in config if name.startswith(starts)]
    assert len(ours) == 6
    assert [config[name] for name in ours] == [dgc[name] for name in ours]


@pytest.mark.parametrize(
    ("steps", "arguments", "decay"),
    [
        (499, {}, 0.7),
        (500, {}, 1.0),
        (499, {"residual_decay": 0.9}, 0.9),
        (499, {"sync_every": 2}, 1.0),
    ],
)
def test_residuals_of_a_short_run_decay(steps, arguments, decay):
    """The inner optimizer does not see residuals, and would move too far."""
    inner = keras.optimizers.AdamW(0.1)
    loco = tfo.SparseLoCo.for_steps(steps, inner, **arguments)
    assert loco.residual_decay == decay


def loaded(strategy, steps, **kwargs):
    """Return a run with a loaded state, and the residuals of that state."""
    saved = train(strategy, steps, **kwargs)
    store = {}
    saved.optimizer.save_own_variables(store)
    run = train(strategy, 0, **kwargs)
    run.optimizer.load_own_variables(store)
    held = [[sum(parts) for parts in run.memory(n)] for n in HELD]
    assert np.abs(held[0][0]).max() > 0.05
    return run, held


HELD = ("residual", "momentum")


def test_residuals_are_sent_if_gradients_are_now_sparse(mirrored):
    """Sparse gradients are not compressed, but the loaded residual is sent."""
    settings = {"sparsity": (0.9,), "rampdown_begin_step": 5}
    run, _ = loaded(mirrored, 4, **settings)

    def apply():
        rows = tf.IndexedSlices(
            tf.ones([2, 50]), tf.constant([3, 3]), tf.constant([40, 50])
        )
        run.optimizer.apply([rows, tf.zeros([7])], run.variables)

    step = tf.function(lambda: mirrored.run(apply), autograph=False)
    for _ in range(3):
        step()
    for replicas in run.memory("residual"):
        np.testing.assert_array_equal(replicas, np.zeros_like(replicas))
    for first, second in run.memory("momentum"):
        np.testing.assert_array_equal(first, second)


def test_residuals_are_sent_if_the_cool_down_is_over(mirrored):
    """The cool-down may have been shortened after saving."""
    settings = {"sparsity": (0.9,), "rampdown_begin_step": 9}
    run, (residuals, momenta) = loaded(mirrored, 4, **settings)
    run.optimizer.iterations.assign(20)
    before = run.weights()
    zero = [np.zeros(shape, "float32") for shape in SHAPES.values()]
    run.step([zero, zero])
    for weight, old, v, u in zip(
        run.weights(), before, residuals, momenta, strict=True
    ):
        np.testing.assert_allclose(weight, old - v - 0.9 * u, atol=1e-6)
    run.step([zero, zero])
    for replicas in run.memory("residual"):
        np.testing.assert_array_equal(replicas, np.zeros_like(replicas))
