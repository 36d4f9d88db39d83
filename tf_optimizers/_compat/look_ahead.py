"""Private names of TensorFlow's distributed data, to look one batch ahead.

Before every step TensorFlow asks all workers whether anybody has a batch, and
the step waits for the answer. The iterator of these data sets asks during the
step before, and for the number of rows as well.
"""

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_lib, values
from tensorflow.python.eager import context

from tf_optimizers._compat.counted import with_rows
from tf_optimizers._compat.replicas import plain_variable

_UNKNOWN = (-1, 0)
# The op, in graphs, that asks about a batch at once, where nothing is known.
FIRST_BATCH = "first_batch"


class AheadIterator(input_lib.DistributedIterator):
    """Draws elements that come with what is known of two batches.

    An element's note is an int32 [1, 2, 2]: of its batch and of the one after
    that, whether this replica has a part, and its rows. The notes of all
    replicas on the next batch are gathered beside the step, and their sum is
    kept in a variable. What has been drawn is a batch of `Counted` and others.
    """

    variable: tf.Variable
    known: tf.Tensor  # The handle of the variable.

    def get_next(self, name: str | None = None) -> Any:
        """Return the next batch, or raise an error at the end."""
        replica = tf.distribute.get_replica_context()
        if tf.distribute.has_strategy() and replica is not None:
            raise ValueError(
                "A batch must be drawn outside of replicas. Received: "
                "`next(iterator)` in a function that `strategy.run` calls. "
                "Pass the batch to `strategy.run`."
            )
        count, batch = self._draw()
        if not self._enable_get_next_as_optional:
            return batch

        def end() -> Any:
            # It is TensorFlow's own that raises the error.
            element, _ = self._get_next_no_partial_batch_handling()
            return with_rows(element, tf.constant(0))

        return tf.cond(count > 0, lambda: batch, end)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Return the next batch, or an empty optional at the end."""
        count, batch = self._draw()
        optional = tf.experimental.Optional
        if not self._enable_get_next_as_optional:
            return optional.from_value(batch)
        spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
        return tf.cond(
            count > 0,
            lambda: optional.from_value(batch),
            lambda: optional.empty(spec),
        )

    def _draw(self) -> tuple[tf.Tensor, Any]:
        """Return how many replicas have a part, and the parts of these here.

        A replica without one has no rows.
        """
        (iterator,) = self._iterators
        is_main = threading.current_thread() is threading.main_thread()
        if tf.executing_eagerly() and is_main:
            # The others wait in the step, where nobody who waits here comes.
            self._strategy.extended.check_step_ended()
        if self._enable_get_next_as_optional:
            parts = input_lib._get_value_or_dummy(
                self._input_workers,
                [iterator.get_next_as_optional_list()],
                produce_dummy=True,
            )
        else:
            parts = iterator.get_next_as_list()
        element, notes = input_lib._create_per_replica(parts, self._strategy)
        count, rows = tf.unstack(self._exchange(notes))
        return count, with_rows(element, rows)

    def _exchange(self, notes: values.PerReplica) -> tf.Tensor:
        """Return what is known of this batch, after asking for the next.

        In a function, that is asked beside all that does not need it; eagerly,
        in a thread.
        """
        # Without a part, there is no note either: a sum makes it zeros.
        this, following = zip(
            *(tf.unstack(tf.reduce_sum(note, 0)) for note in notes.values),
            strict=True,
        )
        total = self._strategy.extended.total_ahead
        beside = self._strategy.extended.beside
        self.wait()
        with tf.device("CPU:0"):
            before = tf.raw_ops.ReadVariableOp(
                resource=self.known, dtype=tf.int32
            )
            before = tf.ensure_shape(before, [2])
            known = tf.cond(
                before[0] < 0,
                lambda: total(this),
                lambda: before,
                name=FIRST_BATCH,
            )

            # Nobody asks at the end: the error that says so cancels whatever
            # is under way, and what had been sent would stay behind, and be
            # taken for part of the next exchange.
            def ask() -> None:
                with tf.device("CPU:0"):
                    later = tf.cond(
                        known[0] > 0, lambda: total(following), lambda: known
                    )
                    tf.raw_ops.AssignVariableOp(
                        resource=self.known, value=later
                    )

            if tf.executing_eagerly() and known[0] > 0:
                beside.call(ask)
            else:
                ask()
        return known

    def wait(self) -> None:
        """Wait for what is asked beside a step."""
        beside = self._strategy.extended.beside
        beside.wait()
        if not tf.executing_eagerly() and hasattr(self, "variable"):
            # Captured: the function's later calls do not come here.
            beside.is_at_once = True

    @property
    def element_spec(self) -> Any:
        """The specification of a batch, without what is known of it."""
        return super().element_spec[0]

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


class AheadIteratorSpec(input_lib.DistributedIteratorSpec):
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
        iterator.known = known
        return iterator


class AheadDataset(input_lib.DistributedDataset):
    """The batches that `experimental_distribute_dataset` shares out."""

    ahead: Any  # The elements of this worker, with their notes.

    def __iter__(self) -> Any:
        """Return an iterator; within a function, one of TensorFlow's own."""
        return _iterate(self) if tf.executing_eagerly() else super().__iter__()


class AheadDatasetsFromFunction(input_lib.DistributedDatasetsFromFunction):
    """The batches that every worker has by itself."""

    ahead: Any  # As above.

    def __iter__(self) -> Any:
        """Return an iterator; within a function, one of TensorFlow's own."""
        return _iterate(self) if tf.executing_eagerly() else super().__iter__()


def look_ahead(distributed: Any, add_notes: Callable) -> None:
    """Let a distributed data set agree on every batch one step ahead.

    Only TensorFlow makes such data sets, and offers no place to do so.

    Args:
        distributed: What a strategy of several workers has returned.
        add_notes: Called with this worker's `tf.data.Dataset` and the number
            of its replicas, which take turns in drawing from it; returns one
            of pairs of an element and a note, see `AheadIterator`.
    """
    if type(distributed) is input_lib.DistributedDataset:
        (dataset,) = distributed._cloned_datasets
        distributed.__class__ = AheadDataset
    else:
        (dataset,) = distributed._datasets
        distributed.__class__ = AheadDatasetsFromFunction
    (host,) = distributed._input_workers.worker_devices
    with tf.device(host):
        distributed.ahead = add_notes(
            dataset, len(distributed._strategy.extended.worker_devices)
        )


def _iterate(distributed: Any) -> AheadIterator:
    """Return an iterator over it that knows nothing of its first batch."""
    workers, strategy = distributed._input_workers, distributed._strategy
    iterator = AheadIterator(
        workers,
        input_lib._create_iterators_per_worker(
            [distributed.ahead],
            workers,
            options=distributed._options,
            canonicalize_devices=True,
        ),
        strategy,
        cardinality=distributed._cardinality,
        enable_get_next_as_optional=distributed._enable_get_next_as_optional,
        options=distributed._options,
    )
    iterator._element_spec = input_lib._create_distributed_tensor_spec(
        strategy, distributed.ahead.element_spec
    )
    with tf.device("CPU:0"):
        # Who has the iterator has the variable, which ends with its object.
        iterator.variable = plain_variable(_UNKNOWN, trainable=False)
    iterator.known = iterator.variable.handle
    # TensorFlow does so, too: a function may be called before the iterator is
    # there, if ops are run asynchronously.
    context.async_wait()
    return iterator
