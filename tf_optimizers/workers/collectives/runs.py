"""Tracks runs of steps, and calls functions in the background.

A step may fail on a worker when only some of its collectives have run, or only
some weights have been updated. The other workers may wait for this worker, or
may have begun later steps. If this worker began another step, workers would
exchange values of different steps. So with several workers, a run of a step
records its start and its end; see `progress.py`.

While a step runs, workers exchange notes about batches. In a `tf.function`,
TensorFlow runs this exchange in parallel with the step. In eager mode, a thread
can run the exchange. The next exchange waits for the thread, so that all
workers exchange in the same order.
"""

import atexit
import multiprocessing.pool
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import effects_of, in_xla
from tf_optimizers.workers._compat import coordination
from tf_optimizers.workers.collectives.all_reduce import (
    SparseCollectiveAllReduce,
)

# Seconds to wait for the last call at exit, before and after all collectives
# are aborted.
_ENDING_SECONDS = 2.0
_ABORTED_SECONDS = 1.0


class BackgroundCall:
    """Calls functions in a thread, one at a time.

    Args:
        owner: The object that uses the thread, such as a strategy. If the
            owner is deleted, a running call continues, since other workers may
            still need the call. At exit, if the call does not end soon, all
            collectives are aborted.
        is_at_once: Whether to call functions directly instead of in a thread,
            for example if there are no other workers. A caller that cannot
            call `wait` before each step may set this attribute to True later.
            Defaults to `False`.
    """

    def __init__(self, owner: object, is_at_once: bool = False) -> None:
        self.is_at_once = is_at_once
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, self._end)

    def call(self, function: Callable[[], object]) -> None:
        """Call `wait`, which may raise an error; then call a function."""
        self.wait()
        if self.is_at_once:
            function()
            return

        def call() -> None:
            try:
                function()
            except Exception as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the function called last; raise its error, if there is one.

        Args:
            seconds: The longest wait, after which this method returns. Defaults
                to `None`: no limit.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return
            self._thread = None
        if self._errors:
            raise self._errors.pop()

    def _end(self) -> None:
        """Join the thread at exit: a running thread could crash TensorFlow."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if self._owner() is None:
            # The owner was deleted before exit. Join the thread only at exit,
            # since `_join` may abort collectives that the process still uses.
            atexit.register(_join, thread)
        else:
            _join(thread)


def _join(thread: threading.Thread) -> None:
    """Join a thread at exit; abort all collectives if it does not end soon."""
    thread.join(_ENDING_SECONDS)
    if thread.is_alive():
        coordination.abort("A worker has exited before the other workers.")
        thread.join(_ABORTED_SECONDS)


def close(queue: tf.queue.QueueBase) -> None:
    """Close a queue, so that no thread waits for its elements."""
    # This function is a finalizer, which Python may call while TensorFlow
    # traces a `tf.function`. Close the queue now, not when the traced function
    # runs.
    with tf.init_scope():
        queue.close(cancel_pending_enqueues=True)


def in_every_replica(function: Callable[[int], Any], count: int) -> list[Any]:
    """Return `function(rank)` for each of `count` local replicas."""
    ranks = range(count)
    if not tf.executing_eagerly():
        return list(map(function, ranks))
    # Use threads, since each replica may wait for the others in `function`.
    with multiprocessing.pool.ThreadPool(count) as pool:
        return pool.map(function, ranks)


def run_tracked(strategy: Any, run: Callable[[], Any], arguments: Any) -> Any:
    """Call `run`, record its start and end, and return its result.

    `progress.py` explains the records. With one worker, or under XLA, nothing
    is recorded.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        run: A function without arguments that calls a step on all local
            replicas.
        arguments: The arguments of the step. The start is recorded when the
            arguments are available, so that the end of an iterator does not
            count as a failed run.
    """
    if strategy.extended.workers == 1 or in_xla():
        return run()
    if tf.executing_eagerly():
        return _run_eagerly(strategy.extended.channel, run)
    return _run_in_graph(strategy, run, arguments)


def after_its_arguments(fn: Callable) -> Callable:
    """Return a function that starts when all of its arguments are available.

    At the end of data of unknown length, no arguments arrive. Then a step must
    run none of its operations, not even those that need no batch, such as
    weight decay. AutoGraph must have converted `fn` already.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
        arguments = [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf)]
        with tf.control_dependencies(arguments):
            return fn(*args, **kwargs)

    return tf.autograph.experimental.do_not_convert(call)


def _run_in_graph(strategy: Any, run: Callable[[], Any], arguments: Any) -> Any:
    channel = strategy.extended.channel
    outputs: list[Any] = []
    with tf.control_dependencies(_tensors(strategy, arguments)):
        channel.enter()
    effects = effects_of(lambda: outputs.append(run()))
    with tf.control_dependencies([*effects, *_tensors(strategy, outputs)]):
        channel.leave()
    return outputs[0]


def _run_eagerly(
    channel: SparseCollectiveAllReduce, run: Callable[[], Any]
) -> Any:
    channel.enter()
    begun = channel.progress()
    try:
        outputs = run()
    except Exception as error:
        is_tensorflows = isinstance(error, tf.errors.OpError)
        if not is_tensorflows and channel.progress() == begun:
            # The step has begun no collective: perhaps an argument is wrong.
            channel.leave()
        raise
    channel.leave()
    return outputs


def _tensors(strategy: Any, nest: Any) -> list[tf.Tensor]:
    """Return the symbolic tensors of all local replicas in a nest."""
    parts = [
        strategy.experimental_local_results(value)
        for value in tf.nest.flatten(nest)
    ]
    leaves = tf.nest.flatten(parts, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf)]
