"""The devices of AdamOffload's state and steps, under every strategy.

A second logical CPU device stands in for an accelerator: everything that a GPU
would hold is on `CPU:1`. Devices of operations are read from traced graphs.
"""

import contextlib
import functools
import json

import cases
import keras
import numpy as np
import pytest
import real_workers
import tensorflow as tf
from arrays import assert_equal
from scripts import offload

import tf_optimizers as tfo
from tf_optimizers._compat.keras_internals import average
from tf_optimizers.offload import host_optimizer

EVERYTHING = {
    "use_ema": True,
    "ema_overwrite_frequency": 2,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
}
STRATEGIES = ["scope", "one device", "mirrored"]


@functools.cache
def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:1")


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    """Return a strategy with the model on CPU:1; `mirrored` also uses CPU:0."""
    if request.param == "mirrored":
        yield request.getfixturevalue("mirrored")
    elif request.param == "one device":
        yield one_device()
    else:
        with tf.device("CPU:1"):
            yield tf.distribute.get_strategy()


def make(strategy, dtype="float32", **kwargs):
    with strategy.scope():
        variables = cases.make_variables(dtype)
        optimizer = tfo.AdamOffload(0.02, **kwargs)
        optimizer.build(variables)
    return variables, optimizer


def device_of(variable):
    return tf.DeviceSpec.from_string(variable.value.device).to_string()[-6:]


def state_of(optimizer):
    """Return all of the optimizer's variables but iterations and rate."""
    return optimizer.variables[2:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_on_the_host_once(strategy, dtype):
    _, optimizer = make(strategy, dtype, **EVERYTHING)
    # Average, accumulator, m and v; and the master weight.
    assert len(state_of(optimizer)) == 2 * (5 if dtype == "bfloat16" else 4)
    for variable in state_of(optimizer):
        assert variable.value.device.endswith("device:CPU:0")
        copies = strategy.experimental_local_results(variable.value)
        assert copies == (variable.value,)
        assert variable.dtype == "float32"


def test_lazy_build_in_a_traced_step_is_placed_the_same(strategy):
    with strategy.scope():
        variables = cases.make_variables("bfloat16")
        optimizer = tfo.AdamOffload(**EVERYTHING)

    @tf.function
    def step(gradients):
        strategy.run(
            lambda: optimizer.apply([g * 1 for g in gradients], variables)
        )

    step([tf.constant(g) for g in cases.make_gradients(0)])
    assert len(state_of(optimizer)) == 10
    for variable in state_of(optimizer):
        assert variable.value.device.endswith("device:CPU:0")


@pytest.mark.parametrize("how", ["at its frequency", "at the end"])
def test_average_replaces_the_master_weight_to_the_last_bit(strategy, how):
    frequency = 2 if how == "at its frequency" else None
    variables, optimizer = make(
        strategy, "bfloat16", use_ema=True, ema_overwrite_frequency=frequency
    )
    for i in range(2):
        gradients = [tf.constant(g) for g in cases.make_gradients(i)]
        strategy.run(
            lambda gradients: optimizer.apply(gradients, variables),
            (gradients,),
        )
    if not frequency:
        optimizer.finalize_variable_values(variables)
    for i, variable in enumerate(variables):
        own = average(optimizer, variable)
        np.testing.assert_array_equal(
            optimizer._masters[i].numpy(), own.numpy()
        )
        assert (own.numpy() != cases.as_numpy(variable)).any()
        for copy in strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(
                cases.as_numpy(copy),
                cases.as_numpy(tf.cast(own, "bfloat16")),
            )


# Operations that only move values.
TRANSPORT = {
    "AssignSubVariableOp",
    "AssignVariableOp",
    "EnsureShape",
    "Identity",
    "Placeholder",
    "ReadVariableOp",
}
# Operations by which replicas exchange gradients.
EXCHANGE = {
    "AddN",
    "ConcatV2",
    "IdentityN",
    "Pack",
    "Reshape",
    "Split",
    "SplitV",
    "Sum",
}
EXCHANGE |= {"CollectiveReduceV2", "CollectiveReduceV3", "NcclAllReduce"}


def trace(strategy, dtype="float32", **kwargs):
    """Return the graph of one `apply` of random gradients."""
    return trace_once(strategy, dtype, tuple(kwargs.items()))


@functools.cache
def trace_once(strategy, dtype, arguments):
    variables, optimizer = make(strategy, dtype, **dict(arguments))

    @tf.function(autograph=False)
    def step():
        def run():
            optimizer.apply(
                [tf.random.normal(v.shape, dtype=dtype) for v in variables],
                variables,
            )

        strategy.run(run)

    return step.get_concrete_function().graph


def is_kernel(op):
    return "_XlaMustCompile" in op.node_def.attr


def all_operations(graph):
    """Yield the operations of a graph and its branches, without kernels."""
    for op in graph.get_operations():
        yield op
        branches = []
        if op.type in ("If", "StatelessIf"):
            branches = [op.get_attr("then_branch"), op.get_attr("else_branch")]
        elif op.type in ("Case", "StatelessCase"):
            branches = op.get_attr("branches")
        for branch in branches:
            function = graph._get_function(branch.name)
            yield from all_operations(function.graph)


def computed_elsewhere(graph):
    """Return operations outside of the host that compute numbers.

    Operations that compute gradients do not count.
    """
    return [
        op
        for op in all_operations(graph)
        if any(
            tensor.dtype.is_floating and tensor.shape.num_elements() != 1
            for tensor in op.outputs
        )
        and not op.device.endswith("CPU:0")
        and "random" not in op.name
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"loss_scale_factor": 4.0},
        {"use_ema": True, "clipvalue": 0.1},
        EVERYTHING,
    ],
    ids=lambda kwargs: "-".join(kwargs) or "plain",
)
def test_every_kernel_runs_on_the_host_once(strategy, dtype, kwargs):
    graph = trace(strategy, dtype, **kwargs)
    kernels = [op for op in all_operations(graph) if is_kernel(op)]
    assert len(kernels) == 2  # One per variable, for any number of replicas.
    for op in kernels:
        assert op.device.endswith("CPU:0")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"loss_scale_factor": 4.0}, EVERYTHING],
    ids=lambda kwargs: "-".join(kwargs) or "plain",
)
def test_nothing_is_computed_on_the_model_s_device(strategy, dtype, kwargs):
    """An operation without a device would run on an accelerator."""
    graph = trace(strategy, dtype, **kwargs)
    allowed = set(TRANSPORT)
    if strategy.num_replicas_in_sync > 1:
        # Replicas exchange float32, unscaled.
        allowed |= EXCHANGE | {"Cast", "RealDiv"}
    wrong = {op.type for op in computed_elsewhere(graph)} - allowed
    assert not wrong
    for op in all_operations(graph):
        # Tensors that a branch captures pass through the branch's device.
        if op.type == "If" and any(t.dtype.is_floating for t in op.inputs):
            assert op.device.endswith("CPU:0")


