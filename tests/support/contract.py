"""Tests that apply to every optimizer; test modules inherit these classes.

Modules parametrize `case`.
"""

import cases
import dgc
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_close, assert_equal

from tf_optimizers import schedules
from tf_optimizers._compat.keras_internals import average

# A step changes weights by 2e-2 of their norm, so that 1e-6 distinguishes any
# two formulas.
TOLERANCE = 1e-6

# Rates that change, as by a callback: residuals and new gradients then have
# different rates.
RATES = [1.0, 2.0, 2.0, 0.5, 0.5, 0.0, 0.1, 0.1, 0.03, 0.01]


def train(case, steps=4, dtype="float32", **kwargs):
    optimizer = case.make(**kwargs)
    return cases.run(optimizer, cases.make_variables(dtype), steps)


class Contract:
    """Tests of every optimizer."""

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.usefixtures("either_path")
    def test_step_matches_reference(self, case, dtype):
        actual = train(case, steps=20, dtype=dtype)
        expected = cases.run_reference(case.reference_step(), 20)
        assert cases.error(actual, expected) < TOLERANCE

    def test_float64_is_computed_in_float64(self, case):
        variables = cases.make_variables("float64")
        # An exact float64: a variable for the learning rate would be float32.
        optimizer = case.make(lambda: tf.constant(0.02, "float64"))
        actual = cases.run(optimizer, variables, 20)
        expected = cases.run_reference(case.reference_step(), 20)
        assert cases.error(actual, expected) < 1e-13

    @pytest.mark.parametrize(
        "dtype", cases.with_long(["float16", "bfloat16"], ["float16"])
    )
    @pytest.mark.usefixtures("either_path")
    def test_half_precision_trains_as_its_float32_twin(self, case, dtype):
        """Steps of 1e-4 vanish in bfloat16 without master weights."""
        values = [
            cases.as_numpy(tf.cast(value, dtype))
            for value in cases.make_values()
        ]
        twin = cases.make_variables(values=values)
        variables = cases.make_variables(dtype, values=values)
        for variables_ in (twin, variables):
            optimizer = case.make(1e-4)
            cases.run(optimizer, variables_, 60)
        for value, half, full in zip(values, variables, twin, strict=True):
            assert half.dtype == dtype
            assert np.abs(full - value).max() > 1e-3
            rounded = tf.cast(full.value, dtype)
            np.testing.assert_array_equal(
                cases.as_numpy(half), cases.as_numpy(rounded)
            )
        state = [v for v in optimizer.variables if "iteration" not in v.path]
        assert {v.dtype for v in state} == {"float32"}

    @pytest.mark.usefixtures("where_xla_runs")
    def test_half_precision_under_xla_trains_as_its_float32_twin(self, case):
        twin = cases.make_variables()
        values = [v.numpy() for v in twin]
        variables = cases.make_variables("bfloat16", values=values)
        optimizer = case.make(1e-4)
        optimizer.build(variables)
        for twin_variable, variable in zip(twin, variables, strict=True):
            twin_variable.assign(tf.cast(variable.value, "float32"))
        actual = cases.run_in_graph(optimizer, variables, 60, jit_compile=True)
        expected = cases.run(case.make(1e-4), twin, 60)
        # One unit in the last place of bfloat16 is 2^-8 of the value.
        assert_close(actual, expected, rtol=2**-8)

    def test_weight_assigned_from_outside_wins_over_its_master(self, case):
        variables = cases.make_variables("bfloat16")
        optimizer = case.make(1e-4)
        cases.run(optimizer, variables, 3)
        variables[0].assign(np.full((4, 5), 2.0))
        cases.run(optimizer, variables, 1, first=3)
        np.testing.assert_allclose(cases.as_numpy(variables[0]), 2.0, rtol=1e-2)

    @pytest.mark.usefixtures("either_path")
    def test_eager_equals_graph(self, case):
        actual = cases.run_in_graph(case.make(), cases.make_variables(), 4)
        assert_equal(actual, train(case))

    @pytest.mark.usefixtures("where_xla_runs")
    def test_xla_equals_graph(self, case):
        variables = cases.make_variables()
        optimizer = case.make(gradient_accumulation_steps=2, use_ema=True)
        optimizer.build(variables)
        actual = cases.run_in_graph(optimizer, variables, 4, jit_compile=True)
        expected = train(case, gradient_accumulation_steps=2, use_ema=True)
        assert cases.error(actual, expected) < TOLERANCE

    def test_half_precision_survives_a_tf_checkpoint(self, case, tmp_path):
        def make():
            variables = cases.make_variables("bfloat16")
            optimizer = case.make(1e-4)
            optimizer.build(variables)
            checkpoint = tf.train.Checkpoint(
                optimizer=optimizer, variables=[v.value for v in variables]
            )
            return optimizer, variables, checkpoint

        optimizer, variables, checkpoint = make()
        cases.run(optimizer, variables, 3)
        path = checkpoint.save(tmp_path / "checkpoint")
        expected = cases.run(optimizer, variables, 30, first=3)
        optimizer, variables, checkpoint = make()
        checkpoint.restore(path).assert_consumed()
        actual = cases.run(optimizer, variables, 30, first=3)
        assert_equal(actual, expected)

    def test_empty_slices_equal_a_zero_gradient(self, case):
        empty = tf.IndexedSlices(
            tf.zeros([0, 5]), tf.zeros([0], tf.int64), [4, 5]
        )
        results = []
        for gradient in (empty, np.zeros((4, 5), "float32")):
            variables = cases.make_variables()
            case.make().apply([gradient, cases.make_gradients(0)[1]], variables)
            results.append([v.numpy() for v in variables])
        assert_equal(*results)

    def test_embedding_trains_in_fit(self, case):
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(4, 5),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(case.make(0.1, loss_scale_factor=8.0), "mse")
        x = np.array([[0, 0], [1, 3]])
        history = model.fit(x, np.array([[1.0], [0.0]]), epochs=30, verbose=0)
        assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]

    @pytest.mark.parametrize("kind", ["piecewise", "lans", "callable"])
    def test_rate_is_that_of_each_step(self, case, kind):
        rates = [0.3, 0.3, 0.02, 0.02, 0.1]
        rate = keras.optimizers.schedules.PiecewiseConstantDecay(
            [1, 3], rates[::2]
        )
        if kind == "lans":
            rate = schedules.LansSchedule(0.1, 2, 1, 4)
            rates = [float(rate(step)) for step in range(5)]
        if kind == "callable":
            values = iter(rates)
            rate = lambda: next(values)  # noqa: E731
        actual = cases.run(case.make(rate), cases.make_variables(), 5)
        rates = iter(np.repeat(rates, 2))  # For two variables.
        expected = cases.run_reference(
            lambda w, g, state, _: case.reference_step()(
                w, g, state, next(rates)
            ),
            5,
        )
        assert cases.error(actual, expected) < TOLERANCE

    def test_learning_rate_can_be_set_between_steps(self, case):
        optimizer = case.make(0.5)
        optimizer.learning_rate = 0.02
        actual = cases.run(optimizer, cases.make_variables(), 3)
        expected = cases.run_reference(case.reference_step(), 3)
        assert cases.error(actual, expected) < TOLERANCE

    def test_loss_scale_is_divided_out(self, case):
        optimizer = case.make(loss_scale_factor=1024.0)
        assert float(optimizer.scale_loss(tf.constant(1.0))) == 1024.0
        actual = cases.run(
            optimizer,
            cases.make_variables(),
            4,
            gradients=lambda i: [g * 1024 for g in cases.make_gradients(i)],
        )
        assert_equal(actual, train(case))

    def test_gradients_as_lists_and_of_other_floats_are_accepted(self, case):
        variables = cases.make_variables()
        gradients = cases.make_gradients(0)
        optimizer = case.make()
        optimizer.apply(
            [gradients[0].tolist(), gradients[1].astype("float64")], variables
        )
        expected = cases.run_reference(case.reference_step(), 1)
        assert cases.error(variables, expected) < TOLERANCE

    def test_accumulated_gradients_equal_their_mean(self, case):
        """Four gradients make two updates; nothing changes in between."""
        variables = cases.make_variables()
        optimizer = case.make(gradient_accumulation_steps=2)
        moved = []
        for step in range(4):
            before = variables[0].numpy()
            optimizer.apply(cases.make_gradients(step), variables)
            moved.append(not np.array_equal(before, variables[0].numpy()))
        assert moved == [False, True, False, True]
        means = [
            [
                (a + b) / 2
                for a, b in zip(
                    cases.make_gradients(2 * i),
                    cases.make_gradients(2 * i + 1),
                    strict=True,
                )
            ]
            for i in range(2)
        ]
        expected = cases.run(
            case.make(), cases.make_variables(), 2, gradients=lambda i: means[i]
        )
        assert cases.error(variables, expected) < TOLERANCE

    def test_moving_average_follows_and_replaces_the_weights(self, case):
        """One of the variables never gets a gradient."""
        variables = [*cases.make_variables(), keras.Variable(np.ones(2))]
        optimizer = case.make(use_ema=True, ema_momentum=0.9)
        averages = None
        for step in range(4):
            with pytest.warns(UserWarning, match="Gradients do not exist"):
                optimizer.apply([*cases.make_gradients(step), None], variables)
            weights = [v.numpy().astype("float64") for v in variables]
            averages = [
                w if averages is None else 0.9 * a + 0.1 * w
                for w, a in zip(weights, averages or weights, strict=True)
            ]
        optimizer.finalize_variable_values(variables)
        assert cases.error(variables, averages) < TOLERANCE

    def test_variable_that_is_passed_twice_has_one_moving_average(self, case):
        variable = keras.Variable(np.ones(3), dtype="float32")
        optimizer = case.make(use_ema=True, ema_momentum=0.5)
        optimizer.build([variable, variable])
        expected = None
        for _ in range(3):
            gradients = [tf.constant([1.0, 2.0, 3.0]), tf.ones([3])]
            optimizer.apply(gradients, [variable, variable])
            weight = variable.numpy()
            expected = weight if expected is None else (expected + weight) / 2
        mean = average(optimizer, variable).numpy()
        np.testing.assert_allclose(mean, expected, rtol=1e-6)

    def test_moving_average_overwrites_at_its_frequency(self, case):
        variables = cases.make_variables()
        optimizer = case.make(
            use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
        )
        plain = cases.run(case.make(), cases.make_variables(), 2)
        actual = cases.run(optimizer, variables, 2)
        assert_equal(actual, plain)
        cases.run(optimizer, variables, 1, first=2)
        averages = [average(optimizer, v).numpy() for v in variables]
        assert_equal(variables, averages)

    def test_moving_average_is_of_the_weights_before_the_first_update(
        self, case
    ):
        """A run may end, or be validated, before the first update."""
        variables = cases.make_variables()
        optimizer = case.make(use_ema=True, gradient_accumulation_steps=4)
        cases.run(optimizer, variables, 3)
        optimizer.finalize_variable_values(variables)
        assert_equal(variables, cases.make_values())

    def test_moving_average_replaces_weights_of_the_running_step(self, case):
        """Layers may have been frozen or thawed since `compile`."""
        layers = [keras.layers.Dense(2, name=name) for name in "abc"]
        model = keras.Sequential([keras.Input((2,)), *layers])
        layers[0].trainable = False
        model.compile(case.make(use_ema=True, ema_momentum=0.5), "mse")
        data = np.random.default_rng(0).random((8, 2))
        for thawed, frozen in ((None, None), *([(layers[0], layers[1])] * 2)):
            if thawed:
                thawed.trainable, frozen.trainable = True, False
            model.fit(data, data, epochs=2, verbose=0, batch_size=4)
            for layer in layers[1:]:
                expected = average(model.optimizer, layer.kernel).numpy()
                np.testing.assert_array_equal(layer.kernel, expected)

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_moving_average_equals_weights_if_every_step_overflows(
        self, case, dtype
    ):
        variables = cases.make_variables(dtype)
        start = [cases.as_numpy(variable) for variable in variables]
        optimizer = keras.optimizers.LossScaleOptimizer(
            case.make(use_ema=True, ema_overwrite_frequency=1)
        )
        model = keras.Model()
        model.optimizer = optimizer
        callback = keras.callbacks.SwapEMAWeights()
        callback.set_model(model)
        for step in range(2):
            overflown = [np.inf * g for g in cases.make_gradients(step, dtype)]
            optimizer.apply(overflown, variables)
            if dtype == "float32":  # Keras cannot swap float16 averages.
                callback.on_test_begin()
                assert_equal(variables, start)
                callback.on_test_end()
        optimizer.finalize_variable_values(variables)
        assert_equal(variables, start)

    def test_moving_average_of_half_precision_is_float32(self, case):
        variables = cases.make_variables("bfloat16")
        optimizer = case.make(1e-4, use_ema=True, ema_momentum=0.999)
        cases.run(optimizer, variables, 50)
        own = average(optimizer, variables[0])
        assert own.dtype == "float32"
        start = tf.cast(cases.make_variables("bfloat16")[0].value, "float32")
        assert np.abs(own - start).max() > 0
        optimizer.finalize_variable_values(variables)
        np.testing.assert_array_equal(
            cases.as_numpy(variables[0]),
            cases.as_numpy(tf.cast(own, "bfloat16")),
        )

    def test_constraint_is_kept(self, case):
        variable = keras.Variable(np.ones((4, 5), "float32"), name="kernel")
        variable.constraint = keras.constraints.MaxNorm(0.5, axis=[0, 1])
        optimizer = case.make()
        cases.run(
            optimizer,
            [variable],
            3,
            gradients=lambda i: cases.make_gradients(i)[:1],
        )
        assert 0.4 < np.linalg.norm(variable.numpy()) < 0.5 + 1e-6

    def test_terminate_on_nan_sees_a_nonfinite_gradient(self, case):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(case.make(), "mse")
        x = np.array([[1.0, 2.0]] * 4)
        x[1, 0] = np.inf
        history = model.fit(
            x,
            np.ones((4, 1)),
            batch_size=1,
            epochs=5,
            shuffle=False,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )
        assert len(history.epoch) == 1

    def test_dynamic_loss_scaling_skips_a_nonfinite_gradient(self, case):
        variables = cases.make_variables()
        optimizer = keras.optimizers.LossScaleOptimizer(case.make())
        gradients = cases.make_gradients(0)
        gradients[0][1, 2] = np.nan
        optimizer.apply(gradients, variables)
        assert_equal(variables, cases.make_values())
        assert float(optimizer.dynamic_scale) == 2.0**14
        optimizer.apply(
            [g * 2.0**14 for g in cases.make_gradients(0)], variables
        )
        expected = cases.run_reference(case.reference_step(), 1)
        assert cases.error(variables, expected) < TOLERANCE

    def test_float8_scales_are_left_to_keras(self, case):
        """Variables that gradients overwrite get no state."""
        scale = keras.Variable(1.0, name="scale")
        scale.overwrite_with_gradient = True
        variables = [*cases.make_variables(), scale]
        optimizer = case.make(use_ema=True)
        optimizer.apply([*cases.make_gradients(0), np.float32(3.0)], variables)
        assert scale.numpy() == 3.0
        expected = cases.run_reference(case.reference_step(), 1)
        assert cases.error(variables[:2], expected) < TOLERANCE


