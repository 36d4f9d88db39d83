"""Computes a replica's share of a global batch's rows, and removes padding."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import distinct
from tf_optimizers._compat.keras_internals import without_optionals
from tf_optimizers._compat.tensorflow_internals import convert, plain_variable
from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers.data.batch_metadata import Counted, RowCounts
from tf_optimizers.workers.data.batch_splits import (
    counts_of_rows,
    rows_in,
    take_rows,
)
from tf_optimizers.workers.data.look_ahead import after
from tf_optimizers.workers.steps.replica_state import replica


class Share:
    """The number of a batch's rows on a replica, and on all replicas.

    A `tf.function` that a step calls may be traced once, and called again for
    batches with other numbers of rows. So it reads the numbers from a variable.

    Args:
        own: The number of rows of the replica; 0 if it has only padding.
        total: The number of rows of all replicas. For an empty batch, with a
            total of 0, all replicas have the same share.
        variable: The replica's variable, float64 [2], for both numbers.
    """

    def __init__(self, own: Any, total: Any, variable: tf.Variable) -> None:
        own, total = tf.cast(own, tf.float64), tf.cast(total, tf.float64)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self._rows = tf.where(total > 0, [own, total], [1.0, replicas])
        self._graph = tf.compat.v1.get_default_graph()
        self._variable = variable
        variable.assign(self._rows)

    @property
    def is_eager(self) -> bool:
        """Whether the step itself runs eagerly."""
        return not tf.is_symbolic_tensor(self._rows)

    @property
    def rows(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The number of rows on the replica, and on all replicas, float64.

        For an empty batch, these are 1 and the number of replicas.
        """
        is_here = tf.compat.v1.get_default_graph() is self._graph
        return tuple(tf.unstack(self._rows if is_here else self._variable))

    @property
    def has_rows(self) -> tf.Tensor:
        """Whether the replica has rows; true for an empty batch."""
        return self.rows[0] > 0

    @property
    def weight(self) -> tf.Tensor:
        """The share: the replica's fraction of all replicas' rows."""
        own, total = self.rows
        return own / total

    @property
    def inverse(self) -> tf.Tensor:
        """The inverse of `weight`, or 0 if the replica has no rows."""
        own, total = self.rows
        return tf.math.divide_no_nan(total, own)


def make_row_variables(devices: int) -> list[tf.Variable]:
    """Create a variable for the `Share` of each local replica."""
    with tf.init_scope(), tf.device("CPU:0"):
        zeros = tf.zeros([2], tf.float64)
        return [plain_variable(zeros) for _ in range(devices)]


def share_of(
    batch: Any, rows: RowCounts | None, variables: Sequence[tf.Variable]
) -> Share:
    """Return the share of the replica that calls this function.

    Args:
        batch: The replica's part of the batch.
        rows: The batch's numbers of rows. If None, the replicas exchange their
            numbers of rows.
        variables: For each of this worker's replicas, the variable of its
            `Share`.
    """
    variable = variables[replicas_of().rank % len(variables)]
    if rows is not None:
        return Share(*_own_and_total(rows), variable)
    counted = rows_of_inputs(batch)
    own = tf.cast(1 if counted is None else counted, tf.float32)
    return Share(own, replicas_of().sum(own), variable)


def rows_of_inputs(batch: Any) -> Any:
    """Return the number of rows of a batch's inputs, or None for scalars.

    The number is an int or a tensor; see `rows_in`.
    """
    inputs = batch[:1] if isinstance(batch, list | tuple) else batch
    return next(iter(counts_of_rows(inputs)), None)


def is_of_rows(value: Any) -> bool:
    """Return whether a value that a step computes has elements for each row.

    Only the shape decides. Some dimension must be unknown or, if the number of
    rows is known, a multiple of this number, since a step may repeat rows.
    """
    if isinstance(value, list | tuple):  # All elements have the same shape.
        return bool(value) and is_of_rows(value[0])
    shape = tf.convert_to_tensor(value).shape
    if not shape.is_fully_defined():
        return True
    rows = replica.rows
    return isinstance(rows, int) and any(
        length % max(rows, 1) == 0 for length in shape
    )


def factor_of_sum(value: Any) -> Any:
    """Return the factor for a loss that is the sum of a value's elements.

    The gradients of the loss are later multiplied by the replica's share. So if
    the value has elements for each row, the factor is the inverse of the share.
    Otherwise, it is 1. In a graph with a static number of rows, this function
    also records the value's shape in `replica.vectors`, for `check_vectors`.
    """
    counts = is_of_rows(value)
    if isinstance(replica.rows, int) and tf.is_symbolic_tensor(value):
        replica.vectors.append((value.shape, counts))
    return replica.share.inverse if counts else 1.0