def test_half_precision_goes_up_and_down_in_two_bytes():
    graph = trace(one_device(), "bfloat16")
    operations = computed_elsewhere(graph)
    assert operations
    for op in operations:
        assert {tensor.dtype for tensor in op.outputs} == {tf.bfloat16}


def train_in_loco(strategy, sync_every):
    """Return variables, the outer optimizer, and the graph of a step."""
    with strategy.scope():
        variables = cases.make_variables("float32")
        optimizer = tfo.SparseLoCo(
            tfo.AdamOffload(0.02),
            sync_every=sync_every,
            sparsity=(0.5,),
            min_compress_size=4,
        )
        optimizer.build(variables)

    @tf.function(autograph=False)
    def step(gradients):
        strategy.run(optimizer.apply, (gradients, variables))

    for i in range(4):
        step([tf.constant(g) for g in cases.make_gradients(i)])
    (traced,) = step._list_all_concrete_functions()
    return variables, optimizer, traced.graph


@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic:UserWarning")
def test_sparse_loco_keeps_residuals_next_to_the_state(sync_every):
    default = tf.distribute.get_strategy()
    expected, _, _ = train_in_loco(default, sync_every)
    weights, optimizer, graph = train_in_loco(one_device(), sync_every)
    for ours, theirs in zip(weights, expected, strict=True):
        assert device_of(ours) == ":CPU:1"
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    names = ("residual", "common_weight")
    kept = [v for v in optimizer.variables if v.path.endswith(names)]
    assert len(kept) == (1 if sync_every == 1 else 3)
    for variable in kept:
        assert device_of(variable) == ":CPU:0"
    assert np.count_nonzero(kept[0].numpy()) >= 10  # Of 20 entries.
    operations = [
        op for op in computed_elsewhere(graph) if op.outputs[0].shape == [4, 5]
    ]
    assert {op.type for op in operations} <= TRANSPORT


