"""Detects workers that wait for each other in different collectives.

    worker 0     sum of 5    sum of 5    sum of 5   waits
    worker 1     sum of 5    sum of 5    sum of 6   waits

Both workers have begun their third collective. The two collectives differ, so
neither will end. A stalled worker publishes its position in the key-value store
of the coordination service: the number, kind, size and layout of its last
collective. Then the worker reads the position that the next worker has
published under the same number. If all workers have published the same number,
but not the same position, at least one worker finds a different position.

Workers may also wait in different channels, for example one in an exchange of
entries, and the other, whose data have ended, in a comparison of batches. So a
worker that waits for a long time also checks whether the next worker waits
elsewhere.

The watchdog also ends all collectives if one has waited for longer than the
strategy's `timeout_seconds`, or if a step has failed on this worker.
"""

import itertools
import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.workers._compat import coordination
from tf_optimizers.workers.collectives.progress import (
    describe,
    failure,
    has_failed,
    is_waiting,
)

# Seconds between two checks. A worker that makes no progress between two checks
# has stalled.
_LOOKING_SECONDS = 3.0
# The longest waits for the next worker's position, and for the thread to end.
_READING_SECONDS = 0.2
_ENDING_SECONDS = 1.0
# After a wait of this many seconds, a worker checks the other channels, too.
_CERTAIN_SECONDS = 9.0


class Watchdog:
    """Watches the collectives of one strategy on one worker.

    Args:
        extended: The strategy's `SparseExtended`.
    """

    def __init__(self, extended: Any) -> None:
        # Keep no reference to `extended`: the thread must not keep the strategy
        # alive.
        self._channels = extended.channels
        self._number = extended.number
        self._worker = extended.worker_index
        self._next = (self._worker + 1) % extended.workers
        self._timeout = extended.timeout_seconds
        self._seen: list[list[int]] = []  # The progress at the last check.
        # The time of the last progress, by index in `_seen`.
        self._since: dict[int, float] = {}
        # The position that this worker has published, by index in `_seen`.
        self._written: dict[int, list[int]] = {}
        # The last position that the next worker also had, by index in `_seen`.
        self._agreed: dict[int, list[int]] = {}

    def look(self) -> str | None:
        """Check once; return an error message if training cannot continue."""
        seen = self._seen
        progress = [channel.progress() for channel in self._channels]
        self._seen = [*itertools.chain(*progress)]
        if any(map(has_failed, self._seen)):
            return failure(f"worker {self._worker}")
        for i, now in enumerate(self._seen):
            if seen[i : i + 1] != [now]:
                self._since[i] = time.monotonic()
            elif self._is_late(i, now):
                return self._timed_out(i, now)
            # `[:4]` leaves out the state, which differs if only one of the two
            # workers has ended the collective.
            elif now[0] and now[:4] != self._agreed.get(i):
                other = self._compare(i, now[:4])
                if other == now[:4]:
                    self._agreed[i] = other
                elif other or (other := self._elsewhere(i, now, progress)):
                    return self._message(now[:4], other)
        return None

    def _elsewhere(
        self, i: int, now: list[int], progress: Sequence[Sequence[list[int]]]
    ) -> list[int] | None:
        """Return where the next worker waits for this worker, or None.

        Return a position only if each worker waits in a collective that the
        other has not begun. In the main channel, which also counts steps that
        exchange nothing, the next worker may be one or two numbers ahead.
        """
        since = time.monotonic() - self._since[i]
        if not is_waiting(now) or since < _CERTAIN_SECONDS:
            return None
        if any(self._read(i, now[0] + ahead) for ahead in (1, 2)):
            return None
        waits = _waits(self._number, self._next, progress)
        return next(
            (other for mine, other in waits if not is_waiting(mine)), None
        )

    def _is_late(self, i: int, now: list[int]) -> bool:
        if self._timeout is None or not is_waiting(now):
            return False
        return time.monotonic() - self._since[i] >= self._timeout

    def _timed_out(self, i: int, now: list[int]) -> str:
        return (
            "All workers must take part in an exchange within the "
            f"`timeout_seconds` of {self._timeout:g}. Received: "
            f"{describe(*now[1:4])}, which has timed out on worker "
            f"{self._worker}, after {time.monotonic() - self._since[i]:.0f} s. "
            "See the output of the other workers, or raise `timeout_seconds` "
            "of `communication_options`."
        )

    def _compare(self, i: int, now: list[int]) -> list[int] | None:
        """Publish a position; return the next worker's with the same count.

        Return None if the next worker has not published one.
        """
        written = self._written.get(i)
        if written != now:
            if written:
                coordination.delete(self._key(i, written[0], self._worker))
            key = self._key(i, now[0], self._worker)
            coordination.write(key, json.dumps(now))
            self._written[i] = now
        return self._read(i, now[0])

    def _read(self, i: int, count: int) -> list[int] | None:
        """Return the next worker's position with this count, or None."""
        key = self._key(i, count, self._next)
        note = coordination.read(key, _READING_SECONDS)
        return None if note is None else json.loads(note)

    def _key(self, i: int, count: int, worker: int) -> str:
        return _key_of(self._number, i, count, worker)

    def _message(self, now: list[int], other: list[int]) -> str:
        return (
            "All workers must exchange values of the same sizes and dtypes, "
            f"in the same order. Received: {describe(*now[1:])} on worker "
            f"{self._worker}, {describe(*other[1:])} on worker {self._next}. "
            "Reduce and gather values of the same shape on all workers, even "
            "if their batches differ, and draw the same number of batches."
        )


def _key_of(number: int, i: int, count: int, worker: int) -> str:
    return f"tf_optimizers/watchdog/{number}/{i}/{count}/{worker}"


def _waits(
    number: int, worker: int, progress: Sequence[Sequence[list[int]]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield where another worker waits in collectives not begun on this worker.

    The main channel, the first in `progress`, is not searched, since it also
    counts steps that exchange nothing, which may run on one worker alone. The
    first replica of each worker stands for all its replicas.

    Yields:
        This worker's progress in a channel, and the other worker's position.
    """
    place = len(progress[0])
    for mine, *others in progress[1:]:
        key = _key_of(number, place, mine[0] + 1, worker)
        if note := coordination.read(key, _READING_SECONDS):
            yield mine, json.loads(note)
        place += 1 + len(others)


def has_gone_on(extended: Any, worker: int) -> bool:
    """Return whether `worker` waits in a collective not begun on this worker.

    The main channel is not searched, so the collective is usually a comparison
    of batches.
    """
    with tf.init_scope():  # Workers also agree while they trace a step.
        progress = [channel.progress() for channel in extended.channels]
    return any(_waits(extended.number, worker, progress))


def watch(extended: Any) -> None:
    """Start a thread that watches the collectives of a strategy.

    The thread ends when the strategy is deleted, at exit, or after an error.
    """
    watchdog, ended = Watchdog(extended), threading.Event()

    def look() -> None:
        while not ended.wait(_LOOKING_SECONDS):
            try:
                message = watchdog.look()
            except tf.errors.OpError:
                return  # Another worker has died; TensorFlow raises an error.
            if message:
                coordination.abort(message)
                return

    thread = threading.Thread(target=look, daemon=True)

    def end() -> None:
        ended.set()
        if threading.current_thread() is not thread:
            # Do not wait forever: a write to the store, which worker 0 hosts,
            # blocks once worker 0 is gone.
            thread.join(_ENDING_SECONDS)

    thread.start()
    # `end` also runs at exit, when a thread that still runs TensorFlow could
    # crash the process.
    weakref.finalize(extended, end)
