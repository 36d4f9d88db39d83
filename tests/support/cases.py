"""The optimizers under test, one row each, and helpers for them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.layerwise.layerwise_optimizer import LayerwiseOptimizer

needs_groups = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="`MultiOptimizer` needs Keras 3.15",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """An optimizer, its reference, and arguments that use all its features."""

    optimizer: type
    reference: Callable
    arguments: dict

    def make(self, learning_rate=0.02, **kwargs):
        return self.optimizer(learning_rate, **self.arguments | kwargs)

    @property
    def has_trust_ratio(self):
        return issubclass(self.optimizer, LayerwiseOptimizer)

    def where_xla_runs(self):
        """Return the scope of a device for which XLA may compile a step."""
        is_host = issubclass(self.optimizer, tfo.AdamOffload)
        return tf.device("CPU:0") if is_host else contextlib.nullcontext()

    def reference_step(self):
        return functools.partial(self.reference, **self.arguments)


CASES = {
    "lamb": Case(
        tfo.Lamb,
        reference.lamb,
        {"weight_decay": 0.05},
    ),
    "lans": Case(
        tfo.LANS,
        reference.lans,
        {"weight_decay": 0.05},
    ),
    "adam_offload": Case(
        tfo.AdamOffload,
        reference.adam_offload,
        {"weight_decay": 0.05},
    ),
}


def each_kind(*long):
    """Parametrize a test by all cases; cases in `long` need `-m long`."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case, id=name, marks=[pytest.mark.long] * (name in long)
            )
            for name, case in CASES.items()
        ],
    )


# `tox` tests code that Lamb and LANS share with only one of them.
EACH_KIND = each_kind("lans")

# The largest difference between XLA and graphs, which round differently. A step
# is 2e-2 of the weights.
ROUNDING = 1e-4 if tf.config.list_physical_devices("GPU") else 1e-5

SHAPES = {"kernel": (4, 5), "bias": (3,)}


def with_long(values, long):
    """Return the parameters of a test; values in `long` need `-m long`.

    A tuple holds several arguments.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else [value]),
            marks=[pytest.mark.long] * (value in long),
        )
        for value in values
    ]


def make_values(seed=0, dtype="float32", shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(dtype) for s in shapes.values()]


def make_variables(dtype="float32", values=None, shapes=SHAPES):
    values = values or make_values(dtype="float32", shapes=shapes)
    return [
        keras.Variable(value, dtype=dtype, name=name)
        for name, value in zip(shapes, values, strict=True)
    ]


def make_gradients(step, dtype="float32"):
    return make_values(seed=100 + step, dtype=dtype)


def run(optimizer, variables, steps, first=0, gradients=make_gradients):
    for step in range(first, first + steps):
        optimizer.apply(gradients(step), variables)
    return [as_numpy(variable) for variable in variables]


def run_in_graph(optimizer, variables, steps, **options):
    """Do as `run`, in a `tf.function` with these options."""

    @tf.function(**options)
    def step(gradients):
        optimizer.apply(gradients, variables)

    for i in range(steps):
        step([tf.constant(g) for g in make_gradients(i)])
    return [as_numpy(variable) for variable in variables]


def run_reference(
    step_function, steps, learning_rate=0.02, values=None, clip=list
):
    """Return the reference's weights after steps with `make_gradients`.

    `clip` is called with the gradients of all variables.
    """
    weights = [v.astype("float64") for v in values or make_values()]
    states = [{} for _ in weights]
    for step in range(steps):
        gradients = [g.astype("float64") for g in make_gradients(step)]
        weights = [
            step_function(w, g, state, learning_rate)
            for w, g, state in zip(
                weights, clip(gradients), states, strict=True
            )
        ]
    return weights


@contextlib.contextmanager
def without_kernels():
    """Run kernels op by op, since compiling them for one test takes longer."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def as_numpy(variable):
    """Return a value as a NumPy array, with float32 in place of bfloat16."""
    value = tf.convert_to_tensor(variable)
    return (
        tf.cast(value, "float32") if value.dtype == "bfloat16" else value
    ).numpy()


def error(actual, expected):
    """Return the largest max|a - b| / max|b| over pairs of arrays a and b."""
    return max(
        np.max(
            np.abs(
                as_numpy(a).astype("float64") - as_numpy(b).astype("float64")
            )
        )
        / np.max(np.abs(as_numpy(b).astype("float64")))
        for a, b in zip(actual, expected, strict=True)
    )
