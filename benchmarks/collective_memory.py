"""Does a worker's memory grow with the steps?

    python benchmarks/collective_memory.py [--workers 2] [--steps 20000]

TensorFlow keeps a record of every collective with a new instance key. Each
contender trains a small model in separate processes on loopback. The resident
memory is the first worker's. Buffers are allocated in the first fifth of the
steps. The growth is the slope of a line through the later measurements.
"""

import argparse
import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import launched
import numpy as np
import results
import tqdm
from exchange import CONTENDERS, OPTIMIZERS, make_step

DEPTH, WIDTH = 2, 64
POINTS = 50
MEASURED = (
    "stock strategy, dense",
    "ours, dense",
    "ours, DGC at 0.1%",
)


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes."""
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def work(contender: str, steps: int, path: pathlib.Path) -> None:
    """Train as one worker; the first worker writes its memory over the run."""
    kind, optimizer = CONTENDERS[contender]
    strategy = kind()
    is_first = strategy.cluster_resolver.task_id == 0
    step = make_step(strategy, OPTIMIZERS[optimizer], DEPTH, WIDTH)
    seen = []
    each = max(steps // POINTS, 1)
    progress = tqdm.tqdm(range(steps), contender, disable=not is_first)
    for i in progress:
        step()
        if (i + 1) % each == 0:
            seen.append((i + 1, resident_bytes()))
    if is_first:
        path.write_text(json.dumps(seen))


def measure(contender: str, workers: int, steps: int) -> dict:
    """Run a contender's workers; return the memory of the first worker."""
    seen = launched.run(
        __file__, workers, "--work", contender, "--steps", str(steps)
    )
    late, resident = np.transpose(seen[len(seen) // 5 :])
    slope, _ = np.polyfit(late, resident, 1)
    return {"workers": workers, "resident": seen, "bytes_per_step": slope}


def main() -> None:
    parser = results.options(__file__, __doc__, workers=2, steps=20_000)
    parser.add_argument(
        "--contenders", nargs="+", choices=MEASURED, default=list(MEASURED)
    )
    parser.add_argument("--work", choices=MEASURED, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.steps, arguments.output)
        return
    for name in arguments.contenders:
        result = measure(name, arguments.workers, arguments.steps)
        results.record(arguments.output, name, result, line)


def line(name: str, result: dict) -> str:
    """Return a line of text with the growth of a contender's memory."""
    growth = result["bytes_per_step"]
    return (
        f"{name}: {growth:.0f} bytes a step, "
        f"{growth / 10:.1f} MB in 100,000 steps"
    )


if __name__ == "__main__":
    main()
