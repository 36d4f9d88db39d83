"""Names that _compat/ borrows from TensorFlow and Keras still exist.

A failure shows the names that a new version lacks.
"""

import ast
import copy
import importlib
import inspect
import itertools
import pathlib
import pkgutil
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as keras_losses
from keras.src.trainers import compile_utils
from keras.src.trainers.data_adapters import array_data_adapter
from tensorflow.python.data.ops import (
    dataset_ops,
    iterator_ops,
    map_op,
    multi_device_iterator_ops,
    scan_op,
    shuffle_op,
)
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
    input_lib,
    mirrored_strategy,
    values,
)
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops

import tf_optimizers as tfo
from tf_optimizers._compat.hooks import insert_callback
from tf_optimizers._compat.keras_internals import (
    VARIABLES,
    global_seed,
    layers_of,
    set_global_seed,
    start_at_epoch,
)
from tf_optimizers._compat.tensorflow_internals import (
    LazyZeros,
    in_xla,
    lazy_zeros,
    plain_variable,
)
from tf_optimizers.workers._compat.step_functions import step_of

PACKAGE = pathlib.Path(tfo.__file__).parent
METHODS = [
    "_backend_apply_gradients",
    "_get_current_learning_rate",
    "_get_variable_index",
    "_lookup_dependency",
    "_overwrite_model_variables_with_average_value",
    "_overwrite_variable_with_gradient",
    "_track_variable",
    "_trackable_children",
    "_var_key",
]
ATTRIBUTES = [
    "_accumulated_gradients",
    "_distribution_strategy",
    "_iterations",
    "_learning_rate",
    "_model_variables_moving_average",
    "_trainable_variables",
]
VARIABLE = ["_constraint", "_name", "_path", "_value"]
MODEL = [
    "_aggregate_additional_loss",
    "_flatten_layers",
    "_initial_epoch",
    "_make_function",
    "_maybe_symbolic_build",
    "_non_trainable_variables",
    "_resolve_auto_jit_compile",
    "_symbolic_build",
]
LOSS_SCALING = [
    "_stateful_handle_finite_grads",
    "_stateful_handle_non_finite_grads",
]
TENSORFLOW = {
    cross_device_ops.CollectiveAllReduce: [
        "_all_reduce",
        "_batch_all_gather",
        "_devices",
        "_group_size",
        "_launchers",
        "_options",
    ],
    cross_device_utils.CollectiveReplicaLauncher: [
        "_all_gather",
        "_control_input",
        "_device",
        "_group_key",
        "_group_size",
        "_options",
    ],
    collective_all_reduce_strategy.CollectiveAllReduceExtended: [
        "_cluster_spec",
        "_collective_key_base",
        "_collective_keys",
        "_communication_options",
        "_cross_device_ops",
        "_enable_check_health",
        "_get_variable_creator_initial_value",
        "_id_in_cluster",
        "_initialize_local",
        "_initialize_local_devices",
        "_initialize_multi_worker",
        "_num_workers",
        "_std_server_started",
        "_update_config_proto",
        "_use_merge_call",
    ],
    mirrored_strategy.MirroredExtended: ["_create_variable"],
    distribute_lib: [
        "_get_default_replica_mode",
        "_pop_per_thread_mode",
        "_push_per_thread_mode",
    ],
    distribute_utils: ["regroup", "select_replica"],
    input_lib.DistributedDataset: ["_cloned_datasets"],
    input_lib.DistributedDatasetsFromFunction: [
        "_datasets",
        "_element_spec",
        "_input_workers",
        "_options",
        "_strategy",
    ],
    input_lib.DistributedIterator: ["_element_spec", "_iterators"],
    input_lib._SingleWorkerOwnedDatasetIterator: ["_iterator"],
    iterator_ops.OwnedIterator: ["_dataset"],
    input_lib.DistributedIteratorSpec: [
        "_cardinality",
        "_component_specs",
        "_enable_get_next_as_optional",
        "_from_components",
        "_to_components",
    ],
    multi_device_iterator_ops.OwnedMultiDeviceIterator: [
        *("_device_iterators", "_devices"),
    ],
    values.PerReplica: ["_type_spec"],
    values.PerReplicaSpec: ["_value_specs"],
    trainer.TFEpochIterator: ["_distributed_dataset"],
    dataset_ops.DatasetV2: [
        *("_functions", "_inputs", "_variant_tensor_attr"),
    ],
    map_op: ["_MapDataset", "_ParallelMapDataset"],
    scan_op: ["_ScanDataset"],
    shuffle_op: [
        *("_ShuffleDataset", "_seed", "_seed2", "_shuffle"),
        "_common_args",
    ],
    ops.Graph: ["_get_function", "_variable_creator_scope"],
    resource_variable_ops.BaseResourceVariable: [
        "_read_variable_op",
        "_restore_from_tensors",
    ],
    context: ["anonymous_name", "global_seed"],
    polymorphic_function.Function: ["_jit_compile"],
    context.Context: [
        "_collective_ops_server_def",
        "_context_handle",
        "abort_collective_ops",
        "check_collective_ops_peer_health",
        "delete_config_key_value",
        "get_config_key_value",
        "set_config_key_value",
        "wait_at_barrier",
    ],
}


