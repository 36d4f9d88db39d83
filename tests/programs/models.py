"""The text of models, losses, metrics and optimizers of random programs."""

from .own import (
    AVERAGE,
    OF_OURS,
    OWN_OPTIMIZERS,
    SAM,
    STATEFUL,
    TRAIN_STEP,
)

SHAPES = {
    "vector": 'x = rng.standard_normal((rows, 6)).astype("float32")',
    "image": 'x = 0.3 * rng.standard_normal((rows, 6, 6, 2)).astype("float32")',
    "series": (
        'x = 0.5 * rng.standard_normal((rows, 6, 4)).astype("float32")\n'
        "x[::2, 4:] = 0"
    ),
    "tokens": (
        'x = rng.integers(1, 10, (rows, 6)).astype("int32")\nx[::2, 4:] = 0'
    ),
}
# Targets, units and activation of the last layer.
TASKS = {
    "regression": (
        "y = np.stack([rng.uniform(0.0, 2.0, rows), np.arange(rows)], 1)"
        '.astype("float32")\ny[:, 1] /= rows',
        2,
        None,
    ),
    "binary": (
        'y = rng.integers(0, 2, (rows, 1)).astype("float32")',
        1,
        "sigmoid",
    ),
    "classes": (
        'y = rng.integers(0, 3, rows).astype("int32")',
        3,
        "softmax",
    ),
    "onehot": (
        'y = np.eye(3, dtype="float32")[rng.integers(0, 3, rows)]',
        3,
        "softmax",
    ),
}
# The layers of each kind of input.
BODIES = {
    "vector": {
        "Dense": 'layers.Dense(8, activation="tanh")',
        "Regularized": (
            "layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.01))"
        ),
        "Constrained": (
            "layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(0.5))"
        ),
        "LayerNormalization": "layers.LayerNormalization()",
        "UnitNormalization": "layers.UnitNormalization()",
        "Unused": "Unused()",
        "GroupNormalization": "layers.GroupNormalization(2)",
        "ActivityRegularization": "layers.ActivityRegularization(l2=0.01)",
        "SpectralNormalization": (
            "layers.SpectralNormalization(layers.Dense(4))"
        ),
        "SynchronizedBatchNorm": (
            "layers.BatchNormalization(synchronized=True)"
        ),
        "BatchNormalization": "layers.BatchNormalization()",
        "Dropout": "layers.Dropout(0.3)",
        "Wide": 'layers.Dense(700, activation="tanh")',
        **{name: f"{name}()" for name in STATEFUL},
        "PReLU": "layers.PReLU()",
        "Residual": "Residual()",
        "EinsumDense": 'layers.EinsumDense("bi,ij->bj", 4)',
    },
    "image": {
        "Conv2D": 'layers.Conv2D(3, 3, activation="tanh")',
        "MaxPooling2D": "layers.MaxPooling2D()",
        "AveragePooling2D": "layers.AveragePooling2D(2)",
        "DepthwiseConv2D": "layers.DepthwiseConv2D(2)",
        "SeparableConv2D": "layers.SeparableConv2D(3, 2)",
        "Conv2DTranspose": "layers.Conv2DTranspose(2, 2)",
        "UpSampling2D": "layers.UpSampling2D()",
        "ZeroPadding2D": "layers.ZeroPadding2D(1)",
        "LayerNormalization": "layers.LayerNormalization()",
        "GlobalMaxPooling2D": "layers.GlobalMaxPooling2D()",
        "GlobalAveragePooling2D": "layers.GlobalAveragePooling2D()",
    },
    "series": {
        "Conv1D": "layers.Conv1D(3, 2)",
        "MaxPooling1D": "layers.MaxPooling1D()",
        "LSTM": "layers.LSTM(4)",
        "LSTM of sequences": "layers.LSTM(4, return_sequences=True)",
        "GRU": "layers.GRU(4)",
        "SimpleRNN": "layers.SimpleRNN(4)",
        "Bidirectional": "layers.Bidirectional(layers.LSTM(3))",
        "masked LSTM": "keras.Sequential([layers.Masking(), layers.LSTM(4)])",
        "ConvLSTM1D": (
            "keras.Sequential([layers.Reshape((3, 2, 4)), "
            "layers.ConvLSTM1D(2, 2), layers.Flatten()])"
        ),
        "TimeDistributed": "layers.TimeDistributed(layers.Dense(3))",
        "SynchronizedBatchNorm": (
            "keras.Sequential([layers.Masking(), "
            "layers.BatchNormalization(synchronized=True)])"
        ),
        "SelfAttention": "SelfAttention()",
        "GlobalAveragePooling1D": "layers.GlobalAveragePooling1D()",
    },
    "tokens": {
        "Embedding": "layers.Embedding(10, 4)",
        "masked Embedding": "layers.Embedding(10, 4, mask_zero=True)",
        "PositionEmbedding": "PositionEmbedding()",
        "TwoEmbeddings": "TwoEmbeddings()",
        "TiedEmbedding": "TiedEmbedding()",
        "LSTM": "layers.LSTM(4)",
        "GRU": "layers.GRU(4)",
        "SelfAttention": "SelfAttention()",
        "GlobalAveragePooling1D": "layers.GlobalAveragePooling1D()",
    },
}
# Layers that no other of the same kind can follow.
LAST = {
    *("GlobalMaxPooling2D", "GlobalAveragePooling2D", "LSTM", "GRU"),
    *("SimpleRNN", "Bidirectional", "masked LSTM", "ConvLSTM1D"),
    "GlobalAveragePooling1D",
}
LOSSES = {
    "regression": {
        "mse": '"mse"',
        "mae": '"mae"',
        "huber": '"huber"',
        "log_cosh": '"log_cosh"',
        "sum": 'keras.losses.MeanSquaredError(reduction="sum")',
        "mean_with_sample_weight": (
            'keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")'
        ),
        "none": 'keras.losses.MeanSquaredError(reduction="none")',
        "by hand: of rows": "loss_of_rows",
        "by hand: scalar": "loss_of_all",
        "by hand: Loss": "OwnLoss()",
        "by hand: columns": 'OfColumns(reduction="sum")',
        "by hand: linear": "linear",
        "by hand: moving": "pulling",
        "CosineSimilarity": "keras.losses.CosineSimilarity()",
    },
    "binary": {
        "binary_crossentropy": '"binary_crossentropy"',
        "BinaryFocalCrossentropy": "keras.losses.BinaryFocalCrossentropy()",
        "from logits": "keras.losses.BinaryCrossentropy(from_logits=True)",
        "hinge": '"hinge"',
        "Dice": "keras.losses.Dice()",
    },
    "classes": {
        "sparse_categorical_crossentropy": '"sparse_categorical_crossentropy"',
        "from logits": (
            "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
        ),
        "ignored class": (
            "keras.losses.SparseCategoricalCrossentropy(ignore_class=0)"
        ),
    },
    "onehot": {
        "categorical_crossentropy": '"categorical_crossentropy"',
        "smoothed": (
            "keras.losses.CategoricalCrossentropy(label_smoothing=0.1)"
        ),
        "kl_divergence": '"kl_divergence"',
        "CategoricalFocalCrossentropy": (
            "keras.losses.CategoricalFocalCrossentropy()"
        ),
    },
}
METRICS = {
    "regression": {
        "mae": '"mae"',
        "RootMeanSquaredError": "keras.metrics.RootMeanSquaredError()",
        "R2Score": "keras.metrics.R2Score()",
        "CosineSimilarity": "keras.metrics.CosineSimilarity()",
        "by hand: function": "error_of_rows",
        "by hand: Metric": "OwnMetric()",
        "by hand: variable": "Counted()",
        "by hand: sum": "Total()",
        "by hand: of losses": "OfLosses()",
        "by hand: of metrics": "OfMetrics()",
        # Without percentages, which labels of 0 make as large as rounding
        # errors.
        "logarithms": "keras.metrics.MeanSquaredLogarithmicError()",
    },
    "binary": {
        "accuracy": '"accuracy"',
        "AUC": "keras.metrics.AUC(name='auc')",
        "Precision": "keras.metrics.Precision(name='p')",
        "Recall": "keras.metrics.Recall(name='r')",
        "F1Score": "keras.metrics.F1Score(threshold=0.5)",
        "FalsePositives": "keras.metrics.FalsePositives(name='fp')",
    },
    "classes": {
        "accuracy": '"accuracy"',
        "top 2": "keras.metrics.SparseTopKCategoricalAccuracy(2)",
        "crossentropy": "keras.metrics.SparseCategoricalCrossentropy()",
    },
    "onehot": {
        "accuracy": '"accuracy"',
        "F1Score": 'keras.metrics.F1Score("macro")',
        "MeanIoU": "keras.metrics.OneHotMeanIoU(3, name='iou')",
        "AUC": "keras.metrics.AUC(multi_label=True, name='auc')",
    },
}
# Epsilons keep the rounding of small gradients small.
OPTIMIZERS = {
    "SGD": "keras.optimizers.SGD({rate}{more})",
    "momentum": (
        "keras.optimizers.SGD({rate}, momentum=0.9, nesterov=True{more})"
    ),
    "Adam": "keras.optimizers.Adam({rate}, epsilon=1e-3{more})",
    "AdamW": (
        "keras.optimizers.AdamW({rate}, weight_decay=0.5, epsilon=1e-3{more})"
    ),
    "RMSprop": "keras.optimizers.RMSprop({rate}, epsilon=1e-3{more})",
    "Adagrad": "keras.optimizers.Adagrad({rate}{more})",
    "Adadelta": "keras.optimizers.Adadelta({rate}, epsilon=1e-3{more})",
    "Adamax": "keras.optimizers.Adamax({rate}, epsilon=1e-3{more})",
    "Nadam": "keras.optimizers.Nadam({rate}, epsilon=1e-3{more})",
    "Ftrl": "keras.optimizers.Ftrl({rate}{more})",
    "KerasLamb": "keras.optimizers.Lamb({rate}, epsilon=1e-3{more})",
    "Adafactor": "keras.optimizers.Adafactor({rate}, epsilon_1=1e-6{more})",
    "ScheduleFreeAdamW": (
        "keras.optimizers.ScheduleFreeAdamW({rate}, epsilon=1e-3{more})"
    ),
    "MultiOptimizer": (
        "keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(\n"
        "    keras.optimizers.SGD(0.1),\n"
        '    {{"embedding|norm|conv|lstm|bias":\n'
        "        keras.optimizers.Adam(0.05, epsilon=1e-3)}},\n"
        "))"
    ),
    "Lamb": (
        "tfo.Lamb({rate}, epsilon=1e-3, weight_decay=0.1, "
        "exclude_from_weight_decay=tfo.BIAS_AND_NORM{more})"
    ),
    "LANS": "tfo.LANS({rate}, epsilon=1e-3, weight_decay=0.1{more})",
    "AdamOffload": (
        "tfo.AdamOffload({rate}, epsilon=1e-3, weight_decay=0.1{more})"
    ),
    "DGC dense": (
        "tfo.DGCMomentum({rate}, sparsity=(0.5,), rampup_begin_step=1000{more})"
    ),
    "DGC": (
        "tfo.DGCMomentum({rate}, sparsity=(0.75,), min_compress_size=1{more})"
    ),
    **{
        name: f"{name}({{rate}}{{more}})"
        for name in (*OWN_OPTIMIZERS, *OF_OURS)
    },
}
WRAPPERS = {
    "none": "{inner}",
    "LossScale": (
        "keras.optimizers.LossScaleOptimizer(\n"
        "    {inner}, dynamic_growth_steps=2{more}\n)"
    ),
    "SparseLoCo": (
        "tfo.SparseLoCo(\n    {inner}, sparsity=(0.5,), "
        "min_compress_size=1{more}\n)"
    ),
    "SparseLoCo of 4": (
        "tfo.SparseLoCo(\n    {inner}, sync_every=4, sparsity=(0.5,), "
        "min_compress_size=1{more}\n)"
    ),
}
WRAPPERS["SparseLoCo ahead"] = (
    "tfo.SparseLoCo(\n    {inner}, sync_every=2, sparsity=(0.5,), "
    "min_compress_size=1,\n    step_ahead=0.5{more}\n)"
)
WRAPPERS["SparseLoCo overlapping"] = (
    "tfo.SparseLoCo(\n    {inner}, sync_every=2, sparsity=(0.5,), "
    "min_compress_size=1,\n    overlap=True{more}\n)"
)
WRAPPERS["ShardedState"] = "tfo.ShardedState({inner}{more})"
# Everything is sent at the end; gradients of a linear loss are constant.
OPTIMIZERS["DGC to the end"] = (
    "tfo.DGCMomentum(\n    {rate}, sparsity=(0.75,), min_compress_size=1, "
    "momentum_masking=False,\n    rampdown_begin_step=2{more}\n)"
)
WRAPPERS["SparseLoCo to the end"] = (
    "tfo.SparseLoCo(\n    {inner}, sparsity=(0.75,), min_compress_size=1, "
    "rampdown_begin_step=2{more}\n)"
)
for _name in ("SparseLoCo ahead", "SparseLoCo overlapping"):
    WRAPPERS[f"{_name} to the end"] = WRAPPERS[_name].replace(
        "sparsity=(0.5,)", "sparsity=(0.75,), rampdown_begin_step=2"
    )
