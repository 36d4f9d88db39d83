"""Properties of Lamb, LANS and AdamOffload, one test each over all of them."""

import copy
import functools
import sys

import cases
import contract
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from arrays import assert_equal
from contract import TOLERANCE, train
from versions import KERAS

import tf_optimizers as tfo
from tf_optimizers import kernels, schedules

pytestmark = cases.EACH_KIND

# Constants of `kernels`, so that 20 elements make three blocks and a rest.
SMALL_BLOCKS = {"_BLOCK": 8, "_LANES": 1, "_ROWS": 2, "_SMALL": 4}
# Kernels with these constants are kept separately, and shared by tests.
MADE_IN_SMALL_BLOCKS = functools.cache(kernels._cached_function.__wrapped__)


@pytest.fixture(params=["at once", "in blocks"])
def either_path(case, request, monkeypatch):
    """Take norms of whole variables, or in blocks, as for large variables.

    With AdamOffload, variables are on the host, or elsewhere.
    """
    elsewhere = None
    if request.param == "in blocks":
        for name, value in SMALL_BLOCKS.items():
            monkeypatch.setattr(kernels, name, value)
        monkeypatch.setattr(kernels, "_cached_function", MADE_IN_SMALL_BLOCKS)
        if case.optimizer is tfo.AdamOffload:
            elsewhere = "CPU:1"
    with tf.device(elsewhere):
        yield


def needs_trust_ratio(case):
    if not case.has_trust_ratio:
        pytest.skip("has no trust ratio")


class TestContract(contract.Contract, contract.NotWrapping):
    """Tests of Lamb, LANS and AdamOffload."""


@pytest.mark.parametrize(
    "shape", [(), (1,), (0, 3), (1, 1, 2, 3), (4099,), (65_535,), (257, 257)]
)
def test_every_shape_matches_reference(case, shape):
    rng = np.random.default_rng(0)
    value, *gradients = rng.standard_normal((4, *shape)).astype("float32")
    variable = keras.Variable(value)
    optimizer = case.make()
    expected, state = value.astype("float64"), {}
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
        expected = case.reference_step()(
            expected, gradient.astype("float64"), state, 0.02
        )
    scale = np.max(np.abs(expected), initial=1e-30)
    difference = np.abs(variable.numpy() - expected)
    assert np.max(difference, initial=0.0) / scale < TOLERANCE


def test_lans_schedule_counts_updates_not_micro_batches(case):
    schedule = schedules.LansSchedule(0.05, 2, 1, 3)
    plain = cases.run(case.make(schedule), cases.make_variables(), 5)
    variables = cases.make_variables()
    optimizer = case.make(schedule, gradient_accumulation_steps=3)
    for step in range(5):
        for _ in range(3):
            # Monitors and the history of `fit` show this value.
            assert float(optimizer.learning_rate) == float(schedule(step))
            optimizer.apply(cases.make_gradients(step), variables)
    assert cases.error(variables, plain) < TOLERANCE


def test_keras_schedules_count_micro_batches_as_in_keras(case):
    schedule = keras.optimizers.schedules.PolynomialDecay(0.05, 12)
    variables = cases.make_variables()
    optimizer = case.make(schedule, gradient_accumulation_steps=3)
    theirs = keras.optimizers.SGD(schedule, gradient_accumulation_steps=3)
    for step in range(4):
        for each in (optimizer, theirs):
            each.apply(cases.make_gradients(step), variables)
        rate = float(optimizer.learning_rate)
        assert rate == float(theirs.learning_rate) == float(schedule(step + 1))


@pytest.mark.usefixtures("either_path")
def test_traces_once(case, monkeypatch):
    traces = []
    module = sys.modules[case.optimizer.__module__]
    name = case.optimizer.__name__.lower() if case.has_trust_ratio else "adam"
    formula = getattr(module, name)

    def counted(*args):
        traces.append("formula")
        return formula(*args)

    monkeypatch.setattr(module, name, counted)
    # Do not reuse kernels of other tests.
    cached = functools.cache(kernels._cached_function.__wrapped__)
    monkeypatch.setattr(kernels, "_cached_function", cached)
    variables = cases.make_variables()
    optimizer = case.make()
    optimizer.build(variables)

    @tf.function
    def step(gradients):
        traces.append("step")
        optimizer.apply(gradients, variables)

    # There are two shapes. A trust ratio takes the formula for norms, too: in
    # blocks and a rest, except for whole variables and on a GPU.
    times = 2
    if case.has_trust_ratio:
        times = 4 if kernels._SMALL > 20 or kernels.on_gpu() else 5
    for i in range(3):
        step([tf.constant(g) for g in cases.make_gradients(i)])
        assert traces.count("formula") == times
        assert traces.count("step") == 1


