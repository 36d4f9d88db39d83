"""The results of `run` and `reduce`.

Not compared: the sum, without an axis, of values whose shapes differ. Our
strategy pads them; TensorFlow's aborts, and no collective runs after that.
"""

import itertools

import tensorflow as tf
from local import per_replica
from strategies.table import Table, context, matrix

TABLE = Table()
OPS = ("SUM", "MEAN")


@TABLE.behaviour
def run_takes_and_returns_nests(strategy):
    def replica(pair, scale, *, offset):
        return {"sum": pair["a"] + pair["b"][0] + offset, "n": [scale, (1.5,)]}

    pair = {
        "a": per_replica(strategy, matrix),
        "b": [per_replica(strategy, lambda i: matrix(i + 2))],
    }
    offset = per_replica(strategy, lambda i: tf.constant(float(i)))
    return strategy.run(replica, (pair, 3), {"offset": offset})


@TABLE.behaviour
def run_returns_none(strategy):
    return strategy.run(lambda: None)


@TABLE.behaviour
def run_of_a_tf_function(strategy):
    value = per_replica(strategy, matrix)
    return strategy.run(tf.function(lambda v: v * 2), (value,))


@TABLE.behaviour
def run_in_control_flow(strategy):
    value = per_replica(strategy, matrix)

    @tf.function
    def loop(value, steps):
        total = strategy.run(lambda v: v, (value,))
        for _ in tf.range(steps):
            total = strategy.run(lambda a, b: a + b, (total, value))
        if steps > 2:
            total = strategy.run(lambda v: -v, (total,))
        return total

    return [loop(value, tf.constant(steps)) for steps in (0, 3)]


@TABLE.behaviour
def context_of_a_replica(strategy):
    def replica():
        return [
            context().replica_id_in_sync_group,
            tf.constant(context().num_replicas_in_sync),
        ]

    return [strategy.run(replica), strategy.num_replicas_in_sync]


@TABLE.behaviour
def collectives_in_a_loop_around_run(strategy):
    value = per_replica(strategy, matrix)

    @tf.function
    def loop(value):
        total = tf.zeros([2, 3])
        for _ in tf.range(3):
            total += strategy.reduce("SUM", value, None)
        return total

    return loop(value)


def scalar(replica):
    return tf.constant(replica + 1.5)


def _reduction(make, op, axis):
    def reduce(strategy, other):
        value = per_replica(strategy, make)
        step = tf.function(lambda value: strategy.reduce(op, value, axis))
        return [strategy.reduce(op, value, axis), step(value)]

    return reduce


def _add_reductions():
    values = {
        "matrices": (matrix, (None, 0, 1)),
        "integers": (lambda i: matrix(i, dtype="int64"), (None, 0, 1)),
        "uneven rows": (lambda i: matrix(i, rows=i + 1), (0,)),
        "no rows on one": (lambda i: matrix(i, rows=i), (0,)),
        "scalars": (scalar, (None,)),
    }
    for op in OPS:
        for name, (make, axes) in values.items():
            for axis in axes:
                TABLE.add(
                    f"reduce {name}, {op}, axis={axis}",
                    _reduction(make, op, axis),
                )
        TABLE.add(
            f"reduce scalars, {op}, axis=0",
            _reduction(scalar, op, 0),
            error="ValueError",
            instead=_reduction(scalar, op, None),
            reason="Keras 3 reduces the logs of a step with an axis.",
        )


_add_reductions()


@TABLE.behaviour
def reduce_tensor_of_the_host(strategy):
    return [strategy.reduce(op, tf.constant([2.0, 4.0]), None) for op in OPS]


def _reduced(strategy, other):
    return strategy.reduce("SUM", per_replica(strategy, matrix), None)


TABLE.add(
    "reduce a nest",
    lambda s, other: s.reduce("SUM", {"a": per_replica(s, matrix)}, None),
    error="ValueError",
    instead=lambda s, other: {"a": _reduced(s, other)},
    reason="Keras 3 reduces nests.",
)


def _of_run(ops):
    """Reduce each result of a `run`, including scalars, by itself."""

    def reduce(strategy, other):
        def step(value):
            outputs = strategy.run(
                lambda v: (tf.reduce_sum(v), v, tf.reduce_mean(v)), (value,)
            )
            return [
                strategy.reduce(op, output, None)
                for op, output in zip(ops, outputs, strict=True)
            ]

        value = per_replica(strategy, matrix)
        return [step(value), tf.function(step)(value)]

    return reduce


for _ops in itertools.product(OPS, repeat=3):
    TABLE.add(f"reduce outputs of run, {', '.join(_ops)}", _of_run(_ops))


@TABLE.behaviour
def reduce_to(strategy):
    value = per_replica(strategy, matrix)
    others = per_replica(strategy, lambda i: matrix(i + 3))
    op = tf.distribute.ReduceOp.SUM
    extended = strategy.extended
    return [
        extended.reduce_to(op, value, destinations=value),
        extended.batch_reduce_to(op, [(value, value), (others, value)]),
    ]
