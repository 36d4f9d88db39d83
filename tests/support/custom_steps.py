"""Models with custom losses, metrics and steps.

They are small versions of models in Keras's guides and examples. Each model
trains on batches of 3, 3 and 1 rows, so that one of two replicas gets no row of
the last batch.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tf_optimizers as tfo

RNG = np.random.default_rng(0)
X = RNG.standard_normal((7, 4)).astype("float32")
Y = RNG.standard_normal((7, 2)).astype("float32")


def dense(units, inputs=4):
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(units)])


def sgd():
    return keras.optimizers.SGD(0.1)


class Logs(keras.callbacks.Callback):
    """Records the logs of every batch."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches += [np.ravel(logs[name]) for name in sorted(logs)]


class ComputesLoss(keras.Sequential):
    """The example in the docstring of `compute_loss`."""

    def __init__(self):
        super().__init__([keras.Input((4,)), Penalized(2)])
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = ops.mean((y_pred - y) ** 2)
        loss += ops.sum(self.losses)
        self.tracker.update_state(loss)
        return loss

    @property
    def metrics(self):
        return [self.tracker]


class Penalized(keras.layers.Dense):
    """Adds three losses: a mean, a `Loss` and a regularizer."""

    def __init__(self, units):
        super().__init__(units, kernel_regularizer="l2")

    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(ops.mean(outputs**2))
        self.add_loss(keras.losses.MeanAbsoluteError()(inputs[:, :2], outputs))
        return outputs


class PenalizedRows(keras.layers.Dense):
    """Adds a loss for each row, and a vector that does not depend on rows.

    The example "OCR model for reading captchas" adds losses of this kind.
    """

    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(ops.mean(outputs**2, axis=-1, keepdims=True))
        self.add_loss(ops.sum(self.kernel**2, axis=-1))
        return outputs


class Guide(keras.Sequential):
    """The model of the guide "Customizing `fit`"."""

    def __init__(self):
        super().__init__([keras.Input((4,)), keras.layers.Dense(2)])
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_of(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def loss_of(self, y, y_pred):
        return ops.mean(keras.losses.mean_squared_error(y, y_pred))

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae]


class GuideWithFloats(Guide):
    """Returns floats, as Keras before 3.15 does in eager mode."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {name: float(value) for name, value in logs.items()}


class GuideWithRows(Guide):
    def loss_of(self, y, y_pred):
        return ops.mean(keras.losses.MeanSquaredError(None)(y, y_pred))


class GuideWithWeight(Guide):
    """Updates a `Mean` by a number, with a weight that is the same for all."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.loss_tracker.update_state(loss, sample_weight=2)
        return {"loss": self.loss_tracker.result()}


class GuideWithWeights(Guide):
    """Weights numbers by constants, variables, and numbers of rows."""

    def __init__(self):
        super().__init__()
        self.weight = keras.Variable(3.0, trainable=False)

    def train_step(self, data):
        logs = super().train_step(data)
        x, y = data
        rows = ops.cast(ops.shape(x)[0], "float32")
        for weight in (tf.constant(2.0), np.float32(2), self.weight, rows):
            self.loss_tracker.update_state(ops.mean(x * y[:, :1]), weight)
        of_rows = y[:, 0] ** 2
        total = ops.sum(of_rows)
        mean = ops.sum(of_rows * x[:, 0]) / total
        self.loss_tracker.update_state(mean, total)
        return logs | {"loss": self.loss_tracker.result()}


class GuideWithVector(Guide):
    """Takes the gradient of a vector, as an older guide does."""

    def loss_of(self, y, y_pred):
        return keras.losses.mean_squared_error(y, y_pred) / 3


