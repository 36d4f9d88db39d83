"""`ShardedState` steps like its inner optimizer under the same strategy."""

import ctypes
import functools
from types import SimpleNamespace

import cases
import keras
import numpy as np
import pytest
import real_workers
import tensorflow as tf
from arrays import assert_close, assert_equal
from local import assert_copies_agree, copies
from scripts import shapes
from scripts import sharded as sharded_script

import tf_optimizers as tfo
from tf_optimizers.callbacks.backup.state import State, redistribute
from tf_optimizers.sharding.ownership import assign_owners, bytes_of, loads_of
from tf_optimizers.workers import worker_replicas
from tf_optimizers.workers.extended import RPC_CHUNK_BYTES

X = np.random.default_rng(0).random((16, 6)).astype("float32")
Y = X[:, :3]


def make_model(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh", kernel_constraint="non_neg"),
                keras.layers.Dense(3),
            ]
        )


def trained(strategy, optimizer, epochs=4):
    """Train on CPUs and without XLA, which rounds differently.

    In a strategy's scope, the strategy chooses the devices.
    """
    with tf.device("CPU:0"):
        model = make_model(strategy)
        with strategy.scope():
            model.compile(optimizer, "mse", jit_compile=False)
        model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model


def assert_alike(strategy, model, other):
    assert_copies_agree(strategy, model.weights)
    assert_close(model.weights, other.weights, atol=1e-6)


