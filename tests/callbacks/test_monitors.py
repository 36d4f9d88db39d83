"""Monitors measure steps, and write to logs and TensorBoard."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from local import copies

import tf_optimizers as tfo
from tf_optimizers import callbacks

pytestmark = pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")

ROWS = np.random.default_rng(0).standard_normal((96, 8)).astype("float32")
TARGETS = ROWS[:, :3] ** 2
BATCH = 16  # 6 batches an epoch
DGC = {"learning_rate": 0.05, "sparsity": (0.9,), "min_compress_size": 16}

CASES = {
    "lamb": (lambda **kw: tfo.Lamb(0.01, **kw), callbacks.TrustRatioMonitor),
    "lans": (lambda **kw: tfo.LANS(0.01, **kw), callbacks.TrustRatioMonitor),
    "dgc": (
        lambda **kw: tfo.DGCMomentum(**DGC, **kw),
        callbacks.CompressionMonitor,
    ),
    "offload": (
        lambda **kw: tfo.AdamOffload(0.01, **kw),
        callbacks.OffloadMonitor,
    ),
}


def make_model(optimizer, **kwargs):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(optimizer, "mse", **kwargs)
    return model


def fit(model, *callbacks, epochs=1, size=96):
    history = model.fit(
        ROWS[:size],
        TARGETS[:size],
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return history.history


def values(variables):
    return [np.array(v, "float64") for v in variables]


def norm(arrays):
    return np.sqrt(sum((a**2).sum() for a in arrays))


@pytest.mark.parametrize("name", ["lamb", "lans"])
def test_trust_ratios_and_norms_are_those_of_the_step(name, tmp_path):
    decayed = {"weight_decay": 0.1, "exclude_from_weight_decay": ["bias"]}
    model = make_model(CASES[name][0](**decayed))
    fit(model)  # After this, v is not that of a first step.
    before = values(model.trainable_variables)
    monitor = callbacks.TrustRatioMonitor(every=1)
    history = fit(model, monitor, size=BATCH)
    after = values(model.trainable_variables)
    optimizer = model.optimizer
    t = int(optimizer.iterations)
    state = {
        v.path.rpartition("/")[2]: np.array(v) for v in optimizer.variables
    }
    ratios = []
    for variable, weight in zip(model.trainable_variables, before, strict=True):
        if "bias" in variable.path:
            ratios.append(1.0)
            continue
        key = variable.path.replace("/", "_")
        m = state[f"{key}_momentum"].astype("float64") / (1 - 0.9**t)
        v = state[f"{key}_velocity"].astype("float64") / (1 - 0.999**t)
        u = m / (np.sqrt(v) + 1e-6) + 0.1 * weight
        ratios.append(norm([weight]) / norm([u]))
    expected = {
        "trust_ratio_min": min(ratios),
        "trust_ratio_median": np.median(ratios),
        "trust_ratio_max": max(ratios),
        "weight_norm": norm(before),
        "update_norm": norm(
            [a - b for a, b in zip(after, before, strict=True)]
        ),
    }
    assert len(set(ratios)) == 3  # two kernels, and the biases
    for key, value in expected.items():
        np.testing.assert_allclose(history[key], [value], rtol=1e-4)


def test_variables_with_the_same_path_have_separate_figures(tmp_path):
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.other = (
                keras.Sequential([keras.layers.Dense(8, name="d")], name="part")
                for _ in range(2)
            )

        def call(self, inputs):
            return self.other(self.one(inputs))

    model = Pair()
    model(np.ones((4, 8)))
    paths = [variable.path for variable in model.trainable_variables]
    assert paths[:2] == paths[2:]
    model.compile(tfo.Lamb(), "mse")
    model.optimizer.build(model.trainable_variables)
    monitor = callbacks.TrustRatioMonitor(every=1, log_dir=tmp_path)
    model.fit(np.ones((4, 8)), np.ones((4, 8)), callbacks=[monitor], verbose=0)
    names = [*paths[:2], *(f"{path} (2)" for path in paths[2:])]
    ratios = {n for n in read_events(tmp_path) if n.startswith("trust_ratio/")}
    assert ratios == {f"trust_ratio/{name}" for name in names}


def test_residual_of_dgc_is_measured_over_replicas(mirrored):
    with mirrored.scope():
        model = make_model(tfo.DGCMomentum(**DGC))
    fit(model)
    kernels = [v for v in model.trainable_variables if v.shape.rank > 1][:1]
    before = values(kernels)
    history = fit(model, callbacks.CompressionMonitor(every=1), size=BATCH)
    moved = np.abs(values(kernels)[0] - before[0]).sum()
    (residual,) = model.optimizer._compressor.residuals
    own = copies(mirrored, residual)
    assert len(own) == 2 and not np.array_equal(*own)
    expected = {
        "sparsity": 0.9,
        "sent_bytes": model.optimizer.communication_summary()["total"][
            "sent_bytes"
        ],
        "residual_norm": norm(own),
        "residual_age": np.abs(own).sum() / moved,
    }
    for key, value in expected.items():
        np.testing.assert_allclose(history[key], [value], rtol=1e-4)


def test_rows_of_an_embedding_are_reported_without_residual():
    """This includes the first measured step, which shows sparse gradients."""
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(100, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(3, use_bias=False),
        ]
    )
    model.compile(tfo.DGCMomentum(**DGC), "mse")
    model.optimizer.build(model.trainable_variables)
    table, kernel = model.trainable_variables
    rows = np.arange(64).reshape(16, 4)
    for size in (16, 8):
        before = values([kernel])[0]
        history = model.fit(
            rows[:size],
            TARGETS[:size],
            batch_size=size,
            verbose=0,
            callbacks=[callbacks.CompressionMonitor(every=1)],
        ).history
        moved = np.abs(values([kernel])[0] - before).sum()
        residuals = model.optimizer._compressor.residuals
        held = sum(np.abs(v.numpy()).sum() for v in residuals)
        assert history["residual_age"] == [
            pytest.approx(held / moved, rel=1e-4)
        ]
        # A row has 5 values and an index; 6 of the kernel's 60 entries are
        # sent.
        assert history["sent_bytes"] == [4 * size * 24 + 6 * 8]


def test_there_is_no_residual_before_compression_begins():
    model = make_model(tfo.DGCMomentum(**DGC, rampup_begin_step=6))
    history = fit(model, callbacks.CompressionMonitor(every=2))
    assert history["sparsity"] == [0]
    assert history["residual_norm"] == [0]
    assert history["residual_age"] == [0]


def test_bytes_are_those_of_the_summary():
    class Subclass(tfo.AdamOffload):
        pass

    model = make_model(Subclass())
    history = fit(model, callbacks.OffloadMonitor(every=2))
    places = model.optimizer.memory_summary()["Subclass"]
    for place in ("device", "host"):
        assert history[f"{place}_bytes"] == [sum(places[place].values())]


def read_events(folder):
    """Return the steps and values in TensorBoard's files by tag."""
    found = {}
    for path in folder.glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, {})[event.step] = number
    return found


