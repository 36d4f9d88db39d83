"""Looks one batch ahead, so that no step waits to hear of the next.

Before every step TensorFlow asks all workers whether anybody has a batch, and
the step waits for the answer. The iterator of these datasets asks during the
step before, and for more than that.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.distribution import (
    DistributedDatasetsFromFunction,
    DistributedDatasetsFromFunctionSpec,
    DistributedIterator,
    DistributedIteratorSpec,
    anonymous_name,
    async_wait,
    create_per_replica,
)
from tf_optimizers._compat.replicas import plain_variable
from tf_optimizers.data import drawn
from tf_optimizers.data.notes import Rows, spec_with_rows, with_rows

# The op, in graphs, that asks about a batch at once, where nothing is known.
FIRST_BATCH = "first_batch"


class AheadIterator(DistributedIterator):
    """Draws elements that come with what is known of two batches.

    An element's note is an int32 [1, 2, n]: of its batch and of the one after
    that. The first entry is whether this replica has a part, the second how
    many rows count. The notes of all replicas on the next batch are gathered
    beside the step, and what they say together is kept in a variable. What has
    been drawn is a batch of `Counted` and others.
    """

    variable: Any  # Who has the iterator has it; it ends with its object.
    known: tf.Tensor  # The handle of the variable.
    is_argument: bool = False  # Of a function.

    @property
    def _is_endless(self) -> bool:
        return self._cardinality == tf.data.INFINITE_CARDINALITY

    def get_next(self, name: str | None = None) -> Any:
        """Return the next batch, or raise an error at the end."""
        replica = tf.distribute.get_replica_context()
        if tf.distribute.has_strategy() and replica is not None:
            raise ValueError(
                "A batch must be drawn outside of replicas. Received: "
                "`next(iterator)` in a function that `strategy.run` calls. "
                "Pass the batch to `strategy.run`."
            )
        having, batch = self._draw()
        if self._is_endless:
            return batch
        return _after(tf.cond(having > 0, lambda: 0, _raise_end), batch)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Return the next batch, or an empty optional at the end."""
        having, batch = self._draw()
        optional = tf.experimental.Optional
        if self._is_endless:
            return optional.from_value(batch)
        spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
        return tf.cond(
            having > 0,
            lambda: optional.from_value(batch),
            lambda: optional.empty(spec),
        )

    def _draw(self) -> tuple[tf.Tensor, Any]:
        """Return how many replicas have a part, and the parts of these here.

        A replica without one has one of which no rows count.
        """
        (iterator,) = self._iterators
        is_main = threading.current_thread() is threading.main_thread()
        if tf.executing_eagerly() and is_main:
            # The others wait in the step, where nobody who waits here comes.
            self._strategy.extended.check_step_ended()
        element, notes = create_per_replica(
            self._parts(iterator), self._strategy
        )
        this, following = zip(
            *(tf.unstack(note[0]) for note in notes.values), strict=True
        )
        known = self._exchange(this, following)
        own = tuple(note[1] for note in this)
        batch = with_rows(element, Rows(known[1], own), self.element_spec)
        check = drawn.check(known)
        return known[0], _after(check, batch)

    def _parts(self, iterator: Any) -> list[Any]:
        """Return an element and its notes for each replica here."""
        if not self._enable_get_next_as_optional:
            return iterator.get_next_as_list()
        return [
            tf.cond(
                optional.has_value(),
                optional.get_value,
                functools.partial(drawn.blank, optional.element_spec),
            )
            for optional in iterator.get_next_as_optional_list()
        ]

    def _exchange(
        self, this: Sequence[tf.Tensor], following: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Return what is known of this batch, after asking for the next.

        In a function, that is asked beside all that does not need it; eagerly,
        in a thread.

        Args:
            this: The notes of this worker's replicas on the batch.
            following: Likewise, on the next.
        """
        extended = self._strategy.extended
        ask = functools.partial(extended.ask_ahead, drawn.summarize)
        self.wait()
        with tf.device("CPU:0"):
            before = tf.raw_ops.ReadVariableOp(
                resource=self.known, dtype=tf.int32
            )
            before = tf.ensure_shape(before, [len(drawn.UNKNOWN)])
            known = tf.cond(
                before[0] < 0,
                lambda: ask(this, before),
                lambda: before,
                name=FIRST_BATCH,
            )

        def ask_for_next() -> None:
            # Nobody asks at the end: the error that says so cancels whatever
            # is under way, and what had been sent would stay behind, and be
            # taken for part of the next exchange.
            with tf.device("CPU:0"):
                later = tf.cond(
                    drawn.goes_on(known),
                    lambda: ask(following, known),
                    lambda: known,
                )
                tf.raw_ops.AssignVariableOp(resource=self.known, value=later)

        if tf.executing_eagerly():
            extended.beside.call(ask_for_next)
        else:
            ask_for_next()
        return known

    def wait(self) -> None:
        """Wait for what is asked beside a step."""
        beside = self._strategy.extended.beside
        beside.wait()
        if not tf.executing_eagerly() and not self.is_argument:
            # Later calls of the function do not come here.
            beside.is_at_once = True

    @property
    def element_spec(self) -> Any:
        """The specification of a batch, without the note on it."""
        return spec_with_rows(self._element_spec[0])

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return AheadIteratorSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
        )


class AheadIteratorSpec(DistributedIteratorSpec):
    """The type of an `AheadIterator`: functions take it as an argument."""

    value_type = property(lambda self: AheadIterator)

    @property
    def _component_specs(self) -> Any:
        return [*super()._component_specs, tf.TensorSpec([], tf.resource)]

    def _to_components(self, value: AheadIterator) -> Any:
        value.wait()
        return [*super()._to_components(value), value.known]

    def _from_components(self, components: Any) -> AheadIterator:
        *iterators, known = components
        iterator = AheadIterator(
            input_workers=self._input_workers,
            components=iterators,
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
        )
        iterator.known, iterator.is_argument = known, True
        return iterator


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
        return spec_with_rows(self._element_spec[0])

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
            iterator.known = _variable_of_function(drawn.UNKNOWN)
            return iterator
        endless = None if self.endless is None else [self.endless]
        iterator = self.begin(lambda: self._iterate(endless or self._datasets))
        self._strategy.extended.beside.wait()
        with tf.device("CPU:0"):
            known = drawn.start(self._last)
            self._last = plain_variable(known, trainable=False)
        iterator.variable, iterator.known = self._last, self._last.handle
        # TensorFlow does so, too: a function may be called before the
        # variable is there, if ops are run asynchronously.
        async_wait()
        return iterator

    def _iterate(self, datasets: Any) -> AheadIterator:
        finite = self._datasets
        self._datasets = [_untuned(dataset) for dataset in datasets]
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
    for i, each in enumerate(made._device_iterators):
        # Nothing has been drawn yet.
        with tf.device(made._devices[i]):
            made._device_iterators[i] = iter(_untuned(each._dataset))


def _variable_of_function(value: Sequence[int]) -> tf.Tensor:
    """Return the handle of a variable that every call of a function makes."""
    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.int32,
        shape=[len(value)],
        # By this name, TensorFlow knows those that nobody else shares.
        shared_name=anonymous_name(),
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
    return handle


def _raise_end() -> tf.Tensor:
    """Raise what says that data have ended: here, those of another dataset."""
    nothing = iter(tf.data.Dataset.range(0))
    with tf.control_dependencies([nothing.get_next()]):
        return tf.constant(0)


def _after(check: Any, batch: Any) -> Any:
    """Return a batch that is there once a check, or an op, is through."""
    if tf.executing_eagerly() or check is None:
        return batch

    def wait(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tensor.device), tf.control_dependencies([check]):
            return tf.identity(tensor)

    return tf.nest.map_structure(wait, batch, expand_composites=True)
