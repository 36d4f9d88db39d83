"""Variables: writes and reads, in replicas and outside."""

import itertools

import tensorflow as tf
from local import per_replica
from strategies.table import Table, in_graph, replica_number

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
METHODS = ("assign", "assign_add", "assign_sub")
TABLE = Table()


def make(strategy, aggregation="NONE", synchronization="AUTO", dtype="float32"):
    kinds = tf.VariableSynchronization
    with strategy.scope():
        return tf.Variable(
            tf.constant([1, 2], dtype),
            aggregation=getattr(tf.VariableAggregation, aggregation),
            synchronization=getattr(kinds, synchronization),
            trainable=False if synchronization == "ON_READ" else None,
        )


def read(strategy, variable):
    """Return a variable's values, read in replicas and outside."""
    return {
        "replica": strategy.run(lambda: variable.read_value()),
        "graph": in_graph(strategy, lambda: variable + 0),
        "cross replica": tf.identity(variable),
        "components": [
            v.read_value()
            for v in strategy.experimental_local_results(variable)
        ],
    }


def own(dtype="float32"):
    return tf.constant([8, 32], dtype) * (replica_number() + 1)


def write(strategy, variable, method, where):
    """Write a different value per replica; return the call's result."""
    update = getattr(variable, method)
    if where == "replica":
        return strategy.run(lambda: update(own(variable.dtype)).read_value())
    if where == "graph":
        in_graph(strategy, lambda: update(own(variable.dtype)))
    elif where == "cross replica":
        update(tf.constant([8, 32], variable.dtype))
    else:
        with strategy.scope():
            update(tf.constant([8, 32], variable.dtype))
    return None


def error_of(synchronization, aggregation, method, where, dtype):
    """Return the error that TensorFlow documents, or None."""
    local = synchronization == "ON_READ"
    adds_to_sum = aggregation == "SUM" and method != "assign"
    if (
        (aggregation == "MEAN" and dtype == "int32")
        or (local and aggregation == "NONE")  # It is read below.
        or (local and adds_to_sum and where in ("cross replica", "scope"))
    ):
        return "ValueError"
    return None


def _written(*kind):
    synchronization, aggregation, method, where, dtype = kind

    def write_and_read(strategy, other):
        variable = make(strategy, aggregation, synchronization, dtype)
        return [
            write(strategy, variable, method, where),
            read(strategy, variable),
        ]

    return write_and_read


def _add_writes():
    wheres = ("replica", "graph", "cross replica", "scope")
    floats = itertools.product(
        ("AUTO", "ON_READ"), AGGREGATIONS, METHODS, wheres, ("float32",)
    )
    integers = itertools.product(
        ("AUTO", "ON_READ"), AGGREGATIONS, ("assign_add",), wheres, ("int32",)
    )
    for kind in itertools.chain(floats, integers):
        TABLE.add(", ".join(kind), _written(*kind), error=error_of(*kind))


_add_writes()


@TABLE.behaviour
def initial_values_of_the_chief(strategy):
    place = float(strategy.cluster_resolver.task_id)
    with strategy.scope():
        variables = [
            tf.Variable([place, 1.0 + place]),
            tf.Variable(lambda: tf.fill([2], place)),
            tf.Variable(
                [place],
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            ),
        ]
    return [read(strategy, variable) for variable in variables]


@TABLE.behaviour
def variable_made_in_a_function(strategy):
    made = []

    @tf.function
    def step():
        if not made:
            made.append(tf.Variable([1.0, 2.0]))
        return strategy.run(lambda: made[0] * own())

    with strategy.scope():
        return [step(), step(), read(strategy, made[0])]


@TABLE.behaviour
def variable_made_in_a_replica(strategy):
    made = []

    def replica():
        if not made:
            made.append(tf.Variable([1.0, 2.0]))
        return made[0] * own()

    return [strategy.run(replica), strategy.run(replica)]


@TABLE.behaviour
def properties_of_variables(strategy):
    variables = [
        make(strategy, a, s)
        for a in AGGREGATIONS
        for s in ("AUTO", "ON_WRITE", "ON_READ")
    ]
    return [
        [
            type(v).__name__,
            v.trainable,
            v.dtype.name,
            v.shape.as_list(),
            str(v.aggregation),
            str(v.synchronization),
            strategy.extended.variable_created_in_scope(v),
        ]
        for v in variables
    ]


def _shaped_otherwise(strategy, other):
    variable = make(strategy, "SUM")
    return strategy.run(lambda: variable.assign([1.0, 2.0, 3.0]))


TABLE.add("value shaped otherwise", _shaped_otherwise, error="ValueError")


@TABLE.behaviour
def gradient_of_a_mirrored_variable(strategy):
    variable = make(strategy)

    def replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2 * own())
        return tape.gradient(loss, variable)

    return [strategy.run(replica), in_graph(strategy, replica)]


def _scattered(method, aggregation, run):
    def scatter(strategy, other):
        variable = make(strategy, aggregation)

        def replica():
            delta = tf.IndexedSlices(own()[:1], tf.constant([1]))
            getattr(variable, method)(delta)

        run(strategy, replica)
        return read(strategy, variable)

    return scatter


def _add_scatters():
    runs = {"replica": lambda s, replica: s.run(replica), "graph": in_graph}
    for method, aggregation, where in itertools.product(
        ("scatter_add", "scatter_update"), AGGREGATIONS, runs
    ):
        cannot = method == "scatter_update" and aggregation in ("SUM", "MEAN")
        TABLE.add(
            f"{method}, {aggregation}, {where}",
            _scattered(method, aggregation, runs[where]),
            error="NotImplementedError" if cannot else None,
        )


_add_scatters()


@TABLE.behaviour
def extended_update(strategy):
    variable = make(strategy, "MEAN")
    value = strategy.extended.reduce_to(
        tf.distribute.ReduceOp.SUM,
        per_replica(strategy, lambda i: tf.fill([2], i + 1.0)),
        destinations=variable,
    )
    with strategy.scope():
        strategy.extended.update(
            variable, lambda v, x: v.assign_add(x), args=(value,)
        )
    return read(strategy, variable)


@TABLE.behaviour
def writing_in_a_loop_of_a_graph(strategy):
    variable = make(strategy, "SUM")

    @tf.function
    def loop():
        for _ in tf.range(3):
            strategy.run(lambda: variable.assign_add(own()))

    loop()
    return read(strategy, variable)


@TABLE.behaviour
def writing_what_all_reduce_returns(strategy):
    variable = make(strategy)

    def replica():
        total = tf.distribute.get_replica_context().all_reduce("SUM", own())
        variable.assign_add(total)

    strategy.run(replica)
    in_graph(strategy, replica)
    return read(strategy, variable)
