"""The text of custom loops, and of tests of conservation."""

from .rules import LOCAL

# Ways to pass a batch to `strategy.run`: the step's parameters, and the call.
ARGS = {
    "in order": ("{names}", "args=({names},)"),
    "reversed": ("{reversed}", "args=({reversed},)"),
    "nested": ("batch", "args=(({reversed},),)"),
    "batch": ("batch", "args=(batch,)"),
    "keywords": ("{names}", "kwargs={{{keywords}}}"),
}
# A replica's part of the loss, from the losses of its rows.
MEANS = {
    "by hand": "tf.reduce_sum(losses) / {batch}.0",
    "global_batch_size": (
        "tf.nn.compute_average_loss(losses, global_batch_size={batch})"
    ),
    "compute_average_loss": "tf.nn.compute_average_loss(losses)",
}
_LOSS_OF = {
    "regression": "MeanSquaredError",
    "binary": "BinaryCrossentropy",
    "classes": "SparseCategoricalCrossentropy",
    "onehot": "CategoricalCrossentropy",
}
# Ways to apply gradients in a step.
APPLY = {
    "apply": (
        "gradients = tape.gradient(scaled, weights)\n"
        "optimizer.apply(gradients, weights)"
    ),
    "apply_gradients": (
        "gradients = tape.gradient(scaled, weights)\n"
        "optimizer.apply_gradients(zip(gradients, weights))"
    ),
    "in two calls": (
        "gradients = tape.gradient(scaled, weights)\n"
        "optimizer.apply(gradients, weights)\n"
        "others = [0.1 * tf.convert_to_tensor(g) for g in gradients]\n"
        "optimizer.apply(others, weights)"
    ),
    "two losses": (
        "gradients = tape.gradient(scaled, weights)\n"
        "others = [0.5 * tf.convert_to_tensor(g) for g in gradients]\n"
        "optimizer.apply([*gradients, *others], [*weights, *weights])"
    ),
}
APPLY["in the tape"] = APPLY["apply"]  # In one process.
_STEP = """loss_of = keras.losses.{loss}(reduction="none")


def step({parameters}):{unpacked}
    with tf.GradientTape(persistent=True) as tape:
        losses = loss_of(y, model(x, training=True)){weighted}
        loss = {mean}
        scaled = optimizer.scale_loss(loss)
    weights = model.trainable_weights
{apply}
{static}    return loss, tf.shape(losses)[0]


{function}def train(batch):
    {names} = batch
    loss, count = strategy.run(step, {args})
    return (
        strategy.reduce("SUM", loss, axis=None),
        strategy.reduce("SUM", count, axis=None),
    )"""
_STATIC = '    seen["is static"] = y.shape[0] is not None\n'
_UNSHARED = """def make_data(context):
    part = data.unbatch().shard(
        context.num_input_pipelines, context.input_pipeline_id
    )
    return part.batch({batch} // context.num_replicas_in_sync or 1{more})


shared = strategy.distribute_datasets_from_function(make_data)"""
SHARED = {
    "dataset": "shared = strategy.experimental_distribute_dataset(data)",
    "its own": _UNSHARED,
}
_IN_PYTHON = """for epoch in range({epochs}):
    found = [train(batch) for batch in shared]
{noted}"""
_IN_GRAPH = """@tf.function
def train_epoch(data):
    losses = tf.TensorArray("float32", 0, dynamic_size=True)
    counts = tf.TensorArray("int32", 0, dynamic_size=True)
    number = 0
    for batch in data:
        loss, count = train(batch)
        losses = losses.write(number, tf.cast(loss, "float32"))
        counts = counts.write(number, count)
        number += 1
    return losses.stack(), counts.stack()


for epoch in range({epochs}):
    found = list(zip(*train_epoch(shared)))
{noted}"""
_EACH = """    seen[f"loop {epoch} losses"] = [float(loss) for loss, _ in found]
    seen[f"loop {epoch} rows"] = [int(count) for _, count in found]"""
_SUMS = """    losses, counts = zip(*found)
    seen[f"loop {epoch} losses"] = float(sum(losses))
    seen[f"loop {epoch} rows"] = int(sum(counts))"""


