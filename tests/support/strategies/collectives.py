"""Exchanges between replicas.

Not compared: an all-gather of empty tensors, which crashes TensorFlow (2.21).
Under our strategy, sparse gradients without rows need no such gather.
"""

import functools
import itertools

import tensorflow as tf
from local import per_replica
from strategies.table import (
    Table,
    context,
    in_graph,
    matrix,
    replica_number,
)

TABLE = Table()
OPS = ("SUM", "MEAN")
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


def _all_reduced(op, dtypes):
    """Return tensors of these dtypes after one call of `all_reduce`."""
    tensors = [matrix(replica_number(), dtype=dtype) for dtype in dtypes]
    return context().all_reduce(op, {"b": tensors, "a": tensors[0][0, 0]})


def _add_all_reduces():
    for op in OPS:
        for dtype in DTYPES:
            TABLE.in_replica(
                f"all_reduce {dtype}, {op}",
                lambda op=op, dtype=dtype: _all_reduced(op, [dtype]),
            )
        several = functools.partial(_all_reduced, op, DTYPES[:4])
        TABLE.add(
            f"all_reduce several dtypes, {op}, eager",
            lambda s, other, several=several: s.run(several),
        )
        TABLE.add(
            f"all_reduce several dtypes, {op}, graph",
            lambda s, other, several=several: in_graph(s, several),
            error="TypeError",
            instead=lambda s, other, several=several: s.run(several),
            reason="TensorFlow packs tensors of one dtype only, in graphs.",
        )


_add_all_reduces()


def slices(rows, start=0, dense_rows=6):
    """Return sparse rows; if there are more than three, some repeat."""
    return tf.IndexedSlices(
        matrix(replica_number() + start, rows),
        tf.range(rows, dtype=tf.int64) % 3,
        tf.constant([dense_rows, 3], tf.int64),
    )


def each_row_once(part):
    """Return slices in which each row occurs once, as a sum."""
    if not isinstance(part, tf.IndexedSlices):
        return part
    rows, places = tf.unique(part.indices)
    values = tf.math.unsorted_segment_sum(part.values, places, len(rows))
    return tf.IndexedSlices(values, rows, part.dense_shape)


def _add_slices():
    makes = {
        "equal rows": lambda: slices(2),
        "duplicates": lambda: slices(6),
        "uneven rows": lambda: slices(5 * replica_number() + 1),
        "none on one": lambda: slices(2 * replica_number()),
        "several": lambda: [slices(4), slices(3 * replica_number(), 4, 9)],
        "with dense values": lambda: (
            [slices(4), matrix(replica_number()), slices(1)]
        ),
    }
    for (name, make), op in itertools.product(makes.items(), OPS):

        def reduce(make=make, op=op):
            return context().all_reduce(op, make())

        def summed(reduce=reduce):
            found = reduce()
            parts = found if isinstance(found, list) else [found]
            parts = list(map(each_row_once, parts))
            return parts if isinstance(found, list) else parts[0]

        TABLE.in_replica(
            f"all_reduce slices, {name}, {op}",
            reduce,
            instead=lambda s, other, summed=summed: s.run(summed),
            reason="Keras's optimizers square duplicate rows separately.",
        )


_add_slices()


def _add_gathers():
    makes = {
        "equal, axis=0": (matrix, 0),
        "equal, axis=1": (matrix, 1),
        "uneven rows": (lambda i: matrix(i, rows=2 * i + 1), 0),
        "uneven columns": (lambda i: tf.transpose(matrix(i, i + 1)), 1),
        "none on one": (lambda i: matrix(i, rows=i), 0),
        "integers": (lambda i: matrix(i, i + 1, "int32"), 0),
        "scalars": (lambda i: tf.constant(1.0), 0),
    }
    for name, (make, axis) in makes.items():
        error = "ValueError" if name == "scalars" else None
        TABLE.in_replica(
            f"all_gather {name}",
            lambda make=make, axis=axis: context().all_gather(
                make(replica_number()), axis
            ),
            error=error,
        )
        TABLE.add(
            f"gather {name}",
            lambda s, other, make=make, axis=axis: s.gather(
                per_replica(s, make), axis
            ),
            error=error,
        )


_add_gathers()
TABLE.in_replica(
    "all_gather nest",
    lambda: context().all_gather([matrix(replica_number())] * 2, 0),
)


def _gradient(exchange):
    def replica():
        value = matrix(replica_number())
        with tf.GradientTape() as tape:
            tape.watch(value)
            weights = tf.constant([[1.0, 2.0, 4.0]]) * (replica_number() + 1)
            total = tf.reduce_sum(exchange(value) ** 2 * weights)
        return tape.gradient(total, value)

    return replica


for _op in OPS:
    TABLE.in_replica(
        f"gradient of all_reduce, {_op}",
        _gradient(lambda v, op=_op: context().all_reduce(op, v)),
    )
TABLE.in_replica(
    "gradient of all_gather", _gradient(lambda v: context().all_gather(v, 0))
)


def _merged():
    return context().merge_call(
        lambda strategy, value: strategy.reduce("SUM", value, None),
        args=(matrix(replica_number()),),
    )


TABLE.in_replica("merge_call", _merged)


def _summed():
    return context().all_reduce("SUM", matrix(replica_number()))


def _conditional():
    return tf.cond(tf.constant(True), _summed, lambda: tf.zeros([2, 3]))


TABLE.add(
    "all_reduce in tf.cond",
    lambda s, other: in_graph(s, _conditional),
    error="RuntimeError",
    instead=lambda s, other: in_graph(s, _summed),
    reason="Keras accumulates gradients in a `tf.cond`.",
)
