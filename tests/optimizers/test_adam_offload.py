"""AdamOffload's formula, on the host and on a device, and its summary."""

import math

import cases
import golden
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.adam_offload import step_size
from tf_optimizers.kernels import betas

GOLDEN = [
    "default",
    "betas_eps",
    "loss_scale",
    "lr_list",
    "nesterov",
    "wd",
    "wd_nesterov",
]

# The device of weights: the host, or a CPU that stands in for an accelerator.
both_places = pytest.mark.parametrize("place", ["CPU:0", "CPU:1"])


def arguments(config):
    """Translate a recorded configuration into our arguments."""
    names = {
        "beta1": "beta_1",
        "beta2": "beta_2",
        "eps": "epsilon",
        "use_nesterov": "nesterov",
        "weight_decay": "weight_decay",
    }
    result = {ours: config[theirs] for theirs, ours in names.items()}
    if config["loss_scale"] != 1.0:
        result["loss_scale_factor"] = config["loss_scale"]
    return result


def schedule(rates):
    """Return a schedule with the rates of MindSpore's list."""
    steps = list(range(len(rates) - 1))
    return keras.optimizers.schedules.PiecewiseConstantDecay(steps, rates)


def run_golden(name, **changes):
    record = golden.load(f"adamoffload_{name}")
    config = record["config"]
    rate = config["learning_rate"]
    optimizer = tfo.AdamOffload(
        schedule(rate) if isinstance(rate, list) else rate,
        **arguments(config) | changes,
    )
    return golden.worst_error(record, optimizer)


@both_places
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trajectory_is_matched(name, place):
    with tf.device(place):
        assert run_golden(name) < golden.TOLERANCE


@cases.needs_groups
def test_golden_groups_are_matched_through_multi_optimizer():
    record = golden.load("adamoffload_groups")
    config = record["config"]
    optimizers = {}
    for group in config["groups"]:
        optimizer = tfo.AdamOffload(
            group.get("lr", config["learning_rate"]),
            # MindSpore decays every variable of a group with a decay.
            **arguments(config)
            | {
                "weight_decay": group.get("weight_decay", 0.0),
                "exclude_from_weight_decay": None,
            },
        )
        optimizers |= {f"^{name}$": optimizer for name in group["params"]}
    optimizer = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(tfo.AdamOffload(), optimizers)
    )
    assert golden.worst_error(record, optimizer) < golden.TOLERANCE


# Similar formulas: each must differ by far more than the tolerance.


def epsilon_after_bias_correction(w, g, state, lr):
    m_hat, v_hat = reference.moments(state, g + 0.05 * w, 0.9, 0.999)
    return w - lr * m_hat / (np.sqrt(v_hat) + 1e-3)


def decay_beside_the_gradient(w, g, state, lr):
    decayed = w - lr * 0.05 * w
    return reference.adam_offload(decayed, g, state, lr, epsilon=1e-3)


def without_bias_correction(w, g, state, lr):
    state = {"t": 10**6} | state
    return ours(w, g, state, lr)


def with_nesterov(w, g, state, lr):
    return ours(w, g, state, lr, nesterov=True)


def ours(w, g, state, lr, **kwargs):
    kwargs = {"weight_decay": 0.05, "epsilon": 1e-3} | kwargs
    return reference.adam_offload(w, g, state, lr, **kwargs)


@both_places
@pytest.mark.parametrize(
    "neighbour",
    [
        epsilon_after_bias_correction,
        decay_beside_the_gradient,
        without_bias_correction,
        with_nesterov,
    ],
    ids=lambda function: function.__name__,
)
def test_neighbour_fails_where_the_optimizer_passes(neighbour, place):
    with tf.device(place):
        optimizer = tfo.AdamOffload(0.02, weight_decay=0.05, epsilon=1e-3)
        actual = cases.run(optimizer, cases.make_variables(), 10)
    assert cases.error(actual, cases.run_reference(ours, 10)) < 1e-6
    assert cases.error(actual, cases.run_reference(neighbour, 10)) > 1e-4


def in_float64(optimizer):
    """Return weights after ten steps, and their distance from float64 ones."""
    return cases.run(optimizer, cases.make_variables("float64"), 10)


def test_step_equals_keras_adam_without_rounding():
    """The powers of the decay rates are exact in float32."""
    rates = {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-8}
    theirs = keras.optimizers.Adam(0.02, **rates)
    expected = in_float64(theirs)
    actual = in_float64(tfo.AdamOffload(0.02, **rates))
    assert cases.error(actual, expected) < 1e-12