def loop_text(program, names, ideal):
    """Return a loop over the batches of `data`."""
    words = {
        "names": ", ".join(names),
        "reversed": ", ".join(reversed(names)),
        "keywords": ", ".join(f'"{name}": {name}' for name in names),
    }
    parameters, args = (text.format(**words) for text in ARGS[program["args"]])
    unpacked = ""
    if parameters == "batch":
        listed = words["reversed" if program["args"] == "nested" else "names"]
        unpacked = f"\n    {listed} = batch"
    lines = APPLY[program["apply"]].splitlines()
    apply = "".join(f"    {line}\n" for line in lines)
    if program["apply"] == "in the tape" and not ideal:
        apply = (
            "    with tape:\n"
            "        optimizer.apply(tape.gradient(scaled, weights), weights)\n"
        )
    is_static = "drop_remainder" in program["pipeline"]
    step = _STEP.format(
        **words | {"parameters": parameters, "args": args},
        loss=_LOSS_OF[program["task"]],
        unpacked=unpacked,
        weighted=" * w" if "w" in names else "",
        mean=MEANS[program["mean"]].format(batch=program["batch"]),
        apply=apply.rstrip("\n"),
        static=_STATIC if is_static else "",
        function="" if program["loop"] == "eager" else "@tf.function\n",
    )
    more = ", drop_remainder=True" if is_static else ""
    shared = SHARED[program["shared as"]].format(
        batch=program["batch"], more=more
    )
    loop = _IN_GRAPH if program["loop"] == "graph" else _IN_PYTHON
    noted = _EACH if program["shared as"] == "dataset" else _SUMS
    loop = loop.format(epochs=program["epochs"], noted=noted)
    if program["wrapper"] in LOCAL:
        loop += "\noptimizer.synchronize()"
    return f"{step}\n\n\n{shared}\n{loop}"


# Sent and unsent values must sum to all gradients.
_CONSERVATION = """{exchange}rng = np.random.default_rng({seed})
scales = {scales}
shapes = [{shapes}]
with strategy.scope():
    variables = [
        keras.Variable(np.zeros(shape), dtype="float32", name=f"v{{i}}")
        for i, shape in enumerate(shapes)
    ]
    optimizer = {optimizer}
    optimizer.build(variables)


def step(gradients):
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    share = tf.cast(replica, "float32") + 1.0
    optimizer.apply([share * g for g in gradients], variables)


@tf.function
def train(gradients):
    strategy.run(step, args=(gradients,))


totals = [np.zeros(shape) for shape in shapes]
replicas = strategy.num_replicas_in_sync
for _ in range({steps}):
    gradients = [
        (scale * rng.standard_normal(shape)).astype("float32")
        for scale, shape in zip(scales, shapes)
    ]
    train([tf.constant(gradient) for gradient in gradients])
    for total, gradient in zip(totals, gradients):
        total += replicas * (replicas + 1) / 2 * gradient.astype("float64")
{synchronize}held = [
    np.array(slot) for slot in optimizer.variables if "residual" in slot.path
]
for i, (variable, rest, total) in enumerate(zip(variables, held, totals)):
    moved = -np.array(variable, "float64")
    error = np.max(np.abs(moved + rest - total)) / np.max(np.abs(total))
    seen[f"conserved {{i}}"] = bool(error < 1e-5)
    seen[f"moved {{i}}"] = bool(np.any(moved))
    # No entry moves further than all gradients together would have moved it.
    seen[f"bounded {{i}}"] = bool(
        np.max(np.abs(moved)) < 2 * np.max(np.abs(total))
    )"""
SCALES = {
    "alike": "[1.0] * 6",
    "1 and 1e-4": "[1.0, 1e-4] * 3",
    "1e-8 to 1e8": "[1e8, 1e-8, 1.0, 1e-4, 1e4, 1e-6]",
}
EXCHANGE = """from tf_optimizers.compression import exchanges

exchanges.LEAST_SAVING = {saving}
"""
_CONSERVING = {
    "DGC": (
        "tfo.DGCMomentum(\n        1.0, momentum=0.0, sparsity=({sparsity},), "
        'min_compress_size=1,\n        value_dtype="{dtype}",\n    )'
    ),
    "SparseLoCo": (
        "tfo.SparseLoCo(\n        keras.optimizers.SGD(1.0), "
        "sparsity=({sparsity},), min_compress_size=1,\n"
        '        value_dtype="{dtype}",\n    )'
    ),
}
_CONSERVING["SparseLoCo overlapping"] = _CONSERVING["SparseLoCo"].replace(
    "sparsity=", "sync_every=2, overlap=True,\n        sparsity="
)
_CONSERVING["SparseLoCo ahead"] = _CONSERVING["SparseLoCo"].replace(
    "sparsity=", "sync_every=2, step_ahead=0.5,\n        sparsity="
)


def exchange_text(program):
    kind = program["exchange"]
    saving = "0" if kind == "sharded" else 'float("inf")'
    return "" if kind == "any" else EXCHANGE.format(saving=saving)


def conservation_text(program):
    """Return a script that checks the conservation of gradients."""
    wrapper = program["wrapper"]
    compressor = "DGC" if wrapper == "none" else wrapper
    synchronize = "optimizer.synchronize()\n" if wrapper in LOCAL else ""
    shapes = "(12, 10), (7,), (64,), (30, 5), (3, 4, 5), (1,)"
    return _CONSERVATION.format(
        exchange=exchange_text(program),
        seed=program["batch"],
        scales=SCALES[program["scales"]],
        shapes=shapes,
        steps=4 * program["epochs"],
        synchronize=synchronize,
        optimizer=_CONSERVING[compressor].format(
            dtype=program["wire"],
            sparsity={1: 0.5, 2: 0.75, 3: 0.9, 4: 0.95}[program["batches"]],
        ),
    )