def test_tf_checkpoint_is_restored_before_the_optimizer_is_built(
    case, tmp_path
):
    def make():
        variables = cases.make_variables()
        optimizer = case.make(use_ema=True)
        values = [v.value for v in variables]
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, variables=values)
        return optimizer, variables, checkpoint

    optimizer, variables, checkpoint = make()
    cases.run(optimizer, variables, 3)
    path = checkpoint.save(tmp_path / "checkpoint")
    cases.run(optimizer, variables, 2, first=3)
    restored, others, checkpoint = make()
    checkpoint.restore(path)
    cases.run(restored, others, 2, first=3)
    assert_equal(
        [*variables, *optimizer.variables], [*others, *restored.variables]
    )


def test_variables_are_in_keras_s_order(case):
    """Keras's files store them by position."""
    adam = keras.optimizers.Adam(use_ema=True, name="same")
    optimizer = case.make(use_ema=True, name="same")
    for each in (adam, optimizer):
        each.build(cases.make_variables())
    expected = [variable.path for variable in adam.variables]
    assert [variable.path for variable in optimizer.variables] == expected


@pytest.mark.xfail(
    KERAS >= (3, 16),
    reason="Keras 3.16's `optimizers.get` knows Keras's own names only",
    raises=ValueError,
    strict=True,
)
def test_keras_gets_the_optimizer_by_name(case):
    name = case.optimizer.__name__
    assert type(keras.optimizers.get(f"tf_optimizers>{name}")) is case.optimizer


def test_keras_gets_the_optimizer_by_config_and_object(case):
    optimizer = case.make(0.5)
    get = keras.optimizers.get
    assert get(optimizer) is optimizer
    config = keras.optimizers.serialize(optimizer)
    assert get(config).get_config() == optimizer.get_config()
    by_name = {"class_name": f"tf_optimizers>{config['class_name']}"}
    by_name["config"] = {}
    assert type(get(by_name)) is case.optimizer


def test_deep_copy_trains_on_its_own(case):
    optimizer = case.make()
    actual = cases.run(copy.deepcopy(optimizer), cases.make_variables(), 3)
    assert not optimizer.built
    expected = cases.run(optimizer, cases.make_variables(), 3)
    assert_equal(actual, expected)


@pytest.mark.parametrize(
    ("floatx", "expected"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")],
)
def test_added_variable_has_full_precision(case, floatx, expected, request):
    """Without a dtype, Keras uses its default dtype."""
    before = keras.config.floatx()
    request.addfinalizer(lambda: keras.config.set_floatx(before))
    keras.config.set_floatx(floatx)
    assert case.make().add_variable(()).dtype == expected


@pytest.mark.parametrize("how", ["patterns", "names", "variables"])
def test_exclusion_survives_the_config(case, how):
    variables = cases.make_variables()
    if how == "patterns":
        optimizer = case.make(exclude_from_weight_decay=["^bias$"])
    else:
        optimizer = case.make()
    if how == "names":
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    if how == "variables":
        optimizer.exclude_from_weight_decay(var_list=[variables[1]])
    config = optimizer.get_config()
    restored = case.optimizer.from_config(config)
    expected = cases.run_reference(
        lambda w, *args: case.reference(
            w,
            *args,
            weight_decay=0.0 if w.ndim == 1 else 0.05,
            adapt=w.ndim > 1,
        ),
        5,
    )
    actual = cases.run(optimizer, variables, 5)
    assert cases.error(actual, expected) < TOLERANCE
    actual = cases.run(restored, cases.make_variables(), 5)
    assert cases.error(actual, expected) < TOLERANCE


def test_excluded_from_decay_only_is_still_adapted(case):
    needs_trust_ratio(case)
    optimizer = case.make(
        exclude_from_weight_decay=["bias"], exclude_from_layer_adaptation=[]
    )
    expected = cases.run_reference(
        lambda w, *args: case.reference(
            w, *args, weight_decay=0.0 if w.ndim == 1 else 0.05
        ),
        5,
    )
    actual = cases.run(optimizer, cases.make_variables(), 5)
    assert cases.error(actual, expected) < TOLERANCE


def test_excluding_one_of_two_variables_with_the_same_name(case):
    first, second = (tf.Variable(v, name="v") for v in np.ones((2, 3)))
    optimizer = case.make()
    optimizer.exclude_from_weight_decay(var_list=[second])
    optimizer.build([first, second])
    assert [optimizer._is_decayed(i) for i in (0, 1)] == [True, False]


def test_plain_tensorflow_variables_are_trained_and_excluded(case):
    variables = [
        tf.Variable(value, name=name)
        for name, value in zip(cases.SHAPES, cases.make_values(), strict=True)
    ]
    kwargs = {"exclude_from_weight_decay": tfo.BIAS_AND_NORM, "use_ema": True}
    actual = cases.run(case.make(**kwargs), variables, 4)
    expected = cases.run(case.make(**kwargs), cases.make_variables(), 4)
    assert_equal(actual, expected)
    decayed = cases.run(case.make(), cases.make_variables(), 4)
    assert not np.array_equal(actual[1], decayed[1])


OF_BIASES = ["bias", "^bias$", "ia", "^b", "s$", "(?i)BIAS", "^b|^no", "^a|ias"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *((name, "bias") for name in OF_BIASES),
        (r"n[^x]*l", "kernel"),
        *((name, "none") for name in ("norm.*", r"\Anorm", r"orm\W")),
    ],
)
def test_excluded_names_are_searched_as_keras_does(case, name, found):
    """Patterns, including anchors, apply to the last part of a path only."""
    names = ("bias_of", "sibias", "norm_proj")
    layers = [keras.layers.Dense(2, name=each) for each in names]
    model = keras.Sequential([keras.Input((2,)), *layers])
    theirs = keras.optimizers.SGD(weight_decay=0.1)
    ours = case.make()
    for optimizer in (theirs, ours):
        optimizer.exclude_from_weight_decay(var_names=[name])
        optimizer.build(model.trainable_variables)
    restored = case.optimizer.from_config(ours.get_config())
    restored.build(model.trainable_variables)
    for i, variable in enumerate(model.trainable_variables):
        expected = theirs._use_weight_decay(variable)
        assert expected is not variable.path.endswith(f"/{found}")
        assert ours._is_decayed(i) is expected
        assert restored._is_decayed(i) is expected


