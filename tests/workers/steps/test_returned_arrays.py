"""Steps and predictions on workers return the arrays of one process."""

import numpy as np
import pytest
import real_workers
from one_process import run_twice
from scripts import arrays


@pytest.fixture(scope="module")
def returned(tmp_path_factory):
    """Return what two workers of two devices each return."""
    folder = tmp_path_factory.mktemp("arrays")
    return real_workers.results("arrays", folder, 2, devices=2, timeout=300)


def assert_alike(found, expected):
    """Compare two results of `arrays.returned`."""
    for place, values in found.items():
        assert values.keys() == expected[place].keys()
        for name, value in values.items():
            np.testing.assert_allclose(
                value, expected[place][name], 1e-6, err_msg=f"{place}, {name}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("mode", arrays.MODES)
def test_workers_return_the_arrays_of_one_process(returned, mode):
    """In a batch of 3 rows, the last of the four replicas has no row."""
    expected = arrays.returned(arrays.MODES[mode])
    for worker in returned:
        assert_alike(worker[mode], expected)


@pytest.mark.parametrize("mode", arrays.MODES)
def test_devices_return_the_arrays_of_one_process(ours, mode):
    expected, found = run_twice(
        ours, lambda: arrays.returned(arrays.MODES[mode])
    )
    assert_alike(found, expected)


def test_gathers_of_eager_steps_are_traced_once_per_shape(ours):
    with ours.scope():
        model = arrays.ReturnsArrays()
    model.compile(run_eagerly=True)
    gather = ours.gather_rows_in_function
    counts = []
    for _ in range(2):
        model.test_on_batch(arrays.X[:6])
        counts.append(gather.experimental_get_tracing_count())
    assert counts[0] == counts[1] > 0
