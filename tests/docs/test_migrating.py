"""The tables of docs/migrating.md are complete, and each replacement runs."""

import ast
import inspect
import pathlib
import re

import cases
import keras
import pytest
from keras.optimizers import schedules
from scripts import moved

import tf_optimizers as tfo

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"
TEXT = PAGE.read_text()

# The names in each document: parameters, and methods with theirs.
DOCUMENTED = {
    "paddle.optimizer.Lamb": """
        learning_rate lamb_weight_decay beta1 beta2 epsilon parameters grad_clip
        exclude_from_weight_decay_fn always_adapt multi_precision name
        ClipGradByGlobalNorm ClipGradByNorm ClipGradByValue
        step clear_grad set_lr get_lr
        minimize loss startup_program parameters no_grad_set
    """,
    # From the English and the Chinese page.
    "paddle.fluid.optimizer.DGCMomentumOptimizer": """
        learning_rate momentum rampup_begin_step rampup_step sparsity
        parameter_list use_nesterov local_grad_clip_norm num_trainers
        regularization L1Decay L2Decay grad_clip GradientClipByNorm name
        clear_gradients current_step_lr set_dict state_dict
        minimize backward loss startup_program parameter_list no_grad_set
        callbacks apply_gradients apply_optimize params_grads
    """,
    "mindspore.nn.AdamOffload": """
        params lr weight_decay order_params learning_rate Iterable beta1 beta2
        eps use_locking use_nesterov loss_scale gradients Tensor[bool]
    """,
    # From the base class, the names that the source of LANS uses.
    "mxnet.optimizer.LANS": """
        learning_rate beta1 beta2 epsilon lower_bound upper_bound aggregate_num
        use_fused_step lr_scheduler rescale_grad clip_gradient wd
        multi_precision set_lr_mult set_wd_mult register
        create_state index weight
        step fused_step update_multi_precision indices weights grads states
    """,
    # With the methods of `tf.keras.optimizers.legacy.Optimizer`.
    "tfa.optimizers.LAMB": """
        learning_rate beta_1 beta_2 epsilon weight_decay weight_decay_rate
        exclude_from_weight_decay exclude_from_layer_adaptation name
        clipnorm clipvalue global_clipnorm lr decay
        add_slot add_weight apply_gradients from_config get_config
        get_gradients get_slot get_slot_names get_updates get_weights minimize
        set_weights variables weights iterations
    """,
    "keras.optimizers.Lamb": " ".join(
        name
        for name in inspect.signature(keras.optimizers.Lamb).parameters
        if name != "kwargs"
    )
    + " exclude_from_weight_decay get_config from_config"
    + " save_own_variables load_own_variables",
}

# Conditions that hold after a replacement that is not a constructor, but not
# before. `result` is its value; `start`, the weights before it.
CHANGED = "[(a != b.numpy()).any() for a, b in zip(start, variables)]"
STEPPED = f"{CHANGED} == [True] * 4"
FIRST_STEPPED = f"{CHANGED} == [True, True, False, False]"


def grouped(*rates):
    found = (
        "sorted(round(float(o.learning_rate), 6) for o in result.optimizers)"
    )
    return (
        f"result.apply(gradients(), variables) is None and {STEPPED}"
        # Each optimizer has the state of its own variables.
        " and all(len(o.variables) > 2 for o in result.optimizers)"
        f" and {found} == {sorted(rates)}"
    )


