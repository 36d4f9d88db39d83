"""The order of tests, and tests that only run on demand."""

import collections
import gc
import re

import pytest

# Modules with assertions that several test files share.
pytest.register_assert_rewrite("contract", "dgc")

# First, files of half a minute or more: those whose workers need two processors
# alternate with those that mostly wait. Then other slow files.
LONGEST = [
    *("test_resume", "test_guide", "test_worker_errors", "test_transport"),
    *("test_tensorflow", "test_look_ahead", "test_preemption", "test_ending"),
    *("test_programs", "test_sharded_state", "test_gradient_compression"),
    *("test_sharded_exchange", "test_images", "test_strategy", "test_output"),
    *("test_local_steps", "test_environment", "test_faults"),
    *("test_contract", "test_dgc_momentum", "test_custom_steps", "test_backup"),
    *("test_sparse_loco", "test_offload_placement", "test_replicas"),
    *("test_own_optimizers", "test_demo", "test_notebooks", "test_additions"),
    *("test_rate_in_momentum", "test_dgc_contract", "test_archive"),
    # These have few tests, but are not fast.
    *("test_overlap", "test_named_steps", "test_uneven_batches"),
    *("test_common_state", "test_loops", "test_architecture", "test_pages"),
    *("test_public_pages", "test_patches", "test_exclusions", "test_docs"),
]


def pytest_configure(config):
    """Load TensorFlow, except in a process that only distributes tests."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("devices")


def pytest_collection_modifyitems(config, items):
    """Run the slowest files first; report tests that are skipped."""
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
    """Exclude imported objects from garbage collection, and make it rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