def test_replicas_step_as_the_inner_optimizer(mirrored):
    """Long tests of devices and workers try all optimizers."""
    with mirrored.scope():
        inner, sharded = tfo.Lamb(0.01), tfo.ShardedState(tfo.Lamb(0.01))
    expected = trained(mirrored, inner)
    model = trained(mirrored, sharded)
    assert_alike(mirrored, model, expected)
    assert_close(sharded.variables, inner.variables, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_gradients_may_have_several_dtypes(mirrored, dtype):
    """TensorFlow's own sum over replicas does not accept them."""
    with mirrored.scope():
        variables = [
            keras.Variable(np.ones(3), dtype=each, name=each)
            for each in ("float32", dtype)
        ]
        sharded = tfo.ShardedState(keras.optimizers.SGD(0.25))
        sharded.build(variables)

    def step():
        gradients = [tf.ones([3], variable.dtype) for variable in variables]
        sharded.apply(gradients, variables)

    tf.function(lambda: mirrored.run(step))()
    for variable in variables:
        for copy in copies(mirrored, variable):
            np.testing.assert_array_equal(copy.astype("float32"), 0.5)


def test_duplicate_rows_are_summed(mirrored):
    """Keras's Adam itself sums them after it has squared them."""
    rows = tf.IndexedSlices(
        *map(tf.constant, ([[1.0], [2.0], [3.0]], [0, 0, 2], [3, 1]))
    )
    moved = []
    for gradient in (rows, tf.convert_to_tensor(rows)):
        with mirrored.scope():
            weight = keras.Variable(np.ones([3, 1]), dtype="float32")
            sharded = tfo.ShardedState(keras.optimizers.Adam(0.1))
            sharded.build([weight])

        def step(gradient=gradient, sharded=sharded, weight=weight):
            sharded.apply([gradient], [weight])

        run = tf.function(functools.partial(mirrored.run, step))
        for _ in range(3):
            run()
        moved.append(weight.numpy())
    np.testing.assert_allclose(*moved, rtol=0, atol=1e-6)


def test_one_replica_is_the_inner_optimizer():
    strategy = tf.distribute.get_strategy()
    settings = {"global_clipnorm": 0.1, "use_ema": True, "weight_decay": 0.1}
    expected = trained(strategy, keras.optimizers.AdamW(0.01, **settings))
    inner = keras.optimizers.AdamW(0.01, **settings)
    model = trained(strategy, tfo.ShardedState(inner))
    assert_equal(model.weights, expected.weights)


EMA = {"use_ema": True, "ema_momentum": 0.5}
# Workers try others. Keras cannot overwrite weights under `MirroredStrategy`.
IN_PARTS = {
    "accumulated": lambda: tfo.Lamb(0.01, **EMA, gradient_accumulation_steps=3),
    "overwritten": lambda: keras.optimizers.SGD(
        0.1, **EMA, ema_overwrite_frequency=3
    ),
}


@pytest.mark.parametrize("name", cases.with_long(IN_PARTS, ["overwritten"]))
def test_averages_and_accumulators_are_those_of_one_replica(mirrored, name):
    expected = trained(tf.distribute.get_strategy(), IN_PARTS[name]())
    with mirrored.scope():
        sharded = tfo.ShardedState(IN_PARTS[name]())
    model = trained(mirrored, sharded)
    assert_alike(mirrored, model, expected)
    pairs = zip(sharded.variables, expected.optimizer.variables, strict=True)
    for mine, theirs in pairs:
        is_sum = mine.path.endswith("_gradient_accumulator")
        value = mine.numpy()
        if is_sum:
            value = sum(copies(mirrored, mine))
        np.testing.assert_allclose(value, theirs.numpy(), atol=1e-6)


def test_weights_stay_if_a_run_has_no_update(mirrored):
    """The averages are not set yet at the end of `fit`."""
    make = IN_PARTS["accumulated"]
    expected = trained(tf.distribute.get_strategy(), make(), epochs=1)
    with mirrored.scope():
        sharded = tfo.ShardedState(make())
    model = trained(mirrored, sharded, epochs=1)  # 2 steps of 3.
    assert_alike(mirrored, model, expected)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_replicated_state_follows_replicas_that_stepped(mirrored):
    """Nadam updates one number in each step; here, on one replica only."""

    def stepped(wrap):
        with mirrored.scope():
            weights = [keras.Variable([1.0], name=name) for name in "ab"]
            optimizer = wrap(keras.optimizers.Nadam(0.1, **EMA))
            optimizer.build(weights)

        def step():
            optimizer.apply([None, tf.ones([1])], weights)

        run = tf.function(lambda: mirrored.run(step))
        for _ in range(3):
            run()
        return [*weights, *optimizer.variables]

    assert_close(stepped(tfo.ShardedState), stepped(lambda o: o), atol=1e-6)


def test_monitors_show_the_bytes_of_replicas(mirrored):
    def history(optimizer, *monitors):
        model = make_model(mirrored)
        with mirrored.scope():
            model.compile(optimizer, "mse")
        callbacks = [tfo.callbacks.TrustRatioMonitor(every=2), *monitors]
        return model, model.fit(
            *(X, Y), batch_size=8, callbacks=callbacks, verbose=0
        ).history

    model, shown = history(
        tfo.ShardedState(tfo.Lamb(0.01)), tfo.callbacks.ShardingMonitor(every=2)
    )
    summary = model.optimizer.memory_summary()
    most = max(summary["owned"]) + summary["shared"]
    assert shown["state_bytes"] == [most]
    assert shown["state_share"] == [most / summary["whole"]]
    _, alone = history(tfo.Lamb(0.01))
    for name in ("trust_ratio_max", "update_norm", "weight_norm"):
        assert shown[name] == pytest.approx(alone[name], rel=1e-4)


def test_a_step_may_be_in_a_condition(mirrored):
    """`MirroredStrategy` cannot sum over replicas there."""
    with mirrored.scope():
        weight = keras.Variable(np.ones([4, 2], "float32"))
        sharded = tfo.ShardedState(keras.optimizers.SGD(0.25))
        sharded.build([weight])

    @tf.function
    def step(is_due):
        def update():
            mirrored.run(lambda: sharded.apply([tf.ones([4, 2])], [weight]))
            return 1

        tf.cond(is_due, update, lambda: 0)

    step(tf.constant(True))
    for copy in copies(mirrored, weight):
        np.testing.assert_array_equal(copy, 0.5)


def test_loss_scaling_may_build_it_in_a_traced_step(mirrored):
    """Keras's `LossScaleOptimizer` builds its inner optimizer on a replica."""

    def trained(around):
        model = make_model(mirrored)
        variables = model.trainable_variables
        with mirrored.scope():
            optimizer = around(keras.optimizers.Adam(0.01))
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)

        @tf.function
        def step():
            gradients = [8.0 * tf.ones(v.shape) for v in variables]
            mirrored.run(optimizer.apply, (gradients, variables))

        step()
        assert np.all(variables[-1].numpy() < 0)  # The bias has moved.
        return model

    assert_alike(mirrored, trained(tfo.ShardedState), trained(lambda o: o))


