"""What does a step cost on a GPU, against peers in the same process?

    python benchmarks/gpu.py [--models offload ...] [--rounds 10]

Contenders take turns, round by round. `offload` trains eight dense layers, and
`batches` does so with other batch sizes. `largest` finds the largest model that
trains in 8 GiB. `trace` records when the GPU, the copies and the host work in a
step of `AdamOffload`. `layers` steps the variables of BERT-base, and
`compression` steps four variables of 25 million parameters each, on one
replica. The memory of a contender is the peak from its creation to the end of
its second step, minus the memory before its creation.
"""

import collections
import concurrent.futures
import functools
import gc
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import keras
import results
import tables
import tensorflow as tf
import tqdm
from step_time import bert_base
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tf_optimizers as tfo

Step = Callable[[], Any]
WIDTH, LAYERS = 7040, 8
GPU = "GPU:0"
LIMIT = 8 << 30
# Width of a layer in the search for the largest model: 16.8 M parameters.
NARROW = 4096
# Shorter breaks would not be visible in a plot.
BREAK_MS = 0.02
# The name of a call to an XLA kernel, in a trace of the host.
HOST_STEP = "CpuExecutable::ExecuteAsyncOnStream"


def timed(step: Step) -> float:
    """Return the milliseconds of a step, until the GPU has finished."""
    tf.test.experimental.sync_devices()
    start = time.perf_counter()
    step()
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - start) * 1e3


def used(what: str) -> int:
    return tf.config.experimental.get_memory_info(GPU)[what]


def measure(
    name: str, makers: dict[str, Callable[[], Step]], rounds: int
) -> dict[str, Any]:
    """Return step times, first calls and memory of contenders."""
    steps, first, memory = {}, {}, {}
    gc.collect()  # Free earlier models before the measurement.
    for key, make in makers.items():
        before = used("current")
        tf.config.experimental.reset_memory_stats(GPU)
        steps[key] = make()
        first[key] = timed(steps[key])
        timed(steps[key])
        memory[key] = used("peak") - before
    times: dict[str, list[float]] = {key: [] for key in steps}
    for _ in tqdm.trange(rounds, desc=name, unit="round"):
        for key, step in steps.items():
            times[key].append(timed(step))
    return {
        "step_ms": times,
        "first_call_ms": first,
        "peak_bytes": memory,
        "gpu": tf.config.experimental.get_device_details(
            tf.config.list_physical_devices("GPU")[0]
        )["device_name"],
    }


def dense_layers(
    make: Callable[[], Any],
    batch: int,
    dtype: str = "float32",
    width: int = WIDTH,
    layers: int = LAYERS,
) -> Step:
    """Return a training step of dense layers."""
    start = keras.initializers.RandomNormal(stddev=width**-0.5, seed=1)
    weights = [
        keras.Variable(start((width, width)), dtype=dtype)
        for _ in range(layers)
    ]
    rows = tf.cast(
        tf.random.stateless_normal([batch, width], [1, 2]), tf.as_dtype(dtype)
    )
    optimizer = make()
    optimizer.build(weights)

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            values = rows
            for weight in weights:
                values = tf.tanh(tf.matmul(values, weight))
            loss = tf.reduce_mean(tf.square(tf.cast(values, "float32")))
        gradients = tape.gradient(loss, [w.value for w in weights])
        optimizer.apply(gradients, weights)

    return step


def only_step(
    make: Callable[[], Any], shapes: list[tuple[int, ...]], xla: bool = False
) -> Step:
    """Return a step of an optimizer alone, with constant gradients."""
    normal = tf.random.stateless_normal
    variables = [
        keras.Variable(0.02 * normal(shape, [1, i]))
        for i, shape in enumerate(shapes)
    ]
    gradients = [0.01 * normal(shape, [2, i]) for i, shape in enumerate(shapes)]
    optimizer = make()
    optimizer.build(variables)
    return tf.function(
        lambda: optimizer.apply(gradients, variables),
        jit_compile=True if xla else None,
        autograph=False,
    )


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam


def offload(rounds: int) -> Iterator[tuple[str, dict]]:
    for dtype, batch in (
        ("float32", 1024),
        ("float32", 8192),
        ("bfloat16", 8192),
    ):
        makers = {
            name: functools.partial(dense_layers, make, batch, dtype)
            for name, make in {
                "keras SGD": SGD,
                "keras Adam": ADAM,
                "tfo.AdamOffload": tfo.AdamOffload,
                "tfo.AdamOffload, global_clipnorm": functools.partial(
                    tfo.AdamOffload, global_clipnorm=1.0
                ),
            }.items()
        }
        name = f"396 M, {dtype}, batch {batch:,}"
        yield name, measure(name, makers, rounds)


def batches(rounds: int) -> Iterator[tuple[str, dict]]:
    for batch in (256, 2048, 4096, 16384):
        makers = {
            name: functools.partial(dense_layers, make, batch)
            for name, make in (
                ("keras Adam", ADAM),
                ("tfo.AdamOffload", tfo.AdamOffload),
            )
        }
        name = f"396 M, float32, batch {batch:,}"
        yield name, measure(name, makers, rounds)


