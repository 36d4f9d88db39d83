"""Background calls run one at a time, and their results are used."""

import gc
import threading

import pytest
import tensorflow as tf

from tf_optimizers.workers.collectives import runs
from tf_optimizers.workers.collectives.later import Later
from tf_optimizers.workers.collectives.runs import BackgroundCall


class Owner:
    """Stands in for a strategy."""


@pytest.fixture
def owner():
    return Owner()


def test_calls_wait_only_for_the_previous_one(owner):
    asking, may_end, done = BackgroundCall(owner), threading.Event(), []

    def ask():
        assert may_end.wait(60)
        done.append("first")

    asking.call(ask)
    assert not done
    may_end.set()
    asking.call(lambda: done.append("second"))
    asking.wait()
    assert done == ["first", "second"]


def test_calls_wait_if_a_function_may_intervene(owner):
    asking, done = BackgroundCall(owner, is_at_once=True), []
    asking.call(lambda: done.append("at once"))
    assert done == ["at once"]


def test_error_is_raised_once_when_waiting(owner):
    def fail():
        raise ValueError("of the exchange")

    asking = BackgroundCall(owner)
    asking.call(fail)
    with pytest.raises(ValueError, match="of the exchange"):
        asking.call(lambda: None)
    asking.wait()


@pytest.mark.parametrize("is_deleted", [False, True])
def test_abandoned_calls_are_ended_at_exit(monkeypatch, is_deleted):
    """A worker that fails before others draw ends, but not its collectives.

    A script may go on without a strategy whose exchange other workers delay.
    """
    aborted, at_exit = threading.Event(), []
    monkeypatch.setattr(runs.coordination, "abort", lambda _: aborted.set())
    monkeypatch.setattr(runs.atexit, "register", lambda *c: at_exit.append(c))
    monkeypatch.setattr(runs, "_ENDING_SECONDS", 0.0)
    owners = [Owner()]
    asking = BackgroundCall(owners[0])
    asking.call(lambda: aborted.wait(60))
    if is_deleted:
        owners.clear()
        gc.collect()
        assert not aborted.is_set()
        function, *arguments = at_exit.pop()
        function(*arguments)
    else:
        asking._end()
    assert aborted.is_set()


def test_owner_deleted_while_a_function_is_traced_leaves_no_op_in_it():
    """Python may delete the owner at any time."""
    owners = [Owner()]
    queue = Later(owners[0], None).started

    @tf.function(autograph=False)
    def trace():
        owners.clear()
        gc.collect()
        return tf.constant(1)

    operations = trace.get_concrete_function().graph.get_operations()
    assert "QueueCloseV2" not in {each.type for each in operations}
    assert queue.is_closed()
