"""In which order tests run, and which only on demand."""

import collections
import gc
import re

import pytest

# Modules with assertions that several files of tests share.
pytest.register_assert_rewrite("contract", "dgc")

# First, half a minute or more each, those whose workers need two processors,
# by turns with those that mostly wait. Then others that take long.
LONGEST = [
    *("test_resume", "test_guide", "test_worker_errors", "test_strategy"),
    *("test_tensorflow", "test_programs", "test_additions", "test_ending"),
    *("test_gradient_compression", "test_images"),
    *("test_transport", "test_output", "test_environment", "test_faults"),
    *("test_local_steps", "test_dgc_momentum", "test_replicas"),
    *("test_backup", "test_notebooks", "test_contract"),
    *("test_offload_placement", "test_sparse_loco", "test_look_ahead"),
    *("test_sharded_state", "test_rate_in_momentum", "test_sharded_exchange"),
    "test_docs",
]


def pytest_configure(config):
    """Load TensorFlow, but not into a process that only has others test."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("devices")


def pytest_collection_modifyitems(config, items):
    """Begin with the files that take longest; say what is left out."""
    places = {name: place for place, name in enumerate(LONGEST)}
    counts = collections.Counter(item.path for item in items)
    items.sort(
        key=lambda item: (
            places.get(item.path.stem, len(places)),
            -counts[item.path],
        )
    )
    if re.search(r"\blong\b", config.getoption("-m")):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="only with `-m long`"))


def pytest_collection_finish():
    """Leave what was imported out of garbage collections, which are rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
