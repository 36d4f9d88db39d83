"""Trains under one strategy in a process of its own; saves what came out.

    python offload.py STRATEGY FOLDER

STRATEGY is `none`, `mirrored` (two replicas in this process) or `workers` (one
per process that `tf_optimizers.launch` starts). Under the latter two it trains
again, saved as STRATEGY-unmerged, and lets no replica wait for another's code,
as strategies with collectives do.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tf_optimizers as tfo

# TensorFlow cannot broadcast bfloat16 between workers.
DTYPES = ("float32", "float16")
SETTINGS = (
    {},
    {"weight_decay": 0.1, "clipnorm": 0.5, "nesterov": True},
    {"use_ema": True, "ema_overwrite_frequency": 4},
    {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5},
    {
        "gradient_accumulation_steps": 3,
        "use_ema": True,
        "ema_overwrite_frequency": 2,
        "loss_scale_factor": 4.0,
    },
)


def make_strategy(name):
    if name == "none":
        return tf.distribute.get_strategy()
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return tf.distribute.MultiWorkerMirroredStrategy()


def train(strategy, dtype, settings):
    """Return the variables' copies here and the optimizer's variables."""
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
            # 1/4 and 3/4 of it, if there are two: exact, and not the same.
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
    """Train with all settings, and leave what came out."""
    arrays, devices = {}, set()
    for dtype in DTYPES:
        for i, settings in enumerate(SETTINGS):
            copies, state = train(strategy, dtype, settings)
            for j, parts in enumerate(copies):
                values = [tf.cast(p, "float32").numpy() for p in parts]
                arrays[f"{dtype} {i} {j}"] = np.stack(values)
            devices |= {
                (
                    len(strategy.experimental_local_results(v.value)),
                    v.value.device,
                )
                for v in state
            }
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    path = os.path.join(folder, f"{name}-{task.get('index', 0)}")
    np.savez(path + ".npz", **arrays)
    with open(path + ".json", "w") as file:
        json.dump(sorted(devices), file)


def main(name, folder):
    strategy = make_strategy(name)
    save(strategy, name, folder)
    if name != "none":
        strategy.extended._use_merge_call = lambda: False
        save(strategy, f"{name}-unmerged", folder)


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()]
        * (2 if sys.argv[1] == "mirrored" else 1),
    )
    main(*sys.argv[1:])