def test_sparse_gradient_equals_dense_gradient(case):
    """Rows are unsorted, repeated and missing."""
    rows = tf.constant([3, 1, 3, 0])
    values = tf.constant(cases.make_values(7, shapes={"rows": (4, 5)})[0])
    dense = np.zeros((4, 5), "float32")
    np.add.at(dense, rows.numpy(), values.numpy())
    bias = cases.make_gradients(0)[1]
    for kwargs in (
        {},
        {"clipnorm": 0.1},
        {"global_clipnorm": 0.1},
        {"clipvalue": 0.1},
        {"loss_scale_factor": 4.0},
        {"gradient_accumulation_steps": 2},
    ):
        results = []
        for gradient in (tf.IndexedSlices(values, rows, [4, 5]), dense):
            variables = cases.make_variables()
            optimizer = case.make(**kwargs)
            for _ in range(4):
                optimizer.apply([gradient, bias], variables)
            results.append([v.numpy() for v in variables])
        for sparse, expected in zip(*results, strict=True):
            np.testing.assert_array_equal(sparse, expected)
            assert not np.array_equal(expected, cases.make_values()[0])


@pytest.mark.parametrize(
    ("argument", "limit", "clip"),
    [
        (
            "clipnorm",
            2.0,
            lambda gs: [reference.clip_by_norm(g, 2.0) for g in gs],
        ),
        (
            "global_clipnorm",
            2.0,
            lambda gs: reference.clip_by_global_norm(gs, 2.0),
        ),
        ("clipvalue", 0.3, lambda gs: [np.clip(g, -0.3, 0.3) for g in gs]),
    ],
    ids=["clipnorm", "global_clipnorm", "clipvalue"],
)
def test_clipping_matches_reference(case, argument, limit, clip):
    actual = train(case, steps=5, **{argument: limit})
    expected = cases.run_reference(case.reference_step(), 5, clip=clip)
    assert cases.error(actual, expected) < TOLERANCE


def test_loss_scale_is_divided_out_in_float32(case):
    """In float16, only two bits of 2e-5 / 1024 remain."""
    values = [np.full((5,), 0.5, "float32")]
    rng = np.random.default_rng(0)
    scaled = (2e-5 * rng.standard_normal(5)).astype("float16")
    results = []
    for kwargs, gradient in (
        ({"loss_scale_factor": 1024.0}, scaled),
        ({}, scaled.astype("float32") / 1024),
    ):
        variables = cases.make_variables("float16", values, {"kernel": (5,)})
        optimizer = case.make(1e-3, epsilon=1e-9, **kwargs)
        optimizer.apply([gradient], variables)
        results.append(optimizer.variables[2].numpy())
    assert results[0].dtype == "float32"
    np.testing.assert_array_equal(*results)


