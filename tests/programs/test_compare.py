"""Failures and other outcomes of random programs."""

import keras
import numpy as np
import pytest

from . import compare, grammar, worker
from .compare import judge

RULE = "`x` must be 1. Received: x=2. Pass 1."


def result(weight=1.0, loss=0.5, error=None, local=None):
    """Return a worker's result for a model with one weight."""
    array = np.array([weight])
    return {
        "seen": {
            "start": [np.array([0.0])],
            "fit 1": {"loss": [loss]},
            "weights 2": [array],
        },
        "replicas": {"0 w": [array if local is None else np.array([local])]},
        "left": {"weights": [array], "steps": [1]},
        "error": error,
    }


def error(text=RULE, kind="ValueError", ours=True):
    return {
        "class": kind,
        "classes": [kind, "Exception"],
        "text": text,
        "traceback": text,
        "ours": ours,
    }


def kind(results, reference=None, nudged=(), **features):
    program = grammar.program_of({"where": "2", **features})
    return judge(program, reference or result(), results, nudged).kind


def test_equal_results_agree():
    rounded = result(weight=1.0 + 1e-6)
    assert kind([rounded, rounded]) == "agreed"


@pytest.mark.parametrize(
    "changed", [{"weight": 1.001}, {"loss": 0.501}, {"loss": np.nan}]
)
def test_other_results_differ(changed):
    other = result(**changed)
    assert kind([other, other]) == "differs"


def test_what_rounding_errors_change_as_much_is_not_compared():
    other = result(weight=1.01)
    both = result(weight=1.01, loss=0.501)
    small, large = result(weight=1.0 + 1e-6), result(weight=0.995)
    assert kind([other, other], nudged=[small, small]) == "differs"
    assert kind([other, other], nudged=[small, large]) == "skipped"
    assert kind([both, both], nudged=[small, large]) == "differs"
    none = result(weight=np.nan)
    assert kind([none, none], nudged=[small, large]) == "differs"
    assert kind([none, none], nudged=[small, none]) == "skipped"
    del none["seen"]["weights 2"]
    assert kind([none, none], nudged=[none, large]) == "differs"
    assert kind([other, other], nudged=[none]) == "differs"


@pytest.mark.parametrize(
    ("scale", "scales", "weight", "expected"),
    [
        ("ordinary", [2.0**14], 1.0, "skipped"),
        ("ordinary", [], 1.0, "differs"),
        ("huge", [2.0**14], 1.0, "differs"),
        ("huge", [2.0**14], 1e20, "skipped"),
    ],
)
def test_overflow_in_one_place_only_is_not_compared(
    scale, scales, weight, expected
):
    other, reference = result(weight=2.0), result(weight)
    other["left"]["scales"], reference["left"]["scales"] = scales, [2.0**15]
    features = {"precision": "mixed_float16", "scale": scale}
    assert kind([other, other], reference, **features) == expected
    assert kind([other, other], reference) == "differs"


def test_worker_reports_steps_and_loss_scales():
    layers = [keras.Input((1,)), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse"
    )
    model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=1, verbose=0)
    left = worker.state_of({"model": model})
    assert (left["steps"], left["scales"]) == ([2], [2.0**15])


def test_missing_result_differs():
    other = result()
    del other["seen"]["fit 1"]
    assert kind([other, other]) == "differs"


def test_known_reason_excludes_its_results():
    other = result(weight=2.0)
    assert kind([other, other], optimizer="DGC") == "agreed"
    assert kind([result(), other], optimizer="DGC") == "replicas differ"
    norm = ["BatchNormalization"]
    assert kind([other, other], layers=norm) == "agreed"
    assert kind([result(), other], layers=norm) == "replicas differ"


def test_replicas_are_equal_to_the_bit():
    parted = result(local=1.0 + 1e-12)
    assert kind([result(), parted]) == "replicas differ"


def test_numbers_that_are_none_are_equal_in_any_precision():
    """NumPy has no bfloat16, so NaN needs a special comparison."""
    bfloat16 = np.array(keras.ops.zeros(1, "bfloat16")).dtype
    none = [np.full(2, np.nan, dtype) for dtype in ("float32", bfloat16)]
    assert compare._same(none, [array.copy() for array in none])
    assert not compare._same(none, [np.zeros_like(array) for array in none])


