"""DGCMomentum, compared with its reference and its limiting cases."""

import contextlib
import itertools

import dgc
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from arrays import assert_equal
from cases import with_long
from dgc import SHAPES, start
from golden import TOLERANCE, load
from local import assert_copies_agree

import tf_optimizers as tfo
from tf_optimizers.compression.sparsity_schedule import sent_count

L = keras.regularizers
NONE = tf.distribute.get_strategy()

pytestmark = pytest.mark.filterwarnings(
    "ignore:DGCMomentum saves traffic:UserWarning"
)


# Rates that change, as by a callback: residuals and new gradients then have
# different rates.
RATES = [0.1, 0.1, 0.1, 0.2, 0.2, 0.02, 0.02, 0.02, 0.0, 0.02, 0.01, 0.01]


def run_both(strategy, steps=12, eager=False, ours=None, theirs=None, **kwargs):
    """Return the largest error of weights, u and v of any step."""
    values = start()
    run = dgc.Run(strategy, values, **(ours or {}), **kwargs)
    replicas = strategy.num_replicas_in_sync
    oracles = [
        reference.DGC(value, replicas, 0.1, **(theirs or {}), **kwargs)
        for value in values.values()
    ]
    error = 0.0
    for step in range(steps):
        gradients = dgc.make_gradients(step, SHAPES.values(), replicas)
        run.optimizer.learning_rate = RATES[step]
        run.step(gradients, eager)
        for i, oracle in enumerate(oracles):
            oracle.lr = RATES[step]
            oracle.step([replica[i].astype("float64") for replica in gradients])
        error = max(error, dgc.worst(run.weights(), [o.w for o in oracles]))
        for name, side in (("momentum", "u"), ("residual", "v")):
            if run.optimizer.min_compress_size > 1 and side == "v":
                continue  # There is no v.
            for memory, oracle in zip(run.memory(name), oracles, strict=True):
                error = max(error, dgc.worst(memory, getattr(oracle, side)))
    return error