class GuideWithTwoViews(Guide):
    """Has two losses per row, of fixed number, and some of fixed length."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(ops.concatenate([x, -x]), training=True)
            losses = ops.mean((y_pred - ops.concatenate([y, y])) ** 2, -1) / 3
            squares = 0.1 * ops.sum(self.layers[0].kernel ** 2)
            means = ops.stack([ops.mean(losses), squares])
            slopes = tape.gradient(y_pred, y_pred)  # Not of weights.
        weights = self.trainable_variables
        gradients = tape.gradient([losses, means, squares], weights)
        self.optimizer.apply(gradients, weights)
        return {"losses": ops.mean(losses), "slopes": ops.mean(slopes)}


class PenalizedViews(PenalizedRows):
    """Adds losses for each row of two views."""

    def call(self, inputs):
        outputs = super().call(ops.concatenate([inputs, -inputs]))
        first, second = ops.split(outputs, 2)
        return first - 2 * second


class GuideWithMeans(Guide):
    """Updates a `Mean` by a list of numbers."""

    def train_step(self, data):
        logs = super().train_step(data)
        x, y = data
        self.loss_tracker.update_state((y - self(x)) ** 2)
        self.update_by_means(y, self(x))
        return logs | {"loss": self.loss_tracker.result()}

    def update_by_means(self, y, y_pred):
        self.loss_tracker.update_state([ops.mean(y), ops.mean(y_pred)])


class GuideWithMeansOfColumns(GuideWithMeans):
    """Updates a `Mean` by a vector, with and without weights."""

    def update_by_means(self, y, y_pred):
        self.loss_tracker.update_state(ops.mean(y**2, 0))
        self.loss_tracker.update_state(ops.mean(y_pred**2, 0), [1.0, 3.0])


class MeanOfColumns(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean((y_true - y_pred) ** 2, 0)


class GuideScaled(GuideWithVector):
    """Scales a vector of losses, as mixed precision needs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = self.loss_of(y, self(x, training=True))
            scaled = self.optimizer.scale_loss(losses)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": ops.mean(losses)}


class GuideSynchronized(Guide):
    """Has batch statistics over all replicas, and gradients to all replicas."""

    def __init__(self):
        super().__init__()
        self.pop()
        for layer in synchronized().layers:
            self.add(layer)


class VectorSynchronized(GuideWithVector, GuideSynchronized):
    """Combines both."""


class ScaledSynchronized(GuideScaled, GuideSynchronized):
    """Scales the mean of its losses."""

    def loss_of(self, y, y_pred):
        return keras.losses.MeanSquaredError()(y, y_pred)


class ScaledVectorSynchronized(GuideScaled, GuideSynchronized):
    """Combines both."""


def synchronized():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, use_bias=False),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(2),
        ]
    )


class GuideWithSum(Guide):
    def loss_of(self, y, y_pred):
        return keras.losses.MeanSquaredError("sum")(y, y_pred) / 3


class GuideOfTensorFlow(Guide):
    """Divides by the batch size, as TensorFlow's guide does."""

    def loss_of(self, y, y_pred):
        rows = keras.losses.mean_squared_error(y, y_pred)
        kernel = self.trainable_variables[0]
        return tf.nn.compute_average_loss(
            rows, global_batch_size=3
        ) + tf.nn.scale_regularization_loss(tf.nn.l2_loss(kernel))


class InFunction(Guide):
    """Has a step that is decorated with `tf.function`."""

    @tf.function
    def train_step(self, data):
        if tf.reduce_any(data[0] > 0):  # A tensor of the graph.
            tf.print(end="")
        return super().train_step(data)


class CallsFunction(Guide):
    """Has a loss in a `tf.function` that is traced once."""

    @tf.function(reduce_retracing=True)
    def loss_of(self, y, y_pred):
        weight = y[:, 0] ** 2
        loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
        return loss(y, y_pred, weight)


class ReadsTwice(Guide):
    """Reads a metric's result before and after a step, and resets it."""

    def train_step(self, data):
        x, y = data
        before = self.mae.result()
        self.mae.reset_state()
        self.mae.update_state(y, self(x))
        of_batch = self.mae.result()
        self.mae.reset_state()
        logs = super().train_step(data)
        return logs | {"before": before, "of batch": of_batch}


class ReturnsFromFunction(Guide):
    """Returns a metric's result from a `tf.function` within the step."""

    @tf.function
    def measure(self, y, y_pred):
        self.mae.update_state(y, y_pred)
        return ops.mean(y_pred), self.mae.result()

    def train_step(self, data):
        x, y = data
        logs = super().train_step(data)
        logs["mean"], logs["mae"] = self.measure(2 * y, self(x))
        return logs