def is_gone(owner, name):
    return f"{owner} has no {name}: see _compat/ for what it was needed for."


def make_optimizer():
    optimizer = keras.optimizers.SGD(
        use_ema=True, gradient_accumulation_steps=2
    )
    optimizer.build([keras.Variable([1.0])])
    return optimizer


# Objects of Keras, and their private names.
KERAS = {
    make_optimizer: METHODS + ATTRIBUTES,
    keras.Sequential: MODEL,
    (lambda: keras.Variable([1.0])): VARIABLE,
    (lambda: keras.optimizers.LossScaleOptimizer(make_optimizer())): (
        LOSS_SCALING
    ),
}


@pytest.mark.parametrize(
    ("make", "name"),
    [(make, name) for make, names in KERAS.items() for name in names],
)
def test_keras_has_private_name(make, name):
    owner = make()
    assert hasattr(owner, name), is_gone(type(owner).__name__, name)


def test_checkpoints_have_variables_by_the_name_that_is_replaced():
    children = keras.optimizers.SGD(0.1)._trackable_children()
    assert len(children[VARIABLES]) == 2, is_gone("A checkpoint", VARIABLES)


def test_keras_variable_is_still_made_by_the_method_that_is_called_again():
    variable = keras.Variable(1.0)
    variable._initialize(np.float32(2))
    assert (variable.value.numpy(), float(variable)) == (2, 2)


def test_keras_fit_still_starts_at_the_initial_epoch_of_callbacks():
    class Start(keras.callbacks.Callback):
        epochs = []

        def on_train_begin(self, logs=None):
            start_at_epoch(self.model, 2)

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs.append(epoch)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.zeros([2, 1])
    model.fit(data, data, epochs=4, verbose=0, callbacks=[Start()])
    assert Start.epochs == [2, 3]


def test_keras_still_sets_the_model_of_callback_lists(monkeypatch):
    """In `fit`, a validation has the same list of callbacks."""
    owner = keras.callbacks.CallbackList
    monkeypatch.setattr(owner, "set_model", owner.set_model)
    events = []

    class Note(keras.callbacks.Callback):
        def __init__(self, name="ours"):
            super().__init__()
            self.name = name

        def on_test_begin(self, logs=None):
            events.append((self.name, "test"))

        def on_predict_begin(self, logs=None):
            events.append((self.name, "predict"))

        def on_epoch_end(self, epoch, logs=None):
            events.append((self.name, "epoch"))

    class Ours(Note):
        pass

    insert_callback(Ours, lambda model: model.name == "chosen")
    data = tf.zeros([2, 1])
    for name in ("chosen", "other"):
        layers = [keras.Input((1,)), keras.layers.Dense(1)]
        model = keras.Sequential(layers, name=name)
        model.compile("sgd", "mse")
        theirs = Note("theirs")
        for arguments in ({"validation_data": (data, data)}, {}):
            call = model.fit if arguments else model.evaluate
            call(data, data, verbose=0, callbacks=[theirs], **arguments)
        model.predict(data, verbose=0, callbacks=[theirs])
    happened = ["test", "epoch", "test", "predict"]
    both = [(who, e) for e in happened for who in ("ours", "theirs")]
    assert events == both + [("theirs", event) for event in happened]


def test_layers_inside_of_others_are_found():
    inner = keras.Sequential([keras.layers.Dense(1, name="dense")])
    model = keras.Sequential([keras.Input((1,)), inner])
    assert "dense" in [layer.name for layer in layers_of(model)]


def test_keras_still_draws_from_the_global_seed():
    keras.utils.clear_session()
    assert global_seed() is None
    first = keras.random.normal([3])
    seed = global_seed()
    second = keras.random.normal([3])
    keras.utils.clear_session()
    set_global_seed(seed)
    assert keras.random.normal([3]).numpy().tolist() == second.numpy().tolist()
    assert first.numpy().tolist() != second.numpy().tolist()


