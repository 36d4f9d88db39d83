"""Numbers collectives by what they exchange.

Workers find each other in a collective by its number, its "instance key".
TensorFlow's own counts up, and every new number is a question to the first
worker: a round trip before anything is exchanged, and a record that is never
forgotten. Here the number follows from the kind of the collective, its dtype
and its elements, which TensorFlow holds a number to, and from nothing else:
not from how often a worker has traced, which need not be equally often.

A number may come again, in a step as in the next, since collectives of a
replica run one after another (by the ordering token), in one order on all
workers (or they would exchange different things), and each ends only when all
that it sends has been taken and all that it receives has come. A worker that
is ahead finds no partner under the number, and waits.
"""

from typing import Any

import tensorflow as tf

# By TensorFlow's names.
REDUCE = "CollectiveReduceV2"
GATHER = "CollectiveGatherV2"
ALL_TO_ALL = "CollectiveAllToAllV2"
_KINDS = (REDUCE, GATHER, ALL_TO_ALL)  # Whichever does the work.
DTYPES = (
    *(tf.bfloat16, tf.float16, tf.float32, tf.float64),
    *(tf.int32, tf.int64),
)

# Of the 31 bits of a number, those of the elements. Smaller numbers are left to
# TensorFlow, which counts from 100.
_ELEMENT_BITS = 26
_STRIDE = 40_503_001  # Tells sizes apart that differ by a multiple of 2^26.


def group_of(kind: str, dtype: tf.DType) -> int:
    """Return the number of a kind and dtype, in [1, 21]."""
    # TensorFlow refuses other dtypes, in words of its own.
    place = (*DTYPES, dtype).index(dtype)
    return 1 + _KINDS.index(kind) * (len(DTYPES) + 1) + place


def describe(group: int, elements: int, layout: int = 0) -> str:
    """Say what a collective exchanges."""
    kind, place = divmod(group - 1, len(DTYPES) + 1)
    dtype = (*(d.name for d in DTYPES), "another dtype")[place]
    packed = f" in the layout {layout:08x}" if layout else ""
    return f"{_KINDS[kind]} of {elements} {dtype}{packed}"


def instance_key(group: int, elements: Any, layout: int = 0) -> Any:
    """Return the number of a collective, in [2^26, 2^31).

    Those of two layouts are the same by chance of 1 in 600 million.

    Args:
        group: Of its kind and dtype.
        elements: Of what is passed to it; an int64 tensor if not known yet.
        layout: What the elements mean, if that is more than the dtype.
    """
    size, first = 1 << _ELEMENT_BITS, group
    if layout:
        first = 1 + len(_KINDS) * (len(DTYPES) + 1)
        size *= (1 << (31 - _ELEMENT_BITS)) - first
        place = (elements * _STRIDE + layout) % size
    else:
        place = (elements + elements // size * _STRIDE) % size
    key = (first << _ELEMENT_BITS) + place
    return tf.cast(key, tf.int32) if tf.is_tensor(key) else key


def lone_key(rank: int) -> int:
    """Return a number under which a replica meets nobody."""
    return (1 << _ELEMENT_BITS) - 1 - rank
