"""In which order tests run, and which only on demand."""

import collections
import gc
import re

import pytest

# Half a minute or more each, of those that start workers and others in turn.
LONGEST = [
    *("test_resume", "test_local_steps", "test_strategy", "test_dgc_momentum"),
    *("test_transport", "test_replicas", "test_backup", "test_sparse_loco"),
    *("test_notebooks", "test_contract", "test_offload_placement"),
    *("test_faults", "test_gradient_compression", "test_worker_errors"),
    *("test_guide", "test_rate_in_momentum", "test_sharded", "test_docs"),
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
    """Leave what was imported out of garbage collections: they are faster."""
    gc.freeze()
    gc.collect()