# Classes with a custom step or loss.
CUSTOM = (
    *("guide", "result", "vector", "weighted mean", "means"),
    *("compute_loss", "per row", "compute_loss plus", "train_step"),
    *("add_loss mean", "add_loss rows", "add_loss views", "add_loss sum"),
    *("unlisted", "SAM", "own average"),
)
_GUIDE = """class Custom(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = {loss}
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.loss_tracker.update_state({update})
        self.mae_metric.update_state(y, y_pred)
        return {{
            "loss": self.loss_tracker.result(),
            "mae": self.mae_metric.result(),
        }}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]"""


def _guide(loss="self.loss_fn(y, y_pred)", update="loss"):
    return _GUIDE.format(loss=loss, update=update)


_RESULT = _guide("ops.mean(ops.square(y - y_pred))")
UNLISTED = "return [self.loss_tracker]  # Not the other one."
HELPERS = {
    "Residual": """class Residual(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(shape[-1], activation="tanh")
        self.dense.build(shape)

    def call(self, x):
        return layers.add([x, self.dense(x)])""",
    "SelfAttention": """class SelfAttention(layers.Layer):
    def build(self, shape):
        self.attention = layers.MultiHeadAttention(2, 2)
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x)""",
    "PositionEmbedding": """class PositionEmbedding(layers.Layer):
    def build(self, shape):
        self.tokens = layers.Embedding(10, 4)
        self.positions = layers.Embedding(6, 4)
        self.tokens.build(shape)
        self.positions.build((6,))

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(6))""",
    "TwoEmbeddings": """class TwoEmbeddings(layers.Layer):
    def build(self, shape):
        self.tables = [layers.Embedding(10, 4), layers.Embedding(5, 4)]
        for table in self.tables:
            table.build(shape)

    def call(self, x):
        one, two = self.tables
        return one(x) + one(x[:, ::-1]) + two(x // 2)""",
    "TiedEmbedding": """class TiedEmbedding(layers.Layer):
    def build(self, shape):
        self.table = layers.Embedding(10, 4)
        self.table.build(shape)

    def call(self, x):
        table = ops.convert_to_tensor(self.table.embeddings)
        return ops.matmul(self.table(x), ops.transpose(table))""",
    "Unused": """class Unused(layers.Layer):
    def build(self, shape):
        self.unused = self.add_weight(shape=(3,), name="unused")

    def call(self, x):
        return x""",
    "loss_of_rows": """def loss_of_rows(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)""",
    "loss_of_all": """def loss_of_all(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))""",
    "linear": """def linear(y_true, y_pred):
    return ops.mean(y_true * y_pred, axis=-1)""",
    "pulling": """with strategy.scope():
    goal = tf.Variable(np.zeros(2, "float32"), trainable=False)


def pulling(y_true, y_pred):
    goal.assign(0.75 * goal + 0.25 * ops.mean(y_true, 0))
    return ops.mean(ops.square(y_pred - goal), axis=-1)""",
    "OwnLoss": """class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred), axis=-1)""",
    "OfColumns": """class OfColumns(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred), axis=0)""",
    "error_of_rows": """def error_of_rows(y_true, y_pred):
    return ops.max(ops.abs(y_true - y_pred), axis=-1)""",
    "OwnMetric": """class OwnMetric(keras.metrics.Metric):
    def __init__(self, name="own"):
        super().__init__(name=name)
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.square(ops.cast(y_true, y_pred.dtype) - y_pred)
        self.total.assign_add(ops.cast(ops.sum(error), self.dtype))
        self.count.assign_add(ops.cast(ops.shape(y_true)[0], self.dtype))

    def result(self):
        return self.total / (self.count + 1e-7)""",
    "Counted": """class Counted(keras.metrics.Metric):
    def __init__(self, name="counted"):
        super().__init__(name=name)
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.cast(y_true > 0.5, self.dtype)))

    def result(self):
        return self.total""",
    "Total": """class Total(keras.metrics.Metric):
    def __init__(self, name="total"):
        super().__init__(name=name)
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.square(ops.cast(y_true, y_pred.dtype) - y_pred)
        self.total.assign_add(ops.cast(ops.sum(error), self.dtype))

    def result(self):
        return self.total""",
    "OfLosses": """class OfLosses(keras.metrics.Metric):
    def __init__(self, name="of_losses"):
        super().__init__(name=name)
        self.mean_of = keras.losses.MeanSquaredError()
        self.sum_of = keras.losses.MeanAbsoluteError(reduction="sum")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = ops.cast(ops.shape(y_true)[0], self.dtype)
        mean = ops.cast(self.mean_of(y_true, y_pred), self.dtype)
        self.total.assign_add(rows * mean)
        self.total.assign_add(
            ops.cast(self.sum_of(y_true, y_pred, sample_weight), self.dtype)
        )
        self.count.assign_add(rows)

    def result(self):
        return self.total / (self.count + 1e-7)""",
    "OfMetrics": """class OfMetrics(keras.metrics.Metric):
    def __init__(self, name="of_metrics"):
        super().__init__(name=name)
        self.loss = keras.losses.MeanSquaredError()
        self.mean = keras.metrics.Mean()
        self.parts = [keras.metrics.MeanAbsoluteError()]

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(self.loss(y_true, y_pred))
        self.parts[0].update_state(y_true, y_pred, sample_weight)

    def result(self):
        return self.mean.result() + self.parts[0].result()""",
    "Twice": '''class Twice(keras.metrics.Metric):
    """How many rows have come more than once in an epoch."""

    def __init__(self, name="twice"):
        super().__init__(name=name)
        self.seen = self.add_weight(
            shape=(rows,), initializer="zeros", name="seen"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        number = ops.cast(ops.round(y_true[:, 1] * rows), "int32")
        self.seen.assign_add(
            ops.sum(ops.one_hot(number, rows, dtype=self.dtype), 0)
        )

    def result(self):
        return ops.sum(ops.maximum(self.seen - 1.0, 0.0))''',
    "guide": _guide(),
    "result": _RESULT,
    "weighted mean": _guide(update="loss, sample_weight=2.0"),
    "means": _guide(update="[loss, ops.mean(y_pred)]"),
    # Takes the gradient of a vector.
    "vector": _guide("keras.losses.mean_squared_error(y, y_pred) / 4"),
    "train_step": TRAIN_STEP,
    "unlisted": _RESULT.replace(
        "return [self.loss_tracker, self.mae_metric]", UNLISTED
    ),
    "SAM": SAM,
    "own average": AVERAGE,
    **OWN_OPTIMIZERS,
    **OF_OURS,
    **STATEFUL,
    "scalar": STATEFUL["Scale"],
    "compute_loss": """class Custom(keras.Model):
    def compute_loss(
        self, x, y, y_pred, sample_weight=None, training=True
    ):
        return ops.mean(ops.square(y - y_pred))""",
    "per row": """class Custom(keras.Model):
    def compute_loss(
        self, x, y, y_pred, sample_weight=None, training=True
    ):
        rows = keras.losses.mean_squared_error(y, y_pred)
        return ops.sum(rows) / ops.cast(ops.shape(rows)[0], rows.dtype)""",
    "compute_loss plus": """class Custom(keras.Model):
    def compute_loss(
        self, x, y, y_pred, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(ops.square(y_pred))""",
    "add_loss mean": """class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(ops.cast(x, "float32"))))
        return x""",
    "add_loss rows": """class Penalty(layers.Layer):
    def call(self, x):
        others = tuple(range(1, len(x.shape)))
        squares = ops.square(ops.cast(x, "float32"))
        self.add_loss(0.1 * ops.mean(squares, others))
        return x""",
    "add_loss views": """class Penalty(layers.Layer):
    def call(self, x):
        others = tuple(range(1, len(x.shape)))
        squares = ops.mean(ops.square(ops.cast(x, "float32")), others)
        self.add_loss(ops.concatenate([0.1 * squares, 0.2 * squares]))
        return x""",
    "add_loss sum": """class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(ops.cast(x, "float32"))))
        return x""",
    "Interruption": """class Interruption(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1:
            raise InterruptedError""",
    "Batches": """class Batches(keras.utils.PyDataset):
    def __init__(self):
        super().__init__({fetched})
        self.order = np.arange({stop})

    def __len__(self):
        return -(-len(self.order) // {batch})

    def __getitem__(self, index):
        part = self.order[index * {batch} : (index + 1) * {batch}]
        return tuple(column[part] for column in ({columns}))

    def on_epoch_end(self):
        {permute}""",
    "Drawing": '''class Drawing(keras.callbacks.Callback):
    """Draws random numbers on the first worker, as for a picture."""

    def on_train_batch_end(self, batch, logs=None):
        if task["index"] == 0:
            np.random.rand()''',
    "Copying": '''class Copying(keras.callbacks.Callback):
    """Sets another model to a worker's values, as a target network is set."""

    def on_train_begin(self, logs=None):
        with strategy.scope():
            self.copy = make_model()

    def on_train_batch_end(self, batch, logs=None):
        self.copy.set_weights(self.model.get_weights())

    def on_train_end(self, logs=None):
        seen["copied"] = self.copy.predict(some(x, 4), verbose=0)
        seen["copied weights"] = self.copy.get_weights()''',
    "Writing": '''class Writing(keras.callbacks.Callback):
    """Writes weights within an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        for weight in self.model.trainable_weights:
            weight.assign(0.875 * weight)''',
    "Evaluating": """class Evaluating(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        seen.setdefault("evaluated", []).append(self.model.evaluate(
            some(x, 5), some(y, 5), 2, return_dict=True, verbose=0
        ))""",
    "Predicting": """class Predicting(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        seen.setdefault("predicted", []).append(
            self.model.predict(some(x, 5), 2, verbose=0)
        )""",
    "Embedding of sums": '''class Embedding(layers.Embedding):
    """Sums duplicate rows before the optimizer sees them."""

    def call(self, inputs):
        inputs = ops.cast(inputs, "int32")
        return ops.take(1.0 * ops.convert_to_tensor(self.embeddings), inputs, 0)


layers.Embedding = Embedding''',
    "gan": """class Pair(keras.Model):
    def __init__(self):
        super().__init__()
        self.a = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        self.b = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
        self.a.compile({optimizer})
        self.b.compile({optimizer})

    def call(self, x):
        return self.b(self.a(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            h = self.a(x, training=True)
            error = keras.losses.mean_squared_error(y, self.b(h))
            loss = ops.mean(error)
            other = -0.1 * loss + ops.mean(ops.square(h))
        for part, goal in ((self.a, loss), (self.b, other)):
            weights = part.trainable_variables
            part.optimizer.apply(tape.gradient(goal, weights), weights)
        return {"steps": ops.cast(self.a.optimizer.iterations, "float32")}""",
    "parts": """class Two(keras.Model):
    def __init__(self):
        super().__init__()
        self.a = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        self.b = keras.Sequential([keras.Input((4,)), layers.Dense(2)])

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.optimizers = [{optimizer}, {optimizer}]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            error = keras.losses.mean_squared_error(y, self.b(self.a(x)))
            loss = ops.mean(error)
        for part, optimizer in zip((self.a, self.b), self.optimizers):
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"steps": ops.cast(self.optimizers[0].iterations, "float32")}""",
    "no call": """class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(3, activation="tanh")])
        self.decoder = keras.Sequential([layers.Dense(6)])
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            rebuilt = self.decoder(self.encoder(x))
            loss = ops.mean(ops.square(x - rebuilt))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]""",
}
# Models of whole scripts.
FAMILIES = {
    "scalar": (
        "return keras.Sequential([\n"
        "    keras.Input((6,)), layers.Dense(2, trainable=False), Scale()\n"
        "])"
    ),
    "gan": "model = Pair()\nmodel.build((None, 6))\nreturn model",
    "parts": "return Two()",
    "no call": "return Autoencoder()",
}
