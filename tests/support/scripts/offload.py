"""Trains under TensorFlow's strategy for several workers; saves results.

    python offload.py FOLDER

`tf_optimizers.launch` starts the workers. A second training, saved as
workers-unmerged, runs without merge calls, as under strategies with
collectives.
"""

import json
import os
import sys
import unittest.mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tf_optimizers as tfo

# TensorFlow cannot broadcast bfloat16 between workers.
SETTINGS = (
    ("float16", {}),
    ("float32", {"weight_decay": 0.1, "clipnorm": 0.5, "nesterov": True}),
    ("float16", {"use_ema": True, "ema_overwrite_frequency": 4}),
    ("float32", {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5}),
    (
        "float16",
        {
            "gradient_accumulation_steps": 3,
            "use_ema": True,
            "ema_overwrite_frequency": 2,
            "loss_scale_factor": 4.0,
        },
    ),
)


def train(strategy, dtype, settings):
    """Return this worker's copies of the variables, and the optimizer's."""
    with strategy.scope():
        variables = [
            keras.Variable(np.ones((4, 5)), dtype=dtype, name="kernel"),
            keras.Variable(np.ones((3,)), dtype=dtype, name="bias"),
        ]
        optimizer = tfo.AdamOffload(0.05, **settings)

    @tf.function
    def step(gradients):
        def run(gradients):
            replica = tf.distribute.get_replica_context()
            count = strategy.num_replicas_in_sync
            # For two replicas, 1/4 and 3/4 of the gradient: exact, and
            # different.
            share = 1.0
            if count == 2:
                rank = tf.cast(replica.replica_id_in_sync_group, "float32")
                share = 0.25 + 0.5 * rank
            optimizer.apply(
                [g * tf.cast(share, g.dtype) for g in gradients], variables
            )

        strategy.run(run, (gradients,))

    rng = np.random.default_rng(0)
    for _ in range(12):
        step(
            [
                tf.constant(rng.integers(-8, 8, v.shape) / 8, dtype)
                for v in variables
            ]
        )
    if optimizer.use_ema:
        optimizer.finalize_variable_values(variables)
    copies = [strategy.experimental_local_results(v.value) for v in variables]
    return copies, optimizer.variables[2:]


def save(strategy, name, folder):
    """Train with all settings, and save the results."""
    arrays, devices = {}, set()
    for i, (dtype, settings) in enumerate(SETTINGS):
        copies, state = train(strategy, dtype, settings)
        for j, parts in enumerate(copies):
            values = [tf.cast(p, "float32").numpy() for p in parts]
            arrays[f"{i} {j}"] = np.stack(values)
        devices |= {
            (len(strategy.experimental_local_results(v.value)), v.value.device)
            for v in state
        }
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    path = os.path.join(folder, f"{name}-{task.get('index', 0)}")
    np.savez(path + ".npz", **arrays)
    with open(path + ".json", "w") as file:
        json.dump(sorted(devices), file)


def save_both(strategy, name, folder):
    """Train with merge calls, and without them."""
    save(strategy, name, folder)
    with unittest.mock.patch.object(
        strategy.extended, "_use_merge_call", lambda: False
    ):
        save(strategy, f"{name}-unmerged", folder)


if __name__ == "__main__":
    workers = tf.distribute.MultiWorkerMirroredStrategy()
    save_both(workers, "workers", sys.argv[1])
