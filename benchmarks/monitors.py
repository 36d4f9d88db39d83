"""What does a monitor cost if it measures one step in 50?

    python benchmarks/monitors.py [--epochs 5]

The cost is the time that `fit` spends in a monitor's methods, relative to the
time that it spends on everything else, in one process. The first epoch is left
out, since it compiles.
"""

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import results
import tables

import tf_optimizers as tfo
from tf_optimizers.callbacks.monitors import Monitor

STEPS, BATCH, EVERY = 100, 64, 50
# Width and depth of a stack of dense layers.
MODELS = {"0.1 M": (128, 6), "4 M": (1000, 4)}
MONITORS = {
    "TrustRatioMonitor, Lamb": (
        tfo.Lamb,
        tfo.callbacks.TrustRatioMonitor,
    ),
    "CompressionMonitor, DGCMomentum": (
        lambda: tfo.DGCMomentum(1e-3),
        tfo.callbacks.CompressionMonitor,
    ),
    "OffloadMonitor, AdamOffload": (
        tfo.AdamOffload,
        tfo.callbacks.OffloadMonitor,
    ),
}


class Timed(keras.callbacks.Callback):
    """Runs a monitor, and records the seconds of the monitor and of epochs."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.monitor = monitor
        self.monitor_s: list[float] = []
        self.epoch_s: list[float] = []

    def set_model(self, model: keras.Model) -> None:
        self.monitor.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self.monitor.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.monitor_s.append(0.0)
        self._start = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._time(self.monitor.on_train_batch_begin, batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._time(self.monitor.on_train_batch_end, batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch_s.append(time.perf_counter() - self._start)

    def _time(self, method: Callable, *args: Any) -> None:
        start = time.perf_counter()
        method(*args)
        self.monitor_s[-1] += time.perf_counter() - start


def measure(
    width: int, depth: int, make_optimizer: Callable, monitor: type, epochs: int
) -> dict[str, list[float]]:
    """Return the seconds of each epoch, and of the monitor in each."""
    rows = np.random.default_rng(0).standard_normal((STEPS * BATCH, width))
    model = keras.Sequential(
        [keras.Input((width,))]
        + [keras.layers.Dense(width, "tanh") for _ in range(depth)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DGC warns about a single replica.
        model.compile(make_optimizer(), "mse")
        timed = Timed(monitor(every=EVERY))
        model.fit(
            rows.astype("float32"),
            rows.astype("float32"),
            batch_size=BATCH,
            epochs=epochs + 1,
            verbose=0,
            callbacks=[timed],
        )
    return {"epoch_s": timed.epoch_s[1:], "monitor_s": timed.monitor_s[1:]}


def main() -> None:
    arguments = results.options(__file__, __doc__, epochs=5).parse_args()
    for name, shape in MODELS.items():
        contenders = {
            key: measure(*shape, *contender, arguments.epochs)
            for key, contender in MONITORS.items()
        }
        result = {"steps": STEPS, "every": EVERY, "contenders": contenders}
        results.record(arguments.output, name, result, tables.monitors)


if __name__ == "__main__":
    main()
