"""Keras's own callbacks, LoRA, Orbax and KerasHub on two workers."""

import importlib.util
import os
import pathlib
import re

import keras
import numpy as np

import tf_optimizers as tfo

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "fine_tuning.md"
FEW = {"sparsity": (0.75,), "min_compress_size": 1}
OPTIMIZERS = {
    "AdamW": lambda **ema: keras.optimizers.AdamW(0.01, **ema),
    "Lamb": lambda **ema: tfo.Lamb(0.01, **ema),
    "LANS": lambda **ema: tfo.LANS(0.01, **ema),
    "AdamOffload": lambda **ema: tfo.AdamOffload(0.01, **ema),
    "DGCMomentum": lambda **ema: tfo.DGCMomentum(0.1, **FEW, **ema),
    "SparseLoCo": lambda **ema: tfo.SparseLoCo(
        keras.optimizers.AdamW(0.01), **FEW, **ema
    ),
    "ShardedState": lambda **ema: tfo.ShardedState(
        keras.optimizers.AdamW(0.01, **ema)
    ),
}
# With these optimizers, workers compute the same steps as one process.
AS_ONE_PROCESS = {"AdamW", "Lamb", "LANS", "ShardedState"}
EMA = {"use_ema": True, "ema_momentum": 0.5}
X = np.random.default_rng(0).standard_normal((32, 8)).astype("float32")
Y = np.ascontiguousarray(X[:, ::-1])


def folder():
    """Return this worker's folder."""
    worker = tfo.SparseMultiWorkerMirroredStrategy().cluster_resolver.task_id
    path = pathlib.Path(os.environ.get("FOLDER", ".")) / f"tools-{worker}"
    path.mkdir(exist_ok=True)
    return path


def fitted(make, epochs=3, callbacks=(), change=lambda layers: None, **kwargs):
    """Train a small model; return it and its history."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, **kwargs), keras.layers.Dense(8, **kwargs)]
    inputs = keras.Input((8,))
    # Not `Sequential`: Keras 3.15 loads its variables by other paths from
    # Orbax.
    model = keras.Model(inputs, layers[1](layers[0](inputs)))
    change(layers)
    model.compile(make(), "mse")
    history = model.fit(
        X,
        Y,
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        validation_data=(X, Y),
        callbacks=list(callbacks),
        verbose=0,
    ).history
    return model, {name: values for name, values in history.items()}


def weights_of(model):
    return [
        np.asarray(keras.ops.cast(w, "float32")).tolist() for w in model.weights
    ]


def callbacks(names=("SparseLoCo",)):
    """Return results of runs whose callbacks read weights, by optimizer."""
    path, found = folder(), {}
    for name in names:
        with tfo.SparseMultiWorkerMirroredStrategy().scope():
            try:
                found[name] = called(name, path)
            except ValueError as error:
                found[name] = {"error": str(error)}
    return found


def called(name, path):
    """Train with callbacks, load the best model, and return the results."""
    best = path / f"{name}.keras"
    # The model holds averages when it is saved.
    model, history = fitted(
        lambda: OPTIMIZERS[name](**EMA),
        callbacks=[
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(best, save_best_only=True),
            keras.callbacks.TensorBoard(
                path / name, histogram_freq=1, write_graph=False
            ),
        ],
    )
    return {
        "history": history,
        "weights": weights_of(model),
        "best": keras.saving.load_model(best).evaluate(X, Y, verbose=0),
        "logs": sum(p.stat().st_size for p in path.glob(f"{name}/*/*v2")),
    }


def with_averages(name):
    """Train one process with averages; return the weights and the history."""
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model, history = fitted(lambda: OPTIMIZERS[name](**EMA), callbacks=[swap])
    return weights_of(model), history


def adapt(layers):
    layers[0].enable_lora(2)
    layers[1].quantize("int8")
    layers[1].enable_lora(2)


def lora(names=("DGCMomentum",)):
    """Return results of models with LoRA on layers of bfloat16 and of int8."""
    found = {}
    for name in names:
        with tfo.SparseMultiWorkerMirroredStrategy().scope():
            model, history = fitted(
                OPTIMIZERS[name], change=adapt, dtype="bfloat16"
            )
        dtypes = {weight.dtype for weight in model.weights}
        found[name] = {
            "loss": history["loss"],
            "weights": weights_of(model),
            "dtypes": sorted(dtypes),
            "trainable": len(model.trainable_weights),
        }
    return found


def orbax(names=tuple(OPTIMIZERS)):
    """Return losses of models and their Orbax copies; None without Orbax."""
    if not importlib.util.find_spec("orbax"):
        return None
    path, found = folder(), {}
    for name in names:
        place = path / f"orbax-{name}"
        callback = keras.callbacks.OrbaxCheckpoint(
            str(place), monitor="loss", save_best_only=True
        )
        with tfo.SparseMultiWorkerMirroredStrategy().scope():
            model, _ = fitted(OPTIMIZERS[name], callbacks=[callback])
            saved = keras.saving.load_model(str(place))
        found[name] = [m.evaluate(X, Y, verbose=0) for m in (model, saved)]
    return found


def hub():
    """Return results of docs/fine_tuning.md's code; None without KerasHub."""
    if not importlib.util.find_spec("keras_hub"):
        return None
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    before = pathlib.Path.cwd()
    os.chdir(os.environ.get("FOLDER", "."))
    try:
        exec(code, space := {})
        has_file = pathlib.Path(f"worker-{space['worker']}.lora.h5").exists()
    finally:
        os.chdir(before)
    model = space["model"]
    found = {
        "loss": model.history.history["loss"],
        "weights": weights_of(model),
        "has_file": has_file,
    }
    for name, make in OPTIMIZERS.items():
        model.compile(make(), space["loss"])
        inputs, x = space["inputs"], space["x"]
        history = model.fit(inputs, x, batch_size=16, epochs=2, verbose=0)
        found[name] = history.history["loss"]
    return found
