"""Exchanges metadata of the next batch during a step, so that no step waits.

Before every step TensorFlow asks all workers whether any of them has a batch,
and the step waits for the answer. This iterator exchanges that, and more,
during the previous step.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.workers._compat.distribution import (
    DistributedIterator,
    DistributedIteratorSpec,
    regroup,
)
from tf_optimizers.workers.data import batch_digests
from tf_optimizers.workers.data.batch_metadata import (
    Rows,
    spec_with_rows,
    with_rows,
)

# Names the graph op that exchanges the notes on an iterator's first batch.
FIRST_BATCH = "first_batch"


class AheadIterator(DistributedIterator):
    """Draws batches of `Counted` from elements with notes on two batches.

    An element's note is an int32 [1, 2, n]: a vector for its own batch, and one
    for the next batch. The first entry says whether this replica has a part,
    the second how many rows of it count. The notes of all replicas on the next
    batch are gathered in parallel with the step, and their summary is kept in a
    variable.
    """

    variable: Any  # This reference keeps the variable alive.
    known: tf.Tensor  # The handle of the variable, which holds a summary.
    is_argument: bool = False  # Whether a function got it as an argument.

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
        return after(tf.cond(having > 0, lambda: 0, _raise_end), batch)

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
        """Return how many replicas have a part, and this worker's parts.

        A replica whose data have ended gets a part whose rows do not count.
        """
        (iterator,) = self._iterators
        is_main = threading.current_thread() is threading.main_thread()
        if tf.executing_eagerly() and is_main:
            # If a step failed here, the other workers still wait in it. Record
            # the failure before this worker waits for a batch.
            self._strategy.extended.check_step_ended()
        element, notes = regroup(self._parts(iterator), always_wrap=True)
        (notes,) = tf.nest.flatten(notes)  # They may be in an `Ending`.
        this, following = zip(
            *(tf.unstack(note[0]) for note in notes.values), strict=True
        )
        known = self._exchange(this, following)
        own = tuple(note[1] for note in this)
        batch = with_rows(element, Rows(known[1], own), self.element_spec)
        check = batch_digests.check(known)
        return known[0], after(check, batch)

    def _parts(self, iterator: Any) -> list[Any]:
        """Return an element and its note for each replica of this worker."""
        if not self._enable_get_next_as_optional:
            return iterator.get_next_as_list()
        return [
            tf.cond(
                optional.has_value(),
                optional.get_value,
                functools.partial(batch_digests.blank, optional.element_spec),
            )
            for optional in iterator.get_next_as_optional_list()
        ]

    def _exchange(
        self, this: Sequence[tf.Tensor], following: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Return the summary of this batch, and start exchanging the next.

        In a function, TensorFlow runs the exchange in parallel with every op
        that does not depend on it. Eagerly, a thread runs it.

        Args:
            this: The notes of this worker's replicas on this batch.
            following: The notes of this worker's replicas on the next batch.
        """
        extended = self._strategy.extended
        ask = functools.partial(extended.ask_ahead, batch_digests.summarize)
        self.wait()
        with tf.device("CPU:0"):
            before = tf.raw_ops.ReadVariableOp(
                resource=self.known, dtype=tf.int32
            )
            before = tf.ensure_shape(before, [len(batch_digests.UNKNOWN)])
            known = tf.cond(
                before[0] < 0,
                lambda: ask(this, before),
                lambda: before,
                name=FIRST_BATCH,
            )

        def ask_for_next() -> None:
            # At the end of the data no worker may exchange: the error at the
            # end cancels pending ops, and messages already sent would be taken
            # for part of a later exchange.
            with tf.device("CPU:0"):
                later = tf.cond(
                    batch_digests.goes_on(known),
                    lambda: ask(following, known),
                    lambda: known,
                )
                tf.raw_ops.AssignVariableOp(resource=self.known, value=later)

        if tf.executing_eagerly():
            extended.background.call(ask_for_next)
        else:
            ask_for_next()
        return known

    def wait(self) -> None:
        """Wait for the exchange in the background to end."""
        background = self._strategy.extended.background
        background.wait()
        if not tf.executing_eagerly() and not self.is_argument:
            # Later calls of the function do not wait here, so exchanges must
            # not run in the background from now on.
            background.is_at_once = True

    @property
    def element_spec(self) -> Any:
        """The type specification of a batch, without its note."""
        return spec_with_rows(self._element_spec)

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
    """The type of an `AheadIterator`, as an argument of a `tf.function`."""

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


def _raise_end() -> tf.Tensor:
    """Raise the error that ends an iteration, by drawing from an empty one."""
    nothing = iter(tf.data.Dataset.range(0))
    with tf.control_dependencies([nothing.get_next()]):
        return tf.constant(0)


def after(check: Any, batch: Any) -> Any:
    """Return a batch that is available only after a check has passed.

    Args:
        check: An op, a tensor, or None if there is nothing to wait for.
        batch: A nest; leaves that are not tensors stay as they are.
    """
    if tf.executing_eagerly() or check is None:
        return batch

    def wait(tensor: Any) -> Any:
        if not tf.is_tensor(tensor):  # For example, no sample weights.
            return tensor
        with tf.device(tensor.device), tf.control_dependencies([check]):
            return tf.identity(tensor)

    return tf.nest.map_structure(wait, batch, expand_composites=True)
