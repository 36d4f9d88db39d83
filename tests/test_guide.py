"""Keras's guide to several workers, as it is written, and what it rests on."""

import numpy as np
import pytest
import workers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two workers report."""
    parts = ["guide", "interleaved", "another_cluster"]
    return workers.results("guide", tmp_path_factory.mktemp("guide"), 2, *parts)


def test_guide_runs(results):
    """A strategy, then others that go on from the last one's checkpoint."""
    first, second = (result["guide"] for result in results)
    assert first == second
    assert first["loss"][-1] < first["loss"][0]
    runs = first["runs"]
    assert [run["start"] for run in runs] == [0, 20]
    assert runs[1]["loss"][0] < runs[0]["loss"][0]


def test_strategies_of_one_process_do_not_meet(results):
    """Their variables and collectives are of different shapes."""
    for result in results:
        for total, size in zip(
            result["interleaved"], (2, 7, 3, 8), strict=True
        ):
            np.testing.assert_array_equal(total, np.full(size, 4.0))


def test_another_cluster_is_refused(results):
    for result in results:
        assert "must have the same cluster" in result["another_cluster"]
