"""What does a whole run send, with and without warm-up and cool-down?

    python benchmarks/run_bytes.py

The bytes that each of two workers sends under our strategy, for one large
variable, as `communication_summary` computes them. Nothing is trained.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import results
import tables

from tf_optimizers.compression.exchanges import choose_exchange
from tf_optimizers.compression.sparsity_schedule import (
    PAPERS,
    SparsitySchedule,
    recommended_schedule,
    sent_count,
)
from tf_optimizers.compression.wire import Wire

SIZE = 4_000_000
MODEL = "4 M, 2 workers"
STEPS = (160, 3268, 10_000, 100_000)


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
        "from 75 %, stages of 1/40": SparsitySchedule(
            **recommended_schedule(steps, sparsities=PAPERS, stages=40)
        ),
    }


def bytes_of(schedule: SparsitySchedule, steps: int, dtype: str) -> int:
    """Return the bytes of the variable that a worker sends in a run."""
    wire = Wire(2, dtype, is_packed=True)
    sizes = []
    for sparsity in schedule.stages:
        if not sparsity:
            sizes.append(4 * SIZE)
            continue
        count = sent_count(SIZE, sparsity)
        (size,) = choose_exchange(wire, [SIZE], [count]).sent_bytes()
        sizes.append(size)
    return sum(sizes[schedule.stage(step)] for step in range(steps))


def measure() -> dict:
    """Return the bytes of runs, by settings, dtype of values and steps."""
    return {
        "dense_bytes": 4 * SIZE,
        "runs": [
            {
                "settings": name,
                "value_dtype": dtype,
                "steps": steps,
                "bytes": bytes_of(schedule, steps, dtype),
            }
            for dtype in ("float32", "float16", "int4", "int2")
            for steps in STEPS
            for name, schedule in schedules(steps).items()
        ],
    }


def main() -> None:
    arguments = results.options(__file__, __doc__).parse_args()
    results.record(arguments.output, MODEL, measure(), tables.run_bytes)


if __name__ == "__main__":
    main()
