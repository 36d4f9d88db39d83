"""Exchanges values while the next steps run.

A step ends only when all of its collectives have ended. So a step that must not
wait for the network leaves the exchange to a thread, and a later step takes the
result:

    step       starts a call                              waits for it
    thread     ....[ the call, on a separate channel ]....

Steps start calls in the same order on all workers. A thread runs its calls one
after another, in this order.
"""

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import (
    effects_of,
    plain_variable,
)
from tf_optimizers.workers.collectives.bits import from_numbers, to_numbers
from tf_optimizers.workers.collectives.runs import BackgroundCall, close
from tf_optimizers.workers.collectives.thread_state import ThreadState

# The capacity of a queue. A queue never fills up, since a call has ended before
# a step starts the call again.
_QUEUE_SIZE = 1 << 16


class Later:
    """Runs calls in a thread, with a separate channel for exchanges.

    Args:
        owner: An object. The thread ends when this object is deleted, and at
            exit.
        channel: The `AheadCollectives` through which calls exchange values.
    """

    def __init__(self, owner: object, channel: Any) -> None:
        self.channel = channel
        self._calls: list[weakref.ref[Call]] = []
        with tf.init_scope(), tf.device("CPU:0"):
            self.started = tf.queue.FIFOQueue(_QUEUE_SIZE, [tf.int64, tf.int64])
        thread, started, calls = (
            BackgroundCall(owner),
            self.started,
            self._calls,
        )
        # Finalizers run in reverse order at exit. So `close` runs before
        # `BackgroundCall` joins the thread. A thread that waits for an open
        # queue would not end.
        weakref.finalize(owner, close, started)
        thread.call(lambda: _run(started, calls))

    def call(
        self, function: Callable[[tf.Tensor], object], replicas: int = 1
    ) -> "Call":
        """Create a call that runs when `replicas` replicas have started it."""
        call = Call(function, self, len(self._calls), replicas)
        self._calls.append(weakref.ref(call))
        return call


class Call:
    """A function that steps start, and that the thread of a `Later` runs.

    Args:
        function: Called in the thread when the last replica has started the
            call. The argument is the one that this replica passed to `start`,
            as an int64 tensor.
        later: The `Later` whose thread runs the function.
        number: The index of the call among the calls of the thread.
        replicas: The number of local replicas that start the call.
    """

    def __init__(
        self,
        function: Callable[[tf.Tensor], object],
        later: Later,
        number: int,
        replicas: int,
    ) -> None:
        self._function, self._number = function, number
        self._started, self._channel = later.started, later.channel
        with tf.init_scope(), tf.device("CPU:0"):
            self._ended = [
                tf.queue.FIFOQueue(_QUEUE_SIZE, [tf.string])
                for _ in range(replicas)
            ]
            self._is_on = [plain_variable(False) for _ in range(replicas)]

    def start(self, rank: int, argument: Any = 0) -> None:
        """Start the call, in a step of the local replica `rank`."""
        with tf.device("CPU:0"):
            self._is_on[rank].assign(True)
            argument = tf.cast(argument, tf.int64)
            number = tf.constant(self._number, tf.int64)
            self._started.enqueue([number, argument])

    def wait(self, rank: int) -> tf.Tensor:
        """Return a tensor that is available when the call has ended.

        If the local replica `rank` has not started the call since its last
        `wait`, the tensor is available at once.

        Raises:
            tf.errors.InvalidArgumentError: If the call has raised an error.
        """

        def take() -> tf.Tensor:
            error = self._ended[rank].dequeue()
            self._is_on[rank].assign(False)
            check = tf.debugging.Assert(tf.equal(error, ""), [error])
            with tf.control_dependencies([] if check is None else [check]):
                return tf.identity(error)

        with tf.device("CPU:0"):
            is_on = self._is_on[rank].read_value()
            return tf.cond(is_on, take, lambda: tf.constant(""))

    def wait_for_all(self) -> None:
        """Between steps, wait until the call has ended.

        Raises:
            tf.errors.InvalidArgumentError: If the call has raised an error.
        """
        for rank in range(len(self._ended)):
            self.wait(rank)

    def run(self, argument: tf.Tensor) -> None:
        """Run the function, and report its end or error to local replicas."""
        error = ""
        try:
            self._function(argument)
        except Exception as raised:
            cause = self._channel.error or raised
            error = (
                "Values that a step sends must arrive before a later step "
                "needs them. Received: an error in the exchange. Find the "
                "error that came first, on any worker, then start all workers "
                f"again. This worker's error: {type(cause).__name__}: {cause}"
            )
        for queue in self._ended:
            queue.enqueue(error)


def _run(started: tf.queue.QueueBase, calls: list["weakref.ref[Call]"]) -> None:
    """Run the calls whose numbers are in a queue, until the queue is closed."""
    starts: collections.Counter[int] = collections.Counter()
    while True:
        try:
            number, argument = started.dequeue()
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            return
        call = calls[int(number)]()
        if call is not None:
            starts[int(number)] += 1
            if starts[int(number)] % len(call._ended) == 0:
                call.run(argument)
        del call  # Do not keep the call alive while waiting.


class GatherLater:
    """Gathers a small tensor from each replica while the next steps run.

    Args:
        extended: The `SparseExtended` of the strategy.
        purpose: The key of the thread in `extended.later`, such as "notes".
        shape: The shape of each replica's tensor.
        dtype: The dtype of the tensors.
    """

    def __init__(
        self, extended: Any, purpose: str, shape: Sequence[int], dtype: tf.DType
    ) -> None:
        later = extended.later[purpose]
        with tf.init_scope(), tf.device("CPU:0"):
            self._sent = [
                plain_variable(tf.zeros(shape, dtype))
                for _ in extended.worker_devices
            ]
            self._arrived = plain_variable(
                tf.zeros([extended.replicas, *shape], dtype)
            )

        def gather() -> None:
            parts = [to_numbers(sent.read_value()) for sent in self._sent]
            numbers = extended.gather_copies(later.channel, parts)
            self._arrived.assign(from_numbers(numbers, dtype))

        run = tf.function(gather, autograph=False)
        self._call = later.call(lambda _: run())

    def start(self, parts: Sequence[tf.Tensor]) -> None:
        """Start the gather.

        Args:
            parts: The tensors of this worker's replicas.
        """

        def keep() -> None:
            for sent, part in zip(self._sent, parts, strict=True):
                sent.assign(part)

        with tf.device("CPU:0"), tf.control_dependencies(effects_of(keep)):
            self._call.start(0)

    def take(self) -> tf.Tensor:
        """Wait for the last gather; return its tensors, [replicas, *shape].

        Return zeros if no tensors were gathered since the last `take`.
        """
        with tf.device("CPU:0"), tf.control_dependencies([self._call.wait(0)]):
            arrived = self._arrived.read_value()
            with tf.control_dependencies([arrived]):
                zeros = tf.zeros_like(arrived)
                cleared = effects_of(lambda: self._arrived.assign(zeros))
            with tf.control_dependencies(cleared):
                return tf.identity(arrived)


class Current(ThreadState):
    """The channel on which the current thread exchanges values.

    None stands for the strategy's main channel.
    """

    channel: Any = None
