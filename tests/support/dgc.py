"""Runs of DGCMomentum under a strategy, with a gradient per replica."""

import keras
import numpy as np
import tensorflow as tf
from golden import load
from local import copies, per_replica

import tf_optimizers as tfo

SHAPES = {"kernel": (6, 8), "cube": (2, 3, 4), "bias": (7,)}


def start(shapes=SHAPES, seed=5):
    """Return random values."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype("float32")
        for name, shape in shapes.items()
    }


def zeros(shapes=SHAPES):
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def around(inner, **settings):
    """Return a factory of SparseLoCo around a new optimizer of a class."""
    return lambda rate, **kwargs: tfo.SparseLoCo(
        inner(rate, **settings), **kwargs
    )


class Run:
    """An optimizer and its variables under a strategy.

    Args:
        strategy: Any strategy.
        values: Initial values of the variables, by name.
        learning_rate: The optimizer's learning rate.
        make: The optimizer's class, or a function with the same arguments.
        dtypes: Dtypes of variables that are not float32, by name.
        kwargs: Settings of the optimizer. By default, every variable is
            compressed.
    """

    def __init__(
        self,
        strategy,
        values,
        learning_rate=0.1,
        make=tfo.DGCMomentum,
        dtypes=(),
        **kwargs,
    ):
        self.strategy = strategy
        dtypes = dict.fromkeys(values, "float32") | dict(dtypes)
        with strategy.scope():
            self.variables = [
                keras.Variable(np.array(value), dtype=dtypes[name], name=name)
                for name, value in values.items()
            ]
            kwargs = {"min_compress_size": 1} | kwargs
            self.optimizer = make(learning_rate, **kwargs)
            self.optimizer.build(self.variables)
        self._apply = tf.function(self._apply_each, autograph=False)

    def _apply_each(self, gradients):
        self.strategy.run(self.optimizer.apply, (gradients, self.variables))

    def _per_replica(self, gradients):
        return [
            per_replica(
                self.strategy, lambda r, i=i: tf.constant(gradients[r][i])
            )
            for i in range(len(self.variables))
        ]

    @property
    def replicas(self):
        """The ranks of this process's replicas."""
        return self.strategy.experimental_local_results(
            per_replica(self.strategy, lambda replica: replica)
        )

    def step(self, gradients, eager=False):
        """Apply `gradients[replica][variable]`, NumPy arrays."""
        apply = self._apply_each if eager else self._apply
        apply(self._per_replica(gradients))

    def step_and_add_up(self, gradients, totals):
        """Step, and add all that this process has added to v to `totals`.

        The optimizer is DGCMomentum with a momentum of 0.9, or SparseLoCo
        around plain SGD.

        Args:
            gradients: See `step`.
            totals: Arrays, one per compressed variable.
        """
        momentum = self.memory("momentum")
        self.step(gradients)
        rate = float(tf.convert_to_tensor(self.optimizer.learning_rate))
        for i, total in enumerate(totals):
            for local, replica in enumerate(self.replicas):
                g = rate * gradients[replica][i].astype("float64")
                if momentum:
                    ahead = g if self.optimizer.nesterov else 0.0
                    g += 0.9 * (momentum[i][local].astype("float64") + ahead)
                total += g

    def restart(self, values, learning_rate):
        """Restore the initial state, since a new run would be traced again."""
        every = self.strategy.experimental_local_results
        for variable in self.optimizer.variables:
            for part in every(variable.value):
                part.assign(tf.zeros_like(part))
        for variable, value in zip(
            self.variables, values.values(), strict=True
        ):
            variable.assign(value)
        self.optimizer.learning_rate = learning_rate

    def graph(self, gradients):
        """Return the graph of a step."""
        gradients = self._per_replica(gradients)
        return self._apply.get_concrete_function(gradients).graph

    def weights(self):
        return [variable.numpy() for variable in self.variables]

    def memory(self, name):
        """Return u ("momentum") or v ("residual"): [variable][local replica].

        Only compressed variables have v; SparseLoCo has no u.
        """
        compressor = self.optimizer._compressor
        variables = compressor.residuals
        if name == "momentum":
            variables = compressor.momentums.values()
        return [copies(self.strategy, variable) for variable in variables]


def make_gradients(step, shapes, replicas, seed=0):
    """Return the gradients of a step, divided by N: [replica][variable]."""
    rng = np.random.default_rng([seed, step])
    return [
        [
            (rng.standard_normal(shape) / replicas).astype("float32")
            for shape in shapes
        ]
        for _ in range(replicas)
    ]


def worst(actual, expected):
    return max(
        np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)
        for a, b in zip(actual, expected, strict=True)
    )


def golden(name, strategy, first=0):
    """Return the errors of weights by step.

    If `first` is not 0, training starts with Paddle's weights and u after
    `first` steps; every replica gets an N-th of u.
    """
    record = load(name)
    config, dtype = record["config"], "float32"
    workers = config["num_trainers"] or 1
    decay = config["regularization"]
    run = Run(
        strategy,
        record["params0"],
        config["learning_rate"],
        momentum=config["momentum"],
        rampup_begin_step=config["rampup_begin_step"],
        rampup_step=config["rampup_step"],
        sparsity=config["sparsity"],
        nesterov=config["use_nesterov"],
        # Paddle's L2Decay(c) adds c w, Keras's L2(l) adds 2 l w.
        regularizer=decay and keras.regularizers.L2(decay[1] / 2),
        clipnorm=config["grad_clip_norm"],
        rate_in_momentum=False,
        min_compress_size=config.get("min_numel", 16384),
    )
    names = list(record["params0"])
    if first:
        before = record["slots_after"][first - 1][0]["u"]
        for i, n in enumerate(names):
            run.variables[i].assign(record["params_after"][first - 1][n])
            run.optimizer._compressor.momentums[i].assign(before[n])
        run.optimizer.iterations.assign(first)
    errors = []
    for step in range(first, record["steps"]):
        grads = record.get("worker_grads") or [[g] for g in record["grads"]]
        run.step(
            [
                [np.array(grads[step][i][n], dtype) / workers for n in names]
                for i in range(workers)
            ]
        )
        after = record["params_after"][step]
        expected = [np.array(after[n], dtype) for n in names]
        errors.append(worst(run.weights(), expected))
    return np.array(errors)