@pytest.mark.parametrize("name", ["lamb", "dgc", "offload"])
def test_figures_reach_logs_and_tensorboard_at_their_steps(name, tmp_path):
    optimizer, monitor = CASES[name]
    model = make_model(optimizer())
    seen = []
    collect = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    history = fit(model, monitor(every=4, log_dir=tmp_path), collect, epochs=2)
    events = read_events(tmp_path)
    figures = set(history) - {"loss"}
    assert len(figures) >= 2
    assert figures <= set(events)
    for figure in figures:
        assert set(events[figure]) == {4, 8, 12}
        shown = [logs.get(figure) for logs in seen]
        assert shown[:3] == [None] * 3
        for step in range(4, 13):
            last = events[figure][step // 4 * 4]
            assert shown[step - 1] == pytest.approx(last, rel=1e-6)
    if name == "lamb":
        paths = {v.path for v in model.trainable_variables}
        assert {f"trust_ratio/{path}" for path in paths} <= set(events)


def test_a_step_is_measured_when_accumulated_gradients_are_applied(tmp_path):
    model = make_model(tfo.Lamb(0.01, gradient_accumulation_steps=3))
    monitor = callbacks.TrustRatioMonitor(every=2, log_dir=tmp_path)
    history = fit(model, monitor)
    assert history["update_norm"][0] > 1e-3
    assert set(read_events(tmp_path)["update_norm"]) == {1, 2}


@pytest.mark.parametrize(
    ("monitor", "names"),
    [
        (callbacks.CompressionMonitor, "`DGCMomentum` or `SparseLoCo`"),
        (callbacks.TrustRatioMonitor, "`Lamb` or `LANS`"),
    ],
)
def test_monitor_of_another_optimizer_is_rejected(monitor, names):
    with pytest.raises(TypeError, match=f"needs a model with {names}"):
        fit(make_model("adam"), monitor())


def test_monitor_of_no_optimizer_is_rejected():
    model = make_model(None)
    with pytest.raises(TypeError, match="Received: a model without an optimiz"):
        fit(model, callbacks.TrustRatioMonitor())


def test_several_steps_per_execution_are_rejected():
    model = make_model(tfo.Lamb(), steps_per_execution=2)
    with pytest.raises(ValueError, match="steps_per_execution=2"):
        fit(model, callbacks.TrustRatioMonitor())


def test_missing_tensorboard_is_an_error_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        fit(make_model(tfo.Lamb()), callbacks.TrustRatioMonitor(2, tmp_path))


@pytest.mark.parametrize(
    ("argument", "error"),
    [({"every": 0}, ValueError), ({"log_dir": 3}, TypeError)],
    ids=["every", "log_dir"],
)
def test_bad_argument_is_rejected(argument, error):
    with pytest.raises(error, match=f"`{[*argument][0]}` must be"):
        callbacks.TrustRatioMonitor(**argument)
