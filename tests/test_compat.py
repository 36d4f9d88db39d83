"""Names that _compat.py borrows from TensorFlow and Keras still exist.

A failure here names what a new version took away.
"""

import inspect
import re

import keras
import pytest
import tensorflow as tf

from tf_optimizers import _compat

METHODS = [
    "_backend_apply_gradients",
    "_get_variable_index",
    "_overwrite_model_variables_with_average_value",
    "_overwrite_variable_with_gradient",
    "_var_key",
]
ATTRIBUTES = [
    "_accumulated_gradients",
    "_distribution_strategy",
    "_iterations",
    "_model_variables_moving_average",
    "_trainable_variables",
]


@pytest.mark.parametrize("name", METHODS)
def test_keras_optimizer_has_private_method(name):
    assert hasattr(keras.optimizers.Optimizer, name), (
        f"keras.optimizers.Optimizer has no {name} any more: see _compat.py "
        "for what it was needed for."
    )


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_keras_optimizer_has_private_attribute(name):
    optimizer = keras.optimizers.SGD(
        use_ema=True, gradient_accumulation_steps=2
    )
    optimizer.build([keras.Variable([1.0])])
    assert hasattr(optimizer, name), (
        f"keras.optimizers.Optimizer has no {name} any more: see _compat.py "
        "for what it was needed for."
    )


def test_keras_still_calls_the_hooks():
    """A hook that nothing calls would leave Keras's own order in place."""
    source = inspect.getsource(keras.optimizers.Optimizer.apply)
    assert "self._backend_apply_gradients(" in source
    source = inspect.getsource(
        keras.optimizers.Optimizer.finalize_variable_values
    )
    assert "self._overwrite_model_variables_with_average_value(" in source


@pytest.mark.parametrize(
    "name", ["interim.maybe_merge_call", "strategy_supports_no_merge_call"]
)
def test_tensorflow_has_private_function(name):
    value = tf.__internal__.distribute
    for part in name.split("."):
        value = getattr(value, part, None)
    assert callable(value), f"tf.__internal__.distribute.{name} is gone."


@pytest.mark.parametrize("xla", [True, None])
def test_xla_is_noticed_while_tracing(xla):
    seen = []

    def note(x):
        seen.append(_compat.in_xla())
        return x

    function = tf.function(
        lambda x: tf.cond(note(x) > 0, lambda: note(x), lambda: -x),
        jit_compile=xla,
    )
    function.get_concrete_function(tf.constant(1.0))
    assert seen == [bool(xla)] * 2, "TensorFlow marks XLA otherwise now."


def test_plain_variable_is_not_captured(mirrored):
    with mirrored.scope():
        plain = _compat.plain_variable(lambda: tf.ones([2]))
        assert len(mirrored.experimental_local_results(tf.Variable(1.0))) == 2
    assert mirrored.experimental_local_results(plain) == (plain,)


def test_every_private_name_of_compat_is_listed_here():
    source = inspect.getsource(_compat)
    used = set(re.findall(r"(?:self\.|def )(_[a-z]\w+)", source))
    assert used == set(METHODS + ATTRIBUTES)


def test_private_names_are_used_in_compat_only():
    """Keras's and TensorFlow's; our own underscores are ours."""
    private = re.compile(
        "|".join(
            [
                *METHODS,
                *ATTRIBUTES,
                "__internal__",
                r"keras\.src",
                r"tensorflow\.python",
            ]
        )
    )
    folder = inspect.getsourcefile(_compat).rpartition("/")[0]
    import pathlib

    for path in pathlib.Path(folder).rglob("*.py"):
        if path.name != "_compat.py":
            assert not private.search(path.read_text()), path