@pytest.mark.parametrize("at_once", [1, 2])
def test_large_variables_are_stepped_in_turn(monkeypatch, at_once):
    """Meanwhile, the changes of stepped variables are sent back."""
    monkeypatch.setattr(host_optimizer, "_LARGE", 4)
    monkeypatch.setattr(host_optimizer, "_AT_ONCE", at_once)
    with tf.device("CPU:1"):
        shapes = [(4,), (2, 2), (3,), (5,)]
        variables = [keras.Variable(tf.ones(shape)) for shape in shapes]
        optimizer = tfo.AdamOffload()
        optimizer.build(variables)
        step = tf.function(
            lambda: optimizer.apply(
                [tf.ones(v.shape) for v in variables], variables
            )
        )
        graph = step.get_concrete_function().graph
    buffers = [op for op in graph.get_operations() if op.type == "VarHandleOp"]

    def waits_for(i, other):
        """Return whether variable i waits for another one."""
        changes = {
            op
            for op in buffers[-1 - other].outputs[0].consumers()
            if op.type == "ReadVariableOp"
        }
        return bool(changes & set(buffers[-1 - i].control_inputs))

    large = [3, 1, 0]
    for place, i in enumerate(large):
        for earlier, other in enumerate(large[:place]):
            assert waits_for(i, other) == (place - earlier == at_once)
    assert not any(waits_for(2, other) for other in large)


def ancestors(op):
    """Return the operations that must run before an operation."""
    found, waiting = set(), [op]
    while waiting:
        op = waiting.pop()
        new = {*op.control_inputs, *(tensor.op for tensor in op.inputs)} - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_variable_is_updated_as_soon_as_its_gradient_arrives(weight_decay):
    """Meanwhile, the backward pass goes on."""
    with tf.device("CPU:1"):
        weights = [keras.Variable(tf.eye(3)) for _ in range(4)]
        optimizer = tfo.AdamOffload(weight_decay=weight_decay)
        optimizer.build(weights)
        values = [weight.value for weight in weights]

        @tf.function(autograph=False)
        def step(rows):
            with tf.GradientTape() as tape:
                for value in values:
                    rows = tf.tanh(rows @ value)
            gradients = [
                tf.identity(gradient, f"gradient_{i}")
                for i, gradient in enumerate(tape.gradient(rows, values))
            ]
            optimizer.apply(gradients, weights)

        graph = step.get_concrete_function(tf.TensorSpec([2, 3])).graph
    operations = graph.get_operations()
    gradients = [graph.get_operation_by_name(f"gradient_{i}") for i in range(4)]
    kernels = [op for op in operations if is_kernel(op)]
    updates = [op for op in operations if op.type == "AssignSubVariableOp"]
    assert len(kernels) == len(updates) == 4
    for i, kernel, update in zip((3, 2, 1, 0), kernels, updates, strict=True):
        before = ancestors(update)
        # Every update waits for the gradient that arrives first.
        assert before.intersection(gradients) == {gradients[i], gradients[3]}
        assert before.intersection(kernels) == {kernel}


# Copies of 4 MB run in parallel with arithmetic on a few bytes.
SHAPES = {"a": (1,), "large": (1000, 1000), "b": (3,), "wide": (2, 400_000)}


def run_200_steps(strategy, dtype="float32", share=1.0):
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s).astype("f4") for s in SHAPES.values()]
    pool = [
        [
            tf.constant(rng.standard_normal(s), "float32")
            for s in SHAPES.values()
        ]
        for _ in range(3)
    ]
    with strategy.scope():
        variables = cases.make_variables(dtype, values, SHAPES)
        optimizer = tfo.AdamOffload(0.01, weight_decay=0.1)
        optimizer.build(variables)

    @tf.function
    def step(gradients):
        strategy.run(
            lambda gradients: optimizer.apply(
                # A gradient that depends on the weights shows when they were
                # read.
                [
                    share * (g + v)
                    for g, v in zip(gradients, variables, strict=True)
                ],
                variables,
            ),
            (gradients,),
        )

    for i in range(200):
        step([tf.cast(g, dtype) for g in pool[i % 3]])
    return variables


@functools.cache
def undisturbed(dtype):
    """Return the weights after steps in place, on the host."""
    variables = run_200_steps(tf.distribute.get_strategy(), dtype)
    return list(map(cases.as_numpy, variables))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_copies_and_short_arithmetic_do_not_race(strategy, dtype):
    share = 1 / strategy.num_replicas_in_sync
    variables = run_200_steps(strategy, dtype, share)
    for variable, expected in zip(variables, undisturbed(dtype), strict=True):
        for copy in strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(cases.as_numpy(copy), expected)


PLACES = {
    "host": contextlib.nullcontext,
    "device": lambda: tf.device("CPU:1"),
    "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:1").scope(),
}


