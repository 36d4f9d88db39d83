"""Stops a worker at a step that has not ended, before it begins the next.

A step that fails on one worker, by a check of its own, may leave it between two
collectives, or have moved some of its weights. The others, which wait, or have
gone on, must not meet the next step of that worker.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.replicas import convert, in_xla
from tf_optimizers.collectives.all_reduce import SparseCollectiveAllReduce


def run_whole(strategy: Any, run: Callable[[], Any], arguments: Any) -> Any:
    """Return what `run` does; see `tf_optimizers/collectives/progress.py`.

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