def test_keras_still_calls_the_hooks():
    """If nothing called a hook, Keras's own order would stay in place."""
    source = inspect.getsource(keras.optimizers.Optimizer.apply)
    assert "self._backend_apply_gradients(" in source
    source = inspect.getsource(
        keras.optimizers.Optimizer.finalize_variable_values
    )
    assert "self._overwrite_model_variables_with_average_value(" in source


def test_keras_still_calls_the_methods_that_batch_hooks_replace():
    for caller, call in (
        (keras_losses.reduce_values, "= scale_loss_for_distribution("),
        (keras_losses.Loss.__call__, "return reduce_weighted_values("),
        (keras.Model.train_step, ".unscale_loss_for_distribution("),
        (compile_utils.CompileLoss.call, ".unscale_loss_for_distribution("),
        (keras.layers.BatchNormalization.call, "self._moments("),
    ):
        source = inspect.getsource(inspect.unwrap(caller))
        assert call in source, is_gone(caller.__qualname__, f"{call}...)")
    assert callable(keras_losses.apply_mask)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_steps_of_a_model_are_recognized(jit_compile, monkeypatch):
    class Decorated(keras.Sequential):
        @tf.function
        def train_step(self, data):
            return {"number": 2 * data}

        @tf.function
        def of_the_user(self, data):
            return data

    ran = []
    model = Decorated([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(jit_compile=jit_compile)
    model.make_predict_function()

    def run(strategy, fn, args):
        ran.append(fn)

    strategy = type(model.distribute_strategy)
    monkeypatch.setattr(strategy, "run", run)
    monkeypatch.setattr(trainer, "reduce_per_replica", lambda *_, **__: None)
    model.predict_function([np.ones((1, 1))])
    assert step_of(ran[0]) == (model, ran[0], "predict_step")
    assert step_of(model.test_step) == (model, model.test_step, "test_step")
    owner, step, kind = step_of(model.train_step)
    assert owner is model
    assert kind == "train_step"
    assert step(2) == {"number": 4}
    for other in (model.of_the_user, model.call, ran.append, np.ones):
        assert step_of(other) is None


@pytest.mark.parametrize(
    "name",
    [
        "distribute.interim.maybe_merge_call",
        "distribute.strategy_supports_no_merge_call",
        "autograph.tf_convert",
        "autograph.control_status_ctx",
    ],
)
def test_tensorflow_has_private_function(name):
    value = tf.__internal__
    for part in name.split("."):
        value = getattr(value, part, None)
    assert callable(value), is_gone("tf.__internal__", name)


@pytest.mark.parametrize("xla", [True, None])
def test_xla_is_noticed_while_tracing(xla):
    seen = []

    def note(x):
        seen.append(in_xla())
        return x

    function = tf.function(
        lambda x: tf.cond(note(x) > 0, lambda: note(x), lambda: -x),
        jit_compile=xla,
    )
    function.get_concrete_function(tf.constant(1.0))
    assert seen == [bool(xla)] * 2, "TensorFlow marks XLA otherwise now."


def test_plain_variable_is_not_captured(mirrored):
    with mirrored.scope():
        plain = plain_variable(lambda: tf.ones([2]))
        assert len(mirrored.experimental_local_results(tf.Variable(1.0))) == 2
    assert mirrored.experimental_local_results(plain) == (plain,)


def make_lazy(shape=(2, 3)):
    with lazy_zeros(shape):
        return tf.Variable(lambda: tf.ones([]), dtype=tf.float32)


def test_lazy_zeros_take_no_memory_when_read_or_cleared(tmp_path):
    lazy, zeros = make_lazy(), np.zeros((2, 3))
    checkpoint = tf.train.Checkpoint(lazy=lazy)
    checkpoint.read(checkpoint.write(tmp_path / "c")).assert_consumed()
    clear = tf.function(lambda: lazy.assign(tf.zeros([2, 3])) + 0.0)
    read = tf.function(lambda: (lazy + 0.0, lazy.read_value(), lazy[:]))
    for value in (
        *(lazy, lazy.value(), lazy.numpy(), tf.concat([lazy], 0)),
        *(copy.deepcopy(lazy), lazy.assign(zeros), clear(), *read()),
    ):
        np.testing.assert_array_equal(value, zeros)
    assert not lazy.has_value()
    with pytest.raises(ValueError, match="incompatible"):
        lazy.assign(zeros[0])


@pytest.mark.parametrize("graph", [False, True])
def test_lazy_zeros_hold_assigned_values(graph, tmp_path):
    lazy, other = make_lazy(), make_lazy()
    value = tf.constant([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    assign = tf.function(lazy.assign) if graph else lazy.assign
    np.testing.assert_array_equal(assign(value), value)
    path = tf.train.Checkpoint(lazy=lazy).write(tmp_path / "c")
    tf.train.Checkpoint(lazy=other).read(path).assert_consumed()
    np.testing.assert_array_equal(other, value)
    lazy.assign(0.0 * value)
    np.testing.assert_array_equal(lazy, 0.0 * value)


def test_lazy_zeros_are_made_for_every_replica_and_in_functions(mirrored):
    made = []
    with mirrored.scope():
        made += mirrored.experimental_local_results(make_lazy())
    tf.function(lambda: made.append(make_lazy()))()
    assert [type(variable) for variable in made] == [LazyZeros] * 3
    assert made[1].device != made[0].device


@pytest.mark.parametrize(
    ("owner", "names"),
    TENSORFLOW.items(),
    ids=[owner.__name__ for owner in TENSORFLOW],
)
def test_tensorflow_has_private_names(owner, names):
    """Look for names in the source of classes: most are set in constructors."""
    source = inspect.getsource(owner)
    for name in names:
        assert re.search(rf"\b{name}\b", source), is_gone(owner, name)


def test_keras_still_makes_data_sets_of_arrays_in_one_place():
    """Keras looks TensorFlow up each time; later versions shuffle per epoch."""
    source = inspect.getsource(
        array_data_adapter.ArrayDataAdapter.get_tf_dataset
    )
    assert "from keras.src.utils.module_utils import tensorflow as tf" in source
    assert "tf.random.shuffle" in source or "_tf_shuffle" in source


def test_every_private_name_is_listed_here():
    """This includes names of other packages that we use, or override."""
    listed = {
        *itertools.chain(*KERAS.values(), *TENSORFLOW.values()),
        *("_initialize", "_moments"),
        "_tf_shuffle",  # Only Keras 3.16 and newer ask for it.
    }
    listed = {name for name in listed if name.startswith("_")}
    own, used, written = names_in(PACKAGE)
    of_python = {"_abc_impl", "_asdict", "_replace", "_current_frames", "_exit"}
    assert (used - own | overridden()) - of_python <= listed
    assert listed <= used | own | written


def test_private_names_do_not_grow_in_number():
    lists = *KERAS.values(), *TENSORFLOW.values()
    assert sum(map(len, lists)) <= 108


DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def names_in(folder):
    """Return private names that a folder defines, uses, and has in strings."""
    own, used, written = set(), set(), set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, DEFINITIONS):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                is_own = ast.unparse(node.value) in ("self", "cls")
                is_set = isinstance(node.ctx, ast.Store)
                (own if is_own and is_set else used).add(node.attr)
            elif isinstance(node, ast.alias):
                used.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                written |= set(re.findall(r"\b_\w+", node.value))
    private = re.compile("_[a-z]", re.I)
    return [set(filter(private.match, names)) for names in (own, used, written)]


def overridden():
    """Return private names of foreign classes that our classes override."""
    found = set()
    for module in pkgutil.walk_packages(tfo.__path__, "tf_optimizers."):
        # The demo's own dependencies may not be installed.
        if "__main__" in module.name or ".demo" in module.name:
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(cls) or not is_ours(cls):
                continue
            theirs = [
                base
                for base in cls.__mro__
                if base.__module__.startswith(("keras.", "tensorflow."))
            ]
            found |= {
                name
                for name in vars(cls)
                if re.match("_[a-z]", name)
                and any(name in vars(base) for base in theirs)
            }
    return found


def is_ours(cls):
    return cls.__module__.startswith("tf_optimizers")


def test_private_names_are_used_in_compat_only():
    """Check names of Keras and TensorFlow; our own may be used anywhere.

    A subclass may use the private attributes that it inherits.
    """
    names = [*METHODS, *ATTRIBUTES, *MODEL, *LOSS_SCALING, "__internal__"]
    names += [r"keras\.src", r"tensorflow\.python"]
    private = re.compile(rf"(?<!\w)(?:{'|'.join(names)})")
    listed = {*itertools.chain(*KERAS.values(), *TENSORFLOW.values())}
    of_others = {name for name in listed if name.startswith("_")}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "_compat":
            text = path.read_text()
            assert not private.search(text), path
            assert not attributes_of_others(text) & of_others, path


def attributes_of_others(text):
    """Return the attributes of all objects but `self`, `cls` and `super()`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    }
