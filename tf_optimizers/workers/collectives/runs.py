"""Keeps failed runs, and what runs beside a step, from the next step.

A step that fails on one worker, by a check of its own, may leave it between two
collectives, or have moved some of its weights. The others, which wait, or have
gone on, must not meet the next step of that worker.

What a worker asks beside a step, a function asks by itself: nothing in it waits
for the answer. Between functions a thread asks, and the next question waits for
it, so that all workers ask in one order.
"""

import multiprocessing.pool
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import convert, in_xla
from tf_optimizers.workers._compat import coordination
from tf_optimizers.workers.collectives.all_reduce import (
    SparseCollectiveAllReduce,
)

# All workers have begun to ask, unless one has failed.
_ENDING_SECONDS = 2.0
_ABORTED_SECONDS = 1.0


class BackgroundCall:
    """Calls functions beside what the program does, one at a time.

    Args:
        owner: For what it does so: an object that ends with it, or with Python.
        is_at_once: Whether there is no other worker. It can be set later,
            where functions may come in between without any notice here.
    """

    def __init__(self, owner: object, is_at_once: bool = False) -> None:
        self.is_at_once = is_at_once
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        weakref.finalize(owner, self._end)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in a thread, after the one before has ended."""
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

    def wait(self) -> None:
        """Wait for the function that has been called, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._errors:
            raise self._errors.pop()

    def _end(self) -> None:
        """End a thread that is left; TensorFlow does not survive one."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_ENDING_SECONDS)
        if thread.is_alive():
            coordination.abort("This worker ends before the others.")
            thread.join(_ABORTED_SECONDS)


def in_every_replica(function: Callable[[int], Any], count: int) -> list[Any]:
    """Return `function(local rank)` of each of this worker's replicas."""
    ranks = range(count)
    if not tf.executing_eagerly():
        return list(map(function, ranks))
    # All at the same time: one after another, the first would wait for the
    # next for ever.
    with multiprocessing.pool.ThreadPool(count) as pool:
        return pool.map(function, ranks)


def run_whole(strategy: Any, run: Callable[[], Any], arguments: Any) -> Any:
    """Return what `run` does; see `progress.py`.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        run: Calls all local replicas.
        arguments: Their arguments. An iterator that ends, and is to give them,
            fails before the run begins.
    """
    is_legacy = not tf.compat.v1.executing_eagerly_outside_functions()
    if strategy.extended.workers == 1 or is_legacy or in_xla():
        return run()
    if tf.executing_eagerly():
        return _run_eagerly(strategy.extended.channel, run)
    return _run_in_graph(strategy, run, arguments)


def after_its_arguments(fn: Callable) -> Callable:
    """Return a replica's function, no part of which runs before its arguments.

    At the end of data of unknown length there are none. What in a step depends
    on no batch, such as `iterations` or weight decay, TensorFlow would still
    run, or not.
    """
    converted = convert(fn)

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
        arguments = [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf)]
        with tf.control_dependencies(arguments):
            return converted(*args, **kwargs)

    return tf.autograph.experimental.do_not_convert(call)


def _run_in_graph(strategy: Any, run: Callable[[], Any], arguments: Any) -> Any:
    channel = strategy.extended.channel
    graph = tf.compat.v1.get_default_graph()
    with tf.control_dependencies(_tensors(strategy, arguments)):
        channel.enter()
    start = len(graph.get_operations())
    outputs = run()
    # All that changes something, and all that may fail.
    effects = [
        op
        for op in graph.get_operations()[start:]
        if op.op_def.is_stateful and op.type != "ReadVariableOp"
    ]
    with tf.control_dependencies([*effects, *_tensors(strategy, outputs)]):
        channel.leave()
    return outputs


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
            channel.leave()  # An argument is wrong, and nothing has changed.
        raise
    channel.leave()
    return outputs


def _tensors(strategy: Any, nest: Any) -> list[tf.Tensor]:
    """Return the symbolic tensors of all local replicas."""
    parts = [
        strategy.experimental_local_results(value)
        for value in tf.nest.flatten(nest)
    ]
    leaves = tf.nest.flatten(parts, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf)]
