"""Reads and changes private attributes of datasets and their iterators."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.map_op import _MapDataset, _ParallelMapDataset
from tensorflow.python.data.ops.scan_op import _ScanDataset
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset

# Transformations that return one element for each element of their input.
MAPS = (_MapDataset, _ParallelMapDataset, _ScanDataset)


def inputs_of(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """Return the input datasets of a dataset."""
    # Callers search a pipeline for shuffles and maps.
    return dataset._inputs()


def graphs_of(dataset: tf.data.Dataset) -> list[Any]:
    """Return the graphs of the functions that a dataset calls."""
    # Callers search the graphs for shuffles, random ops and calls to Python.
    return [each.function.graph for each in dataset._functions()]


def called_graphs(op: tf.Operation) -> Iterator[Any]:
    """Yield the graphs of the functions that an op of a graph calls."""
    # An op has only the names of these functions, as attributes.
    for attribute in op.node_def.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name:
                yield op.graph._get_function(function.name).graph


def seeds_of(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Return the two seeds of a shuffle; an empty list for other datasets."""
    # Workers that read the same data compare these seeds, because they must
    # draw the same rows.
    if not isinstance(dataset, _ShuffleDataset):
        return []
    return [dataset._seed, dataset._seed2]


def arguments_of(dataset: tf.data.Dataset) -> dict[str, Any]:
    """Return the name and the type of a dataset, as arguments of its op."""
    # The caller creates the op again, with another generator of seeds.
    return dataset._common_args


def set_variant(dataset: tf.data.Dataset, variant: tf.Tensor) -> None:
    """Replace a dataset's op with the op that returned `variant`."""
    # The generator of seeds is private, and cannot be replaced otherwise.
    dataset._variant_tensor_attr = variant


def dataset_of(distributed: Any) -> tf.data.Dataset:
    """Return this worker's dataset, sharded and rebatched by TensorFlow.

    `distributed` is the result of `experimental_distribute_dataset`.
    """
    # The public iterator of a distributed dataset yields distributed values.
    (dataset,) = distributed._cloned_datasets
    return dataset


def specs_of(spec: Any) -> Sequence[tf.TypeSpec]:
    """Return the types of the components of a per-replica value.

    `spec` is the type of the per-replica value.
    """
    # `tf.distribute.DistributedValues` has no public `tf.TypeSpec`.
    return spec._value_specs


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset without autotuning, unless the user has set the option.

    TensorFlow (2.21) waits for the tuning thread when an iterator is deleted.
    The thread sleeps for as long as the iterator has existed, at most a minute,
    and often misses the signal to stop. So an epoch could take twice as long.
    Without tuning, `tf.data.AUTOTUNE` means one parallel call per core, at most
    16.
    """
    options = tf.data.Options()
    if dataset.options().autotune.enabled is None:
        options.autotune.enabled = False
    return dataset.with_options(options)


def stop_autotuning_on_devices(iterator: Any) -> None:
    """Replace each device's iterator with one without autotuning.

    If the iterator copies no batches to devices, nothing is replaced.
    """
    # TensorFlow accepts no options for these iterators.
    (worker,) = iterator._iterators
    made = worker._iterator
    for i, each in enumerate(getattr(made, "_device_iterators", ())):
        # No element has been drawn yet, so a new iterator loses none.
        with tf.device(made._devices[i]):
            made._device_iterators[i] = iter(without_autotuning(each._dataset))
