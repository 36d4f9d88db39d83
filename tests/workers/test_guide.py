"""Keras's guide to several workers, and the behavior that it relies on."""

import itertools
import operator

import cases
import keras
import numpy as np
import pytest
import real_workers
import state
import tensorflow as tf
from arrays import assert_close
from scripts import dtypes, moved
from scripts.guide import (
    LOOPED,
    ROWS,
    looked_between,
    trained_on_batches,
    trained_positions,
)
from versions import KERAS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the reports of two workers."""
    folder = tmp_path_factory.mktemp("guide")
    parts = ["guide", "uncompiled", "another_cluster"]
    parts += ["versions", "shifted"]
    parts += ["hashes", "order", "seeds", "rows", "read", "assigned", "parted"]
    parts += ["copied", "first_replicas", "made_outside"]
    parts += ["compared", "by_rows", "looked", "batches"]
    parts += ["numbers", "variables", "models", "quantized", "empty"]
    parts += ["moved"]
    return real_workers.results("guide", folder, 2, *parts)


ALL = pytest.param("all", marks=pytest.mark.long)
EAGERLY = pytest.param("long_results", marks=pytest.mark.long)


@pytest.fixture(scope="module")
def long_results(tmp_path_factory):
    """Return the reports of two workers on slower parts."""
    folder = tmp_path_factory.mktemp("long")
    parts = ["kinds", "outside", "looped", "every looked", "generated"]
    parts += ["files", "counts", "permuted"]
    parts += ["every models", "every empty", "every batches"]
    results = real_workers.results("guide", folder, 2, *parts)
    return [
        {part.removeprefix("every "): found for part, found in result.items()}
        for result in results
    ]


@pytest.fixture(scope="module", params=["some", ALL])
def looked(request):
    """Return reports on data that one worker reads; some datasets or all."""
    is_all = request.param == "all"
    found = request.getfixturevalue("long_results" if is_all else "results")
    return [result["looked"] for result in found]


THREE = pytest.param(3, marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[2, THREE])
def order(request, tmp_path_factory):
    """Return the rows of shared data, by worker."""
    if request.param == 2:
        results = request.getfixturevalue("results")
    else:
        folder = tmp_path_factory.mktemp("order")
        results = real_workers.results("guide", folder, request.param, "order")
    return [result["order"] for result in results]


def test_guide_runs(results):
    """One strategy, then another that continues from its checkpoint."""
    first, second = (result["guide"] for result in results)
    assert first == second
    runs = first["runs"]
    assert runs[0]["loss"][1] < runs[0]["loss"][0]
    assert [run["start"] for run in runs] == [0, 20]
    assert runs[1]["loss"][0] < runs[0]["loss"][0]


def test_metrics_of_a_model_that_is_not_compiled_are_read(results):
    assert [result["uncompiled"] for result in results] == [1.5, 1.5]


def test_metrics_are_read_together_and_after_every_step(results):
    """Steps may have no collective; metrics may be reset."""
    rows = ROWS.reshape(8, 3)
    sums = [*rows[:4].sum(1).cumsum(), *rows[4:].sum(1).cumsum()]
    numbers = [3 * (1 + i % 4) for i in range(8)]
    expected = [[s, s / n] for s, n in zip(sums, numbers, strict=True)]
    for result in results:
        np.testing.assert_allclose(result["read"]["found"], expected, 1e-6)
        assert result["read"]["asked"] == 8
        assert result["read"]["copied"] == 12
        assert result["read"]["restored"] == 2


def test_assigned_state_is_common_when_read(results):
    """One worker may save state alone if it is already common."""
    first, second = (result["assigned"] for result in results)
    assert first == second
    assert first["asked"] == ["the end of an epoch", "a save of the model"]
    model = state.center()
    state.fit(model, epochs=1)
    loss, _, center = first["measured"]
    assert center == pytest.approx(state.center_of(model), rel=1e-5)
    data = state.X, state.Y
    assert loss == pytest.approx(model.evaluate(*data, verbose=0), rel=1e-5)
    model.train_on_batch(*data)
    for found in first["saved"]:
        assert found == pytest.approx(state.center_of(model), rel=1e-5)


def test_state_of_first_replicas_is_common(results):
    """TensorFlow copies it only within a worker."""
    first, second = (result["first_replicas"] for result in results)
    assert first == second
    model, center = state.center(), tf.Variable(np.zeros(2, "float32"))
    model.compile(model.optimizer, state.pull(center))
    state.fit(model, epochs=1)
    expected = [*state.center_of(model), *center.numpy()]
    assert first == pytest.approx(expected, rel=1e-5)


def test_state_made_outside_of_the_scope_is_common(results):
    """Each worker has a variable of its own, which a loss function assigns."""
    first, second = (result["made_outside"] for result in results)
    assert first == second
    center = tf.Variable(np.zeros(2, "float32"))
    model = state.compiled(keras.layers.Dense(2))
    model.compile(model.optimizer, state.pull(center))
    state.fit(model)
    assert first == pytest.approx(center.numpy().tolist(), rel=1e-5)


def test_values_of_a_worker_are_common_in_the_model_set_to_them(results):
    first, second = (result["copied"] for result in results)
    assert first["own"] != second["own"]
    assert first["found"] == second["found"]
    other, model = first["found"]
    assert other == pytest.approx(model, rel=1e-6)


def test_weights_that_one_worker_has_set_are_an_error_in_predict(results):
    for result in results:
        message = result["copied"]["error"]
        assert "must agree on the weights before a prediction" in message
        assert "/kernel`" in message
        assert "synchronize" not in message


def test_weights_copied_within_a_round_are_an_error_in_predict(results):
    for result in results:
        message = result["copied"]["within"]
        assert "must agree on the weights before a prediction" in message
        assert "call `optimizer.synchronize()` on every worker" in message


def test_another_optimizer_within_a_round_is_an_error(results):
    for result in results:
        message = result["copied"]["taken"]
        assert "must agree on the optimizer's first step" in message
        assert "call `synchronize` of the optimizer" in message


def test_weights_assigned_by_steps_are_an_error(results):
    for result in results:
        message = result["parted"]
        assert "must agree on the weights" in message
        assert "A step, or a layer, assigns to `" in message
        assert "/bias` without an optimizer" in message


def test_another_cluster_is_rejected(results):
    for result in results:
        assert "must have the same cluster" in result["another_cluster"]


def test_every_row_is_seen_once_an_epoch(order):
    for kind, first in order[0]["epochs"].items():
        for epoch in range(len(first)):
            rows = [result["epochs"][kind][epoch] for result in order]
            assert sorted(itertools.chain(*rows)) == [*range(24)], kind


def test_order_changes_from_epoch_to_epoch(order):
    """Keras's shuffling by a seed of TensorFlow is an exception."""
    for kind, epochs in order[0]["epochs"].items():
        different = 1 if kind == "seeded" else len(epochs)
        assert len({tuple(epoch) for epoch in epochs}) == different, kind