def test_zero_gradient_leaves_undecayed_weights(case):
    variables = cases.make_variables()
    optimizer = case.make(weight_decay=0.0)
    zeros = [np.zeros_like(v) for v in cases.make_values()]
    optimizer.apply(zeros, variables)
    assert_equal(variables, cases.make_values())
    # The state is valid: the next step equals the reference.
    state = {}
    expected = case.reference_step()
    gradient = cases.make_gradients(0)[0].astype("float64")
    weight = cases.make_values()[0].astype("float64")
    case.reference(weight, 0.0 * gradient, state, 0.02)
    expected = case.reference(weight, gradient, state, 0.02, weight_decay=0.0)
    optimizer.apply(cases.make_gradients(0), variables)
    assert cases.error(variables[:1], [expected]) < TOLERANCE


def test_zero_weights_move_with_ratio_one(case):
    shapes = cases.SHAPES.values()
    variables = cases.make_variables(
        values=[np.zeros(s, "float32") for s in shapes]
    )
    actual = cases.run(case.make(), variables, 3)
    expected = cases.run_reference(
        case.reference_step(), 3, values=[np.zeros(s) for s in shapes]
    )
    assert cases.error(actual, expected) < TOLERANCE


@pytest.mark.parametrize(
    "scale", cases.with_long([1e-25, 1e-10, 1e10, 1e20], [1e-10, 1e10])
)
@pytest.mark.parametrize("clip", [{}, {"clipnorm": 1e15}], ids=["", "clipped"])
@pytest.mark.usefixtures("either_path")
def test_tiny_and_huge_gradients_match_reference(case, scale, clip):
    """Their squares are outside of float32's range."""
    variables = cases.make_variables()
    optimizer = case.make(weight_decay=0.0, **clip)
    for step in range(5):
        gradients = [g * scale for g in cases.make_gradients(step)]
        optimizer.apply([g.astype("float32") for g in gradients], variables)

    def expected(w, g, state, lr):
        g = g * scale
        g = reference.clip_by_norm(g, 1e15) if clip else g
        return case.reference(w, g, state, lr, weight_decay=0.0)

    assert cases.error(variables, cases.run_reference(expected, 5)) < TOLERANCE


@pytest.mark.parametrize("scale", [4e37, 1e38])
@pytest.mark.parametrize("argument", ["clipnorm", "global_clipnorm"])
def test_gradient_that_float32_has_no_norm_for_is_clipped(
    case, argument, scale
):
    """In float32, its norm is inf, or the inverse of its norm is 0."""

    def train(scale):
        variables = cases.make_variables()
        gradients = [scale * g for g in cases.make_gradients(0)]
        case.make(**{argument: 0.1}).apply(gradients, variables)
        return variables

    assert cases.error(train(np.float32(scale)), train(1)) < TOLERANCE


@pytest.mark.usefixtures("either_path")
def test_huge_gradients_for_long_stay_finite_and_moving(case):
    variables = cases.make_variables()
    optimizer = case.make(weight_decay=0.0)
    optimizer.build(variables)

    @tf.function
    def step(gradients):
        optimizer.apply(gradients, variables)

    for i in range(300):
        before = variables[0].numpy()
        step([tf.constant(g * 1e20) for g in cases.make_gradients(i)])
        moved = np.linalg.norm(variables[0].numpy() - before)
        relative = moved / np.linalg.norm(before)
        assert 0.001 < relative < 0.03


@pytest.mark.parametrize(
    "value", cases.with_long([np.nan, np.inf, -np.inf], [-np.inf])
)
@pytest.mark.parametrize(
    "clip",
    [{}, {"clipnorm": 1.0}, {"clipvalue": 1.0}, {"global_clipnorm": 1.0}],
    ids=lambda clip: next(iter(clip), "unclipped"),
)
@pytest.mark.usefixtures("either_path")
def test_nonfinite_gradient_is_visible_in_the_weights(case, value, clip):
    variables = cases.make_variables()
    gradients = cases.make_gradients(0)
    gradients[0][1, 2] = value
    case.make(**clip).apply(gradients, variables)
    assert not np.isfinite(variables[0].numpy()).all()
    if np.isnan(value) and case.has_trust_ratio:
        # All elements, not only one, since the trust ratio changes for all.
        assert np.isnan(variables[0].numpy()).all()
    if "global_clipnorm" in clip:
        assert np.isnan(variables[1].numpy()).all()
    else:
        assert np.isfinite(variables[1].numpy()).all()
