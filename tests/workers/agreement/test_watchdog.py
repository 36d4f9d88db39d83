"""The watchdog detects workers in different collectives, and no others."""

import gc
import threading
import types

import pytest

from tf_optimizers.workers._compat import coordination
from tf_optimizers.workers.agreement import watchdog
from tf_optimizers.workers.agreement.watchdog import Watchdog
from tf_optimizers.workers.collectives.progress import kind_number

SUM = kind_number("CollectiveReduceV2", "float32")
GATHER = kind_number("CollectiveGatherV2", "int32")


class Extended:
    """Stands in for a strategy, whose replicas have a given progress."""

    def __init__(self, channels, index, workers, timeout=None):
        self.channels = [
            types.SimpleNamespace(progress=progress) for progress in channels
        ]
        self.number, self.worker_index, self.workers = 1, index, workers
        self.timeout_seconds = timeout


class Worker:
    """A worker with a given progress of its two replicas, in two channels."""

    def __init__(self, *args, **kwargs):
        self.far = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
        self.near = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
        channels = lambda: list(self.far), lambda: list(self.near)
        self.watchdog = Watchdog(Extended(channels, *args, **kwargs))


@pytest.fixture
def notes(monkeypatch):
    """Return the messages between workers."""
    notes = {}
    monkeypatch.setattr(coordination, "write", notes.__setitem__)
    monkeypatch.setattr(coordination, "read", lambda key, _: notes.get(key))
    monkeypatch.setattr(coordination, "delete", notes.__delitem__)
    return notes


def look(workers, times=3):
    return [
        message
        for _ in range(times)
        for worker in workers
        if (message := worker.watchdog.look())
    ]


def test_progressing_and_idle_workers_send_little(notes):
    workers = [Worker(index, 3) for index in range(3)]
    for step in range(1, 5):
        for worker in workers:
            worker.far = [[step, SUM, 5, 0, 0], [step, SUM, step, 0, 0]]
            assert not look([worker], 1)
    assert not notes
    assert not look(workers)
    assert len(notes) == 6
    # One worker is late; earlier messages are deleted.
    for worker in workers[:2]:
        worker.far = [[5, GATHER, 5, 0, 0], [5, SUM, 1, 0, 0]]
    assert not look(workers)
    assert len(notes) == 6


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            [7, SUM, 5, 0, 0],
            [7, SUM, 6, 0, 0],
            "CollectiveReduceV2 of 6 float32",
        ),
        (
            [7, SUM, 5, 0, 0],
            [7, GATHER, 5, 0, 0],
            "CollectiveGatherV2 of 5 int32",
        ),
    ],
    ids=["sizes", "kinds"],
)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_workers_in_different_collectives_get_an_error(
    notes, ours, theirs, said, odd
):
    workers = [Worker(index, 3) for index in range(3)]
    for index, worker in enumerate(workers):
        worker.far = [[9, SUM, 1, 0, 0], theirs if index == odd else ours]
    messages = look(workers)
    assert messages
    for message in messages:
        assert f"{said} on worker {odd}" in message
        assert "CollectiveReduceV2 of 5 float32 on worker" in message


@pytest.mark.parametrize(
    ("count", "state", "seconds", "is_wrong"),
    [
        (7, 0, 0.0, True),
        (9, 0, 0.0, False),  # The other worker has begun the same collective,
        (10, 0, 0.0, False),  # or has even ended it.
        (7, 1, 0.0, False),  # This worker has not ended the one before.
        (7, 0, 60.0, False),
    ],
)
def test_workers_that_wait_in_different_channels_get_an_error(
    notes, monkeypatch, count, state, seconds, is_wrong
):
    monkeypatch.setattr(watchdog, "_CERTAIN_SECONDS", seconds)
    first, second = workers = [Worker(0, 2), Worker(1, 2)]
    first.far, first.near = [[9, SUM, 5, 0, 1]] * 2, [[3, GATHER, 8, 0, state]]
    second.far = [[count, SUM, 5, 0, 0]] * 2
    second.near = [[4, GATHER, 2, 0, 1]]
    messages = look(workers)
    assert bool(messages) is is_wrong
    for message in messages:
        assert "CollectiveReduceV2 of 5 float32 on worker 0" in message
        assert "CollectiveGatherV2 of 2 int32 on worker 1" in message


def test_failed_step_is_reported_at_once(notes):
    workers = [Worker(index, 2) for index in range(2)]
    workers[1].far[1] = [3, SUM, 5, 0, 4]
    (message,) = look(workers, 1)
    assert "that has failed on worker 1" in message


def test_worker_after_a_collective_does_not_wait(notes):
    workers = [Worker(0, 2), Worker(1, 2)]
    for worker, state in zip(workers, (3, 2), strict=True):
        worker.far[1] = [4, GATHER, 3509, 7, state]
    assert not look(workers)
    workers[1].far[1] = [4, GATHER, 3509, 7, 0]
    assert not look(workers)


def test_collective_times_out_and_nothing_else_does(notes, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    worker = Worker(0, 2, timeout=5.0)

    def look_for(seconds):
        said = []
        for _ in range(seconds // 2):
            clock[0] += 2.0
            said += look([worker], 1)
        return said

    worker.far = [[1, SUM, 5, 0, 0], [1, SUM, 5, 0, 2]]
    assert not look_for(20)
    worker.far[1] = [2, SUM, 5, 0, 3]
    assert not look_for(6)
    worker.far[1] = [3, SUM, 6, 0, 3]
    message, *_ = look_for(8)
    assert "CollectiveReduceV2 of 6 float32, which has timed out" in message


def test_end_does_not_wait_for_missing_workers(monkeypatch):
    """Otherwise the process would never end."""
    told, back = threading.Event(), threading.Event()

    def write(key, value):
        told.set()
        back.wait(60)

    gc.collect()  # Leave out strategies of other tests, which would end below.
    monkeypatch.setattr(coordination, "write", write)
    monkeypatch.setattr(watchdog, "_LOOKING_SECONDS", 0.01)
    extended = [Extended([lambda: [[1, SUM, 5, 0, 0]]], 0, 2)]
    watchdog.watch(extended[0])
    assert told.wait(30)

    ending = threading.Thread(target=extended.clear)
    ending.start()
    ending.join(20)
    ended = not ending.is_alive()
    back.set()
    assert ended
