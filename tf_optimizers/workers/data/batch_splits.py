"""Splits a global batch into the parts of replicas.

For example, 7 rows are split among 3 replicas as follows:

    rows     0 1 2   3 4   5 6
    replica  0       1     2

If there is only one row, replicas 1 and 2 get a copy of this row as padding,
since few layers accept a batch without rows. Such a part counts as 0 rows.
"""

from typing import Any

import tensorflow as tf

_SPLIT = tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec

_RULE = "All values of a batch must have the same number of rows."
_HINT = (
    "If a value is the same for all rows, repeat it for each row, or store it "
    "in the model. If a value has k rows for each row of the other values, "
    "reshape it to [rows, k, ...]."
)


def is_split(spec: Any) -> bool:
    """Return whether batches of a given type can be split by rows."""
    leaves = tf.nest.flatten(spec)
    return any(_has_rows(leaf) for leaf in leaves) and all(
        isinstance(leaf, _SPLIT | tf.OptionalSpec)
        or leaf == tf.type_spec_from_value(None)
        for leaf in leaves
    )


def _has_rows(spec: Any) -> bool:
    return isinstance(spec, _SPLIT) and spec.shape.rank != 0


def split(batch: Any, places: range, replicas: int) -> list[tuple[Any, Any]]:
    """Return some replicas' parts of a batch, and the number of rows of each.

    Args:
        batch: A nest. At least one value must not be a scalar.
        places: The indices of the parts to return.
        replicas: The total number of parts.
    """
    rows = _common_rows(batch)
    # Keep rows static only if each part has the same number of rows, above 0.
    is_even = isinstance(rows, int) and rows > 0 and not rows % replicas
    if not is_even:
        rows = tf.compat.v1.placeholder_with_default(rows, [])
    return [_part(batch, rows, place, replicas) for place in places]


def _part(batch: Any, rows: Any, place: int, replicas: int) -> tuple[Any, Any]:
    least, extra = rows // replicas, rows % replicas
    if isinstance(rows, int):
        return take_rows(batch, place * least, least), least
    own = least + tf.cast(place < extra, tf.int32)
    begin = place * least + tf.minimum(place, extra)
    begin = tf.where(own > 0, begin, 0)
    return take_rows(batch, begin, tf.maximum(own, 1)), own


def take_rows(batch: Any, begin: Any, count: Any) -> Any:
    """Return up to `count` rows of each value, starting at row `begin`.

    Scalars and values that are not tensors are returned unchanged.
    """
    return tf.nest.map_structure(
        lambda value: _take(value, begin, count), batch
    )


def _take(value: Any, begin: Any, count: Any) -> Any:
    if isinstance(value, tf.SparseTensor):
        return _take_sparse(value, begin, count)
    if rows_in(value) is None:
        return value
    return value[begin : begin + count]


def _take_sparse(value: tf.SparseTensor, begin: Any, count: Any) -> Any:
    shape = tf.unstack(value.dense_shape, num=value.shape.rank)
    start = [tf.cast(begin, tf.int64)] + [tf.zeros([], tf.int64)] * (
        len(shape) - 1
    )
    size = [tf.cast(count, tf.int64), *shape[1:]]
    taken = tf.sparse.slice(value, tf.stack(start), tf.stack(size))
    # Layers need the static dimensions, which the slice has lost.
    known = [
        here if dim is None else tf.constant(dim, tf.int64)
        for here, dim in zip(shape[1:], value.shape[1:], strict=True)
    ]
    return tf.SparseTensor(
        taken.indices,
        taken.values,
        tf.stack([taken.dense_shape[0], *known]),
    )


def rows_in(value: Any) -> Any:
    """Return a value's number of rows; None for scalars and other objects.

    The number is an int if the first dimension of a dense tensor is static.
    Otherwise, it is an int32 tensor.
    """
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.Tensor) and value.shape.rank != 0:
        known = value.shape[0] if value.shape.rank else None
        return tf.shape(value)[0] if known is None else known
    return None


def fixed_rows(spec: Any) -> int | None:
    """Return the fixed number of rows of the first value with rows, or None."""
    leaves = list(filter(_has_rows, tf.nest.flatten(spec)))
    return rows_of_type(leaves[0]) if leaves else None


def rows_of_type(spec: Any) -> int | None:
    """Return the fixed number of rows of a value of a given type, or None."""
    if not _has_rows(spec) or spec.shape.rank is None:
        return None
    return spec.shape[0]


def blank(spec: Any) -> Any:
    """Return zeros, or an empty optional, of a given type.

    Unknown dimensions become 1.
    """
    return tf.nest.map_structure(_blank, spec)


def _blank(spec: Any) -> Any:
    if isinstance(spec, tf.OptionalSpec):
        return tf.experimental.Optional.empty(None)
    if not isinstance(spec, _SPLIT):
        return None
    dims = [None] if spec.shape.rank is None else spec.shape.as_list()
    shape = [1 if dim is None else dim for dim in dims]
    if isinstance(spec, tf.SparseTensorSpec):
        indices = tf.zeros([0, len(shape)], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), shape)
    zeros = tf.zeros(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank:
        return tf.RaggedTensor.from_tensor(
            zeros,
            ragged_rank=spec.ragged_rank,
            row_splits_dtype=spec.row_splits_dtype,
        )
    return zeros


def _common_rows(batch: Any) -> Any:
    """Return a batch's number of rows; raise if it differs between values."""
    every = counts_of_rows(batch)
    known = [rows for rows in every if isinstance(rows, int)]
    if len({*known}) > 1:
        raise ValueError(f"{_RULE} Received: {known} rows. {_HINT}")
    if len(every) == len(known):
        return known[0]
    if len(every) == 1:
        return every[0]
    check = tf.debugging.Assert(
        tf.reduce_all(tf.equal(every, every[0])),
        [f"{_RULE} Received:", tf.stack(every), f"rows. {_HINT}"],
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(every[0])


def counts_of_rows(batch: Any) -> list[Any]:
    """Return the number of rows of each value in a batch, ignoring scalars."""
    counts = map(rows_in, tf.nest.flatten(batch))
    return [rows for rows in counts if rows is not None]
