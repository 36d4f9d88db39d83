"""What a step can do before its gradient is there, in graphs that branch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.replicas import are_merged, in_xla
from tf_optimizers.distribute.boxes import close, open_box


def begin(
    index: Any, functions: Sequence[Callable[[], Any]]
) -> list[Callable[[], Any]]:
    """Call one of several functions; return, of each, what gives its result.

    Only the one at `index` may be asked for it. A conditional waits for all
    that any of its branches needs, so this one is apart from that in which the
    results are used.

    Where replicas are merged, which are in one process then, a function is not
    called before its result is asked for: replicas cannot exchange in a
    conditional of their own. Nor under XLA, which runs on one device, and knows
    no boxes.
    """
    if len(functions) == 1:
        result = functions[0]()
        return [lambda: result]
    if are_merged() or in_xla():
        return list(functions)
    results: dict[int, Any] = {}

    def branch(i: int) -> tf.Tensor:
        results[i] = functions[i]()
        return close(results[i])

    every = range(len(functions))
    box = tf.switch_case(
        tf.cast(index, tf.int32), [functools.partial(branch, i) for i in every]
    )
    return [functools.partial(_result, box, results, i) for i in every]


def _result(box: tf.Tensor, results: dict[int, Any], i: int) -> Any:
    return open_box(box, results[i])