@cases.needs_groups
def test_multi_optimizer_belongs_around(mirrored, tmp_path):
    def choose(wrap):
        kernels = wrap(keras.optimizers.AdamW(0.01))
        others = wrap(keras.optimizers.SGD(0.1, momentum=0.9))
        return lambda variable: kernels if "kernel" in variable.path else others

    def multi(wrap):
        with mirrored.scope():
            optimizer = keras.optimizers.MultiOptimizer(choose(wrap))
        return trained(mirrored, optimizer, epochs=3)

    model, expected = multi(tfo.ShardedState), multi(lambda inner: inner)
    assert_alike(mirrored, model, expected)
    owned = [v for part in model.optimizer.optimizers for v in part.variables]
    assert all(State(model).is_owned(slot) for slot in owned)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    alone = tf.distribute.get_strategy()
    loaded = make_model(alone)
    loaded.compile(keras.optimizers.MultiOptimizer(choose(tfo.ShardedState)))
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(path)
    theirs = [v for part in loaded.optimizer.optimizers for v in part.variables]
    assert_equal(owned, theirs)
    with pytest.raises(ValueError, match="wrap those in"):
        tfo.ShardedState(
            keras.optimizers.MultiOptimizer(choose(lambda inner: inner))
        )


@pytest.mark.parametrize(
    ("make", "owned"),
    [
        # 6 x 8, 8 x 3, 8 and 3: 24 + 12 + 8 | 24 + 12 + 3.
        (keras.optimizers.Adam, [44, 39]),
        (tfo.Lamb, [48, 35]),
    ],
)
def test_replicas_hold_parts_of_the_state(mirrored, make, owned):
    with mirrored.scope():
        sharded = tfo.ShardedState(make())
    trained(mirrored, sharded, epochs=1)
    summary = sharded.memory_summary()
    assert summary["owned"] == [8 * size for size in owned]
    assert summary["whole"] == 8 * 83 + summary["shared"]
    for variable in sharded.variables[2:]:
        first, second = copies(mirrored, variable)
        assert not np.any(first * second)
        assert np.any(variable.numpy())


class ElementwiseSGD(keras.optimizers.SGD):
    is_elementwise = True


@pytest.mark.parametrize("name", sharded_script.EVERY)
def test_elementwise_optimizers_step_parts_as_the_whole(name):
    """All optimizers with `is_elementwise`, and no others."""
    make = sharded_script.EVERY[name]
    random = np.random.default_rng(0)
    start = random.normal(size=(8, 6)).astype("float32")
    steps = random.normal(size=(3, 8, 6)).astype("float32")
    steps *= np.arange(1, 9, dtype="float32")[:, None]  # Steps differ by row.

    def stepped(rows):
        optimizer, weight = make(0.1), keras.Variable(start[rows])
        for gradient in steps:
            optimizer.apply([tf.constant(gradient[rows])], [weight])
        return weight.numpy() - start[rows]

    whole = stepped(slice(0, 8))
    parts = np.concatenate([stepped(slice(0, 3)), stepped(slice(3, 8))])
    is_equal = np.allclose(parts, whole, rtol=0, atol=1e-6)
    assert is_equal == tfo.ShardedState.is_elementwise(make())


@pytest.mark.parametrize(
    "base", [keras.optimizers.Adam, tfo.AdamOffload, ElementwiseSGD]
)
def test_subclasses_may_have_another_step(base):
    class Normalized(base):
        def update_step(self, gradient, variable, learning_rate):
            gradient /= tf.norm(gradient)  # Needs all rows.
            return super().update_step(gradient, variable, learning_rate)

    assert tfo.ShardedState.is_elementwise(base(0.1))
    assert not tfo.ShardedState.is_elementwise(Normalized(0.1))
    Normalized.is_elementwise = True
    assert tfo.ShardedState.is_elementwise(Normalized(0.1))


