"""Excluded variables, before and after a model is loaded."""

import itertools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal

import tf_optimizers as tfo

X, Y = np.random.default_rng(0).random((2, 8, 3)).astype("float32")
KINDS = pytest.mark.parametrize(
    "kind",
    cases.with_long(
        ["sequential", "subclassed", "functional", "equal names"],
        ["subclassed", "functional"],
    ),
)


def dense(**kwargs):
    return keras.layers.Dense(3, **kwargs)


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = dense(), dense()

    def call(self, x):
        return self.second(self.first(x))


def make_model(kind):
    if kind == "subclassed":
        model = Subclassed()
        model(X)
        return model
    if kind == "sequential":
        return keras.Sequential([keras.Input((3,)), dense(), dense()])
    inputs = keras.Input((3,))
    if kind == "functional":
        return keras.Model(inputs, dense()(dense()(inputs)))
    parts = [
        keras.Sequential([keras.Input((3,)), dense(name="same")], name=name)
        for name in ("one", "two")
    ]
    return keras.Model(inputs, parts[1](parts[0](inputs)))


def save_and_load(model, folder):
    path = folder / "model.keras"
    model.save(path)
    return keras.models.load_model(path, {"Subclassed": Subclassed})


def train(model, epochs=1):
    model.fit(X, Y, epochs=epochs, shuffle=False, verbose=0)
    return model


def compiled(kind, optimizer):
    model = make_model(kind)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def decayed(model):
    optimizer = model.optimizer
    return [optimizer._is_decayed(i) for i in range(len(model.weights))]


def assert_go_on_alike(model, loaded):
    """Train both models further, and compare."""
    assert_equal(train(model).get_weights(), train(loaded).get_weights())
    assert decayed(loaded) == decayed(model)


@KINDS
@cases.EACH_KIND
def test_variables_stay_excluded_when_loaded(case, kind, tmp_path):
    model = compiled(kind, case.make(weight_decay=0.5))
    model.optimizer.exclude_from_weight_decay(var_list=[model.weights[2]])
    train(model)
    assert decayed(model) == [True, True, False, True]
    loaded = save_and_load(model, tmp_path)
    assert_go_on_alike(model, loaded)
    # Save and load the loaded model again.
    again = save_and_load(loaded, tmp_path)
    assert_go_on_alike(loaded, again)


def decayed_alone(model):
    """Return, for each weight, whether a step without gradients moves it."""
    before = model.get_weights()
    zeros = [tf.zeros(weight.shape) for weight in before]
    model.optimizer.apply(zeros, model.trainable_variables)
    return [
        not np.array_equal(a, b)
        for a, b in zip(model.get_weights(), before, strict=True)
    ]


def shift(model):
    """Make biases differ from 0, so that decay moves them."""
    for weight in model.weights:
        weight.assign(weight + 1.0)


def exclude(optimizer, model, how):
    """Exclude weights; return which of the four are still decayed."""
    if how == "variables":
        optimizer.exclude_from_weight_decay([model.weights[2]])
        return [True, True, False, True]
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return [True, False, True, False]


INNER = {
    "keras": lambda: keras.optimizers.SGD(0.1, weight_decay=0.5),
    "ours": lambda: tfo.AdamOffload(0.1, weight_decay=0.5),
}
HOW = ["variables", "names"]
OF_LOCO = [*itertools.product(INNER, ["sequential", "equal names"], HOW)]
# The other cases cover each pair of values.
LONG_OF_LOCO = [
    *[("keras", "sequential", "names"), ("keras", "equal names", HOW[0])],
    *[("ours", "sequential", HOW[0]), ("ours", "equal names", "names")],
]


@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
@pytest.mark.parametrize(
    ("wrap", "inner", "kind", "how"),
    cases.with_long(
        [
            *((tfo.SparseLoCo, *each) for each in OF_LOCO),
            *((tfo.ShardedState, "keras", "sequential", how) for how in HOW),
        ],
        [(tfo.SparseLoCo, *each) for each in LONG_OF_LOCO],
    ),
)
def test_inner_optimizers_exclude_the_same_when_loaded(
    wrap, inner, kind, how, tmp_path
):
    model = make_model(kind)
    shift(model)
    optimizer = wrap(INNER[inner]())
    expected = exclude(optimizer, model, how)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    loaded = save_and_load(model, tmp_path)
    copy = make_model(kind)
    copy.set_weights(model.get_weights())
    copy.compile(wrap.from_config(optimizer.get_config()), "mse")
    for each in (model, loaded, copy):
        assert decayed_alone(each) == expected


@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wrap", [tfo.SparseLoCo, tfo.ShardedState])
def test_wrapper_adds_exclusions_to_those_of_its_inner_optimizer(wrap, how):
    inner, model = INNER["keras"](), make_model("sequential")
    shift(model)
    _, *others = exclude(inner, model, how)
    optimizer = wrap(inner)
    optimizer.exclude_from_weight_decay([model.weights[0]])
    model.compile(optimizer, "mse")
    assert decayed_alone(model) == [False, *others]


