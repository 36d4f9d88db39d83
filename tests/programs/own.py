"""The text of users' optimizers, layers and steps."""

_OWN_MOMENTUM = """class {name}(keras.optimizers.Optimizer):
    def __init__(self, learning_rate=0.1, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.speeds = {speeds}{more}

    def update_step(self, gradient, variable, learning_rate):
        place = self._get_variable_index(variable)
        speed = self.speeds[place]
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        self.assign(speed, 0.9 * speed + gradient)
{step}"""
_SPEED = 'self.add_variable_from_reference({of}, "speed")'
_STEP = "        self.assign_sub(variable, rate * speed)"
# Loops over variables in `build`.
_SPEEDS = {
    "OfCopies": f"[\n            {_SPEED.format(of='variable')}\n"
    "            for variable in list(variables)\n        ]",
    "OfReversed": f"[\n            {_SPEED.format(of='variable')}\n"
    "            for variable in reversed(list(variables))\n        ][::-1]",
    "OfIndices": f"[\n            {_SPEED.format(of='variables[i]')}\n"
    "            for i in range(len(variables))\n        ]",
    "OfAttribute": f"[\n            {_SPEED.format(of='variable')}\n"
    "            for variable in self._trainable_variables\n        ]",
}
_COUNTS = """
        self.counts = [
            self.add_variable({shape}, dtype="int32", name=f"count_{{i}}")
            for i, variable in enumerate(variables)
        ]"""
_COUNTED = """        count = self.counts[place]
        self.assign_add(count, ops.ones_like(count))
        self.assign_sub(variable, rate * speed / (
            1 + ops.cast(count, variable.dtype)
        ))"""
# Optimizers of a user's own, by their class.
OWN_OPTIMIZERS = {
    name: _OWN_MOMENTUM.format(name=name, speeds=speeds, more="", step=_STEP)
    for name, speeds in _SPEEDS.items()
}
for _name, _shape in {
    "Counting": "()",
    "CountingEach": "variable.shape",
}.items():
    OWN_OPTIMIZERS[_name] = _OWN_MOMENTUM.format(
        name=_name,
        speeds=_SPEEDS["OfCopies"],
        more=_COUNTS.format(shape=_shape),
        step=_COUNTED,
    )
# Subclasses of ours with Keras's signature; in one process, of Keras's.
_OF_OURS = """class {name}({base}):
    def update_step(self, gradient, variable, learning_rate):
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        self.assign_sub(variable, rate * gradient)"""
OF_OURS = {
    name: _OF_OURS.format(name=name, base=f"tfo.{name[2:]}")
    for name in ("MyLamb", "MyLANS")
}
IDEAL_OF_OURS = {
    name: _OF_OURS.format(name=name, base="keras.optimizers.Optimizer")
    for name in OF_OURS
}

# Layers that assign state from their rows.
_CENTRE = """class {name}(layers.Layer):
    def build(self, shape):
        self.centre = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False,
            name="centre"{more},
        )

    def call(self, x, training=False):
        if training:
            mean = ops.mean(ops.cast(x, self.centre.dtype), 0)
            self.centre.assign(0.9 * self.centre + 0.1 * mean)
        return x - ops.cast(self.centre, x.dtype)"""
STATEFUL = {
    "Centre": _CENTRE.format(name="Centre", more=""),
    "CommonCentre": _CENTRE.format(
        name="CommonCentre", more=', aggregation="mean"'
    ),
    "Codebook": """class Codebook(layers.Layer):
    def build(self, shape):
        self.used = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False,
            dtype="int32", name="used",
        )

    def call(self, x, training=False):
        if training:
            self.used.assign_add(ops.sum(
                ops.one_hot(ops.argmax(x, -1), x.shape[-1], dtype="int32"), 0
            ))
        return x""",
    "EveryDtype": """class EveryDtype(layers.Layer):
    def build(self, shape):
        self.held = [
            self.add_weight(
                shape=(3,), initializer="ones", trainable=False, dtype=dtype,
                name=f"held_{dtype}",
            )
            for dtype in (
                *("float16", "bfloat16", "float32", "float64", "bool"),
                *("int8", "int16", "int32", "int64"),
                *("uint8", "uint16", "uint32", "uint64"),
            )
        ]

    def call(self, x):
        return x * ops.cast(self.held[1][0], x.dtype)""",
    "Scale": """class Scale(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale""",
}

# Names and decorators of a model's step.
STEPS = ("def", "another name", "decorated", "lambda", "closure", "partial")
_DECORATOR = """def logged(step):
    def run(self, data):
        return step(self, data)

    return run


"""
# The end of a step: updates metrics.
_UPDATE = """        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, y_pred, sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}"""
_TEST_STEP = f"""

    def check(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(x, y, y_pred, sample_weight, training=False)
{_UPDATE}

    test_step = check"""