@pytest.mark.parametrize(
    "ending", cases.with_long(["keras", "weights.h5", "ckpt"], ["weights.h5"])
)
def test_files_are_those_of_the_inner_optimizer(mirrored, tmp_path, ending):
    with mirrored.scope():
        sharded = tfo.ShardedState(keras.optimizers.AdamW(0.01))
        inner = keras.optimizers.AdamW(0.01)
    model = trained(mirrored, sharded, epochs=2)
    path = str(tmp_path / f"model.{ending}")
    if ending == "keras":
        model.save(path)
        loaded = keras.models.load_model(path)
        assert isinstance(loaded.optimizer, tfo.ShardedState)
    else:
        loaded = make_model(mirrored)
        with mirrored.scope():
            loaded.compile(inner, "mse")
            inner.build(loaded.trainable_variables)
        if ending == "ckpt":
            tf.train.Checkpoint(model=model, optimizer=sharded).write(path)
            status = tf.train.Checkpoint(model=loaded, optimizer=inner)
            status.read(path).assert_existing_objects_matched()
        else:
            model.save_weights(path)
            loaded.load_weights(path)
    assert_equal(loaded.optimizer.variables, sharded.variables)
    before = [variable.numpy() for variable in sharded.variables]
    if ending == "ckpt":
        tf.train.Checkpoint(model=loaded, optimizer=inner).write(path)
        back = tf.train.Checkpoint(model=model, optimizer=sharded)
        back.read(path).assert_existing_objects_matched()
    elif ending == "weights.h5":
        loaded.save_weights(path)
        model.load_weights(path)
    assert_equal(sharded.variables, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tfo.DGCMomentum(0.1),
        lambda: tfo.SparseLoCo(keras.optimizers.SGD()),
        lambda: tfo.ShardedState(keras.optimizers.SGD()),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ],
)
def test_others_that_exchange_or_wrap_are_rejected(make):
    with pytest.raises(ValueError, match="`inner_optimizer` must"):
        tfo.ShardedState(make())


def test_sparse_loco_rejects_shared_state():
    with pytest.raises(ValueError, match="must leave the exchange"):
        tfo.SparseLoCo(tfo.ShardedState(keras.optimizers.SGD()))


@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: keras.optimizers.SGD(use_ema=True, **kwargs),
        tfo.AdamOffload,
    ],
)
def test_state_that_replicas_cannot_share_is_rejected(mirrored, make):
    model = make_model(mirrored)
    with mirrored.scope():
        sharded = tfo.ShardedState(make(gradient_accumulation_steps=2))
        with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
            sharded.build(model.trainable_variables)


def bert_base():
    """Return variables with the shapes of BERT-base."""
    width, inner = 768, 3072
    norm = [(width,), (width,)]
    attention = 4 * [(width, width), (width,)] + norm
    mlp = [(width, inner), (inner,), (inner, width), (width,)] + norm
    embeddings = [(30522, width), (512, width), (2, width), *norm]
    shapes = [*embeddings, *12 * (attention + mlp), (width, width), (width,)]
    return [SimpleNamespace(shape=s, dtype="float32") for s in shapes]


@pytest.mark.parametrize("may_split", [False, True])
def test_four_workers_own_a_quarter_of_bert_each(may_split):
    variables = bert_base()
    pieces = assign_owners(variables, 4, may_split)
    loads = loads_of([(variables[p.index], p) for p in pieces], 4)
    assert max(loads) <= 0.255 * sum(map(bytes_of, variables))
    for i, variable in enumerate(variables):
        own = [p for p in pieces if p.index == i]
        assert sum(bytes_of(variable, p) for p in own) == bytes_of(variable)
        assert len({p.owner for p in own}) == len(own)


def test_large_variables_are_warned_of(mirrored):
    with mirrored.scope():
        variables = [keras.Variable(np.zeros([50, 9], "float32"))]
        with pytest.warns(
            UserWarning, match="more than 1.5 times as many bytes"
        ):
            tfo.ShardedState(tfo.Lamb()).build(variables)


# Under `MirroredStrategy`, Keras (3.15) cannot overwrite weights by averages.
# Adam itself squares duplicate rows of sparse gradients before it sums them.
ON_DEVICES = *sharded_script.EVERY, "mixed_float16"
ON_FOUR_DEVICES = (
    "AdamW",
    "Muon",
    "tfo.LANS",
    "tfo.AdamOffload",
    "mixed_float16",
)


@pytest.mark.parametrize(
    ("names", "workers", "devices"),
    [
        (("words",), 2, 1),
        *(
            pytest.param(names, *layout, marks=pytest.mark.long)
            for names, layout in [
                (ON_DEVICES, (1, 2)),
                (ON_FOUR_DEVICES, (1, 4)),
                (sharded_script.MAKE, (2, 1)),
                (sharded_script.MAKE, (2, 2)),
                (sharded_script.MAKE, (4, 1)),
            ]
        ),
    ],
)
def test_workers_step_as_the_inner_optimizer(tmp_path, names, workers, devices):
    mode = "compare" if workers > 1 else "devices"
    for result in real_workers.results(
        *("sharded", tmp_path, workers, mode, *names), devices=devices
    ):
        assert result["wrong"] == []
        largest = max(result["owned"])
        assert largest < 1.3 * sum(result["owned"]) / (workers * devices)
        assert result.get("string_bytes", RPC_CHUNK_BYTES) == RPC_CHUNK_BYTES, (
            "TensorFlow's server is no longer configured by "
            "`_update_config_proto`, see workers/extended.py."
        )


