"""Numbers collectives, and tracks how far a replica is in them.

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

A worker whose step fails, and that goes on with the next, would meet the others
in the wrong place without notice: numbers of collectives come again in every
step. So each replica notes whether it is in a collective, and in a run of a
step, and does not go on from one that has not ended:

              idle    in a collective    in a run    in a collective of it
    enter     run     failed             failed      failed
    begin     coll.   failed             coll.       failed
    end               idle                           run
    leave                                idle

The variable is the token that orders collectives as well: what changes it
stands in line with them.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import plain_variable

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


_IDLE, _ALONE, _RUN, _IN_RUN, _FAILED = range(5)

_ENTER = (_RUN, _FAILED, _FAILED, _FAILED, _FAILED)
_BEGIN = (_ALONE, _FAILED, _IN_RUN, _FAILED, _FAILED)
_END = (_FAILED, _IDLE, _FAILED, _RUN, _FAILED)
_LEAVE = (_FAILED, _FAILED, _IDLE, _FAILED, _FAILED)


def has_failed(progress: Sequence[int]) -> bool:
    """Tell whether a step did not end, and another was to begin."""
    return progress[-1] == _FAILED


def is_in_run(progress: Sequence[int]) -> bool:
    """Tell whether a step has begun, and not ended."""
    return progress[-1] in (_RUN, _IN_RUN)


def is_waiting(progress: Sequence[int]) -> bool:
    """Tell whether a collective has begun, and not ended."""
    return progress[-1] in (_ALONE, _IN_RUN)


def failure(place: str) -> str:
    """Say that a step has failed at a place."""
    return (
        "All workers must end a step before they begin the next. Received: a "
        f"step that has failed on {place}, whose first error says why. The "
        "weights of others may have moved on: start all workers again, from "
        "a backup. To skip a batch, skip it on all workers: sum a flag over "
        "replicas, and test the sum."
    )


class Progress:
    """The progress of one replica, in one group of devices.

    Args:
        device: The replica's.
        is_guarded: Whether other processes belong to the group. If not, all
            replicas fail together.
    """

    def __init__(self, device: str, is_guarded: bool) -> None:
        self.is_guarded = is_guarded
        with tf.init_scope(), tf.device(device):
            self._variable = plain_variable(
                tf.zeros([5], tf.int64), trainable=False
            )

    @property
    def token(self) -> tf.Tensor:
        """What collectives take as their ordering token."""
        return self._variable.handle

    def numpy(self) -> list[int]:
        """Return the count, the last collective, and the state.

        Counted is how many runs and collectives have begun. Of the last one:
        the group, the elements and their layout.
        """
        return self._variable.numpy().tolist()

    def enter(self) -> None:
        """Note that a run begins, of which collectives are a part."""
        self._move(_ENTER, 1)

    def leave(self) -> None:
        """Note that it has ended."""
        self._move(_LEAVE)

    def begin(self, group: int, elements: Any, layout: int) -> tf.Tensor:
        """Note that a collective begins; return whether it may."""
        now = self._variable.read_value()
        what = [
            tf.convert_to_tensor(number, tf.int64)
            for number in (group, elements, layout)
        ]
        state = tf.gather(tf.constant(_BEGIN, tf.int64), now[4])
        if not self.is_guarded:
            state = now[4]
        self._variable.assign(
            tf.stack([now[0] + 1, *what, state]), read_value=False
        )
        return state != _FAILED

    def end(self) -> None:
        """Note that the collective has ended."""
        self._move(_END)

    def _move(self, states: Sequence[int], begun: int = 0) -> None:
        if self.is_guarded:
            now = self._variable.read_value()
            state = tf.gather(tf.constant(states, tf.int64), now[4])
            self._variable.assign(
                tf.concat([now[:1] + begun, now[1:4], [state]], 0),
                read_value=False,
            )
