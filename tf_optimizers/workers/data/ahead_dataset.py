"""Makes distributed datasets whose iterators look one batch ahead."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import (
    plain_variable,
    temporary_variable,
)
from tf_optimizers.workers._compat.datasets import (
    stop_autotuning_on_devices,
    without_autotuning,
)
from tf_optimizers.workers._compat.distribution import (
    DistributedDatasetsFromFunction,
    DistributedDatasetsFromFunctionSpec,
    async_wait,
)
from tf_optimizers.workers.data import batch_digests
from tf_optimizers.workers.data.batch_metadata import spec_with_rows
from tf_optimizers.workers.data.look_ahead import AheadIterator

# Iterators that copy batches to a device are slower to create and to use. The
# strategy's methods reject these options, so `look_ahead` sets them.
_TO_THE_HOST = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=(
        tf.distribute.InputReplicationMode.PER_REPLICA
    ),
)


class AheadDataset(DistributedDatasetsFromFunction):
    """A distributed dataset whose iterators look one batch ahead.

    Attributes:
        endless: The dataset from which eager iterators draw, or None; see
            `look_ahead`.
        begin: Called to make an eager iterator; see `look_ahead`.
    """

    _datasets: Any
    _options: Any
    endless: tf.data.Dataset | None
    begin: Callable[[Callable], Any]
    _last: tf.Variable | None = None  # The last eager iterator's summary.

    @property
    def element_spec(self) -> Any:
        """The type of a batch, without the notes that workers exchange."""
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
        """Return an iterator; an eager call may wait for other workers."""
        if not tf.executing_eagerly():
            iterator = self._iterate(self._datasets)
            unknown = tf.constant(batch_digests.UNKNOWN)
            iterator.known = temporary_variable(unknown, [None])
            return iterator
        endless = None if self.endless is None else [self.endless]
        iterator = self.begin(lambda: self._iterate(endless or self._datasets))
        self._strategy.extended.background.wait()
        with tf.device("CPU:0"):
            known = batch_digests.start(self._last)
            self._last = plain_variable(known, shape=[None])
        iterator.variable, iterator.known = self._last, self._last.handle
        # If eager ops run asynchronously, a `tf.function` could otherwise run
        # before the variable exists.
        async_wait()
        return iterator

    def map(self, *_: Any, **__: Any) -> None:
        """Raise an error; `fit` calls this method to use `class_weight`."""
        raise ValueError(
            "`class_weight` and `map` need data that are not distributed yet. "
            "Received: a distributed dataset. Pass the `tf.data.Dataset` "
            "itself to `fit`, which distributes it; or yield batches with "
            "weights as the third element."
        )

    def set_up(self, batches: int, endless: Any, begin: Callable) -> None:
        """Set attributes.

        If the worker's only replica is on a CPU, and the user has set no
        options, batches are not copied.
        """
        self._cardinality = batches
        self.endless, self.begin = endless, begin
        devices = self._strategy.extended.worker_devices
        is_host = len(devices) == 1 and "device:CPU:" in devices[0]
        if is_host and self._options is None:
            self._options = _TO_THE_HOST

    def _iterate(self, datasets: Any) -> AheadIterator:
        finite = self._datasets
        self._datasets = [without_autotuning(dataset) for dataset in datasets]
        if self._options == _TO_THE_HOST:
            self._datasets = [dataset.prefetch(1) for dataset in self._datasets]
        try:
            iterator = super().__iter__()
        finally:
            self._datasets = finite
        stop_autotuning_on_devices(iterator)
        iterator.__class__ = AheadIterator
        iterator.set_may_end(datasets is finite)
        return iterator


class AheadDatasetSpec(DistributedDatasetsFromFunctionSpec):
    """The type of an `AheadDataset`, as an argument of a `tf.function`."""

    value_type = property(lambda self: AheadDataset)

    def _from_components(self, components: Any) -> AheadDataset:
        return look_ahead(super()._from_components(components))


def look_ahead(
    distributed: Any,
    batches: int = tf.data.UNKNOWN_CARDINALITY,
    endless: tf.data.Dataset | None = None,
    begin: Callable[[Callable], Any] = lambda make: make(),
) -> AheadDataset:
    """Make the iterators of a distributed dataset look one batch ahead.

    TensorFlow constructs the dataset, and offers no way to choose its class. So
    this function changes the class of the object.

    Args:
        distributed: The result of `distribute_datasets_from_function`. Its
            datasets must yield pairs (element, notes); see `AheadIterator`.
        batches: The number of batches, or TensorFlow's constant for an unknown
            or infinite number.
        endless: This worker's dataset, continued without end. Eager iterators
            draw from this dataset instead of `distributed`. Iterators in a
            `tf.function` do not, since the function might then never end.
        begin: Called with a function that makes an eager iterator; returns the
            iterator.
    """
    distributed.__class__ = AheadDataset
    distributed.set_up(batches, endless, begin)
    return distributed
