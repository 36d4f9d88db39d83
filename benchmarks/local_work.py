"""What does compression cost a replica, by number of tensors and parameters?

    python benchmarks/local_work.py [--models "20 M in 1"] [--rounds 15]

There is one replica, and no exchange. A step of `DGCMomentum` accumulates,
selects 0.1%, masks the selected entries, and subtracts them from the weights.
With `clipnorm`, it first clips. `SparseLoCo` first steps with its inner
optimizer, and selects from the change of the weights. All contenders take turns
in one process, as in step_time.py, with the same yardstick.
"""

import warnings
from collections.abc import Callable

import keras
import results
import step_time
import tables

import tf_optimizers as tfo

# Millions of parameters, and the number of square tensors.
MODELS = {
    f"{millions:g} M in {tensors}": tensors
    * [(round((millions * 1e6 / tensors) ** 0.5),) * 2]
    for millions, tensors in (
        (0.25, 1),
        (1, 1),
        (4, 1),
        (20, 1),
        (4, 10),
        (4, 100),
    )
}


def compressing(**kwargs: object) -> Callable:
    return step_time.optimizer_step(tfo.DGCMomentum(1e-3, **kwargs))


def contenders() -> dict[str, Callable]:
    return {
        tables.YARDSTICK: step_time.yardstick_step,
        "DGC at 0.1%": compressing(),
        "DGC at 0.1%, clipnorm": compressing(clipnorm=1.0),
        **{
            f"DGC at 0.1%, {dtype}": compressing(value_dtype=dtype)
            for dtype in ("float16", "int4", "int2")
        },
        "DGC, dense stage": compressing(rampup_begin_step=10**6),
        "keras SGD, momentum": step_time.optimizer_step(
            keras.optimizers.SGD(1e-3, momentum=0.9)
        ),
        "keras AdamW": step_time.optimizer_step(keras.optimizers.AdamW(1e-3)),
        "AdamW in SparseLoCo at 0.1%": step_time.optimizer_step(
            tfo.SparseLoCo(keras.optimizers.AdamW(1e-3))
        ),
    }


def main() -> None:
    parser = results.options(__file__, __doc__, MODELS, rounds=15)
    arguments = parser.parse_args()
    # Ignore the warning that a single replica has no traffic.
    warnings.filterwarnings("ignore", ".* saves traffic")
    for name in arguments.models:
        result = step_time.measure(
            name, MODELS[name], contenders(), arguments.rounds
        )
        results.record(arguments.output, name, result, tables.step_time)


if __name__ == "__main__":
    main()
