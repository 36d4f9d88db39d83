"""Any input leads to a valid step, or to a documented error without changes.

`HYPOTHESIS_PROFILE=long pytest tests/optimizers/test_properties.py` tries more.
"""

import math
import os

import cases
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tf_optimizers as tfo
from tf_optimizers.callbacks.backup.files import DamagedError, Folder
from tf_optimizers.callbacks.backup.state import redistribute

# CI always tries the same examples, so that no commit fails by chance.
common = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("ci", derandomize=True, max_examples=60, **common)
settings.register_profile("long", max_examples=2000, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist"),
]
OPTIMIZERS = {
    **{name: case.optimizer for name, case in cases.CASES.items()},
    "dgc": tfo.DGCMomentum,
}
every_optimizer = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys()
)
REFUSALS = (TypeError, ValueError)

numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, 1, -1, 0.9, 1e-3, 0.5, 2, 10**400, np.float32(0.1)]),
)
oddities = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.integers(),
    st.lists(st.one_of(st.floats(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([1j, b"x", object(), np.zeros(2), np.float64(0.3), print]),
)
ARGUMENTS = [
    *("learning_rate", "beta_1", "beta_2", "epsilon", "weight_decay"),
    *("lower_bound", "upper_bound", "clip_normalized_gradient", "nesterov"),
    *("exclude_from_weight_decay", "exclude_from_layer_adaptation"),
    *("momentum", "rampup_begin_step", "rampup_step", "sparsity"),
    *("regularizer", "min_compress_size", "momentum_masking", "value_dtype"),
    *("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"),
    *("use_ema", "ema_momentum", "ema_overwrite_frequency", "name"),
    *("gradient_accumulation_steps", "no_such_argument"),
]
arguments = st.dictionaries(
    st.sampled_from(ARGUMENTS), st.one_of(numbers, oddities), max_size=3
)


@pytest.fixture
def without_kernels():
    """Run op by op, since each example has other constants."""
    with cases.without_kernels():
        yield


@every_optimizer
@pytest.mark.usefixtures("without_kernels")
@given(arguments=arguments)
def test_constructor_accepts_or_rejects(optimizer, arguments):
    try:
        made = optimizer(**{"learning_rate": 0.1} | arguments)
    except REFUSALS as error:
        assert str(error).endswith((".", "}"))
        return
    step(made, [tf.zeros([4, 5]), tf.zeros([3])])


@every_optimizer
@given(changes=arguments)
def test_config_is_restored_or_rejected(optimizer, changes):
    config = optimizer(0.1).get_config()
    changes = {key: value for key, value in changes.items() if key in config}
    try:
        made = optimizer.from_config(config | changes)
    except REFUSALS as error:
        assert str(error)
        return
    again = optimizer.from_config(made.get_config())
    assert again.get_config() == made.get_config()


def step(optimizer, gradients):
    """Step; return the variables."""
    variables = cases.make_variables()
    optimizer.apply(gradients, variables)
    return variables


SHAPES = list(cases.SHAPES.values())
DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "bool"]
magnitudes = st.sampled_from(
    [0.0, 1e-45, 1e-38, 1e-20, 1e-3, 1.0, 1e3, 1e15, 1e30, np.nan, np.inf]
)


@st.composite
def gradients(draw, index):
    """Draw a gradient: None, dense or sparse, of any shape and dtype."""
    kind = draw(st.sampled_from(["dense", "dense", "sparse", "none"]))
    if kind == "none":
        return None
    shape = list(SHAPES[index])
    if draw(st.integers(0, 5)) == 0:
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(["float32"] * 5 + DTYPES))
    scale = draw(magnitudes)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if kind == "dense":
        return tf.cast(rng.standard_normal(shape) * scale, dtype)
    rows = draw(st.integers(0, 6))
    values = rng.standard_normal([rows, *shape[1:]]) * scale
    indices = rng.integers(0, SHAPES[index][0], rows)
    return tf.IndexedSlices(
        tf.cast(values, dtype), tf.constant(indices), tf.constant(SHAPES[index])
    )


def make(name):
    """Return an optimizer after a step."""
    if name == "dgc":
        optimizer = tfo.DGCMomentum(0.1, sparsity=(0.5,), min_compress_size=4)
    else:
        optimizer = cases.CASES[name].make()
    variables = cases.make_variables()
    optimizer.apply(cases.make_gradients(0), variables)
    return optimizer, variables


def values_of(gradient):
    """Return the values that must reach the weights, in the state's dtype."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return tf.cast(gradient, "float32").numpy()


@pytest.mark.parametrize("name", cases.with_long(OPTIMIZERS, ["lans"]))
@given(kernel=gradients(0), bias=gradients(1), extra=st.integers(0, 9))
def test_gradient_is_a_step_or_changes_nothing(name, kernel, bias, extra):
    optimizer, variables = make(name)
    given_gradients = [kernel, bias, bias][: 3 if extra == 0 else 2]
    everything = [*variables, *optimizer.variables]
    before = [cases.as_numpy(v) for v in everything]
    try:
        optimizer.apply(given_gradients, variables)
    except REFUSALS as error:
        assert "Received" in str(error)
        after = [cases.as_numpy(v) for v in everything]
        assert_equal(before, after)
        return
    assert int(optimizer.iterations.numpy()) == 2
    for variable, gradient in zip(variables, given_gradients, strict=True):
        if gradient is not None:
            is_finite = np.isfinite(values_of(gradient)).all()
            found = np.isfinite(variable.numpy()).all()
            assert found == is_finite, variable.path


LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 3))


@given(
    old=LAYOUTS,
    new=LAYOUTS,
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_any_number_of_replicas_shares_the_same_sum(old, new, seed, scale):
    """Sums of integers are exact."""
    rng = np.random.default_rng(seed)
    count, replicas = math.prod(old), math.prod(new)
    values = (rng.standard_normal([count, 7]) * scale).astype("float32")
    own = redistribute(
        True, False, values.__getitem__, old, new, range(replicas)
    )
    means = redistribute(
        False, False, values.__getitem__, old, new, range(replicas)
    )
    assert len(own) == replicas and own[0].dtype == values.dtype
    numbers = rng.integers(-9, 9, [count, 7], "int32")
    shares = redistribute(
        True, False, numbers.__getitem__, old, new, range(replicas)
    )
    np.testing.assert_array_equal(np.sum(shares, 0), np.sum(numbers, 0))
    assert shares[0].dtype == numbers.dtype
    # All replicas agree, or nothing has changed.
    expected = values if old == new else own[:1] * replicas
    np.testing.assert_array_equal(own, expected)
    total = values.sum(0, dtype="float64")
    for mean, value in zip(means, values, strict=False):
        expected = value if old == new else total / count
        np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(
        np.sum(own, axis=0, dtype="float64"),
        total,
        rtol=1e-6,
        atol=1e-6 * scale,
    )


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", ["json", "npz"])
def test_any_damage_is_noticed(tmp_path, kind, position, bit, cut):
    folder = Folder(tmp_path)
    arrays = {"lasting.0": np.arange(6, dtype="float32")}
    parts = [folder.write_file(1, 0, arrays)]
    folder.commit(1, {"epoch": 3, "parts": parts})
    name = {"json": "00000001.json", "npz": "00000001.worker-0.npz"}[kind]
    data = bytearray((tmp_path / name).read_bytes())
    position %= len(data)
    if cut:
        del data[position:]
    else:
        data[position] ^= 1 << bit
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DamagedError):
        content = folder.content(1)
        folder.check_file(1, 0, content["parts"][0])