class NotWrapping:
    """Tests of optimizers that do not wrap another optimizer."""

    def test_save_and_load_mid_run_gives_the_same_next_step(
        self, case, tmp_path
    ):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((8, 4)).astype("float32")
        y = rng.standard_normal((8, 3)).astype("float32")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        optimizer = case.make(use_ema=True, clipnorm=1.0)
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is case.optimizer
        for each in (model, loaded):
            each.fit(x, y, batch_size=8, epochs=2, verbose=0)
        pairs = [
            *zip(model.weights, loaded.weights, strict=True),
            *zip(
                model.optimizer.variables,
                loaded.optimizer.variables,
                strict=True,
            ),
        ]
        for a, b in pairs:
            np.testing.assert_array_equal(a.numpy(), b.numpy())

    @pytest.mark.parametrize(
        "rate",
        [1, np.float32(0.5), np.array(0.5), tf.constant(0.5), 0],
        ids=["int", "numpy", "0-d array", "tensor", "zero"],
    )
    def test_learning_rate_of_any_number_kind_is_accepted(self, case, rate):
        assert float(case.make(rate).learning_rate) == float(rate)


class Compressed:
    """Tests of optimizers that send entries, and keep the rest.

    Modules define two fixtures: `lossless`, settings that lose nothing, and
    `twin`, which creates an optimizer with a rate of about 1e-4.
    """

    @pytest.fixture
    def either_path(self):
        """There is only one path: these optimizers compute no norms."""

    def test_nothing_is_lost(self, case, mirrored, lossless):
        """Sum of everything sent + sum of v = sum of everything accumulated.

        Without feedback, rounding alone would lose ten times as much.
        """
        zeros = dgc.zeros()
        settings = {"sparsity": (0.9,), "make": case.make} | lossless
        run = dgc.Run(mirrored, zeros, **settings)
        accumulated = list(zeros.values())
        for step in range(81):  # Whole rounds.
            run.optimizer.learning_rate = RATES[step % len(RATES)]
            gradients = dgc.make_gradients(step, dgc.SHAPES.values(), 2)
            run.step_and_add_up(gradients, accumulated)
        balance = {
            "sent": [-weight for weight in run.weights()],
            "unsent": [
                np.sum(each, axis=0, dtype="float64")
                for each in run.memory("residual")
            ],
            "accumulated": accumulated,
        }
        dgc.assert_nothing_is_lost([balance], atol=1e-4)

    @pytest.mark.parametrize(
        "dtype", cases.with_long(["float16", "bfloat16"], ["bfloat16"])
    )
    def test_half_precision_of_replicas_trains_as_its_float32_twin(
        self, case, mirrored, dtype, twin
    ):
        """Steps are smaller than the rounding of half precision."""
        dgc.check_twin(mirrored, dtype, twin, [1.0, 0.25])
