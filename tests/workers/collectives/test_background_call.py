"""What is asked beside a step is asked once at a time, and heard."""

import gc
import threading

import pytest

from tf_optimizers.workers.collectives import runs as beside
from tf_optimizers.workers.collectives.runs import BackgroundCall


class Owner:
    """What a strategy is to it."""


@pytest.fixture
def owner():
    return Owner()


def test_calls_do_not_wait_but_for_the_one_before(owner):
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


def test_calls_wait_where_a_function_may_come_in_between(owner):
    asking, done = BackgroundCall(owner, is_at_once=True), []
    asking.call(lambda: done.append("at once"))
    assert done == ["at once"]


def test_error_is_raised_where_it_is_waited_for_and_once(owner):
    def fail():
        raise ValueError("of the exchange")

    asking = BackgroundCall(owner)
    asking.call(fail)
    with pytest.raises(ValueError, match="of the exchange"):
        asking.call(lambda: None)
    asking.wait()


def test_what_nobody_waits_for_is_ended(owner, monkeypatch):
    """As at the end of a worker that has failed before the others draw."""
    aborted = threading.Event()
    monkeypatch.setattr(beside.coordination, "abort", lambda _: aborted.set())
    monkeypatch.setattr(beside, "_ENDING_SECONDS", 0.0)
    owners = [Owner()]
    BackgroundCall(owners[0]).call(lambda: aborted.wait(60))
    owners.clear()
    gc.collect()
    assert aborted.is_set()