def test_each_file_has_its_own_order(order):
    """A function creates and shuffles a dataset per file."""
    for parts in zip(*(o["epochs"]["flat_map"] for o in order), strict=True):
        size = 6 // len(order)  # In batches of 6 rows.
        rows = [
            row
            for i in range(0, len(parts[0]), size)
            for part in parts
            for row in part[i : i + size]
        ]
        assert [row // 8 for row in rows] == 8 * [0] + 8 * [1] + 8 * [2]
        places = np.reshape(rows, (3, 8)) % 8
        assert len({tuple(file) for file in places}) == 3


def test_generators_of_the_host_draw_the_same(order):
    for result in order:
        assert result["drawn"] == order[0]["drawn"]


def test_different_seeds_are_an_error_that_names_them(results):
    for result in results:
        messages = result["seeds"]
        assert messages.pop("not shared") is None
        if KERAS >= (3, 16):  # Keras shuffles arrays without a seed.
            assert messages.pop("arrays") is None
        else:
            assert "[[1, 0]] on worker 1" in messages["arrays"]
        for message in messages.values():
            assert "must shuffle shared data in the same way" in message
        expected = "the seeds [[3, 0]] on worker 0, [[3, 1]] on worker 1"
        assert expected in messages["shuffle"]
        remedy = "shuffle on the same line on all workers"
        assert remedy in messages["branches"]
        assert "`keras.utils.set_random_seed` before" in messages["shuffle"]


@pytest.mark.long
def test_different_numbers_of_batches_are_an_error_that_names_them(
    long_results,
):
    for result in long_results:
        messages = result["counts"]
        assert "3 on worker 0, 5 on worker 1" in messages["known"]
        expected = "3 on worker 0, infinitely many on worker 1"
        assert expected in messages["infinite"]


@pytest.mark.long
def test_unknown_numbers_of_batches_end_together(long_results):
    """Workers without rows wait for the others."""
    first, second = (result["counts"] for result in long_results)
    assert [first["epochs"], second["epochs"]] == [
        [[*range(6), 4, 4]] * 2,  # Padding repeats row 4.
        [[*range(10)]] * 2,
    ]
    assert first["evaluate"] == second["evaluate"] > 0
    assert first["predict"] == second["predict"] == 16
    # No prediction for the missing batch at the end.
    assert first["updates"] == second["updates"] == 2 * 5


def test_python_converts_variables_as_without_a_strategy(results):
    """Variables that replicas add to are summed, as by `numpy`."""
    for result in results:
        found = result["numbers"]
        assert found["sgd"] == pytest.approx([0, 0.001])
        rates = [0.1 * (1 + np.cos(np.pi * i / 6)) / 2 for i in (1, 2)]
        assert found["adam"] == pytest.approx([0, rates[0], 1, rates[1]])
        assert found["plain"] == [2.5, 2, 2.5]
        assert found["own"] == [7.0, 7]
        assert found["copied"] == 3.5
        assert found["several"] == "TypeError"


@pytest.mark.parametrize("dtype", dtypes.DTYPES)
def test_variable_of_any_dtype_begins_with_the_value_of_the_first(
    results, dtype
):
    """Compare bits, since other dtypes cannot represent all values."""
    value, other = (
        dtypes.bits_of(dtypes.value_of(dtype, worker)) for worker in (0, 1)
    )
    assert value != other
    empty = [] if dtype == "string" else ""
    for result in results:
        assert result["variables"][dtype] == [*(3 * [value]), empty]


@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
@pytest.mark.parametrize(
    "name", cases.with_long(dtypes.EMPTY, {*dtypes.EMPTY} - {*dtypes.FEW_EMPTY})
)
def test_model_trains_with_an_empty_weight(request, name):
    """TensorFlow crashes if workers exchange empty tensors."""
    is_long = name not in dtypes.FEW_EMPTY
    found = request.getfixturevalue("long_results" if is_long else "results")
    (kernel, start), other = (result["empty"][name] for result in found)
    assert other == [kernel, start]
    assert cases.error([kernel], [np.array(start)]) > 1e-2
    if name not in dtypes.COMPRESSING:
        expected, begun = dtypes.grouped(dtypes.EMPTY[name])
        assert begun == start
        np.testing.assert_allclose(kernel, expected, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
@pytest.mark.parametrize(
    "name",
    cases.with_long(dtypes.ALL, {*dtypes.ALL} - {*dtypes.FEW}),
)
def test_model_of_bfloat16_trains_as_in_one_process(request, name):
    """Weights are bitwise equal, except embeddings, summed in another order."""
    is_long = name not in dtypes.FEW
    found = request.getfixturevalue("long_results" if is_long else "results")
    (weights, start), other = (result["models"][name] for result in found)
    assert other == [weights, start]
    assert not any(map(operator.eq, weights, start))
    if name in dtypes.COMPRESSING:
        return
    expected, begun = dtypes.trained(dtypes.OPTIMIZERS[name])
    assert begun == start
    if name in dtypes.ROUNDING:
        ours, alone = floats_of(weights.pop(0)), floats_of(expected.pop(0))
        moved = np.abs(alone - floats_of(start[0])).max()
        np.testing.assert_allclose(ours, alone, rtol=0, atol=moved / 50)
    assert weights == expected


def floats_of(bits):
    """Return bfloat16 numbers from bits."""
    words = np.frombuffer(bytes.fromhex(bits), "uint16").astype("uint32")
    return (words << 16).view("float32")


def test_quantized_model_trains_other_weights(results):
    """As in QLoRA: an int8 kernel with float32 adapters."""
    first, second = (result["quantized"] for result in results)
    assert first["weights"] == second["weights"]
    expected = dtypes.adapted()
    assert expected["dtypes"] == first["dtypes"] == ["float32", "int8"]
    assert first["loss"] == pytest.approx(expected["loss"], 1e-6)
    assert_close(first["weights"], expected["weights"], atol=1e-5)


@pytest.mark.long
def test_files_are_not_written_to(long_results):
    """TensorFlow may use arrays without a copy, and compute in place."""
    assert [result["files"] for result in long_results] == [True, True]


@pytest.mark.long
def test_data_may_have_any_dtype(long_results):
    for result in long_results:
        for losses in result["kinds"].values():
            assert losses == pytest.approx(result["kinds"]["float32"], 1e-6)


def test_versions_that_differ_are_named(results):
    for result in results:
        own, message = result["versions"]
        assert f"numpy='{own}' on worker 0, numpy='0.1' on worker" in message
        assert "Install the same versions" in message


def test_first_worker_warns_of_texts_that_are_hashed_differently(results):
    first, second = (result["hashes"] for result in results)
    assert second == [[], []]
    no_warnings, (message, file) = first
    assert no_warnings == []
    assert "PYTHONHASHSEED" in message
    assert file == "guide"


def test_weights_are_compared_without_names(results):
    """Only different weights are an error, which shows this worker's name."""
    names = set()
    for result in results:
        path, message = result["shifted"]
        assert f"Received: {path}=['" in message
        names.add(path)
    assert len(names) == 2


def test_rows_that_all_replicas_have_move_as_in_one_process(results):
    first, second = (result["rows"] for result in results)
    assert first == second
    # A tenth of the effect of duplicates on a step.
    assert_close(first, trained_positions(), atol=1e-5)


@pytest.mark.long
def test_compile_outside_of_the_scope_is_as_inside(long_results):
    """Compare the step count, the rate, and metrics over all rows."""
    first, second = (result["outside"] for result in long_results)
    for name in {case.split()[0] for case in first}:
        assert first[f"{name} False"] == first[f"{name} True"], name
        assert second[f"{name} False"] == first[f"{name} True"], name


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPED)
def test_optimizer_of_a_loop_may_be_made_and_built_anywhere(long_results, name):
    first, second = (result["looped"][name] for result in long_results)
    # Accumulated gradients differ between replicas.
    assert first == 5 * first[:1] and second == 5 * second[:1]
    kernel_bias_and_steps = slice(3)
    assert first[0][kernel_bias_and_steps] == second[0][kernel_bias_and_steps]


def test_different_rows_are_an_error_on_all_workers(results):
    for result in results:
        messages = result["compared"]["differ"]
        for kind, message in messages.items():
            assert "All workers must draw the same batches" in message, kind
        for workers in (1, 2):
            message = messages[f"callback, {workers}"]
            assert "one worker alone may have drawn a batch" in message
            assert "draw them from a separate generator" in message


def test_early_reads_do_not_change_the_rows(looked):
    """All workers see the order of one process, without missing rows."""
    first, second = (result["rows"] for result in looked)
    for name in first:
        for own, other in zip(first[name], second[name], strict=True):
            assert sorted(own + other) == [*range(24)], name
        if not name.startswith(("cached", "later")):
            assert len({tuple(rows) for rows in first[name]}) == 3, name


def test_shuffles_by_a_seed_are_those_of_one_process(results):
    """This includes data that the first worker has read before."""
    halves = [result["looked"]["seeded"] for result in results]
    orders = looked_between(looks=True)
    for own, other, order in zip(*halves, orders, strict=True):
        for i in range(4):
            both = own[3 * i : 3 * i + 3] + other[3 * i : 3 * i + 3]
            assert both == order[6 * i : 6 * i + 6]


@pytest.mark.long
def test_generators_of_the_host_are_aligned_before_an_epoch(long_results):
    """They are aligned before NumPy draws at the epoch's end."""
    permuted = [result["permuted"] for result in long_results]
    (first, own), (second, other) = permuted
    assert first is None and second is None
    for rows, others in zip(own, other, strict=True):
        assert sorted(rows + others) == [*range(24)]


@pytest.mark.long
def test_generator_continues_the_same_on_all_workers(long_results):
    """This includes later calls of `fit`, and validations by steps."""
    first, second = (result["generated"] for result in long_results)
    assert first == second
    losses = [mean_loss([*range(8 * i, 8 * i + 8)]) for i in range(2)]
    np.testing.assert_allclose(first[:2], losses, rtol=1e-5)
    np.testing.assert_allclose(first[2], mean_loss([*range(12)]), rtol=1e-5)
    for predictions in (first[5:13], first[18:]):
        np.testing.assert_allclose(np.diff(predictions)[[0, 1, 2, 4, 5, 6]], 1)


def mean_loss(rows):
    """Return the loss of a model that returns its input."""
    rows = np.array(rows, dtype="float64")
    return np.mean((rows**2 - rows) ** 2)


def test_single_batches_are_shared_as_in_one_process(results):
    """Batches of five rows and of one row, on two workers."""
    first, second = (dict(result["batches"]) for result in results)
    for own in (first, second):
        del own["apart"], own["forms"]
    assert first == second
    for name, expected in trained_on_batches().items():
        assert np.shape(first[name]) == np.shape(expected)
        np.testing.assert_allclose(first[name], expected, rtol=1e-5)


@pytest.mark.parametrize("source", ["results", EAGERLY])
def test_single_batches_that_differ_are_an_error_before_the_step(
    request, source
):
    """This applies to graphs and eager mode, and to a missing row."""
    for result in request.getfixturevalue(source):
        for *messages, has_moved in result["batches"]["apart"]:
            assert not has_moved
            for message in messages:
                assert "must pass the same rows to `train_on_batch`" in message


@pytest.mark.parametrize("source", ["results", EAGERLY])
def test_batches_of_different_forms_are_an_error_on_every_worker(
    request, source
):
    """One worker may be unable to build the loss, or to trace the step."""
    differ = "Received: batches that differ between workers"
    for worker, result in enumerate(request.getfixturevalue(source)):
        for is_eager, found in enumerate(result["batches"]["forms"]):
            alone = "ValueError" if worker else "an error on some workers only"
            for each in ("labels", "inputs"):
                assert (differ if is_eager else alone) in found[each]
            assert differ in found["weights"]
            assert differ in found["dtype"]
            assert found["same"] is None


def test_augmented_rows_need_not_be_equal(results):
    """Equal labels show that rows are the same, or may be."""
    for result in results:
        assert result["compared"]["augmented"] is None
        assert result["compared"]["like one"] is None


def test_files_are_shared_by_rows(results):
    """Rows keep their order, for any number of files."""
    for result in results:
        found = result["by_rows"]
        assert found["files"] == [*range(9), 100, 101, 102]
        assert found["one"] == [*range(9)]
        assert found["emptied"] == [*range(4), 100, 101, 102]


def test_batches_of_files_are_never_empty(results):
    """Files of 9 and 3 rows: TensorFlow adds a sixth batch without rows."""
    for result in results:
        rows, steps = result["by_rows"]["by file"]
        assert rows == [*range(9), 100, 101, 102]
        assert steps == 5


def test_code_of_the_page_on_horovod_has_the_documented_effect(results):
    """Both workers agree; test_keras_tools.py tries every row."""
    few = {code for code in moved.EFFECTS if not moved.is_long(code)}
    assert set(moved.FEW) < few < set(moved.EFFECTS)
    moved.check(results, "moved", few)


def test_scripts_of_the_page_on_horovod_equal_one_process(results):
    """The global batch has the rows of both workers."""
    first, second = (result["moved"] for result in results)
    assert first["weights"] == second["weights"]
    assert first["loop"] == second["loop"]
    assert first["loss"] == second["loss"]
    expected, loss = moved.in_one_process()
    assert_close(first["loop"], expected, atol=1e-6)
    np.testing.assert_allclose(first["loss"], loss, atol=1e-6)