def layers(rounds: int) -> Iterator[tuple[str, dict]]:
    shapes = bert_base()
    contenders = {
        "keras Adam": ADAM,
        "keras Lamb": lambda: keras.optimizers.Lamb(weight_decay=0.01),
        "tfo.Lamb": tfo.Lamb,
        "tfo.LANS": lambda: tfo.LANS(weight_decay=0.01),
    }
    for kind in ("graph", "XLA"):
        makers = {
            name: functools.partial(only_step, make, shapes, kind == "XLA")
            for name, make in contenders.items()
        }
        yield f"bert-base, {kind}", measure(kind, makers, rounds)


def compression(rounds: int) -> Iterator[tuple[str, dict]]:
    shapes = 4 * [(5000, 5000)]
    makers = {
        name: functools.partial(only_step, make, shapes)
        for name, make in {
            "keras SGD": lambda: SGD(0.01, momentum=0.9),
            "tfo.DGCMomentum, 99.9%": lambda: tfo.DGCMomentum(0.01),
            "keras AdamW": keras.optimizers.AdamW,
            "tfo.SparseLoCo(AdamW), 99.6%": lambda: tfo.SparseLoCo(
                keras.optimizers.AdamW(), sparsity=(0.996,)
            ),
        }.items()
    }
    yield "4 x 25 M", measure("4 x 25 M", makers, rounds)


def kind_of(plane: str, line: str, event: str) -> str | None:
    """Return the kind of an event in a trace; None if it does not count."""
    if plane.startswith("/device:GPU"):
        if not line.startswith("Stream"):
            return None  # These lines repeat the events of streams.
        for copy in ("MemcpyD2H", "MemcpyH2D"):
            if copy in event:
                return copy
        return "GPU"
    return "host" if HOST_STEP in event else None


def traced(step: Step) -> dict[str, list[list[float]]]:
    """Return when each kind works: (start, end) in ms since the first start."""
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            timed(step)
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    spans = collections.defaultdict(list)
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                kind = kind_of(plane.name, line.name, name)
                start = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                if kind:
                    spans[kind].append((start, start + event.duration_ps / 1e9))
    first = min(start for each in spans.values() for start, _ in each)
    return {kind: joined(each, first) for kind, each in spans.items()}


def joined(spans: list[tuple[float, float]], first: float) -> list[list[float]]:
    """Return spans relative to `first`; join spans that nearly touch."""
    rows: list[list[float]] = []
    for start, end in sorted(spans):
        if rows and start < rows[-1][1] + BREAK_MS:
            rows[-1][1] = max(rows[-1][1], end)
        else:
            rows.append([start, end])
    return [[round(at - first, 3) for at in row] for row in rows]


def trace(rounds: int) -> Iterator[tuple[str, dict]]:
    for batch in (1024, 8192):
        step = dense_layers(tfo.AdamOffload, batch)
        for _ in range(rounds):
            timed(step)
        yield f"trace, batch {batch:,}", {"spans_ms": traced(step)}


def fits(name: str, layers: int) -> bool:
    """Return whether a model trains within `LIMIT`, in a separate process."""
    script = [sys.executable, __file__, "--try", name, str(layers)]
    done = subprocess.run(script, capture_output=True, text=True)
    if done.returncode and "ResourceExhausted" not in done.stderr:
        raise RuntimeError(done.stderr[-2000:])
    return not done.returncode


def try_layers(name: str, layers: int) -> None:
    part = tf.config.LogicalDeviceConfiguration(memory_limit=LIMIT >> 20)
    (gpu,) = tf.config.list_physical_devices("GPU")
    tf.config.set_logical_device_configuration(gpu, [part])
    make = {"keras Adam": ADAM, "tfo.AdamOffload": tfo.AdamOffload}[name]
    step = dense_layers(make, 1024, width=NARROW, layers=layers)
    for _ in range(3):
        timed(step)


def largest(rounds: int) -> Iterator[tuple[str, dict]]:
    del rounds
    found = {}
    # Try numbers around those that the bytes per parameter suggest.
    for name, layers in (
        ("keras Adam", range(22, 34)),
        ("tfo.AdamOffload", range(46, 66)),
    ):
        # Try them in parallel, since processes spend most of the time on
        # starting and waiting for memory.
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            fit = list(pool.map(functools.partial(fits, name), layers))
        if not fit[0] or fit[-1]:
            raise RuntimeError(
                f"The largest model must be among {layers} layers. Received: "
                f"{fit} for {name}. Widen the range."
            )
        found[name] = layers[fit.index(False) - 1] * NARROW**2
    yield "8 GiB", {"parameters": found}


MODELS = {
    run.__name__: run
    for run in (offload, layers, compression, batches, largest, trace)
}


def main() -> None:
    parser = results.options(__file__, __doc__, MODELS, rounds=10)
    parser.add_argument("--try", nargs=2, dest="layers")
    arguments = parser.parse_args()
    if arguments.layers:
        name, count = arguments.layers
        try_layers(name, int(count))
        return
    for model in arguments.models:
        for name, result in MODELS[model](arguments.rounds):
            results.record(arguments.output, name, result, tables.gpu)


if __name__ == "__main__":
    main()
