"""Starts the workers of the next restart in advance."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from tf_optimizers.launch.output import Output
from tf_optimizers.launch.worker import Worker

# A function that starts the workers of an attempt. Its arguments are the number
# of the attempt, the stack that ends the workers, and whether they stand by.
Start = Callable[[int, ExitStack, bool], list[Worker]]


class Standbys:
    """The workers of the next attempt, on standby until this attempt fails.

    The first attempt has number 0, and each restart is a new attempt.

    Args:
        start: Starts the workers of an attempt.
        delay: Seconds from the start of an attempt until the workers of the
            next attempt start; None to start no workers in advance.
        last: The number of the last attempt.
        output: Writes a message if workers cannot be started.
    """

    def __init__(
        self, start: Start, delay: float | None, last: int, output: Output
    ) -> None:
        self._start = start
        self._delay = delay
        self._last = last
        self._output = output
        self._next = 0
        self._due: float | None = None
        self._group: list[Worker] = []
        self._stack = ExitStack()

    def plan(self, attempt: int) -> None:
        """Plan when to start the next attempt's workers.

        Call this method when attempt number `attempt` begins.
        """
        self._next = attempt + 1
        if self._delay is not None and attempt < self._last:
            self._due = time.monotonic() + self._delay

    def seconds_left(self) -> float | None:
        """Return the seconds until the planned start; None without a plan."""
        if self._due is None:
            return None
        return max(0.0, self._due - time.monotonic())

    def update(self) -> None:
        """Start the standby workers if their delay is over."""
        if self.seconds_left() != 0:
            return
        self._due = None
        with ExitStack() as stack:
            try:
                self._group = self._start(self._next, stack, True)
            except (OSError, RuntimeError) as error:
                self._output.say(f"Cannot start standby workers: {error}.")
                return
            self._stack = stack.pop_all()

    def take(self, stack: ExitStack) -> list[Worker]:
        """Make the standby workers run the command, and return them.

        Closing `stack` ends the workers. Returns an empty list if there are no
        standby workers, or if one of them has ended. In the second case, the
        others are ended, too.
        """
        self._due = None
        group, self._group = self._group, []
        with self._stack.pop_all() as own:
            for worker in group:
                worker.update()
            if any(worker.exit_code is not None for worker in group):
                return []
            stack.push(own.pop_all())
        for worker in group:
            worker.begin()
        return group

    def close(self) -> None:
        """End the standby workers."""
        self._stack.close()