def test_parts_of_other_ranks_are_sent_together(tmp_path):
    """TensorFlow's graph optimizer may mistake one's shape for another's."""
    expected = shapes.trained(tf.distribute.get_strategy())
    for result in real_workers.results("shapes", tmp_path, 3):
        for found, wanted in zip(result, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.long
def test_owners_are_found_among_more_than_ten_workers(tmp_path):
    """TensorFlow orders task 10 before task 2."""
    for result in real_workers.results(
        "sharded", tmp_path, 11, "compare", "words"
    ):
        assert result["wrong"] == []


@pytest.mark.long
def test_killed_workers_resume_in_other_numbers(tmp_path):
    """Kill two workers; resume with three, then with one. Compare with one."""
    alone, folder = tf.distribute.get_strategy(), tmp_path / "backups"
    expected = sharded_script.resumed(alone, tmp_path / "alone", 3)
    killed = real_workers.run("sharded", tmp_path, 2, "resume", folder, 3, 3)
    assert killed.exit_code and killed.results == [None, None]
    results = real_workers.results("sharded", tmp_path, 3, "resume", folder, 2)
    last = sharded_script.resumed(alone, folder, 3)
    before = sharded_script.resumed(alone, tmp_path / "two epochs", 2)
    pairs = [(last, expected), *((result, before) for result in results)]
    for found, wanted in pairs:
        assert_close(found, wanted, rtol=0, atol=1e-6)


def test_backup_of_other_replicas_gives_the_owner_its_value(mirrored):
    with mirrored.scope():
        sharded = tfo.ShardedState(keras.optimizers.Adam())
    model = trained(mirrored, sharded, epochs=1)
    state = State(model)
    assert all(map(state.is_owned, state.slots))
    alone = tfo.ShardedState(keras.optimizers.Adam())
    model = trained(tf.distribute.get_strategy(), alone, epochs=1)
    assert all(map(State(model).is_owned, alone.variables))
    saved = [np.zeros(2, "float32"), np.array([0.1, 0.3], "float32")]
    received = redistribute(
        False, False, saved.__getitem__, (2, 1), (3, 1), [2], True
    )
    np.testing.assert_array_equal(received[0], saved[1])
    (received,) = redistribute(
        False, False, saved.__getitem__, (2, 1), (1, 1), [0], True
    )
    np.testing.assert_array_equal(received, saved[1])


def allocated():
    """Return the bytes that the C library has allocated."""
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks"
    names += " fordblks keepcost"
    fields = [(name, ctypes.c_size_t) for name in names.split()]
    kind = type("mallinfo2", (ctypes.Structure,), {"_fields_": fields})
    call = ctypes.CDLL(None).mallinfo2
    call.restype = kind
    return call().hblkhd + call().uordblks


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33"
)
def test_received_parts_do_not_keep_their_message():
    """A variable with a part of the message would keep all of it."""
    weight, size = tf.Variable(tf.zeros([1024])), 1 << 22

    @tf.function(autograph=False)
    def receive(sent):
        rows = tf.unstack(tf.reshape(sent + 1, [4, -1]), num=4)
        weight.assign(worker_replicas._joined([rows[1][:1024]]))

    receive(tf.zeros([size]))
    held = allocated()
    weight.assign(tf.zeros([1024]))
    assert held - allocated() < size


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33"
)
def test_state_takes_little_more_memory_than_its_values(mirrored):
    """TensorFlow keeps memory for each variable name."""
    with mirrored.scope():
        variables = [
            keras.Variable(np.ones(8, "float32"), name=f"weight_{i}")
            for i in range(50)
        ]
        optimizer = keras.optimizers.AdamW()
        held = allocated()
        tfo.ShardedState(optimizer).build(variables)
    slots = optimizer.variables[2:]
    assert len(slots) == 100
    assert (allocated() - held) / len(slots) < 20_000
    assert slots[0].value.name == f"{optimizer.name}/weight_0_momentum:0"