def test_zero_gradient_moves_decayed_weights_as_any_gradient():
    """The decay is L2: it is the gradient, and a step has a fixed size."""
    variables = cases.make_variables()
    zeros = [np.zeros_like(v) for v in cases.make_values()]
    tfo.AdamOffload(0.01, weight_decay=0.05).apply(zeros, variables)
    expected = [v - 0.01 * np.sign(v) for v in cases.make_values()]
    assert cases.error(variables, expected) < 1e-6


@pytest.mark.parametrize("step", [1, 10, 100_000])
def test_step_size_keeps_all_digits(step):
    exact = 0.1 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    rates = betas(0.9, 0.999)
    single = step_size(rates, tf.constant(0.1), tf.constant(float(step)))
    assert float(single) == pytest.approx(exact, rel=5e-7)


@both_places
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_gradient_stays_in_its_element(value, place):
    with tf.device(place):
        variables = cases.make_variables()
    gradients = cases.make_gradients(0)
    gradients[0][1, 2] = value
    tfo.AdamOffload().apply(gradients, variables)
    finite = np.isfinite(variables[0].numpy())
    assert not finite[1, 2] and finite.sum() == 19


@both_places
@pytest.mark.parametrize("decay", [0.0, 2.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-8)]
)
def test_variable_may_have_several_gradients(dtype, tolerance, decay, place):
    """This happens if two losses share an encoder."""

    def train(dtype, place):
        with tf.device(place):
            variable = keras.Variable(np.ones(3), dtype=dtype)
        optimizer = tfo.AdamOffload(0.1, weight_decay=decay)
        gradients = [[1.0, 2.0, -3.0], [2.0, 1.0, -1.0], [-0.5, 0.1, -4.0]]
        for _ in range(3):
            optimizer.apply(list(map(tf.constant, gradients)), [variable] * 3)
        return tf.cast(variable, "float32").numpy()

    expected = train("float32", "CPU:0")
    np.testing.assert_allclose(train(dtype, place), expected, rtol=tolerance)


def test_memory_summary_counts_bytes():
    """There are 23 parameters."""
    with tf.device("CPU:1"):
        variables = cases.make_variables()
    optimizer = tfo.AdamOffload(use_ema=True, gradient_accumulation_steps=2)
    optimizer.build(variables)
    nothing = {"weights": 0, "state": 0, "master_weights": 0}
    assert optimizer.memory_summary() == {
        "AdamOffload": {
            "device": nothing | {"weights": 92},
            "host": nothing | {"state": 4 * 92},
        },
        "keras.optimizers.Adam": {
            "device": nothing | {"weights": 92, "state": 184},
            "host": nothing,
        },
    }


def test_memory_summary_of_half_precision_counts_master_weights():
    with tf.device("CPU:1"):
        variables = cases.make_variables("bfloat16")
    optimizer = tfo.AdamOffload()
    optimizer.build(variables)
    summary = optimizer.memory_summary()
    assert summary["AdamOffload"] == {
        "device": {"weights": 46, "state": 0, "master_weights": 0},
        "host": {"weights": 0, "state": 184, "master_weights": 92},
    }
    theirs = summary["keras.optimizers.Adam"]["device"]
    assert theirs == {"weights": 46, "state": 92, "master_weights": 0}


@both_places
def test_memory_summary_equals_keras_adam_s_state(place):
    with tf.device(place):
        variables = cases.make_variables()
        theirs = keras.optimizers.Adam()
        ours = tfo.AdamOffload()
        for optimizer in (theirs, ours):
            optimizer.build(variables)
    size = sum(v.numpy().nbytes for v in theirs.variables[2:])
    assert size == 2 * 92
    summary = ours.memory_summary()["keras.optimizers.Adam"]
    places = {"host": "CPU:0", "device": "CPU:1"}
    for name, found in summary.items():
        assert found["state"] == (size if places[name] == place else 0)


def test_memory_summary_of_replicas_counts_each(mirrored):
    with mirrored.scope():
        variables = cases.make_variables()
        optimizer = tfo.AdamOffload()
        optimizer.build(variables)
    summary = optimizer.memory_summary()
    assert summary["AdamOffload"]["device"]["weights"] == 92
    assert summary["AdamOffload"]["host"] == {
        "weights": 92,  # The first replica is on the host.
        "state": 184,
        "master_weights": 0,
    }
    assert summary["keras.optimizers.Adam"]["device"]["state"] == 184


def test_memory_summary_before_build_is_rejected():
    with pytest.raises(RuntimeError, match="after the first `fit`"):
        tfo.AdamOffload().memory_summary()
