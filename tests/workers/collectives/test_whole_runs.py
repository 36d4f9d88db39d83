"""A worker continues after a step only if the step has ended."""

import types

import pytest
import tensorflow as tf

from tf_optimizers.workers.collectives.progress import Progress, has_failed
from tf_optimizers.workers.collectives.runs import run_tracked

FAILED = "It would wait alone"


class Worker:
    """One of several workers, whose collectives exchange nothing."""

    def __init__(self):
        self.own = Progress("CPU:0", is_guarded=True)
        channel = types.SimpleNamespace(
            enter=self.own.enter,
            leave=self.own.leave,
            progress=lambda: [self.own.numpy()],
        )
        self.extended = types.SimpleNamespace(workers=2, channel=channel)
        self.variable = tf.Variable(0.0)

    def experimental_local_results(self, value):
        return (value,)

    def exchange(self):
        may_begin = tf.debugging.Assert(self.own.begin(1, 5, 0), [FAILED])
        with tf.control_dependencies([may_begin]):
            self.variable.assign_add(1.0)
        self.own.end()

    def step(self, is_good=True, argument=0.0):
        """Exchange, check an assertion, and exchange."""

        def run():
            self.exchange()
            with tf.control_dependencies([tf.debugging.Assert(is_good, ["x"])]):
                self.exchange()
            return self.variable + argument

        return run_tracked(self, run, argument)


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture(params=["graph", "eager"])
def step(request, worker):
    is_graph = request.param == "graph"
    return tf.function(worker.step) if is_graph else worker.step


def test_steps_that_end_follow_each_other(worker, step):
    for count in range(1, 4):
        assert step() == 2 * count
    worker.exchange()
    assert worker.own.numpy() == [10, 1, 5, 0, 0]


def test_no_step_follows_one_that_has_failed(worker, step):
    step()
    with pytest.raises(tf.errors.InvalidArgumentError, match="x"):
        step(tf.constant(False))
    assert not has_failed(worker.own.numpy())
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=FAILED):
            step()
        assert has_failed(worker.own.numpy())
    assert worker.variable == 3.0


def test_changes_after_the_last_exchange_count(worker):
    """Weights have moved on some workers only."""

    def run(is_good):
        worker.exchange()
        total = tf.identity(worker.variable)
        with tf.control_dependencies([total]):
            tf.debugging.Assert(is_good, ["x"])

    step = tf.function(
        lambda is_good: run_tracked(worker, lambda: run(is_good), ())
    )
    step(tf.constant(True))
    with pytest.raises(tf.errors.InvalidArgumentError, match="x"):
        step(tf.constant(False))
    with pytest.raises(tf.errors.InvalidArgumentError, match=FAILED):
        step(tf.constant(True))


def test_no_collective_follows_one_that_was_cancelled(worker):
    worker.own.begin(1, 5, 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=FAILED):
        worker.exchange()


def test_iterator_may_end(worker):
    iterator = iter(tf.data.Dataset.range(2).map(float))
    step = tf.function(lambda: worker.step(argument=next(iterator)))
    for _ in range(2):
        step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    worker.step()


def test_wrong_argument_changes_nothing(worker):
    def raise_error():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        run_tracked(worker, raise_error, ())
    assert worker.step() == 2.0


def test_error_amid_collectives_is_a_failure(worker):
    def raise_error():
        worker.exchange()
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        run_tracked(worker, raise_error, ())
    with pytest.raises(tf.errors.InvalidArgumentError, match=FAILED):
        worker.step()