EFFECTS = {
    "optimizer.build(variables)": "optimizer.built",
    "optimizer.apply(gradients(), variables)": STEPPED,
    "optimizer.apply(gradients(variables[:2]), variables[:2])": FIRST_STEPPED,
    "optimizer.apply_gradients(zip(gradients(), variables))": STEPPED,
    "gradients()": "[g.shape for g in result] == [v.shape for v in variables]",
    "gradients(variables[:2])": "len(result) == 2",
    'model.get_layer("first").trainable = False': (
        "model.trainable_variables == model.get_layer('last').variables"
    ),
    "optimizer.learning_rate = 0.5": "float(optimizer.learning_rate) == 0.5",
    "float(optimizer.learning_rate)": "result == np.float32(1e-3)",
    "int(optimizer.iterations)": "result == 0",
    "optimizer.variables": "result[0] is optimizer.iterations",
    "optimizer.save_own_variables(state := {})": "len(state) == 2",
    "{v.path: v for v in optimizer.variables}": (
        "[path.split('/')[-1] for path in result]"
        " == ['iteration', 'learning_rate']"
    ),
    'optimizer.add_variable((), name="count")': (
        "result.path.endswith('/count')"
    ),
    'optimizer.exclude_from_weight_decay(var_names=["bias"])': (
        "optimizer.get_config()['exclude_from_weight_decay']"
    ),
    'keras.saving.get_registered_object("tf_optimizers>LANS")': (
        "result is tfo.LANS"
    ),
    "keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap("
    'tfo.AdamOffload(), {".*first/.*": tfo.AdamOffload(0.1)}))': (
        grouped(1e-3, 0.1)
    ),
    "keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap("
    'tfo.LANS(0.01), {".*first/.*": tfo.LANS(0.02)}))': (grouped(0.01, 0.02)),
    "optimizer.build(variables); optimizer.save_own_variables(state := {}); "
    "optimizer.load_own_variables(state)": (
        "len(optimizer.variables) == 2 + 2 * 4 and len(state) >= 2 + 2 * 4"
    ),
    "theirs = keras.optimizers.Lamb(); theirs.apply(gradients(), variables); "
    "theirs.save_own_variables(state := {}); optimizer.build(variables); "
    "optimizer.load_own_variables(state)": (
        "int(optimizer.iterations) == 1"
        " and all((a.numpy() == b.numpy()).all()"
        " for a, b in zip(optimizer.variables, theirs.variables, strict=True))"
    ),
    "tfo.Lamb.from_config(tfo.Lamb(beta_1=0.8).get_config())": (
        "result.beta_1 == 0.8"
    ),
    "tfo.Lamb.from_config(keras.optimizers.Lamb(beta_1=0.8).get_config())": (
        "(result.beta_1, result.epsilon) == (0.8, 1e-7)"
    ),
}


def rows():
    """Yield (document, names in the first column, code, reason)."""
    for section in TEXT.split("\n## ")[1:]:
        title, body = section.split("\n", 1)
        for row in moved.rows(body):
            yield title, *row


ROWS = list(rows())
# Each replacement once, from the first row with it.
CODES = {
    code: f"{title.split('.')[0]} {names[-1]}"
    for title, names, code, _ in reversed(ROWS)
    if code
}


def namespace():
    space = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.S).group(1), space)
    space["start"] = [v.numpy() for v in space["variables"]]
    return space


def holds(effect, space):
    try:
        return bool(eval(effect, space))
    except (NameError, TypeError, KeyError, AttributeError):
        return False


@pytest.mark.parametrize("document", DOCUMENTED)
def test_every_documented_name_has_a_row(document):
    names = {
        n for title, found, _, _ in ROWS if title == document for n in found
    }
    assert names == set(DOCUMENTED[document].split())


def test_every_table_is_of_a_document():
    assert {title for title, *_ in ROWS} == set(DOCUMENTED)


def test_a_row_has_code_or_says_why_none_is_needed():
    for _, names, code, reason in ROWS:
        assert bool(code) != reason.startswith("none needed: "), names


def constructors(tree):
    """Return the outermost calls of our optimizers."""
    body = tree.body[-1]
    if len(tree.body) > 1 or not isinstance(body, ast.Expr):
        return []
    value = body.value
    calls = value.elts if isinstance(value, ast.List) else [value]
    ours = re.compile(r"tfo\.(Lamb|LANS|AdamOffload|DGCMomentum)\(")
    return [c for c in calls if ours.match(ast.unparse(c))]


def plain(value):
    """Return an argument as `get_config` does."""
    if isinstance(value, keras.regularizers.Regularizer):
        return keras.regularizers.serialize(value)
    if isinstance(value, schedules.LearningRateSchedule):
        return schedules.serialize(value)
    if isinstance(value, tuple):
        return list(value)
    return pytest.approx(value) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            code,
            id=name,
            marks=[cases.needs_groups] * ("MultiOptimizer" in code),
        )
        for code, name in CODES.items()
    ],
)
def test_replacement_has_the_documented_effect(code):
    space = namespace()
    calls = constructors(ast.parse(code))
    if not calls:
        assert not holds(EFFECTS[code], space)
        space["result"] = moved.run(code, space)
        assert holds(EFFECTS[code], space)
    for call in calls:
        config = eval(ast.unparse(call), space).get_config()
        for argument in call.keywords:
            value = eval(ast.unparse(argument.value), space)
            assert config[argument.arg] == plain(value), argument.arg


def test_keras_lamb_has_no_method_that_ours_lacks():
    assert set(dir(keras.optimizers.Lamb())) <= set(dir(tfo.Lamb()))