SETTINGS = {
    "plain": ({"sparsity": (0.75,)}, {}),
    "no masking": (
        {"sparsity": (0.75,), "momentum_masking": False},
        {"masking": False},
    ),
    "l1l2, clip, nesterov": (
        {
            "sparsity": (0.75,),
            "regularizer": L.L1L2(0.1, 0.2),
            "clipnorm": 0.5,
            "nesterov": True,
        },
        {
            "penalty": lambda w: 0.1 * np.sign(w) + 0.4 * w,
            "clipnorm": 0.5,
            "nesterov": True,
        },
    ),
    "warm-up": (
        {
            "sparsity": (0.5, 0.75, 0.9),
            "rampup_begin_step": 3,
            "rampup_step": 6,
        },
        {
            "sparsity": lambda s: (
                None if s < 3 else (0.5, 0.75, 0.9)[min((s - 3) * 3 // 6, 2)]
            )
        },
    ),
    "warm-up, clip, nesterov, l2": (
        {
            "sparsity": (0.5, 0.9),
            "rampup_begin_step": 4,
            "rampup_step": 3,
            "clipnorm": 0.5,
            "nesterov": True,
            "regularizer": L.L2(0.1),
        },
        {
            "sparsity": lambda s: (
                None if s < 4 else (0.5, 0.9)[min((s - 4) * 2 // 3, 1)]
            ),
            "clipnorm": 0.5,
            "nesterov": True,
            "penalty": lambda w: 0.2 * w,
        },
    ),
    "rate outside, warm-up, clip, nesterov, l2": (
        {
            "sparsity": (0.5,),
            "rampup_begin_step": 4,
            "clipnorm": 0.5,
            "nesterov": True,
            "regularizer": L.L2(0.1),
            "rate_in_momentum": False,
        },
        {
            "sparsity": lambda s: None if s < 4 else 0.5,
            "clipnorm": 0.5,
            "nesterov": True,
            "penalty": lambda w: 0.2 * w,
            "rate_in_momentum": False,
        },
    ),
    "there and back": (
        {
            "sparsity": (0.5, 0.9),
            "rampup_step": 2,
            "rampdown_begin_step": 5,
            "rampdown_step": 3,
        },
        {"sparsity": lambda s: [0.5, *4 * [0.9], 0.5, 0.5, 0, *4 * [None]][s]},
    ),
    "there and back, nesterov, no masking": (
        {
            "sparsity": (0.5,),
            "rampdown_begin_step": 6,
            "nesterov": True,
            "momentum_masking": False,
        },
        {
            "sparsity": lambda s: [*6 * [0.5], 0, *5 * [None]][s],
            "nesterov": True,
            "masking": False,
        },
    ),
    "too small": (
        {"min_compress_size": 10**6, "clipnorm": 0.5},
        {"compressed": False, "clipnorm": 0.5},
    ),
}


# Other settings cover these in short runs.
LONG = ["plain", "no masking", "l1l2, clip, nesterov", "warm-up"]
LONG += ["there and back, nesterov, no masking"]


@pytest.mark.parametrize("settings", with_long(SETTINGS, LONG))
def test_two_replicas_match_reference(mirrored, settings):
    ours, theirs = SETTINGS[settings]
    assert run_both(mirrored, ours=ours, theirs=theirs) < 1e-5


@pytest.mark.parametrize(
    "name",
    with_long(["plain", "there and back", "too small"], ["plain", "too small"]),
)
def test_eager_matches_reference(mirrored, name):
    ours, theirs = SETTINGS[name]
    assert run_both(mirrored, 8, eager=True, ours=ours, theirs=theirs) < 1e-5


@pytest.mark.parametrize(
    "name",
    with_long(["plain", "no masking", "warm-up"], ["plain", "warm-up"]),
)
def test_one_replica_matches_reference(name):
    ours, theirs = SETTINGS[name]
    strategy = tf.distribute.get_strategy()
    assert run_both(strategy, ours=ours, theirs=theirs) < 1e-5


def test_one_replica_has_small_variables_in_every_stage():
    values = {"kernel": np.ones((6, 8)), "bias": np.ones(7)}
    settings = {"sparsity": (0.5,), "min_compress_size": 10}
    run = dgc.Run(NONE, values, **settings, rampdown_begin_step=1)
    for step in range(3):
        run.step([[np.ones(v.shape, "float32") for v in values.values()]])
        (bias,) = run.weights()[1:]
        assert (bias < 1 - 0.1 * (step + 1) + 1e-6).all()


def weights_of_reference(settings):
    """Return the weights of two workers after five steps."""
    oracles = [
        reference.DGC(value, 2, 0.1, **settings) for value in start().values()
    ]
    for step in range(5):
        gradients = dgc.make_gradients(step, SHAPES.values(), 2)
        for i, oracle in enumerate(oracles):
            oracle.lr = RATES[step]
            oracle.step([replica[i].astype("float64") for replica in gradients])
    return [oracle.w for oracle in oracles]


def test_reference_distinguishes_each_setting():
    """Each setting changes weights by far more than the tolerance."""
    plain = weights_of_reference({})
    for name, (_, settings) in SETTINGS.items():
        if name != "plain":
            changed = weights_of_reference(settings)
            assert dgc.worst(changed, plain) > 1e-3, name


@pytest.mark.parametrize(
    "name",
    with_long(
        ["default", "l2", "rampup", "single"], ["default", "l2", "single"]
    ),
)
def test_golden_of_two_workers(mirrored, name):
    assert dgc.golden(f"dgc_paddle_{name}", mirrored).max() < TOLERANCE


def test_golden_with_nesterov_up_to_the_switch(mirrored):
    """After it, Paddle's momentum is too large, by 1 / momentum."""
    errors = dgc.golden("dgc_paddle_nesterov", mirrored)
    begin = load("dgc_paddle_nesterov")["config"]["rampup_begin_step"]
    assert errors[:begin].max() < TOLERANCE
    assert errors[begin] > 1e-2


@pytest.mark.parametrize("name", ["default", "nesterov_l2"])
def test_golden_of_small_parameters(name):
    errors = dgc.golden(
        f"dgc_fluid185_dense_{name}", tf.distribute.get_strategy()
    )
    assert errors.max() < TOLERANCE


def momentum_sgd(values, gradients, rate, momentum):
    """Return weights after Keras's momentum SGD, with the rate outside."""
    variables = [keras.Variable(v, name=k) for k, v in values.items()]
    optimizer = keras.optimizers.SGD(rate, momentum=momentum)
    for step in gradients:
        sums = [sum(column) for column in zip(*step, strict=True)]
        optimizer.apply(sums, variables)
    return [variable.numpy() for variable in variables]


def test_masked_momentum_of_entries_that_are_all_sent_is_sgd(mirrored):
    """test_rate_in_momentum.py tests the other limits."""
    values = start()
    run = dgc.Run(mirrored, values, sparsity=(0.0,))
    gradients = [
        dgc.make_gradients(step, SHAPES.values(), 2) for step in range(10)
    ]
    for step in gradients:
        run.step(step)
    expected = momentum_sgd(values, gradients, 0.1, 0.0)
    assert dgc.worst(run.weights(), expected) < 1e-6
    other = momentum_sgd(values, gradients, 0.1, 0.9)
    assert dgc.worst(run.weights(), other) > 0.1


def test_overflow_on_one_replica_is_not_accumulated(mirrored):
    """The second replica overflows; Keras's loss scaling asks the first."""
    run = dgc.Run(mirrored, {"kernel": np.zeros(4)}, sparsity=(0.5,))
    inner = run.optimizer
    with mirrored.scope():
        run.optimizer = keras.optimizers.LossScaleOptimizer(inner)
        run.optimizer.build(run.variables)
    gradients = 2.0**15 * np.ones((2, 1, 4), "float32")
    gradients[1, 0, 3] = np.inf
    run.step(gradients, eager=True)
    run.optimizer, scaled = inner, run.optimizer
    assert scaled.dynamic_scale.numpy() == 2.0**14
    assert inner.iterations.numpy() == 0
    for values in (run.weights(), run.memory("momentum")[0]):
        np.testing.assert_array_equal(values, np.zeros_like(values))
    run.step(np.ones((2, 1, 4), "float32"), eager=True)
    assert np.isfinite(run.memory("residual")).all()
    np.testing.assert_allclose(run.weights()[0], [-0.2, -0.2, 0, 0])


def test_communication_summary_separates_variables_with_the_same_path(mirrored):
    with mirrored.scope():
        optimizer = tfo.DGCMomentum(0.1)
        variables = [
            keras.Variable(tf.zeros(size), name="same") for size in (3, 4, 5)
        ]
        optimizer.build(variables)
    summary = optimizer.communication_summary()
    assert {
        name: row["dense_bytes"] for name, row in summary["variables"].items()
    } == {"same": 12, "same (2)": 16, "same (3)": 20}


def test_replicas_agree_to_the_bit(mirrored):
    run = dgc.Run(mirrored, start(), sparsity=(0.5, 0.9), rampup_step=5)
    for step in range(10):
        run.step(dgc.make_gradients(step, SHAPES.values(), 2))
    assert_copies_agree(mirrored, run.variables)
    for first, second in run.memory("residual"):
        assert np.abs(first - second).max() > 0.01  # These differ by design.


NOT_FINITE = list(itertools.product([None, 0.5], [np.nan, np.inf, -np.inf]))


@pytest.mark.parametrize(
    ("clipnorm", "value"), with_long(NOT_FINITE, NOT_FINITE[1::2])
)
@pytest.mark.parametrize("min_size", [1, 1000], ids=["compressed", "dense"])
def test_nonfinite_gradient_is_visible_in_the_weights(
    mirrored, value, clipnorm, min_size
):
    run = dgc.Run(
        mirrored,
        start(),
        sparsity=(0.9,),
        clipnorm=clipnorm,
        min_compress_size=min_size,
    )
    run.step(dgc.make_gradients(0, SHAPES.values(), 2))
    gradients = dgc.make_gradients(1, SHAPES.values(), 2)
    gradients[1][0][2, 3] = value
    run.step(gradients)
    assert not np.isfinite(run.weights()[0]).all()
    assert np.isfinite(run.weights()[1]).all()


def test_gradient_that_float32_has_no_norm_for_is_clipped(mirrored):
    weights = []
    run = dgc.Run(mirrored, start(), sparsity=(0.9,), clipnorm=0.1)
    for scale in (np.float32(1), np.float32(1e38)):
        run.restart(start(), 0.1)
        gradients = dgc.make_gradients(0, SHAPES.values(), 2)
        run.step([[scale * g for g in replica] for replica in gradients])
        weights.append(run.weights())
    assert dgc.worst(*weights) < 1e-6
    assert dgc.worst(weights[0], start().values()) > 1e-3


def test_stages_and_schedule_share_the_clock_of_updates(mirrored):
    schedule = tfo.schedules.LansSchedule(0.1, 2, 1, 2)
    values, weights = {"kernel": start()["kernel"]}, []
    for k, accumulation in (1, {}), (2, {"gradient_accumulation_steps": 2}):
        settings = {"sparsity": (0.5,), "rampup_begin_step": 1} | accumulation
        run = dgc.Run(mirrored, values, schedule, **settings)
        for step in range(3):
            for _ in range(k):
                run.step(dgc.make_gradients(step, [(6, 8)], 2))
        weights.append(run.weights())
    assert dgc.worst(*weights) < 1e-6


def test_sum_is_clipped_while_all_is_dense(mirrored):
    """This includes large variables."""
    values = {"kernel": np.zeros((6, 8), "float32")}
    run = dgc.Run(
        mirrored, values, sparsity=(0.9,), rampup_begin_step=2, clipnorm=1.0
    )
    gradient = np.full((6, 8), 500 / np.sqrt(48), "float32")
    run.step([[gradient], [gradient]])
    assert np.linalg.norm(run.weights()[0]) == pytest.approx(0.1, rel=1e-6)


def test_tensor_with_a_nan_is_sent_on(mirrored):
    """After one NaN in a tensor, the official DGC never sends it again."""
    run = dgc.Run(mirrored, {"kernel": np.zeros((6, 8))}, sparsity=(0.9,))
    for step in range(30):
        gradients = dgc.make_gradients(step, [(6, 8)], 2)
        if step == 3:
            gradients[0][0][2, 3] = np.nan
        run.step(gradients)
    weights = run.weights()[0]
    assert np.isnan(weights).sum() == 1
    assert np.count_nonzero(weights) == weights.size


def test_momentum_of_an_entry_that_was_not_sent_is_kept(mirrored):
    """If v has fewer nonzero entries than are sent, the rest is padding."""
    run = dgc.Run(mirrored, {"w": np.zeros(8)}, sparsity=(0.5,))
    gradient = np.zeros(8, "float32")
    gradient[:6] = [0, 1, 2, 3, 4, 5]
    run.step([[gradient], [0 * gradient]])
    np.testing.assert_array_equal(
        run.memory("momentum")[0][0], np.float32([0, 0.1, 0, 0, 0, 0, 0, 0])
    )
    np.testing.assert_allclose(
        run.weights()[0], [0, 0, -0.2, -0.3, -0.4, -0.5, 0, 0], rtol=1e-6
    )


def test_regularizer_skips_variables_with_their_own(mirrored):
    with mirrored.scope():
        layers = [
            keras.layers.Dense(3, kernel_regularizer=regularizer)
            for regularizer in (L.L2(0.3), None)
        ]
        for layer in layers:
            layer.build((None, 4))
        variables = [layer.kernel for layer in layers]
        optimizer = tfo.DGCMomentum(0.1, regularizer=L.L2(0.5))
        optimizer.build(variables)
    before = [v.numpy() for v in variables]
    zeros = [tf.zeros((4, 3))] * 2
    mirrored.run(optimizer.apply, (zeros, variables))
    np.testing.assert_array_equal(variables[0].numpy(), before[0])
    np.testing.assert_allclose(
        variables[1].numpy(), before[1] * (1 - 0.1), rtol=1e-5
    )


def test_only_large_float32_variables_are_compressed():
    optimizer = tfo.DGCMomentum(0.1)
    made = {
        (shape, dtype): keras.Variable(np.zeros(shape), dtype=dtype)
        for shape in ((128, 128), (127, 128))
        for dtype in ("float16", "bfloat16", "float32", "float64")
    }
    optimizer.build(list(made.values()))
    (position,) = optimizer._compressor.compressed
    assert list(made)[position] == ((128, 128), "float32")


def test_sparse_gradients_are_exchanged_whole(mirrored):
    """Rows of an embedding, including duplicates, get dense momentum."""
    table = np.random.default_rng(0).standard_normal((20, 3)).astype("float32")
    run = dgc.Run(mirrored, {"table": table}, sparsity=(0.9,), clipnorm=1.0)
    rows = [np.array([1, 1, 7]), np.array([7, 19, 0])]
    rng = np.random.default_rng(1)
    velocity, expected = 0.0, table.astype("float64")
    for _ in range(5):
        values = rng.standard_normal((2, 3, 3)).astype("float32")
        slices = [
            tf.IndexedSlices(*map(tf.constant, (*own, [20, 3])))
            for own in zip(values, rows, strict=True)
        ]
        dgc.apply_own(mirrored, run.optimizer, *run.variables, slices)
        dense = np.zeros((20, 3))
        for replica in range(2):
            np.add.at(dense, rows[replica], values[replica])
        velocity = 0.9 * velocity + reference.clip_by_norm(dense, 1.0)
        expected = expected - 0.1 * velocity
    assert dgc.worst(run.weights(), [expected]) < 1e-6
    # Three rows of three values, with 8-byte indices.
    sent = run.optimizer.communication_summary()["variables"]["table"]
    assert sent == {"dense_bytes": 240, "sent_bytes": 60, "ratio": 4.0}


@pytest.mark.parametrize("first", ["dense", "sparse"])
def test_gradients_may_be_dense_in_one_step_and_sparse_in_another(
    mirrored, first
):
    """The first kind decides; replicas agree, and nothing is lost."""
    run = dgc.Run(
        mirrored,
        {"table": np.zeros((20, 3), "float32")},
        momentum=0.0,
        sparsity=(0.9,),
    )
    optimizer, (table,) = run.optimizer, run.variables
    rng = np.random.default_rng(0)
    total = np.zeros((20, 3))
    for step in range(6):
        values = rng.standard_normal((2, 5, 3)).astype("float32")
        rows = rng.integers(20, size=(2, 5))
        gradients = [
            tf.IndexedSlices(*map(tf.constant, (*own, [20, 3])))
            for own in zip(values, rows, strict=True)
        ]
        if (first == "sparse") == step % 2:
            gradients = list(map(tf.convert_to_tensor, gradients))
        dgc.apply_own(mirrored, optimizer, table, gradients)
        np.add.at(total, rows.ravel(), values.reshape(10, 3))
        assert_copies_agree(mirrored, [table])
    unsent = np.sum(run.memory("residual"), axis=(0, 1))
    assert (np.abs(unsent).max() > 0.01) == (first == "dense")
    np.testing.assert_allclose(table - unsent, -0.1 * total, atol=1e-6)
    sent = optimizer.communication_summary()["variables"]["table"]["sent_bytes"]
    assert (sent == 240) == (first == "sparse")


def run_of_a_table(strategy):
    """Return a run with a table of 256 KiB and a kernel."""
    rng = np.random.default_rng(0)
    shapes = {"table": (16384, 4), "kernel": (6, 8)}
    values = {name: rng.standard_normal(s) for name, s in shapes.items()}
    return dgc.Run(strategy, values, sparsity=(0.75,))


def step_of_a_table(run):
    """Apply two rows to the table, and a dense gradient to the kernel."""
    slices = tf.IndexedSlices(
        tf.ones([2, 4]), tf.constant([3, 7]), tf.constant([16384, 4])
    )
    dense = tf.reshape(tf.range(48.0), [6, 8])
    run.strategy.run(run.optimizer.apply, ([slices, dense], run.variables))


def have_v(run):
    """Return which replicas have allocated v, by variable."""
    return [
        [
            bool(tf.raw_ops.VarIsInitializedOp(resource=component.handle))
            for component in run.strategy.experimental_local_results(v.value)
        ]
        for v in run.optimizer._compressor.residuals
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_v_of_a_table_takes_no_memory(mirrored, replicas):
    run = run_of_a_table(mirrored if replicas == 2 else NONE)
    assert have_v(run) == 2 * [replicas * [False]]
    step_of_a_table(run)
    assert have_v(run) == [replicas * [False], replicas * [True]]
    table, kernel = run.memory("residual")
    assert [np.abs(v).max() for v in table] == replicas * [0.0]
    assert min(np.abs(v).max() for v in kernel) > 1
    names = [v.name for v in run.optimizer.variables[2:]]
    assert names == [
        f"{variable}_{memory}"
        for variable in ("table", "kernel")
        for memory in ("momentum", "residual")
    ]


@pytest.mark.parametrize(
    "old", with_long(["reader", "writer", "neither"], ["neither"])
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_files_do_not_depend_on_the_memory_of_v(
    mirrored, replicas, old, tmp_path, monkeypatch
):
    """v may have been allocated; saving and loading do not allocate it."""

    def make(who):
        with monkeypatch.context() as patch:
            if who == old:
                name = "tf_optimizers.compression.compressor.lazy_zeros"
                patch.setattr(name, contextlib.nullcontext)
            return run_of_a_table(mirrored if replicas == 2 else NONE)

    writer, reader, loader = make("writer"), make("reader"), make("reader")
    step_of_a_table(writer)
    path = tf.train.Checkpoint(o=writer.optimizer).write(tmp_path / "c")
    restored = tf.train.Checkpoint(o=reader.optimizer).read(path)
    restored.assert_existing_objects_matched().assert_consumed()
    store = {}
    writer.optimizer.save_own_variables(store)
    loader.optimizer.load_own_variables(store)
    for run in (reader, loader):
        assert have_v(run)[0] == replicas * [old == "reader"]
        for name in ("momentum", "residual"):
            for actual, expected in zip(
                run.memory(name), writer.memory(name), strict=True
            ):
                np.testing.assert_array_equal(sum(actual), sum(expected))
        for mine, others in zip(run.variables, writer.variables, strict=True):
            mine.assign(others)
    for run in (writer, reader, loader):
        step_of_a_table(run)
        assert_equal(run.weights(), writer.weights())


def test_v_of_a_table_that_was_compressed_is_sent(mirrored, tmp_path):
    """The embedding is first trained densely, then by rows."""
    writer, reader = run_of_a_table(mirrored), run_of_a_table(mirrored)
    unsent = np.zeros((16384, 4), "float32")
    unsent[5, 2] = 4.0
    writer.optimizer._compressor.residuals[0].assign(unsent)
    path = tf.train.Checkpoint(o=writer.optimizer).write(tmp_path / "c")
    tf.train.Checkpoint(o=reader.optimizer).read(path).assert_consumed()
    for run in (writer, reader):
        before = run.weights()[0][5]
        step_of_a_table(run)
        assert not np.any(run.memory("residual")[0])
        np.testing.assert_array_equal(run.weights()[0][5], before - unsent[5])


def test_sum_of_residuals_is_read_and_saved(mirrored, tmp_path):
    run = dgc.Run(mirrored, start(), sparsity=(0.75,))
    for step in range(3):
        run.step(dgc.make_gradients(step, SHAPES.values(), 2))
    for residual, parts in zip(
        run.optimizer._compressor.residuals,
        run.memory("residual"),
        strict=True,
    ):
        with mirrored.scope():
            total = tf.convert_to_tensor(residual.value)
        np.testing.assert_array_equal(total, sum(parts))
    path = tf.train.Checkpoint(optimizer=run.optimizer).save(tmp_path / "c")
    alone = dgc.Run(tf.distribute.get_strategy(), start(), sparsity=(0.75,))
    tf.train.Checkpoint(optimizer=alone.optimizer).restore(
        path
    ).assert_existing_objects_matched()
    assert int(alone.optimizer.iterations) == 3
    for name in ("momentum", "residual"):
        for (one,), two in zip(
            alone.memory(name), run.memory(name), strict=True
        ):
            np.testing.assert_array_equal(one, two[0] + two[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: tfo.DGCMomentum(0.1), "`keras.optimizers.SGD"),
        (
            lambda: tfo.SparseLoCo(keras.optimizers.SGD(0.1)),
            "the inner optimizer alone",
        ),
    ],
)
def test_one_replica_is_warned_once_it_trains(make, instead):
    """A model may be loaded, which builds its optimizer, only to predict."""
    optimizer, variables = make(), [keras.Variable(np.zeros(3))]
    optimizer.build(variables)
    with pytest.warns(UserWarning, match=f"has no traffic. Use {instead}"):
        optimizer.apply([np.ones(3)], variables)
    optimizer.apply([np.ones(3)], variables)


def test_two_replicas_are_not_warned(mirrored, recwarn):
    dgc.Run(mirrored, start())
    assert not [w for w in recwarn if "DGCMomentum" in str(w.message)]


def test_xla_runs_without_compressed_variables():
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer = tfo.DGCMomentum(0.1)
    optimizer.build([variable])

    @tf.function(jit_compile=True)
    def step(gradient):
        optimizer.apply([gradient], [variable])

    step(tf.ones(3))
    np.testing.assert_allclose(variable.numpy(), 0.9 * np.ones(3), rtol=1e-6)


@pytest.mark.parametrize(
    ("size", "sparsity", "expected"),
    [
        (10**6, 0.999, 1000),
        (20000, 0.999, 20),
        (48, 0.75, 12),
        (10, 0.999, 1),
        (10, 0.0, 10),
        (1000, 0.9375, 62),
        (10**9, 0.999, 10**6),
        (30, 0.9, 3),
    ],
)
def test_number_sent_is_exact_in_decimal(size, sparsity, expected):
    assert sent_count(size, sparsity) == expected


def test_communication_summary():
    optimizer = tfo.DGCMomentum(
        0.1, rampup_begin_step=2, rampup_step=2, sparsity=(0.9, 0.999)
    )
    with pytest.raises(RuntimeError, match="needs a built optimizer"):
        optimizer.communication_summary()
    variables = [
        keras.Variable(np.zeros((1000, 100), "float32"), name="kernel"),
        keras.Variable(np.zeros(100, "float32"), name="bias"),
        keras.Variable(np.zeros(50), name="half", dtype="float16"),
    ]
    optimizer.build(variables)
    dense = 4 * (100_000 + 100 + 50)
    assert optimizer.communication_summary()["total"] == {
        "dense_bytes": dense,
        "sent_bytes": dense,
        "ratio": 1.0,
    }
    summary = optimizer.communication_summary(100)
    assert summary["step"] == 100
    assert summary["variables"]["kernel"] == {
        "dense_bytes": 400_000,
        "sent_bytes": 800,
        "ratio": 500.0,
    }
    assert summary["variables"]["bias"]["sent_bytes"] == 400
    assert summary["total"]["sent_bytes"] == 800 + 400 + 200
    summary = optimizer.communication_summary(2)
    assert summary["variables"]["kernel"]["sent_bytes"] == 8 * 10_000
    optimizer.iterations.assign(2)
    assert optimizer.communication_summary() == summary


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sparsity": ()}, ValueError, "at least one stage"),
        ({"sparsity": (1.0,)}, ValueError, r"a number in \[0, 1\)"),
        ({"sparsity": (0.5, -0.1)}, ValueError, r"`sparsity\[1\]` must be"),
        ({"sparsity": (0.9, 0.5)}, ValueError, "must not decrease"),
        ({"sparsity": (float("nan"),)}, ValueError, r"in \[0, 1\)"),
        ({"sparsity": 0.999}, TypeError, r"write `sparsity=\(0.999,\)`"),
        ({"sparsity": "0.9"}, TypeError, "must be a sequence"),
        ({"sparsity": (True,)}, TypeError, r"`sparsity\[0\]`"),
        ({"rampup_begin_step": -1}, ValueError, "integer >= 0"),
        ({"rampup_begin_step": 1.5}, TypeError, "integer >= 0"),
        ({"rampup_step": 0}, ValueError, "integer >= 1"),
        ({"momentum": 1.0}, ValueError, r"in \[0, 1\)"),
        ({"momentum": -0.1}, ValueError, r"in \[0, 1\)"),
        ({"nesterov": 1}, TypeError, "True or False"),
        ({"momentum_masking": None}, TypeError, "True or False"),
        ({"min_compress_size": 0}, ValueError, "integer >= 1"),
        ({"value_dtype": "int8"}, ValueError, "must be one of .*'bfloat16'"),
        ({"regularizer": "l2"}, TypeError, r"`keras.regularizers.L2\(1e-4\)`"),
        ({"regularizer": 0.1}, TypeError, "must be None or an instance of"),
        (
            {"regularizer": L.OrthogonalRegularizer()},
            TypeError,
            "must be None or an instance of",
        ),
        ({"rate_in_momentum": None}, TypeError, "True or False"),
        ({"rampdown_begin_step": 1.5}, TypeError, "integer >= 0"),
        ({"rampdown_begin_step": 0}, ValueError, r"rampup_step = 1\. "),
        (
            {"rampup_begin_step": 5, "rampdown_begin_step": 5},
            ValueError,
            r"rampup_step = 6\. .*Raise `rampdown_begin_step`",
        ),
        ({"rampdown_step": 0}, ValueError, "integer >= 1"),
        ({"rampdown_step": 5}, ValueError, "needs a `rampdown_begin_step`"),
        ({"clipvalue": 1.0}, ValueError, "support `clipvalue`.*`clipnorm`"),
        ({"global_clipnorm": 1.0}, ValueError, "support `global_clipnorm`"),
        ({"weight_decay": 0.1}, ValueError, "support `weight_decay`.*L2"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_argument_is_rejected(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        tfo.DGCMomentum(0.1, **arguments)
    assert "Received" in str(caught.value)


def test_gradient_of_unknown_rows_is_clipped():
    """Shapes of a generator's data are unknown."""
    optimizer = tfo.DGCMomentum(1.0, clipnorm=1.0, min_compress_size=1)
    variable = keras.Variable(np.zeros((6, 8), "float32"))

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def step(gradient):
        optimizer.apply([gradient], [variable])

    step(tf.fill([6, 8], 3.0))
    assert 0 < np.linalg.norm(variable.numpy()) <= 1.0


def test_repeated_variable_is_rejected():
    optimizer = tfo.DGCMomentum(0.1, min_compress_size=1)
    variable = keras.Variable(np.zeros((6, 8), "float32"), name="kernel")
    with pytest.raises(ValueError, match="Received: several for kernel"):
        optimizer.apply([tf.ones([6, 8])] * 2, [variable] * 2)
    assert not np.any(variable.numpy())


@pytest.mark.parametrize("cool_down", [True, False])
def test_alternating_variables_are_rejected_before_a_cool_down(cool_down):
    """The step that sends all residuals has only one of the variables."""
    end = {"rampdown_begin_step": 4, "rampdown_step": 2} if cool_down else {}
    optimizer = tfo.DGCMomentum(0.1, min_compress_size=1, **end)
    first, second = (
        keras.Variable(np.zeros((6, 8), "float32"), name=name)
        for name in ("first", "second")
    )
    optimizer.build([first, second])
    optimizer.apply([tf.ones([6, 8])], [first])
    if cool_down:
        with pytest.raises(ValueError, match="no gradient for first"):
            optimizer.apply([tf.ones([6, 8])], [second])
    else:
        optimizer.apply([tf.ones([6, 8])], [second])
    assert np.any(second.numpy()) != cool_down
