"""Steps and predictions on workers return the arrays of one process."""

import numpy as np
import pytest
import real_workers
from scripts import arrays


@pytest.fixture(scope="module")
def returned(tmp_path_factory):
    """Return what two workers of two devices each return."""
    folder = tmp_path_factory.mktemp("arrays")
    return real_workers.results("arrays", folder, 2, devices=2, timeout=300)


@pytest.mark.parametrize("mode", arrays.MODES)
def test_workers_return_the_arrays_of_one_process(returned, mode):
    """In a batch of 3 rows, the last of the four replicas has no row."""
    expected = arrays.returned(arrays.MODES[mode])
    for worker in returned:
        for place, values in worker[mode].items():
            assert values.keys() == expected[place].keys()
            for name, value in values.items():
                np.testing.assert_allclose(
                    value,
                    expected[place][name],
                    1e-6,
                    err_msg=f"{place}, {name}",
                )