@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrap", [tfo.SparseLoCo, tfo.ShardedState])
def test_config_of_a_wrapper_excludes_names_in_another_model(wrap, inner):
    """The inner optimizer's config does not have the wrapper's exclusions."""
    optimizer = wrap(INNER[inner]())
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(make_model("sequential").trainable_variables)
    model = keras.Sequential([keras.Input((3,)), dense()])
    shift(model)
    model.compile(wrap.from_config(optimizer.get_config()), "mse")
    assert decayed_alone(model) == [True, False]


@cases.needs_groups
@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("inner", INNER)
def test_wrapper_adds_exclusions_to_those_of_groups_inside(inner, how):
    group, model = INNER[inner](), make_model("sequential")
    shift(model)
    _, *others = exclude(group, model, how)
    groups = keras.optimizers.OptimizerMap(group)
    optimizer = tfo.SparseLoCo(keras.optimizers.MultiOptimizer(groups))
    optimizer.exclude_from_weight_decay([model.weights[0]])
    model.compile(optimizer, "mse")
    assert decayed_alone(model) == [False, *others]


@cases.needs_groups
@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
def test_groups_inside_exclude_variables():
    groups = keras.optimizers.OptimizerMap(
        INNER["keras"](), {".*/kernel": INNER["ours"]()}
    )
    optimizer = tfo.SparseLoCo(keras.optimizers.MultiOptimizer(groups))
    model = make_model("sequential")
    shift(model)
    optimizer.exclude_from_weight_decay(model.weights[:2])
    model.compile(optimizer, "mse")
    assert decayed_alone(model) == [False, False, True, True]


@cases.needs_groups
@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("inner", INNER)
def test_optimizers_that_a_callable_chooses_exclude_variables(inner, how):
    """They are not known before the optimizer is built."""
    made = keras.optimizers.MultiOptimizer(lambda _: INNER[inner]())
    optimizer = tfo.SparseLoCo(made)
    model = make_model("sequential")
    shift(model)
    expected = exclude(optimizer, model, how)
    model.compile(optimizer, "mse")
    assert decayed_alone(model) == expected


@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
@pytest.mark.parametrize("on", ["wrapper", "inner"])
@pytest.mark.parametrize("place", [0, 2], ids=["half", "full"])
@pytest.mark.parametrize("inner", INNER)
def test_inner_optimizer_excludes_the_same_beside_half_precision(
    inner, place, on, tmp_path
):
    """The inner optimizer updates master weights, which have other names."""
    layers = keras.Input((3,)), dense(dtype="bfloat16"), dense()
    model = keras.Sequential(layers)
    shift(model)
    wrapped = INNER[inner]()
    optimizer = tfo.SparseLoCo(wrapped)
    called = optimizer if on == "wrapper" else wrapped
    called.exclude_from_weight_decay([model.weights[place]])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    models = [model]
    if on == "wrapper" or inner == "ours":  # Keras's config has no exclusions.
        models.append(save_and_load(model, tmp_path))
        # A step may make the same call each time it runs.
        called.exclude_from_weight_decay([model.weights[place]])
    for each in models:
        assert decayed_alone(each) == [i != place for i in range(4)]


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_variables_stay_excluded_when_saved_before_they_are_built(
    kind, tmp_path
):
    model = compiled(kind, tfo.Lamb(weight_decay=0.5))
    model.optimizer.exclude_from_weight_decay(var_list=[model.weights[2]])
    assert not model.optimizer.built
    loaded = save_and_load(model, tmp_path)
    assert_go_on_alike(model, loaded)
    assert decayed(loaded) == [True, True, False, True]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("subclassed", r"model\. .* for a model with the.*\.buil.* new opti"),
        pytest.param(
            *("equal names", r"model exactly once.* fits several var.*\.build"),
            marks=pytest.mark.skipif(
                keras.__version__ >= "3.16", reason="loading keeps paths there"
            ),
        ),
    ],
)
def test_ambiguous_variables_are_an_error(kind, message, tmp_path):
    """Their paths alone do not identify the variable."""
    model = compiled(kind, tfo.Lamb())
    model.optimizer.exclude_from_weight_decay(var_list=[model.weights[2]])
    with pytest.raises(ValueError, match=f"must be in the {message}"):
        save_and_load(model, tmp_path)
    model.optimizer.build(model.trainable_variables)
    assert decayed(save_and_load(model, tmp_path)) == [True, True, False, True]


