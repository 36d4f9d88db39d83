"""With a delay, a step sends what the steps before it have left."""

import functools

import dgc
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from test_dgc_momentum import SETTINGS, SHAPES, run_both, start

import tf_optimizers as tfo

NONE = tf.distribute.get_strategy()

pytestmark = pytest.mark.filterwarnings(
    "ignore:DGCMomentum saves traffic:UserWarning"
)

run_late = functools.partial(run_both, oracle=reference.LateDGC)


def late(ours):
    return ours | {"delay": 1}


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "no masking",
        "l1l2, clip, nesterov",
        "warm-up",
        "rate outside, warm-up, clip, nesterov, l2",
        "there and back",
        "too small",
    ],
)
def test_two_replicas_match_reference(mirrored, name):
    ours, theirs = SETTINGS[name]
    assert run_late(mirrored, ours=late(ours), theirs=theirs) < 1e-5


@pytest.mark.parametrize("name", ["plain", "there and back", "too small"])
def test_without_merging_it_matches_reference(name):
    """Where an exchange is in a conditional of its own, or in none."""
    ours, theirs = SETTINGS[name]
    assert run_late(NONE, ours=late(ours), theirs=theirs) < 1e-5
    assert run_late(NONE, 8, eager=True, ours=late(ours), theirs=theirs) < 1e-5


def test_reference_tells_late_from_at_once(mirrored):
    for name in ("plain", "too small"):
        ours, theirs = SETTINGS[name]
        assert run_both(mirrored, 5, ours=late(ours), theirs=theirs) > 1e-2


def held(run):
    """Return sums of v over replicas, of every variable."""
    compressor = run.optimizer._compressor
    local = run.strategy.experimental_local_results
    return [
        sum(part.numpy().astype("float64") for part in local(v.variable.value))
        for v in compressor._of(range(len(run.variables)))
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rule", [True, False])
def test_nothing_is_lost(mirrored, rule, dtype):
    """Sum of everything sent + sum of v = sum of everything accumulated."""
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    run = dgc.Run(
        *(mirrored, zeros, 0.5),
        sparsity=(0.5, 0.9),
        rampup_begin_step=3,
        rampup_step=4,
        rate_in_momentum=rule,
        value_dtype=dtype,
        min_compress_size=8,  # The bias is smaller.
        delay=1,
    )
    accumulated = [np.zeros(shape) for shape in SHAPES.values()]
    for step in range(60):
        gradients = dgc.make_gradients(step, SHAPES.values(), 2)
        run.step_and_add_up(gradients, accumulated)
    for sent, left, total in zip(
        run.weights(), held(run), accumulated, strict=True
    ):
        assert np.abs(left).max() > 0.1
        sent = sent if rule else sent / 0.5
        np.testing.assert_allclose(left - sent, total, atol=2e-5)


def test_rampdown_leaves_nothing(mirrored):
    """Not even the last gradient."""
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    run = dgc.Run(
        *(mirrored, zeros),
        sparsity=(0.9,),
        rampdown_begin_step=5,
        min_compress_size=8,
        delay=1,
    )
    for step in range(6):
        run.step(dgc.make_gradients(step, SHAPES.values(), 2))
        is_left = [np.abs(v).max() > 0.01 for v in held(run)]
        assert is_left == [step < 5] * len(SHAPES)


def test_sparse_gradients_are_made_dense(mirrored):
    """Duplicate rows are summed; the rows that come travel a step later."""
    rows = [[[0, 2, 0]], [[1, 2, 2]]]
    ends = []
    for is_sparse in (True, False):
        run = dgc.Run(mirrored, {"table": np.ones((4, 3))}, delay=1)

        def apply(replica, is_sparse=is_sparse, run=run):
            slices = tf.IndexedSlices(
                tf.ones([3, 3]), tf.gather(rows, replica)[0], [4, 3]
            )
            gradient = tf.convert_to_tensor(slices) if not is_sparse else slices
            run.optimizer.apply([gradient], run.variables)

        for _ in range(3):
            mirrored.run(
                tf.function(apply, autograph=False),
                (run._distribute(lambda replica: replica),),
            )
        ends.append(run.weights()[0])
    np.testing.assert_array_equal(*ends)
    assert np.abs(ends[0] - 1).max() > 0.1


def test_accumulated_gradients_count_as_their_mean(mirrored):
    ends = []
    for count in (1, 2):
        kwargs = {"gradient_accumulation_steps": count} if count > 1 else {}
        run = dgc.Run(mirrored, start(), sparsity=(0.75,), delay=1, **kwargs)
        for step in range(6):
            for _ in range(count):
                run.step(dgc.make_gradients(step, SHAPES.values(), 2))
        ends.append(run.weights())
    assert dgc.worst(*ends) < 1e-6
    assert dgc.worst(ends[0], list(start().values())) > 1e-2


def test_loss_scaling_skips_what_is_not_finite(mirrored):
    """What waits is neither lost nor sent twice."""
    run = dgc.Run(mirrored, {"kernel": np.zeros(4)}, sparsity=(0.5,), delay=1)
    inner, gradients = run.optimizer, np.ones((2, 1, 4), "float32")
    run.step(gradients, eager=True)
    with mirrored.scope():
        run.optimizer = keras.optimizers.LossScaleOptimizer(inner)
        run.optimizer.build(run.variables)
    scaled = 2.0**15 * gradients
    scaled[1, 0, 3] = np.inf
    run.step(scaled, eager=True)
    np.testing.assert_array_equal(run.weights()[0], np.zeros(4))
    run.optimizer = inner
    run.step(gradients, eager=True)
    np.testing.assert_allclose(run.weights()[0], [-0.2, -0.2, 0, 0])


@pytest.mark.parametrize("delay", [2, -1, True, 1.0, None])
def test_other_delays_are_refused(delay):
    kind = ValueError if delay in (2, -1) else TypeError
    with pytest.raises(kind, match=r"`delay` must be an integer in \[0, 1\]"):
        tfo.DGCMomentum(0.1, delay=delay)


def test_config_has_the_delay():
    optimizer = tfo.DGCMomentum(0.1, delay=1)
    assert tfo.DGCMomentum.from_config(optimizer.get_config()).delay == 1
    config = tfo.DGCMomentum(0.1).get_config()
    assert config.pop("delay") == 0
    assert tfo.DGCMomentum.from_config(config).delay == 0
