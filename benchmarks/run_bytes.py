"""What does a whole run send, with and without warm-up and cool-down?

    python benchmarks/run_bytes.py

The results are the bytes that each of two workers sends under our strategy, for
one large variable, as `communication_summary` computes them. No model trains.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import results
import tables

from tf_optimizers.compression.exchanges import choose_exchange
from tf_optimizers.compression.sparsity_schedule import (
    WARM_UP,
    SparsitySchedule,
    recommended_schedule,
    recommended_updates,
    sent_count,
)
from tf_optimizers.compression.wire import Wire

SIZE = 4_000_000
MODEL = "4 M, 2 workers"
STEPS = (160, 3268, 10_000, 100_000)
ROUNDS = (8, 15, 30, 60)  # Local steps per exchange.


def schedules(steps: int) -> dict[str, SparsitySchedule]:
    both = recommended_schedule(steps)
    up = {name: both[name] for name in ("sparsity", "rampup_step")}
    return {
        "last stage only": SparsitySchedule(both["sparsity"][-1:]),
        "warm-up": SparsitySchedule(**up),
        "warm-up and cool-down": SparsitySchedule(**both),
        "stages of 1/20": SparsitySchedule(
            **recommended_schedule(steps, stages=20)
        ),
        "from 75%, stages of 1/40": SparsitySchedule(
            **recommended_schedule(steps, sparsities=WARM_UP, stages=40)
        ),
    }


def bytes_of(
    schedule: SparsitySchedule, steps: int, dtype: str, sync_every: int = 1
) -> int:
    """Return the bytes that a worker sends for the variable in a run."""
    wire = Wire(2, dtype, is_packed=True)
    sizes = []
    for sparsity in schedule.stages:
        if not sparsity:
            sizes.append(4 * SIZE)
            continue
        count = sent_count(SIZE, sparsity)
        (size,) = choose_exchange(wire, [SIZE], [count]).sent_bytes()
        sizes.append(size)
    exchanges = [*range(sync_every - 1, steps, sync_every)]
    if steps % sync_every:  # `fit` ends the last round early.
        exchanges.append(steps)
    return sum(sizes[schedule.stage(step)] for step in exchanges)


def local_steps(steps: int, sync_every: int) -> dict:
    """Return a run with local steps, set by `for_steps`, and its bytes."""
    settings = recommended_updates(steps, sync_every)
    dtype = settings["value_dtype"]
    stages = {
        name: value
        for name, value in settings.items()
        if name.startswith(("ramp", "spars"))
    }
    schedule = SparsitySchedule(**stages, sync_every=sync_every)
    return {
        "settings": f"SparseLoCo.for_steps, every {sync_every} steps",
        "value_dtype": dtype,
        "steps": steps,
        "bytes": bytes_of(schedule, steps, dtype, sync_every),
    }


def measure() -> dict:
    """Return the bytes of runs, by settings, dtype of values and steps."""
    runs = [
        {
            "settings": name,
            "value_dtype": dtype,
            "steps": steps,
            "bytes": bytes_of(schedule, steps, dtype),
        }
        for dtype in ("float32", "float16", "int4", "int2")
        for steps in STEPS
        for name, schedule in schedules(steps).items()
    ]
    runs += [local_steps(steps, every) for every in ROUNDS for steps in STEPS]
    return {"dense_bytes": 4 * SIZE, "runs": runs}


def main() -> None:
    arguments = results.options(__file__, __doc__).parse_args()
    results.record(arguments.output, MODEL, measure(), tables.run_bytes)


if __name__ == "__main__":
    main()