def check_vectors(
    kind: str, rows: int, vectors: Sequence[Any], others: Sequence[Any]
) -> None:
    """Raise if a vector's length is a multiple of `rows` only by chance.

    The length of such a vector does not change if there is one more row.
    `vectors` and `others` are the step's `replica.vectors` for `rows`, and for
    one more row.
    """
    for (shape, counts), (other, _) in zip(vectors, others, strict=False):
        if counts and shape == other:
            raise ValueError(
                f"A vector that `{kind}` sums in a loss must have an element "
                "for each row, or a length that is not a multiple of the "
                f"number of rows. Received: shape {shape} for {rows} rows per "
                "replica, and the same shape for one more row. Sum the vector "
                "yourself, or use a different global batch size."
            )


def sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    """Return the sum of a number over all replicas.

    In a model's step, a replica without rows adds 0.
    """
    if not may_wait():
        raise RuntimeError(
            "A loss that needs a sum over all replicas, such as the sum of a "
            "mask, cannot run eagerly if workers have several devices. "
            "Received: a step that runs eagerly. Pass `run_eagerly=False` to "
            "`compile`, run the step in a `tf.function`, or use one device "
            "per worker."
        )
    if replica.share is not None:
        value = tf.where(replica.share.has_rows, value, 0.0)
    return replicas_of().sum(tf.stop_gradient(value))


def may_wait() -> bool:
    """Return whether a replica may wait for a sum in the middle of a step.

    This is false in an eager step if the worker has several devices. Then the
    worker's replicas take turns. While a replica waits for a sum, another
    replica runs, and replaces the `losses` of the model's layers.
    """
    devices = tf.distribute.get_strategy().extended.worker_devices
    return not tf.executing_eagerly() or len(devices) == 1


def check_function() -> None:
    """Raise in an eager step's `tf.function` if workers have several devices.

    In an eager step, a worker's replicas take turns. Within a `tf.function`,
    the first would wait forever for the next.
    """
    share = replica.share
    if share is None or not share.is_eager or tf.executing_eagerly():
        return
    if len(tf.distribute.get_strategy().extended.worker_devices) > 1:
        raise RuntimeError(
            "A `tf.function` that an eager step calls must not exchange values "
            "between replicas if workers have several devices. Received: a "
            "`tf.function` that does, for example for a synchronized "
            "`BatchNormalization` or a sum of a mask. Pass `run_eagerly=False` "
            "to `compile`, or use one device per worker."
        )


_as_it_is = tf.autograph.experimental.do_not_convert


class Loop:
    """The batches that a custom training loop passes to `strategy.run`.

    Args:
        counted: The arguments that belong to batches with known numbers of
            rows.
        others: Whether any other argument differs between replicas.

    Attributes:
        has_same_arguments: Whether no argument differs between replicas.
    """

    def __init__(self, counted: Sequence[Counted], others: bool) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        # In eager mode, all tensors of a batch share one `RowCounts`.
        self._rows = distinct(each.rows for each in counted)
        self.has_same_arguments = not counted and not others

    def rows_of_batch(self, rows: Any) -> tuple[Any, Any, Any] | None:
        """Return a batch's number of rows on this replica and on all replicas.

        Args:
            rows: The number of rows on the replica, which identifies the batch.
                The first batch with this number is used or, if there is none,
                the first batch.

        Returns:
            Two int32 scalars, and whether they are certain. They are certain if
            all batches have the same total. If `may_wait` is false, they are
            also certain if at most one batch has `rows` rows on this replica.
            None if this object was created in another graph, or if no batch has
            known numbers of rows.
        """
        is_here = tf.compat.v1.get_default_graph() is self._graph
        if not is_here or not self._rows:
            return None
        own, total = (
            tf.stack(each)
            for each in zip(*map(_own_and_total, self._rows), strict=True)
        )
        fits = tf.cast(own == rows, tf.int32)
        place = tf.argmax(fits)
        is_certain = len(self._rows) == 1 or tf.reduce_all(total == total[0])
        if not may_wait():
            is_certain |= tf.reduce_sum(fits) <= 1
        return own[place], total[place], is_certain


def _own_and_total(rows: RowCounts) -> tuple[tf.Tensor, tf.Tensor]:
    return rows.own[replicas_of().rank % len(rows.own)], rows.total


