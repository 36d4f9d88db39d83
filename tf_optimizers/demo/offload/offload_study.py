"""The offload study: Adam's state on the device, compared with the host."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import tf_optimizers as tfo
from tf_optimizers.demo.data import load_splits, shuffled_batches
from tf_optimizers.demo.network import build_model
from tf_optimizers.demo.parts import Settings

BATCH_SIZE = 64
STEPS, QUICK_STEPS = 160, 32
SEED = 0
RATE = 1e-3

# Both optimizers add epsilon at the same place in their formulas, so with the
# same epsilon, their losses can be compared.
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "keras Adam": lambda: keras.optimizers.Adam(RATE, epsilon=1e-8),
    "tfo.AdamOffload": lambda: tfo.AdamOffload(RATE, epsilon=1e-8),
}


def choose_device() -> str:
    """Return a GPU or, without one, a second CPU device.

    TensorFlow can add a CPU device only before its first operation. So this
    module calls the function on import, before any part of the demo runs. If
    TensorFlow has already started with one CPU device, return this device.
    """
    if tf.config.list_physical_devices("GPU"):
        return "GPU:0"
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    if tf.config.get_logical_device_configuration(cpu) is None:
        two = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
        try:
            tf.config.set_logical_device_configuration(cpu, two)
        except RuntimeError:
            return "CPU:0"  # TensorFlow has already started.
    return f"CPU:{len(tf.config.list_logical_devices('CPU')) - 1}"


DEVICE = choose_device()


def run(settings: Settings, progress: tqdm) -> dict[str, Any]:
    """Train twice; the result is ready for JSON."""
    steps = QUICK_STEPS if settings.quick else STEPS
    progress.reset(len(OPTIMIZERS))
    data = load_splits(settings.data_dir)["train"]
    losses = {}
    for name, make_optimizer in OPTIMIZERS.items():
        progress.set_description_str(f"{name}, {steps} steps")
        batches = shuffled_batches(data, BATCH_SIZE, SEED).take(steps)
        with tf.device(DEVICE):
            optimizer = make_optimizer()
            losses[name] = train(optimizer, batches)
        progress.update()
    return {
        "device": DEVICE,
        "settings": {"batch_size": BATCH_SIZE, "steps": steps, "rate": RATE},
        "losses": losses,
        "largest_difference": largest_difference(*losses.values()),
        "memory": optimizer.memory_summary(),
    }


def train(
    optimizer: keras.optimizers.Optimizer, batches: tf.data.Dataset
) -> list[float]:
    """Train the network, initialized with `SEED`; return each step's loss."""
    model = build_model(SEED)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # On a GPU, Keras would compile the steps of its own optimizer with XLA.
        jit_compile=False,
    )
    losses = []
    for batch in batches:
        model.reset_metrics()  # Keras would average over earlier steps.
        losses.append(float(model.train_on_batch(*batch)))
    return losses


def largest_difference(first: list[float], second: list[float]) -> float:
    """Return the largest |first - second| / |second| of all steps."""
    a, b = np.array(first), np.array(second)
    return float(np.max(np.abs(a - b) / np.abs(b)))
