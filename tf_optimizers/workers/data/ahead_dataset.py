"""Makes datasets on whose batches all workers agree one step ahead."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import (
    anonymous_name,
    plain_variable,
)
from tf_optimizers.workers._compat.distribution import (
    DistributedDatasetsFromFunction,
    DistributedDatasetsFromFunctionSpec,
    async_wait,
)
from tf_optimizers.workers.data import batch_digests
from tf_optimizers.workers.data.batch_metadata import spec_with_rows
from tf_optimizers.workers.data.look_ahead import AheadIterator

# How parts reach a worker's only replica, if that is on the host: they are
# there. To make an iterator that brings them to devices, and to draw from it,
# takes twice as long. The strategy's own methods take no such options.
_TO_THE_HOST = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=(
        tf.distribute.InputReplicationMode.PER_REPLICA
    ),
)


class AheadDataset(DistributedDatasetsFromFunction):
    """Batches on which all workers agree one step ahead."""

    batches: int  # How many, or TensorFlow's constant for unknown, infinite.
    _datasets: Any
    endless: tf.data.Dataset | None  # What is drawn from, but in functions.
    begin: Callable[[Callable], Any]  # Makes an iterator of an epoch, eagerly.
    _last: tf.Variable | None = None

    @property
    def cardinality(self) -> int:
        """How many batches there are; what it draws from has no end."""
        return self.batches

    @property
    def element_spec(self) -> Any:
        """The specification of a batch, without the note on it."""
        return spec_with_rows(self._element_spec)

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return AheadDatasetSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
        )

    def __iter__(self) -> AheadIterator:
        """Return an iterator that knows nothing of its first batch."""
        if not tf.executing_eagerly():
            iterator = self._iterate(self._datasets)
            iterator.known = _variable_of_function(batch_digests.UNKNOWN)
            return iterator
        endless = None if self.endless is None else [self.endless]
        iterator = self.begin(lambda: self._iterate(endless or self._datasets))
        self._strategy.extended.background.wait()
        with tf.device("CPU:0"):
            known = batch_digests.start(self._last)
            self._last = plain_variable(known, trainable=False)
        iterator.variable, iterator.known = self._last, self._last.handle
        # TensorFlow does so, too: a function may be called before the
        # variable is there, if ops are run asynchronously.
        async_wait()
        return iterator

    def map(self, *_: Any, **__: Any) -> None:
        """Raise an error: `fit` calls this with `class_weight`."""
        raise ValueError(
            "`class_weight` and `map` need data before they are distributed. "
            "Received: a distributed dataset. Pass the `tf.data.Dataset` "
            "itself to `fit`, which distributes it, or weights as the third "
            "part of each batch."
        )

    def _iterate(self, datasets: Any) -> AheadIterator:
        finite = self._datasets
        self._datasets = [_untuned(dataset) for dataset in datasets]
        if self._options == _TO_THE_HOST:
            self._datasets = [dataset.prefetch(1) for dataset in self._datasets]
        try:
            iterator = super().__iter__()
        finally:
            self._datasets = finite
        _leave_devices_untuned(iterator)
        iterator.__class__ = AheadIterator
        iterator._cardinality = self.batches
        has_end = self.batches != tf.data.INFINITE_CARDINALITY
        iterator._enable_get_next_as_optional = has_end and datasets is finite
        return iterator


class AheadDatasetSpec(DistributedDatasetsFromFunctionSpec):
    """The type of an `AheadDataset`: functions take it as an argument."""

    value_type = property(lambda self: AheadDataset)

    def _from_components(self, components: Any) -> AheadDataset:
        return look_ahead(super()._from_components(components))


def look_ahead(
    distributed: Any,
    batches: int = tf.data.UNKNOWN_CARDINALITY,
    endless: tf.data.Dataset | None = None,
    begin: Callable[[Callable], Any] = lambda make: make(),
) -> AheadDataset:
    """Let a distributed dataset agree on every batch one step ahead.

    Only TensorFlow makes such datasets, and offers no place to do so.

    Args:
        distributed: What `distribute_datasets_from_function` has returned for
            datasets of pairs of an element and notes on it: see
            `AheadIterator`.
        batches: How many there are.
        endless: What goes on when the dataset of this worker has ended. In a
            function it does not do: that waits until its iterators are through.
        begin: Called before an epoch with what makes an iterator, which it
            returns.
    """
    distributed.__class__ = AheadDataset
    distributed.batches, distributed.begin = batches, begin
    distributed.endless = endless
    devices = distributed._strategy.extended.worker_devices
    is_host = len(devices) == 1 and "device:CPU:" in devices[0]
    if is_host and distributed._options is None:
        distributed._options = _TO_THE_HOST
    return distributed


def dataset_of(distributed: Any) -> tf.data.Dataset:
    """Return what this worker draws from, with what TensorFlow has added.

    Args:
        distributed: What `experimental_distribute_dataset` has returned.
    """
    (dataset,) = distributed._cloned_datasets
    return dataset


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset that is not tuned, unless the user says so.

    The thread that tunes sleeps for as long again as an iterator has lived, a
    minute at most, and often does not hear that it may end (TensorFlow 2.21).
    Who drops the iterator waits for it: an epoch would take up to twice its
    time. Untuned, what is left to be tuned has a thread for each core.
    """
    options = tf.data.Options()
    if dataset.options().autotune.enabled is None:
        options.autotune.enabled = False
    return dataset.with_options(options)


def _leave_devices_untuned(iterator: Any) -> None:
    """Let devices draw likewise; TensorFlow offers no options for these."""
    (worker,) = iterator._iterators
    made = worker._iterator
    for i, each in enumerate(getattr(made, "_device_iterators", ())):
        # Nothing has been drawn yet.
        with tf.device(made._devices[i]):
            made._device_iterators[i] = iter(_untuned(each._dataset))


def _variable_of_function(value: Sequence[int]) -> tf.Tensor:
    """Return the handle of a variable that every call of a function makes."""
    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.int32,
        shape=[len(value)],
        # TensorFlow takes a variable of this name for one that is not shared.
        shared_name=anonymous_name(),
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
    return handle