def without_padding(function: Callable, arguments: Any) -> Callable:
    """Return a function that drops padding rows and calls `function`.

    Do not pass a model's step, since steps count rows themselves.

    Args:
        function: Called on each replica with its part of the arguments.
        arguments: A pair (positional arguments, keyword arguments).
    """
    leaves = tf.nest.flatten(arguments)
    counted = [leaf for leaf in leaves if isinstance(leaf, Counted)]
    others = any(
        isinstance(leaf, tf.distribute.DistributedValues)
        and not isinstance(leaf, Counted | tf.Variable)
        for leaf in leaves
    )
    converted = convert(function)

    def take(value: Any, whole: Any) -> Any:
        if not isinstance(whole, Counted) or whole.is_full:
            return value
        return all_or_no_rows(value, _own_and_total(whole.rows)[0] > 0)

    def call(*args: Any, **kwargs: Any) -> Any:
        own = map(take, tf.nest.flatten((args, kwargs)), leaves)
        args, kwargs = tf.nest.pack_sequence_as((args, kwargs), list(own))
        with replica.set(loop=Loop(counted, others)):
            return converted(*args, **kwargs)

    return _as_it_is(call)


def all_or_no_rows(value: Any, is_taken: tf.Tensor) -> Any:
    """Return all rows of a value, or no rows if `is_taken` is false.

    In a graph, the result has a dynamic number of rows. A value that is not a
    batch is returned unchanged.
    """
    rows = rows_in(value)
    if rows is None:
        return value
    return take_rows(value, 0, tf.where(is_taken, rows, 0))


def with_checked_rows(name: Any, value: Any, rows: Any) -> Any:
    """Return a prediction; raise unless it has an element for each row.

    Replicas predict for different rows, and their predictions are concatenated.
    If an element belonged to no row, its place in the result would depend on
    the number of replicas.

    Args:
        name: The name of the prediction, or None.
        value: The prediction. A value that is not a tensor is not checked.
        rows: The number of rows of the inputs; an int if it is static.

    Raises:
        ValueError: If the prediction is a scalar, or if both numbers are static
            and differ.
        tf.errors.InvalidArgumentError: If the numbers differ and are not both
            static. A `tf.function` raises this error when the function runs.
    """
    if not tf.is_tensor(value):
        return value
    found = rows_in(value)
    rule = (
        "A prediction must have a row for each row of the inputs. "
        f"Received: {f'`{name}`' if name else 'a prediction'}"
    )
    hint = (
        "If a row has k predictions, reshape them to [rows, k, ...]. If a "
        "value depends on all rows, compute it from the result of `predict`."
    )
    if found is None:
        raise ValueError(f"{rule}, which is a scalar. {hint}")
    if isinstance(found, int) and isinstance(rows, int):
        if found != rows:
            raise ValueError(
                f"{rule}, with {found} rows, for {rows} inputs. {hint}"
            )
        return value
    check = tf.debugging.Assert(
        tf.equal(found, rows),
        [f"{rule}, with", found, "rows, for", rows, f"inputs. {hint}"],
    )
    return after(check, value)


def as_in_one_process(batch: Any, rows: RowCounts | None) -> Any:
    """Return a replica's part of a batch in the form that a step expects.

    The parts of an empty batch may contain padding, but a single process would
    get no rows. Optionals become None.
    """
    batch = without_optionals(batch)
    is_eager = tf.executing_eagerly()
    if rows is None or (is_eager and rows.total > 0):
        return batch
    return tf.nest.map_structure(
        lambda value: (
            value  # A fixed number of rows cannot become 0.
            if isinstance(rows_in(value), int) and not is_eager
            else all_or_no_rows(value, rows.total > 0)
        ),
        batch,
    )


def trace_with_rows(
    function: Callable[[Any], object], batch: Any, rows: int
) -> None:
    """Trace a function for parts with one more row, but do not run it.

    `batch` contains the parts of all replicas of this worker, of `rows` rows
    each. The function is called outside of `strategy.run`.
    """

    def longer(tensor: tf.Tensor) -> tf.TensorSpec:
        shape = tensor.shape.as_list()
        shape[:1] = [rows + 1] if shape[:1] == [rows] else shape[:1]
        return tf.TensorSpec(shape, tensor.dtype)

    leaves = tf.nest.flatten(batch, expand_composites=True)
    # Keras passes None for sample weights that are not given.
    places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf)]

    def call(*tensors: tf.Tensor) -> None:
        given = dict(zip(places, tensors, strict=True))
        all_of = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
        function(
            tf.nest.pack_sequence_as(batch, all_of, expand_composites=True)
        )

    tf.function(call, autograph=False).get_concrete_function(
        *(longer(leaves[i]) for i in places)
    )