@KINDS
def test_config_excludes_the_same_positions(kind):
    """The model is built again, so its names have higher numbers."""
    model = train(compiled(kind, tfo.AdamOffload()))
    for is_built in (False, True):
        optimizer = tfo.AdamOffload(weight_decay=0.1)
        optimizer.exclude_from_weight_decay(var_list=[model.weights[2]])
        if is_built:
            optimizer.build(model.trainable_variables)
        copy = tfo.AdamOffload.from_config(optimizer.get_config())
        assert copy.get_config() == optimizer.get_config()
        other = make_model(kind) if is_built else model
        copy.build(other.trainable_variables)
        found = [copy._is_decayed(i) for i in range(4)]
        assert found == [True, True, False, True]


def test_config_of_a_model_it_does_not_fit_is_an_error():
    model = compiled("sequential", tfo.Lamb())
    model.optimizer.exclude_from_weight_decay(var_list=[model.weights[2]])
    variables = model.trainable_variables
    unbuilt = model.optimizer.get_config()
    model.optimizer.build(variables)
    others = cases.make_variables()
    for config in (unbuilt, model.optimizer.get_config()):
        optimizer = tfo.Lamb.from_config(config)
        with pytest.raises(ValueError, match="a model with.*a new opti"):
            optimizer.build(others)
        assert not optimizer.built
        assert len(optimizer.variables) == 2


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        (tfo.Lamb, ", or pass `exclude_from_weight_decay` to the .*"),
        (lambda: tfo.ShardedState(keras.optimizers.SGD()), ""),
    ],
)
def test_late_exclusion_is_an_error(kind, end):
    """`ShardedState` has no argument for exclusions."""
    optimizer = kind()
    optimizer.build(cases.make_variables())
    with pytest.raises(RuntimeError, match=rf"on a new optimizer{end}\.$"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


def test_late_exclusion_names_those_that_a_loaded_optimizer_keeps():
    model = compiled("sequential", tfo.Lamb())
    model.optimizer.exclude_from_weight_decay(var_list=[model.weights[2]])
    model.optimizer.build(model.trainable_variables)
    loaded = tfo.Lamb.from_config(model.optimizer.get_config())
    loaded.build(model.trainable_variables)
    with pytest.raises(RuntimeError, match="which keeps its exclusions"):
        loaded.exclude_from_weight_decay(var_list=[model.weights[2]])


@pytest.mark.parametrize(
    "pattern",
    cases.with_long(["^sequential", "dense.*/kernel", "^dense"], ["^dense"]),
)
@pytest.mark.parametrize(
    "argument", ["exclude_from_weight_decay", "exclude_from_layer_adaptation"]
)
def test_patterns_mean_the_same_when_loaded(argument, pattern, tmp_path):
    """Patterns may include the model's name, which Keras 3.15 does not load."""
    model = compiled("sequential", tfo.LANS(**{argument: [pattern]}))
    loaded = save_and_load(train(model), tmp_path)
    optimizers = [model.optimizer, loaded.optimizer]
    for index, variable in enumerate(model.weights):
        is_excluded = pattern[-6:] != "kernel" or variable.name == "kernel"
        assert [not o._is_adapted(index) for o in optimizers] == [
            is_excluded
        ] * 2
    assert_go_on_alike(model, loaded)


def test_patterns_may_be_replaced_in_a_config():
    model = compiled("sequential", tfo.Lamb(exclude_from_weight_decay=["b"]))
    train(model)
    config = model.optimizer.get_config()
    optimizer = tfo.Lamb(**config | {"exclude_from_weight_decay": ["kernel"]})
    optimizer.build(model.trainable_variables)
    found = [optimizer._is_decayed(i) for i in range(4)]
    assert found == [False, True, False, True]


def test_patterns_may_begin_with_a_layer_of_a_sequential_model():
    """The example in the documentation does so."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Embedding(3, 2, name="embedding"),
            keras.layers.Dense(1, name="not_embedding"),
        ]
    )
    optimizer = tfo.Lamb(exclude_from_weight_decay=[r"^embedding/"])
    optimizer.build(model.trainable_variables)
    found = [optimizer._is_decayed(i) for i in range(3)]
    assert found == [False, True, True]


def test_pattern_may_begin_with_a_layer_outside_of_models():
    model = keras.Sequential([keras.Input((3,)), dense(name="only")])
    inputs = keras.Input((3,))
    for variables in (
        model.weights,
        keras.Model(inputs, dense(name="only")(inputs)).weights,
        [keras.Variable(np.ones(3), name="kernel")],
    ):
        optimizer = tfo.Lamb(exclude_from_weight_decay=["^only/", "^ker.*/"])
        optimizer.build(variables)
        is_layer = len(variables) == 2
        for i in range(len(variables)):
            assert optimizer._is_decayed(i) is not is_layer


def test_checkpoint_of_an_optimizer_with_exclusions(tmp_path):
    """TensorFlow tracks lists and dicts in an optimizer."""
    model = compiled("sequential", tfo.Lamb(exclude_from_weight_decay=["b"]))
    train(model)
    checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
    checkpoint.save(tmp_path / "checkpoint")