def assert_nothing_is_lost(balances, **kwargs):
    """Check that sent plus unsent values equal the accumulated values.

    Args:
        balances: The "sent", "unsent" and "accumulated" sums of each worker,
            lists with one value per variable.
        **kwargs: Arguments of `np.testing.assert_allclose`.
    """
    for i, sent in enumerate(balances[0]["sent"]):
        unsent, accumulated = (
            sum(np.array(balance[name][i]) for balance in balances)
            for name in ("unsent", "accumulated")
        )
        assert np.abs(unsent).max() > 0.1
        np.testing.assert_allclose(
            np.array(sent) + unsent, accumulated, **kwargs
        )


# Scales of the gradients of variables in one model.
SCALES = [1e-8, 1e4, 1e-4, 1e8, 1.0]
# At first, entries are sent as a dense tensor if possible, then as entries; at
# the end, residuals are sent.
STAGES = {
    "sparsity": (0.25, 0.9),
    "rampup_step": 6,
    "rampdown_begin_step": 8,
    "rampdown_step": 2,
}


def balances_of_scales(strategy, **settings):
    """Return the sums of values by step, variable and element.

    The keys of a step are "sent", the values that all processes have sent, and
    "unsent" and "accumulated", the values of this process. All sums are in
    multiples of the variable's scale.
    """
    names = [f"w{scale}" for scale in SCALES]
    run = Run(strategy, dict.fromkeys(names, np.zeros(90)), 1.0, **settings)
    accumulated = [np.zeros(90) for _ in SCALES]
    replicas, steps = strategy.num_replicas_in_sync, []
    shapes = [90] * len(SCALES)
    for step in range(12):
        gradients = [
            [np.float32(s) * g for s, g in zip(SCALES, own, strict=True)]
            for own in make_gradients(step, shapes, replicas)
        ]
        run.step_and_add_up(gradients, accumulated)
        own = {
            "sent": [-weight.astype("float64") for weight in run.weights()],
            "unsent": [
                np.sum(each, axis=0, dtype="float64")
                for each in run.memory("residual")
            ],
            "accumulated": accumulated,
        }
        steps.append(
            {
                name: [
                    (part / scale).tolist()
                    for part, scale in zip(parts, SCALES, strict=True)
                ]
                for name, parts in own.items()
            }
        )
    return steps


def assert_all_scales_are_conserved(processes, dtype):
    """Check every step in all processes' `balances_of_scales`.

    Errors are relative to the scale of each variable.
    """
    smallest = np.finfo("float16").smallest_subnormal
    waits = (dtype == "float16") & (np.array(SCALES) < smallest)
    for step, balances in enumerate(zip(*processes, strict=True)):
        sent = np.array(balances[0]["sent"])
        unsent, accumulated = (
            np.sum([balance[name] for balance in balances], axis=0)
            for name in ("unsent", "accumulated")
        )
        np.testing.assert_allclose(
            sent + unsent, accumulated, atol=1e-5, err_msg=f"step {step}"
        )
        assert (waits | (np.abs(sent).max(axis=1) > 1e-4)).all()
        assert np.abs(unsent).max(axis=1).all() == (step < 9)


def apply_own(strategy, optimizer, variable, gradients):
    """Apply a different gradient per replica to a variable."""

    def replica():
        context = tf.distribute.get_replica_context()
        place = tf.get_static_value(context.replica_id_in_sync_group)
        optimizer.apply([gradients[place]], [variable])

    strategy.run(replica)


def check_twin(strategy, dtype, make, gradients):
    """Check that half-precision weights are rounded float32 weights.

    Each of the steps is smaller than the rounding of the dtype.

    Args:
        strategy: A strategy with two replicas.
        dtype: The dtype of the weights, "float16" or "bfloat16".
        make: Returns an optimizer with a rate of about 1e-4.
        gradients: The value of all elements of each replica's gradient.
    """
    value = tf.reshape(tf.cast(tf.linspace(1.0, 2.0, 64), dtype), [8, 8])
    value = tf.cast(value, tf.float32).numpy()
    exact = _train_twin(strategy, value, "float32", make, gradients)
    actual = _train_twin(strategy, value, dtype, make, gradients)
    assert np.abs(exact - value).max() > 3e-3
    np.testing.assert_array_equal(
        actual, tf.cast(tf.cast(exact, dtype), tf.float32)
    )


def _train_twin(strategy, value, dtype, make, gradients):
    with strategy.scope():
        variable = keras.Variable(value, dtype=dtype, name="kernel")
        optimizer = make()
        optimizer.build([variable])
    own = [tf.fill(value.shape, tf.cast(g, dtype)) for g in gradients]
    step = tf.function(lambda: apply_own(strategy, optimizer, variable, own))
    for _ in range(60):
        step()
    return tf.cast(variable.value, tf.float32).numpy()
