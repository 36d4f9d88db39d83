"""Exchanges metadata of the next batch while a step runs.

With TensorFlow's own iterators, workers find out before a step whether any
worker has a batch, and the step waits for this exchange. An `AheadIterator`
exchanges this information, and more, during the previous step. So in a
`tf.function`, only an iterator's first step waits for a whole exchange.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import effects_of
from tf_optimizers.workers._compat import coordination
from tf_optimizers.workers._compat.distribution import (
    DistributedIterator,
    DistributedIteratorSpec,
    regroup,
)
from tf_optimizers.workers.collectives.later import GatherLater
from tf_optimizers.workers.data import batch_digests
from tf_optimizers.workers.data.batch_digests import SIZE, Verdict
from tf_optimizers.workers.data.batch_metadata import (
    RowCounts,
    spec_with_rows,
    with_rows,
)
from tf_optimizers.workers.data.batch_splits import blank
from tf_optimizers.workers.data.local_rounds import round_of_fit
from tf_optimizers.wrapped import LocalRound

# The name of the graph op that exchanges notes on an iterator's first batch.
FIRST_BATCH = "first_batch"


class AheadIterator(DistributedIterator):
    """Draws batches, and exchanges notes on the next batch during a step.

    Each element comes with two notes, an int32 [1, 2, n]: a note on its own
    batch, and a note on the next batch; see `batch_digests.py`. In parallel
    with a step, workers gather the notes of all replicas on the next batch, and
    store a summary of these notes in a variable.

    Notes may also contain the number of rows of the whole batch. Then, some
    steps of a round (`local_rounds.py`) gather no notes; see `_in_round`. In
    such a step, each worker computes the summary from its own notes. The
    variable contains the summary, followed by the notes that are not exchanged
    yet.
    """

    variable: Any  # This reference keeps the variable alive.
    known: tf.Tensor  # The handle of the variable.
    is_argument: bool = False  # Whether this is a `tf.function`'s argument.

    @property
    def _is_endless(self) -> bool:
        return self._cardinality == tf.data.INFINITE_CARDINALITY

    def set_may_end(self, may_end: bool) -> None:
        """Set whether this worker's data may end."""
        self._enable_get_next_as_optional = may_end and not self._is_endless

    def get_next(self, name: str | None = None) -> Any:
        """Return the next batch, or raise an error at the end."""
        replica = tf.distribute.get_replica_context()
        if tf.distribute.has_strategy() and replica is not None:
            raise ValueError(
                "A batch must be drawn outside of `strategy.run`. Received: "
                "`next(iterator)` in a function that `strategy.run` calls. "
                "Draw the batch outside, and pass it to `strategy.run`."
            )
        count, batch = self._draw()
        if self._is_endless:
            return batch
        return after(tf.cond(count > 0, lambda: 0, _raise_end), batch)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Return the next batch, or an empty optional at the end."""
        count, batch = self._draw()
        optional = tf.experimental.Optional
        if self._is_endless:
            return optional.from_value(batch)
        spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
        return tf.cond(
            count > 0,
            lambda: optional.from_value(batch),
            lambda: optional.empty(spec),
        )

    def _draw(self) -> tuple[tf.Tensor, Any]:
        """Draw this worker's parts of the next batch.

        A replica whose data have ended gets padding rows. Return the number of
        replicas whose data have not ended, and this worker's parts.
        """
        (iterator,) = self._iterators
        is_main = threading.current_thread() is threading.main_thread()
        if tf.executing_eagerly() and is_main:
            # If the last step failed on this worker, other workers may still be
            # waiting in that step. Record the failure before this worker waits
            # for a batch.
            self._strategy.extended.check_step_ended()
        element, notes = regroup(self._parts(iterator), always_wrap=True)
        # The notes may be wrapped in an `Ending`.
        (notes,) = tf.nest.flatten(notes)
        this, following = zip(
            *(tf.unstack(note[0]) for note in notes.values), strict=True
        )
        known = self._compare_batches(this, following)
        own = tuple(note[1] for note in this)
        batch = with_rows(element, RowCounts(known[1], own), self.element_spec)
        check = batch_digests.check(known)
        return known[0], after(check, batch)

    def _parts(self, iterator: Any) -> list[Any]:
        """Return an element and its notes for each replica of this worker."""
        if not self._enable_get_next_as_optional:
            return iterator.get_next_as_list()
        return [
            tf.cond(
                optional.has_value(),
                optional.get_value,
                functools.partial(blank, optional.element_spec),
            )
            for optional in iterator.get_next_as_optional_list()
        ]

    def _compare_batches(
        self, this: Sequence[tf.Tensor], following: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Return this batch's summary, and summarize the next batch.

        In a `tf.function`, TensorFlow exchanges notes in parallel with ops that
        do not need the summary. In eager mode, a thread exchanges the notes,
        unless `background.is_at_once`.
        """
        self.wait()
        # Notes with a total of rows are longer. The size may be unknown in a
        # `tf.function` that is called with both kinds of notes.
        has_total = (following[0].shape[0] or 0) > SIZE
        current = round_of_fit() if has_total else None
        known, waiting = self._known_summary(this)

        def summary_of_next() -> tf.Tensor:
            if current is None:
                return self._summarize(following, known)
            return self._in_round(known, waiting, following, current)

        def summarize_next() -> None:
            # At the end of the data, no worker may start an exchange. The error
            # that ends the iteration would cancel this exchange, and a later
            # exchange would receive the messages.
            with tf.device("CPU:0"):
                may_continue = (known[0] > 0) & (known[2] == Verdict.SAME)
                later = tf.cond(may_continue, summary_of_next, lambda: known)
                tf.raw_ops.AssignVariableOp(resource=self.known, value=later)

        background = self._strategy.extended.background
        if not tf.executing_eagerly():
            summarize_next()
        elif current is None:
            background.call(summarize_next)
        else:
            background.call(functools.partial(_or_abort, summarize_next))
        return known

    def _known_summary(
        self, this: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return this batch's summary, and the notes not exchanged yet.

        For an iterator's first batch, workers exchange notes now.
        """
        with tf.device("CPU:0"):
            stored = tf.raw_ops.ReadVariableOp(
                resource=self.known, dtype=tf.int32
            )
            size = len(batch_digests.UNKNOWN)
            before = tf.ensure_shape(stored[:size], [size])
            known = tf.cond(
                before[0] < 0,
                lambda: self._summarize(this, before),
                lambda: before,
                name=FIRST_BATCH,
            )
            return known, stored[size:]

    def _summarize(
        self, notes: Sequence[tf.Tensor], known: tf.Tensor
    ) -> tf.Tensor:
        """Exchange notes on a batch; return the batch's summary."""
        # Leave out the total of rows, if notes end with one.
        notes = [tf.ensure_shape(note[:SIZE], [SIZE]) for note in notes]
        return self._strategy.extended.summarize_notes(
            batch_digests.summarize, notes, known
        )

    def _in_round(
        self,
        known: tf.Tensor,
        waiting: tf.Tensor,
        following: Sequence[tf.Tensor],
        current: LocalRound,
    ) -> tf.Tensor:
        """Return the summary of the next batch, in a round of local steps.

        Workers exchange notes in the last step of a round, in the step on a
        worker's last batch, and if a whole round's notes are waiting. In other
        steps, the summary comes from this worker's notes, and is followed by
        the notes still to be exchanged: those in `waiting` and `following`.

        Raises:
            tf.errors.InvalidArgumentError: If data end on some workers only, or
                if data end after batches that differ between workers. A
                `tf.function` raises the error when the function runs.
        """
        extended, count = self._strategy.extended, len(following)
        own = batch_digests.summarize_own(
            following[0], extended.replicas, known
        )
        notes = tf.stack([note[:SIZE] for note in following])
        notes = tf.concat(
            [tf.reshape(waiting, [-1, count, SIZE]), notes[tf.newaxis]], 0
        )
        missing = current.batches - tf.shape(notes)[0]

        def compare_round() -> tf.Tensor:
            # Pad the notes to the number of batches in a round. The padding
            # stands for batches that no replica has.
            end = tf.pad(following[0][2:3], [[2, SIZE - 3]])
            ends = tf.tile(end[tf.newaxis, tf.newaxis], [missing, count, 1])
            filled = tf.ensure_shape(
                tf.concat([notes, ends], 0), [current.batches, count, SIZE]
            )
            parts = tf.unstack(filled, axis=1)

            def now() -> tf.Tensor:
                return extended.summarize_notes(
                    batch_digests.summarize_all, parts, known, is_in_step=False
                )

            def later() -> tf.Tensor:
                gather = extended.notes_later((current.batches, SIZE))
                return _summarize_later(gather, parts, known, own[0] == 0)

            summary = (
                tf.cond(current.waits, now, later)
                if current.overlaps
                else now()
            )
            # Raise the error now if there may be no next draw, since a step may
            # be waiting for a worker whose data have ended. Otherwise, the next
            # draw raises the error, before the next step begins.
            is_last = (summary[2] == Verdict.ENDED) | (own[0] == 0)
            verdict = tf.where(is_last, summary[2], Verdict.SAME)
            check = batch_digests.check(tf.stack([0, 0, verdict]))
            return after(check, tf.concat([own[:2], summary[2:]], 0))

        is_due = current.ends | (missing <= 0) | (own[0] == 0)
        return tf.cond(
            is_due,
            compare_round,
            lambda: tf.concat([own, tf.reshape(notes, [-1])], 0),
        )

    def wait(self) -> None:
        """Wait until the exchange in the background has ended."""
        background = self._strategy.extended.background
        background.wait()
        if not tf.executing_eagerly() and not self.is_argument:
            # Later calls of the traced function will not wait here. So from now
            # on, exchanges must not run in the background thread.
            background.is_at_once = True

    @property
    def element_spec(self) -> Any:
        """The type of a batch, without the notes that workers exchange."""
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


def _summarize_later(
    gather: GatherLater,
    parts: Sequence[tf.Tensor],
    known: tf.Tensor,
    is_end: tf.Tensor,
) -> tf.Tensor:
    """Start to exchange a round's notes; return the summary of earlier rounds.

    If this worker's data end (`is_end`), wait for the notes of this round, and
    include them in the summary.
    """
    # If no notes have been sent, `take` returns zeros, which stand for batches
    # that no replica has.
    before = batch_digests.summarize_all(gather.take(), known)
    with tf.control_dependencies([before]):
        effects = effects_of(lambda: gather.start(parts))

    def wait() -> tf.Tensor:
        return batch_digests.summarize_all(gather.take(), before)

    with tf.control_dependencies(effects):
        return tf.cond(is_end, wait, lambda: before)


def _or_abort(function: Callable[[], None]) -> None:
    """Call a function; abort all collectives on an `InvalidArgumentError`.

    Without the abort, a step in the main thread could wait forever for a worker
    whose data have ended.
    """
    try:
        function()
    except tf.errors.InvalidArgumentError as error:
        coordination.abort(error.message)
        raise


def _raise_end() -> tf.Tensor:
    """Raise the error that ends an iteration, by reading an empty dataset."""
    nothing = iter(tf.data.Dataset.range(0))
    with tf.control_dependencies([nothing.get_next()]):
        return tf.constant(0)


def after(check: Any, batch: Any) -> Any:
    """Return a batch that is available only after a check has passed.

    Args:
        check: An op or tensor; None if there is nothing to wait for.
        batch: A nest. Leaves that are not tensors are returned unchanged.
    """
    if tf.executing_eagerly() or check is None:
        return batch

    def wait(tensor: Any) -> Any:
        if not tf.is_tensor(tensor):  # For example, missing sample weights.
            return tensor
        with tf.device(tensor.device), tf.control_dependencies([check]):
            return tf.identity(tensor)

    return tf.nest.map_structure(wait, batch, expand_composites=True)
