"""Bad input raises an error with rule, value and advice; nothing changes."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal

import tf_optimizers as tfo

pytestmark = pytest.mark.parametrize(
    "case", cases.CASES.values(), ids=cases.CASES.keys()
)

NUMBERS = {
    "learning_rate": [-1e-3, np.nan, np.inf, 10**400],
    "beta_1": [-0.1, 1.0, 1.5, np.nan],
    "beta_2": [-0.1, 1.0, 2, np.nan],
    "epsilon": [0.0, -1e-8, 1e-50, 1e39, np.nan, np.inf],
    "weight_decay": [-0.01, np.nan, np.inf],
    "lower_bound": [-1.0, np.nan, np.inf],
    "upper_bound": [0.0, -1.0, np.nan],
    "clip_normalized_gradient": [0.0, -1.0, np.nan],
    "clipnorm": [0.0, -1.0, np.nan],
    "clipvalue": [0.0, -1.0],
    "global_clipnorm": [0.0, -1.0],
    "loss_scale_factor": [0.0, -2.0, np.inf],
    "ema_momentum": [-0.1, 1.1],
    "gradient_accumulation_steps": [0, 1, -2],
    "ema_overwrite_frequency": [0, -1],
}
KINDS = {
    "learning_rate": ["fast", True, [0.1], np.ones(2), 1j, tf.constant([0.1])],
    "beta_1": ["0.9", None, True, [0.9]],
    "beta_2": ["0.9", None, 1j],
    "epsilon": ["tiny", None],
    "weight_decay": ["some", False, [0.1]],
    "exclude_from_weight_decay": ["bias", [1], 5, {"bias": 1}],
    "exclude_from_layer_adaptation": ["bias", [None], 0.5],
    "lower_bound": ["1", True],
    "upper_bound": ["1"],
    "clipnorm": ["1", True],
    "gradient_accumulation_steps": [2.5, "2", True],
    "ema_overwrite_frequency": [1.5],
    "use_ema": [1, "yes"],
    "name": [3],
}


def flatten(table):
    return [(name, value) for name in table for value in table[name]]


# Arguments that only some optimizers have.
OF_SOME = {
    "exclude_from_layer_adaptation": (tfo.Lamb, tfo.LANS),
    "lower_bound": (tfo.Lamb, tfo.LANS),
    "upper_bound": (tfo.Lamb, tfo.LANS),
    "clip_normalized_gradient": (tfo.LANS,),
}


def is_unknown(case, name):
    """Return whether the optimizer does not have the argument."""
    if case.optimizer in OF_SOME.get(name, (case.optimizer,)):
        return False
    with pytest.raises(ValueError, match="not recognized"):
        case.optimizer(**{name: None})
    return True


def check_message(error, name, value):
    message = str(error.value)
    assert message.startswith(f"`{name}` must")
    assert f"{name}={value!r}" in message
    assert message.endswith(".")


@pytest.mark.parametrize(("name", "value"), flatten(NUMBERS))
def test_argument_out_of_range_is_a_value_error(case, name, value):
    if is_unknown(case, name):
        return
    with pytest.raises(ValueError) as error:
        case.optimizer(**{name: value})
    check_message(error, name, value)


@pytest.mark.parametrize(("name", "value"), flatten(KINDS))
def test_argument_of_wrong_kind_is_a_type_error(case, name, value):
    if is_unknown(case, name):
        return
    with pytest.raises(TypeError) as error:
        case.optimizer(**{name: value})
    check_message(error, name, value)


def test_variable_as_learning_rate_is_rejected(case):
    for variable in (tf.Variable(0.1), keras.Variable(0.1)):
        with pytest.raises(TypeError, match="lambda: variable"):
            case.optimizer(variable)


def test_symbolic_learning_rate_is_rejected(case):
    @tf.function
    def make(rate):
        case.optimizer(rate)

    with pytest.raises(TypeError, match="`learning_rate` must be"):
        make(tf.constant(0.1))


def test_invalid_regular_expression_is_rejected(case):
    with pytest.raises(ValueError, match="re.escape"):
        case.optimizer(exclude_from_weight_decay=["bias("])


def test_bounds_in_wrong_order_are_rejected(case):
    if is_unknown(case, "lower_bound"):
        return
    with pytest.raises(ValueError, match="lower_bound=2.0, upper_bound=1.0"):
        case.optimizer(lower_bound=2, upper_bound=1)


def test_two_ways_of_clipping_are_rejected(case):
    with pytest.raises(ValueError, match="Only one of"):
        case.optimizer(clipnorm=1.0, clipvalue=1.0)


def test_unknown_argument_is_rejected(case):
    with pytest.raises(ValueError, match="not recognized: {'beta1'"):
        case.optimizer(beta1=0.9)


def bad_gradients():
    kernel, bias = cases.make_gradients(0)
    slices = tf.IndexedSlices(np.ones((2, 4), "float32"), [0, 1], [4, 5])
    return {
        "none at all": (ValueError, "empty list", []),
        "all None": (ValueError, "None for every", [None, None]),
        "too few": (ValueError, "1 gradients and 2 variables", [kernel]),
        "too many": (ValueError, "3 gradients", [kernel, bias, bias]),
        "swapped": (ValueError, "shape of its variable", [bias, kernel]),
        "transposed": (
            ValueError,
            r"\(5, 4\), instead of \(4, 5\), for kernel",
            [kernel.T, bias],
        ),
        "scalar": (
            ValueError,
            r"\(\), instead of \(3,\), for bias",
            [kernel, np.float32(1)],
        ),
        "slices of other width": (ValueError, "kernel", [slices, bias]),
        "integers": (TypeError, "int32", [kernel.astype("int32"), bias]),
        "complex": (TypeError, "complex", [kernel, bias.astype("complex64")]),
    }


@pytest.mark.parametrize("kind", bad_gradients())
@pytest.mark.parametrize("built", [True, False], ids=["built", "unbuilt"])
def test_bad_gradients_are_rejected_and_change_nothing(case, kind, built):
    exception, message, gradients = bad_gradients()[kind]
    variables = cases.make_variables()
    optimizer = case.make(use_ema=True)
    if built:
        cases.run(optimizer, variables, 2)
    before = [v.numpy() for v in [*variables, *optimizer.variables]]
    with pytest.raises(exception, match=message):
        optimizer.apply(gradients, variables)
    after = [v.numpy() for v in [*variables, *optimizer.variables]]
    assert optimizer.built is built
    assert_equal(before, after)


def test_empty_apply_gradients_is_rejected(case):
    with pytest.raises(ValueError, match="at least one gradient"):
        case.make().apply_gradients([])


def test_apply_gradients_takes_an_iterator_of_pairs(case):
    variables = cases.make_variables()
    pairs = zip(cases.make_gradients(0), variables, strict=True)
    iterations = case.make().apply_gradients(pairs)
    assert iterations.numpy() == 1
    expected = cases.run_reference(case.reference_step(), 1)
    assert cases.error(variables, expected) < 1e-6


def test_unbuilt_apply_without_variables_is_rejected(case):
    with pytest.raises(ValueError, match="build"):
        case.make().apply(cases.make_gradients(0))


def test_unknown_variable_is_rejected_and_changes_nothing(case):
    variables = cases.make_variables()
    optimizer = case.make()
    cases.run(optimizer, variables, 1)
    before = [v.numpy() for v in [*variables, *optimizer.variables]]
    stranger = keras.Variable(np.ones(3, "float32"))
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(cases.make_gradients(0), [variables[0], stranger])
    after = [v.numpy() for v in [*variables, *optimizer.variables]]
    assert_equal(before, after)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_variable_that_cannot_be_optimized_is_rejected(case, dtype):
    optimizer = case.make()
    with pytest.raises(TypeError, match=f"of dtype {dtype}"):
        optimizer.build([tf.Variable(tf.zeros([2], dtype))])
    assert not optimizer.built