def test_layers_have_the_precision_that_a_script_sets():
    worker.reset_process()
    keras.config.set_floatx("float64")
    try:
        assert keras.layers.Dense(1).dtype_policy.name == "float64"
    finally:
        worker.reset_process()


def test_state_differs_if_never_averaged():
    other, features = result(weight=2.0), {"layers": ["Centre"]}
    assert kind([result(), other], **features) == "replicas differ"
    features["actions"] = ["train_on_batch"]
    assert kind([result(), other], **features) == "agreed"


def test_warning_that_names_a_variable_explains_a_difference():
    parted = result(local=2.0)
    parted["warnings"] = [
        "Variables to which replicas assign different values must be "
        "floating-point. Received: `w` of dtype int32."
    ]
    assert kind([result(), parted]) == "agreed"
    parted["warnings"][0] = parted["warnings"][0].replace("`w`", "`v`")
    assert kind([result(), parted]) == "replicas differ"


def test_variable_in_a_history_is_no_number():
    history = {"fit 1": {"loss": [0.5], "total": [keras.Variable(1.0)]}}
    found = worker.in_plain_values(history)
    assert found == {"fit 1": {"loss": [0.5], "total": ["a Variable"]}}
    other, reference = result(), result()
    other["seen"] |= found
    reference["seen"]["fit 1"]["total"] = [1.0]
    assert kind([other, other], reference) == "differs"


def test_names_of_variables_may_differ():
    """Layers have other names on a worker that has created another model."""
    other = result()
    other["replicas"] = {"0 w_1": other["replicas"]["0 w"]}
    assert kind([result(), other]) == "agreed"
    del other["replicas"]["0 w_1"]
    assert kind([result(), other]) == "replicas differ"


def test_worker_without_an_answer_fails():
    assert kind([result(), None]) == "hang or crash"


def test_error_in_one_process_is_no_failure():
    assert kind([], reference=result(error=error())) == "skipped"


def test_error_with_a_rule_counts_as_refused():
    refused = result(weight=0.0, error=error())
    refused["left"]["steps"] = [0]
    del refused["seen"]["weights 2"]
    assert kind([refused, refused]) == "refused"
    assert kind([result(), refused]) == "error on some workers"
    other = refused | {"error": error("`y` must be 2. Received: y=1.")}
    assert kind([refused, other]) == "different errors"
    other["error"] = error(RULE.replace("x=2", "x=3"))
    assert kind([refused, other]) == "refused"


def test_rule_checked_in_a_graph_counts_as_refused():
    rule = "All workers must draw the same. Received: others. Seed it."
    text = f"Graph execution error: tf_optimizers\n assertion failed: [{rule}]"
    refused = result(error=error(text, "InvalidArgumentError", ours=False))
    assert kind([refused, refused]) == "refused"
    parted = result(weight=2.0, error=refused["error"])
    assert kind([refused, parted]) == "changed before the error"
    for each, used in (refused, 1), (parted, 2):
        each["left"]["weights"] = [np.array([used], "int32")]
    assert kind([refused, parted]) == "refused"


@pytest.mark.parametrize(
    "other",
    [
        {"text": "Cannot convert `input_tensor` to a `PerReplica` object"},
        {"text": RULE, "ours": False},
        {"kind": "InvalidArgumentError", "ours": False},
    ],
)
def test_other_errors_are_failures(other):
    failed = result(error=error(**other))
    assert kind([failed, failed]) == "error"


def test_missing_worker_does_not_count_as_refused():
    text = "All workers must reach it. Received nothing from worker 1."
    refused = result(error=error(text))
    assert kind([refused, refused]) == "hang or crash"


def test_error_must_leave_weights_alone():
    changed = result(weight=1.0, error=error())
    changed["left"]["steps"] = [0]
    del changed["seen"]["weights 2"]
    assert kind([changed, changed]) == "changed before the error"
