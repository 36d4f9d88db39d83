"""Seeds the shuffles of datasets, and finds random operations in datasets."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.patches import hook
from tf_optimizers.workers._compat.datasets import (
    MAPS,
    called_graphs,
    graphs_of,
    inputs_of,
    seeds_of,
)
from tf_optimizers.workers.data.shuffle_draws import count_draws

# Stateful ops whose results are assumed to be the same on all workers.
_SAME_ON_WORKERS = {
    *("Assert", "LookupTableFindV2", "PrintV2", "ReadVariableOp"),
}


def seeds_of_shuffles(dataset: tf.data.Dataset) -> list[list[int]]:
    """Return the seeds of a dataset's shuffles, in a fixed order.

    Shuffled datasets that functions make, as in `flat_map`, are not included.
    """
    own = list(map(int, seeds_of(dataset)))
    seeds = [own] if own else []
    for graph in graphs_of(dataset):
        seeds += [
            [op.get_attr("seed"), op.get_attr("seed2")]
            for op in graph.get_operations()
            if op.type == "RandomShuffle"
        ]
    return seeds + [
        seed for each in inputs_of(dataset) for seed in seeds_of_shuffles(each)
    ]


def has_random_maps(dataset: tf.data.Dataset) -> bool:
    """Return whether the content of rows may differ between workers.

    The content may differ if a `map` runs a stateful op (except
    `_SAME_ON_WORKERS`), such as a random op or a Python function, or if a
    Python generator yields the rows.
    """
    is_map = isinstance(dataset, MAPS)
    for graph in graphs_of(dataset):
        if _is_random(graph) if is_map else _has_random_maps(graph):
            return True
    return any(map(has_random_maps, inputs_of(dataset)))


def comes_from_python(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset calls a stateful Python function."""
    return any(
        op.type in ("PyFunc", "EagerPyFunc")
        for graph in graphs_of(dataset)
        for op in _ops(graph, lambda op: True)
    ) or any(map(comes_from_python, inputs_of(dataset)))


def _is_random(graph: Any) -> bool:
    """Return whether any op may have different results on workers.

    Ops that call functions are skipped: the ops of the functions are checked
    instead.
    """
    return any(
        op.op_def.is_stateful
        and op.type not in _SAME_ON_WORKERS
        and not any(called_graphs(op))
        for op in _ops(graph, lambda op: True)
    )


def _has_random_maps(graph: Any) -> bool:
    """Return whether rows that a graph makes may differ between workers."""

    def makes_rows(op: Any) -> bool:
        is_map = "Map" in op.type and "FlatMap" not in op.type
        return is_map or op.type == "ScanDataset"

    return any(
        op.type == "GeneratorDataset"
        or (makes_rows(op) and any(map(_is_random, called_graphs(op))))
        for op in _ops(graph, lambda op: not makes_rows(op))
    )


def _ops(graph: Any, is_entered: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the ops of a graph, and the ops of functions that they call.

    Functions that an op calls are included only if `is_entered(op)`.
    """
    for op in graph.get_operations():
        yield op
        if is_entered(op):
            for inner in called_graphs(op):
                yield from _ops(inner, is_entered)


def replace_shuffles(
    choose_seed: Callable[[], int | None],
    choose_shuffle: Callable[[], Callable | None],
) -> None:
    """Make TensorFlow and Keras shuffle with chosen seeds, permanently.

    Setting TensorFlow's global seed instead would have side effects: random
    numbers in `Dataset.map` would be the same in every epoch. Keras shuffles
    arrays with such numbers, so every epoch would have the same order.

    Args:
        choose_seed: Returns the seed for a `Dataset.shuffle` without a seed, or
            None to set no seed.
        choose_shuffle: Returns a function that shuffles the rows of arrays in
            `fit`, or None to keep Keras's own function.
    """

    def seeded(
        original: Callable,
        source: Any,
        size: Any,
        seed: Any = None,
        reshuffles: bool | None = None,
        **kwargs: Any,
    ) -> tf.data.Dataset:
        chosen = choose_seed() if seed is None else None
        seed = seed if chosen is None else chosen
        dataset = original(source, size, seed, reshuffles, **kwargs)
        return count_draws(dataset, source, size, reshuffles, chosen)

    def make_dataset(original: Callable, adapter: Any) -> tf.data.Dataset:
        with _shuffling(adapter, choose_shuffle()):
            return original(adapter)

    hook("shuffle_op._shuffle", seeded)
    hook("ArrayDataAdapter.get_tf_dataset", make_dataset)


@contextlib.contextmanager
def _shuffling(adapter: Any, shuffle: Callable | None) -> Iterator[None]:
    """Make Keras shuffle arrays with `shuffle`, if given, in this context."""
    if shuffle is None:
        yield
        return
    if hasattr(adapter, "_tf_shuffle"):  # Keras 3.16 and later.
        adapter._tf_shuffle = shuffle
        yield
        return
    original = tf.random.shuffle
    tf.random.shuffle = shuffle
    try:
        yield
    finally:
        tf.random.shuffle = original