def with_step(text, kind, tests):
    """Return the text of a class with another form of step."""
    if kind == "decorated":
        text = _DECORATOR + text.replace(
            "    def train_step(", "    @logged\n    def train_step("
        )
    elif kind != "def":
        text = text.replace("def train_step(", "def step_of_mine(")
    if kind == "another name":
        text += "\n\n    train_step = step_of_mine"
    if tests:
        text += _TEST_STEP
    return text


# Assigns the step to an existing model.
JOINED = {
    "lambda": "model.train_step = lambda data: model.step_of_mine(data)",
    "closure": (
        "def make_step(model):\n"
        "    def run(data):\n"
        "        return model.step_of_mine(data)\n\n"
        "    return run\n\n"
        "model.train_step = make_step(model)"
    ),
    "partial": (
        "model.train_step = functools.partial(type(model).step_of_mine, model)"
    ),
}
# Additional results of a `train_step`.
RETURNED = {
    "metrics": "",
    "rate": '"rate": self.optimizer.learning_rate',
    "steps": '"steps": self.optimizer.iterations',
    "bool": '"is fine": ops.all(ops.isfinite(ops.cast(y_pred, "float32")))',
    "by output": (
        '"by output": ops.mean(ops.square('
        'ops.cast(y, "float32") - ops.cast(y_pred, "float32")), 0), '
        '"predicted": ops.mean(ops.cast(y_pred, "float32"), 0)'
    ),
    # Afterwards, so that the other results are those of the batch.
    "reset": (
        '"reset": [metric.reset_state() for metric in self.metrics] '
        "and self.metrics[0].result()"
    ),
}
# Random numbers in a step, without a seed.
DRAWN = {
    "nothing": "",
    "a number": "()",
    "elements": "ops.shape(y_pred)",
}
_DRAW = """            shape = {shape}
            y_pred *= keras.random.uniform(shape, 0.5, 1.0, y_pred.dtype)
"""


def with_draws(text, drawn):
    """Return the text of a class whose step multiplies by random numbers."""
    if not DRAWN[drawn]:
        return text
    loss = "            loss = self.compute_loss("
    return text.replace(loss, _DRAW.format(shape=DRAWN[drawn]) + loss)


# Who holds a variable that a step assigns: its name in the step, and outside.
HOLDERS = {
    "an object": ("box.held", "box.held"),
    "the script": ("held", "held"),
    "the model": ("self.held", "model.held"),
}
HELD_AS = ("keras.Variable", "tf.Variable")
_HELD = """with strategy.scope():
    {name} = {make}


"""
_ASSIGNED = """        value = ops.cast(y, "float32")
        {name}.assign({value})
        for metric in"""


def with_held(text, holder, kind, aggregation):
    """Return the text of a class whose step assigns a variable."""
    if holder == "nobody":
        return text
    name, _ = HOLDERS[holder]
    value = f"0.75 * {name} + 0.25 * ops.mean(value)"
    if aggregation == "sum":
        value = "ops.sum(value)"
    if kind == "tf.Variable":
        aggregation = f"tf.VariableAggregation.{aggregation.upper()}"
    else:
        aggregation = f'"{aggregation}"'
    make = (
        f'{kind}(\n    np.float32(0), trainable=False, dtype="float32",\n'
        f"    aggregation={aggregation},\n)"
    )
    if holder == "the model":
        init = _INIT.format(make=make.replace("\n", "\n        "))
        text = text.replace("    def train_step(", f"{init}    def train_step(")
    else:
        text = _HELD.format(name=name, make=make.replace("\n", "\n    ")) + text
        if holder == "an object":
            text = f"box = types.SimpleNamespace()\n{text}"
    assigned = _ASSIGNED.format(name=name, value=value)
    return text.replace("        for metric in", assigned, 1)


_INIT = """    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held = {make}

"""
TRAIN_STEP = f"""class Custom(keras.Model):
    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
{_UPDATE}"""
# Keras builds the optimizer with the trainable average, too.
AVERAGE = (
    TRAIN_STEP.replace(
        "    def train_step(",
        """    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.average = self.add_weight(
            shape=(8,), initializer="zeros", name="average"
        )

    def train_step(""",
    )
    .replace(
        "self.trainable_weights",
        "[w for w in self.trainable_weights if w is not self.average]",
    )
    .replace(
        "        for metric in",
        """        # Equal on all replicas, even in a round of local steps.
        self.average.assign(0.75 * self.average + 0.25)
        for metric in""",
        1,
    )
)
SAM = f"""class Custom(keras.Model):
    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        weights = self.trainable_weights
        steps = [
            0.05 * tf.convert_to_tensor(gradient)
            for gradient in tape.gradient(loss, weights)
        ]
        for weight, step in zip(weights, steps):
            weight.assign_add(step)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        gradients = tape.gradient(loss, weights)
        for weight, step in zip(weights, steps):
            weight.assign_sub(step)
        self.optimizer.apply(gradients, weights)
{_UPDATE}"""