class ReturnsLoss(Guide):
    """Logs the loss itself, without a metric."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": loss}


class Autoencoder(keras.Model):
    """A VAE without `call`, whose noise is part of the data."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(4)])
        self.decoder = dense(4, 2)
        self.total = keras.metrics.Mean(name="total_loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.kl]

    def train_step(self, data):
        x, noise = data
        with tf.GradientTape() as tape:
            mean, log_var = ops.split(self.encoder(x), 2, axis=1)
            decoded = self.decoder(mean + ops.exp(0.5 * log_var) * noise)
            error = ops.mean(ops.sum((x - decoded) ** 2, axis=1))
            kl = -0.5 * (1 + log_var - mean**2 - ops.exp(log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            total = error + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        self.total.update_state(total)
        self.kl.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.kl.result()}


class Adversaries(keras.Model):
    """A GAN whose first step builds its optimizers.

    `call` does not fit the data, which only `train_step` understands.
    """

    def __init__(self):
        super().__init__()
        self.generator = dense(4, 2)
        self.discriminator = dense(1)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    def call(self, noise):
        return self.generator(noise)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def train_step(self, data):
        real, noise = data
        combined = ops.concatenate([self.generator(noise), real])
        ones = ops.ones((ops.shape(real)[0], 1))
        labels = ops.concatenate([ones, 0 * ones])
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            made = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(0 * ones, made)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {
            "d_loss": self.d_tracker.result(),
            "generator": self.g_tracker.result(),
        }


class Distiller(keras.Model):
    """Distills a student; `compute_loss` has additional arguments."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = dense(2), dense(2)
        self.teacher.trainable = False

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False
    ):
        soft = keras.losses.KLDivergence()(
            ops.softmax(self.teacher(x, training=False) / 2, axis=1),
            ops.softmax(y_pred / 2, axis=1),
        )
        return 0.3 * keras.losses.MeanSquaredError()(y, y_pred) + 0.7 * soft

    def call(self, x):
        return self.student(x)


class Total(keras.metrics.Metric):
    """The example of Keras's docs: `result` returns the variable."""

    def __init__(self, name="total", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable(
            shape=(), initializer="zeros", name="total"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        positive = ops.logical_and(y_true > 0, y_pred > 0)
        positive = ops.cast(positive, self.dtype)
        self.total.assign(self.total + ops.sum(positive))

    def result(self):
        return self.total


class Unlisted(ReturnsLoss):
    """Has metrics in several places, but not in `metrics`; returns arrays."""

    def __init__(self):
        super().__init__()
        self.places = {"total": [Total()]}
        mean = keras.metrics.Mean(name="mean")
        self.of_users = lambda: mean  # Keras does not look for metrics here.

    def train_step(self, data):
        logs = super().train_step(data)
        x, y = data
        y_pred = self(x)
        self.of_users().update_state((y - y_pred) ** 2)
        (total,) = self.places["total"]
        total.update_state(y, y_pred)
        return {
            "mean": self.of_users().result(),
            "positive": total.result(),
            "columns": ops.mean((y - y_pred) ** 2, axis=0),
            "rows": ops.mean((y - y_pred) ** 2, axis=1),
            **logs,
        }

    @property
    def metrics(self):
        return []


class Sharp(Guide):
    """Takes the gradients of a step at moved weights (SAM).

    The weights are moved along the gradients at the original weights.
    """

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables

        def gradients():
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x, training=True))
            return loss, tape.gradient(loss, weights)

        _, first = gradients()
        norm = tf.linalg.global_norm(first)
        moves = [0.3 * gradient / norm for gradient in first]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        loss, second = gradients()
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(second, weights)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


def with_metrics(optimizer=None, **arguments):
    model = dense(2)
    rows = [keras.metrics.RootMeanSquaredError(), "mae", number]
    model.compile(optimizer or sgd(), "mse", metrics=rows, **arguments)
    return model


def number(y_true, y_pred):
    """A metric whose result is a single number."""
    return ops.mean(ops.abs(y_pred))


def several_optimizers():
    """Return one optimizer for kernels and one for biases, if Keras can."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return sgd()
    choice = keras.optimizers.OptimizerMap(sgd())
    choice[".*bias"] = keras.optimizers.Adam(0.1)
    return keras.optimizers.MultiOptimizer(choice)


def compiled(model, *arguments, **kwargs):
    model.compile(*(arguments or [sgd()]), **kwargs)
    return model


class Kinds(keras.Model):
    """Predicts values of many dtypes."""

    def call(self, x):
        x = tf.round(4 * x)
        kinds = {name: tf.cast(x, name) for name in KINDS}
        return kinds | {"string": tf.strings.as_string(x)}


KINDS = ("bool", "int8", "int16", "bfloat16", "float16", "float32")


def predictions():
    """Return predictions for batches of 3, 3 and 1 rows, as lists."""
    found = Kinds().predict(X, batch_size=3, verbose=0)
    return {
        name: values.astype("U" if name == "string" else "float32").tolist()
        for name, values in found.items()
    }


CASES = {
    "compute_loss": lambda: compiled(ComputesLoss()),
    "guide": lambda: compiled(Guide()),
    "guide, eager": lambda: compiled(Guide(), sgd(), run_eagerly=True),
    "guide, floats": lambda: compiled(
        GuideWithFloats(), sgd(), run_eagerly=True
    ),
    "guide, steps": lambda: compiled(Guide(), sgd(), steps_per_execution=2),
    "guide, accumulated": lambda: compiled(
        Guide(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    ),
    "guide, ours": lambda: compiled(Guide(), tfo.Lamb(0.1)),
    "rows": lambda: compiled(GuideWithRows()),
    "read twice": lambda: compiled(ReadsTwice()),
    "read in a function": lambda: compiled(ReturnsFromFunction()),
    "read twice, eager": lambda: compiled(
        ReadsTwice(), sgd(), run_eagerly=True
    ),
    "sum": lambda: compiled(GuideWithSum()),
    "weight": lambda: compiled(GuideWithWeight()),
    "weights": lambda: compiled(GuideWithWeights()),
    "vector": lambda: compiled(GuideWithVector()),
    "vector, eager": lambda: compiled(
        GuideWithVector(), sgd(), run_eagerly=True
    ),
    "vector, two views": lambda: compiled(GuideWithTwoViews()),
    "vector, scaled": lambda: compiled(GuideScaled()),
    "vector, loss scale": lambda: compiled(
        GuideScaled(), keras.optimizers.LossScaleOptimizer(sgd())
    ),
    "vector, synchronized": lambda: compiled(VectorSynchronized()),
    "synchronized, loss scale": lambda: compiled(
        ScaledSynchronized(), keras.optimizers.LossScaleOptimizer(sgd())
    ),
    "vector, synchronized, loss scale": lambda: compiled(
        ScaledVectorSynchronized(), keras.optimizers.LossScaleOptimizer(sgd())
    ),
    "synchronized": lambda: compiled(GuideSynchronized()),
    "synchronized, no reduction": lambda: compiled(
        synchronized(), sgd(), keras.losses.MeanSquaredError(None)
    ),
    "average of TensorFlow": lambda: compiled(GuideOfTensorFlow()),
    "function": lambda: compiled(InFunction()),
    "function within": lambda: compiled(CallsFunction()),
    "VAE": lambda: compiled(Autoencoder()),
    "GAN": lambda: compiled(
        Adversaries(),
        keras.optimizers.Adam(0.1),
        keras.optimizers.Adam(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
    ),
    "distillation": lambda: compiled(Distiller(), sgd(), metrics=["mae"]),
    "metrics": with_metrics,
    "metrics, eager": lambda: with_metrics(run_eagerly=True),
    "no reduction, eager": lambda: compiled(
        dense(2), sgd(), keras.losses.MeanSquaredError(None), run_eagerly=True
    ),
    "rows added": lambda: compiled(
        keras.Sequential([keras.Input((4,)), PenalizedRows(2)]), sgd(), "mse"
    ),
    "views added": lambda: compiled(
        keras.Sequential([keras.Input((4,)), PenalizedViews(2)]), sgd(), "mse"
    ),
    "sum of columns": lambda: compiled(
        dense(2), sgd(), MeanOfColumns(reduction="sum")
    ),
    "means": lambda: compiled(GuideWithMeans()),
    "means, eager": lambda: compiled(GuideWithMeans(), sgd(), run_eagerly=True),
    "means of columns": lambda: compiled(GuideWithMeansOfColumns()),
    "several optimizers": lambda: compiled(
        dense(2), several_optimizers(), keras.losses.MeanSquaredError(None)
    ),
    "unlisted": lambda: compiled(Unlisted()),
}


def fit(name):
    """Return the trained model, and its logs of batches and epochs."""
    keras.utils.set_random_seed(1)
    model, logs = CASES[name](), Logs()
    history = model.fit(
        *(X, Y), batch_size=3, epochs=2, shuffle=False, verbose=0,
        callbacks=[logs],
    )  # fmt: skip
    return model, [np.concatenate(logs.batches), *history.history.values()]