def make_model(dtype):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, dtype=dtype) for _ in range(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = tfo.AdamOffload(0.01, use_ema=True, clipnorm=1.0)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


X = np.random.default_rng(0).standard_normal((16, 4)).astype("float32")
Y = np.random.default_rng(1).standard_normal((16, 5)).astype("float32")


def train(model, epochs):
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, shuffle=False)
    return [cases.as_numpy(w) for w in model.weights]


SOURCES = [
    ("device", "bfloat16"),
    pytest.param(("host", "float32"), marks=pytest.mark.long),
    pytest.param(("one device", "float32"), marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=SOURCES, ids="-".join)
def source(request, tmp_path_factory):
    """Return a model's device, dtype and files, and later weights."""
    place, dtype = request.param
    folder = tmp_path_factory.mktemp("source")
    with PLACES[place]():
        model = make_model(dtype)
        train(model, 2)
        model.save(folder / "model.keras")
        model.save_weights(folder / "model.weights.h5")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.save(folder / "checkpoint")
        # `fit` assigns the averages at its end, outside of any step.
        return dtype, folder, path, train(model, 1)


@pytest.mark.parametrize("target", ["host", "device"])
def test_restart_on_another_device_gives_the_same_steps(source, target):
    dtype, folder, path, expected = source
    with PLACES[target]():
        loaded = [keras.models.load_model(folder / "model.keras")]
        for _ in range(2):
            model = make_model(dtype)
            model.optimizer.build(model.trainable_variables)
            loaded.append(model)
        loaded[1].load_weights(folder / "model.weights.h5")
        checkpoint = tf.train.Checkpoint(
            model=loaded[2], optimizer=loaded[2].optimizer
        )
        checkpoint.restore(path).assert_existing_objects_matched()
        for model in loaded:
            assert_equal(train(model, 1), expected)
            for variable in state_of(model.optimizer):
                assert device_of(variable).endswith("CPU:0")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the results of one replica."""
    folder = tmp_path_factory.mktemp("alone")
    offload.save(tf.distribute.get_strategy(), "none", folder)
    return np.load(folder / "none-0.npz")


def assert_equal_to_one_replica(name, folder, alone, processes, copies):
    for process in range(processes):
        actual = np.load(folder / f"{name}-{process}.npz")
        assert len(alone.files) == len(actual.files) == 10
        for key in alone.files:
            assert len(actual[key]) == copies
            for copy in actual[key]:
                np.testing.assert_array_equal(copy, alone[key][0])
        devices = json.loads((folder / f"{name}-{process}.json").read_text())
        # There is one copy, on this process's host.
        assert [count for count, _ in devices] == [1]
        assert devices[0][1].endswith(f"task:{process}/device:CPU:0")


@pytest.fixture(scope="module")
def two_replicas(mirrored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirrored")
    offload.save_both(mirrored, "mirrored", folder)
    return folder


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    outcome = real_workers.run("offload", folder, 2, folder, timeout=300)
    assert outcome.exit_code == 0, outcome.output
    return folder


@pytest.mark.parametrize("name", ["mirrored", "mirrored-unmerged"])
def test_two_replicas_of_a_process_equal_one_to_the_bit(
    name, two_replicas, alone
):
    assert_equal_to_one_replica(name, two_replicas, alone, 1, copies=2)


@pytest.mark.long  # test_guide.py trains with our strategy.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["workers", "workers-unmerged"])
def test_two_workers_equal_one_replica_to_the_bit(name, two_workers, alone):
    assert_equal_to_one_replica(name, two_workers, alone, 2, copies=1)


def test_xla_on_another_device_is_rejected_with_the_way_out():
    with tf.device("CPU:1"):
        variables, optimizer = cases.make_variables(), tfo.AdamOffload()
        before = [v.numpy() for v in variables]
        with pytest.raises(RuntimeError, match="jit_compile=False") as error:
            cases.run_in_graph(optimizer, variables, 1, jit_compile=True)
    assert "Received: kernel" in str(error.value)
    assert "device:CPU:1" in str(error.value)
    assert not optimizer.built
    assert_equal(before, variables)


def test_sparse_gradient_goes_down_as_rows():
    with tf.device("CPU:1"):
        variable = keras.Variable(np.ones((1000, 4)), name="embeddings")
        optimizer = tfo.AdamOffload()
        optimizer.build([variable])

        @tf.function(autograph=False)
        def step(rows):
            slices = tf.IndexedSlices(tf.ones([3, 4]), rows, [1000, 4])
            optimizer.apply([slices], [variable])

        spec = tf.TensorSpec([3], tf.int64)
        graph = step.get_concrete_function(spec).graph
    (dense,) = [
        op
        for op in graph.get_operations()
        if op.type == "SparseSegmentSumWithNumSegments"
    ]
    assert dense.device.endswith("CPU:0")
