"""What does one optimizer step cost, against peers in the same process?

    python benchmarks/step_time.py [--models bert-base] [--rounds 15]

All contenders take turns, round by round, so that noise of the machine affects
all of them. `ResourceApplyAdam` is the yardstick of memory speed: it reads and
writes 28 bytes per parameter and computes next to nothing. All contenders
update the same weights, each with its own state.

All times go into a JSON file; medians and ratios are printed. `--models`
measures only some lists of shapes, and keeps the file's other results.
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import results
import tables
import tensorflow as tf
import tqdm

import tf_optimizers as tfo


def bert_base() -> list[tuple[int, ...]]:
    """Return the shapes of the 199 variables of BERT-base with its pooler."""
    width, inner = 768, 3072
    norm = [(width,), (width,)]
    attention = 4 * [(width, width), (width,)] + norm
    mlp = [(width, inner), (inner,), (inner, width), (width,)] + norm
    embeddings = [(30522, width), (512, width), (2, width), *norm]
    return embeddings + 12 * (attention + mlp) + [(width, width), (width,)]


MODELS = {
    "20M": [(20_000_000,)],
    "bert-base": bert_base(),
    "small": 200 * [(64, 64)] + 200 * [(64,)],
}


def optimizer_step(
    optimizer: keras.optimizers.Optimizer, xla: bool = False
) -> Callable:
    """Return a factory of steps of an optimizer with fresh state."""

    def make(variables: list, gradients: list[tf.Tensor]) -> Callable:
        optimizer.build(variables)
        return tf.function(
            lambda: optimizer.apply(gradients, variables),
            jit_compile=True if xla else None,
            autograph=False,
        )

    return make


def yardstick_step(variables: list, gradients: list[tf.Tensor]) -> Callable:
    """Return one step of TensorFlow's fused Adam kernel."""
    slots = [
        [tf.Variable(tf.zeros(variable.shape)) for variable in variables]
        for _ in range(2)
    ]

    def step() -> None:
        for variable, m, v, gradient in zip(
            variables, *slots, gradients, strict=True
        ):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.value.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=0.9,
                beta2_power=0.999,
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-8,
                grad=gradient,
            )

    return tf.function(step, autograph=False)


def contenders() -> dict[str, Callable]:
    return {
        tables.YARDSTICK: yardstick_step,
        "tfo.Lamb": optimizer_step(tfo.Lamb()),
        "tfo.LANS": optimizer_step(tfo.LANS(weight_decay=0.01)),
        "tfo.AdamOffload": optimizer_step(tfo.AdamOffload()),
        "keras Lamb, graph": optimizer_step(
            keras.optimizers.Lamb(weight_decay=0.01)
        ),
        "keras Lamb, XLA": optimizer_step(
            keras.optimizers.Lamb(weight_decay=0.01), xla=True
        ),
        "keras Adam, graph": optimizer_step(keras.optimizers.Adam()),
        "keras Adam, XLA": optimizer_step(keras.optimizers.Adam(), xla=True),
    }


def milliseconds(step: Callable) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def measure(
    name: str, shapes: list, contenders: dict[str, Callable], rounds: int
) -> dict:
    """Return first-call and step times of contenders on one list of shapes."""
    rng = np.random.default_rng(0)
    variables = [
        keras.Variable(0.02 * rng.standard_normal(s, "float32")) for s in shapes
    ]
    gradients = [
        tf.constant(0.01 * rng.standard_normal(s, "float32")) for s in shapes
    ]
    steps = {
        key: make(variables, gradients) for key, make in contenders.items()
    }
    first = {key: milliseconds(step) for key, step in steps.items()}
    times: dict[str, list[float]] = {key: [] for key in steps}
    for _ in tqdm.trange(rounds, desc=name, unit="round"):
        for key, step in steps.items():
            times[key].append(milliseconds(step))
    return {
        "variables": len(shapes),
        "parameters": sum(int(np.prod(s)) for s in shapes),
        "first_call_ms": first,
        "step_ms": times,
    }


def main() -> None:
    parser = results.options(__file__, __doc__, MODELS, rounds=15)
    arguments = parser.parse_args()
    for name in arguments.models:
        result = measure(name, MODELS[name], contenders(), arguments.rounds)
        results.record(arguments.output, name, result, tables.step_time)


if __name__ == "__main__":
    main()
