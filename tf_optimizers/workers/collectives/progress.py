"""Gives collectives fixed instance keys, and tracks each replica's progress.

Within a group of devices, TensorFlow matches the collectives of different
workers by a number, the instance key. For each new key, a worker sends a
request to the first worker. The request takes a round trip before anything is
exchanged, and leaves a record that is never deleted. By default, TensorFlow
numbers collectives consecutively, so every step has new keys. Here, the key
depends only on the collective's operation, dtype, number of elements and
layout. So steps that exchange values of the same shapes and dtypes use the same
keys, even if workers trace functions a different number of times. TensorFlow
requires that collectives with the same key have the same operation, dtype and
number of elements.

It is safe to use a key again, even within a step. An ordering token makes a
replica run its collectives one after another, and all workers run them in the
same order. A collective ends only when all values that it sends have been read,
and all values that it receives have arrived. So if a worker begins its next
collective early, this collective waits for the other workers.

After a failed step, however, a worker that continued would exchange values in
the wrong collective, and no error would show this. So each replica records
whether it is in a collective, and whether it is in a run of a step. If a
collective or a run has not ended when the next one begins, the replica has
failed, and cannot continue. Each event (row) changes the state (column) as
follows:

              idle    in a collective    in a run    in both
    enter     run     failed             failed      failed
    begin     coll.   failed             both        failed
    end       failed  idle               failed      run
    leave     failed  failed             idle        failed

The ordering token is the variable that contains this state. So TensorFlow runs
changes of state and collectives in order.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import plain_variable

# TensorFlow's names for the operations.
REDUCE = "CollectiveReduceV2"
GATHER = "CollectiveGatherV2"
ALL_TO_ALL = "CollectiveAllToAllV2"
_OPERATIONS = (REDUCE, GATHER, ALL_TO_ALL)
DTYPES = (
    *(tf.bfloat16, tf.float16, tf.float32, tf.float64),
    *(tf.int32, tf.int64),
)

# A key has 31 bits. The upper 5 bits contain the number of the kind or, if the
# message is packed, a larger number. The lower 26 bits depend on the number of
# elements and on the layout. Keys with 0 in the upper bits are left to
# TensorFlow, which counts up from 100, and to `lone_key`, which counts down.
_ELEMENT_BITS = 26
_STRIDE = 40_503_001  # So that sizes 2^26 apart get different keys.


def kind_number(operation: str, dtype: tf.DType) -> int:
    """Return the number, in [1, 21], of a collective's operation and dtype."""
    # All other dtypes share the last number of an operation, since TensorFlow
    # rejects them.
    place = (*DTYPES, dtype).index(dtype)
    return 1 + _OPERATIONS.index(operation) * (len(DTYPES) + 1) + place


def describe(kind: int, elements: int, layout: int = 0) -> str:
    """Describe a collective, for an error message. Kind 0 means none."""
    if not kind:
        return "no collective"
    operation, place = divmod(kind - 1, len(DTYPES) + 1)
    dtype = (*(d.name for d in DTYPES), "another dtype")[place]
    packed = f" in the layout {layout:08x}" if layout else ""
    return f"{_OPERATIONS[operation]} of {elements} {dtype}{packed}"


def instance_key(kind: int, elements: Any, layout: int = 0) -> Any:
    """Return the key of a collective, in [2^26, 2^31).

    The chance that two different layouts have the same key is 1 in 670 million.

    Args:
        kind: The number of the collective's kind, from `kind_number`.
        elements: The number of elements of a replica's tensor: an int, or an
            int64 tensor if the number is not known statically.
        layout: A checksum of a packed message's dtypes and shapes, from
            `message.layout`. Defaults to `0`, for a tensor that is not packed.
    """
    size, first = 1 << _ELEMENT_BITS, kind
    if layout:
        first = 1 + len(_OPERATIONS) * (len(DTYPES) + 1)
        size *= (1 << (31 - _ELEMENT_BITS)) - first
        place = (elements * _STRIDE + layout) % size
    else:
        place = (elements + elements // size * _STRIDE) % size
    key = (first << _ELEMENT_BITS) + place
    return tf.cast(key, tf.int32) if tf.is_tensor(key) else key


def lone_key(rank: int) -> int:
    """Return a key that no other replica uses, so that a collective waits."""
    return (1 << _ELEMENT_BITS) - 1 - rank


_IDLE, _COLLECTIVE, _RUN, _BOTH, _FAILED = range(5)

# For each event: the next state, indexed by the current state.
_ENTER = (_RUN, _FAILED, _FAILED, _FAILED, _FAILED)
_BEGIN = (_COLLECTIVE, _FAILED, _BOTH, _FAILED, _FAILED)
_END = (_FAILED, _IDLE, _FAILED, _RUN, _FAILED)
_LEAVE = (_FAILED, _FAILED, _IDLE, _FAILED, _FAILED)


def has_failed(progress: Sequence[int]) -> bool:
    """Return whether the replica has failed; see the table above."""
    return progress[-1] == _FAILED


def is_in_run(progress: Sequence[int]) -> bool:
    """Return whether a run of a step has begun and has not ended."""
    return progress[-1] in (_RUN, _BOTH)


def is_waiting(progress: Sequence[int]) -> bool:
    """Return whether a collective has begun and has not ended."""
    return progress[-1] in (_COLLECTIVE, _BOTH)


def failure(place: str) -> str:
    """Return the error message for a step that has failed on `place`."""
    return (
        "All workers must end a step before they begin the next step. "
        f"Received: a step that has failed on {place}; see the first error "
        "there. Other workers may already have updated their weights, so start "
        "all workers again, from a backup. To skip a batch, skip it on all "
        "workers: all-reduce a flag, and skip the batch if the sum is not 0."
    )


class Progress:
    """Records the progress of one replica through steps and collectives.

    Args:
        device: The replica's device.
        is_guarded: Whether replicas of other processes take part in the
            collectives. If not, the state is not tracked, since all replicas
            fail together.
    """

    def __init__(self, device: str, is_guarded: bool) -> None:
        self.is_guarded = is_guarded
        with tf.init_scope(), tf.device(device):
            self._variable = plain_variable(tf.zeros([5], tf.int64))

    @property
    def token(self) -> tf.Tensor:
        """The token by which TensorFlow orders the replica's collectives."""
        return self._variable.handle

    def numpy(self) -> list[int]:
        """Return the progress as `[count, kind, elements, layout, state]`.

        The count is the number of runs (if guarded) and collectives that have
        begun. Kind, elements and layout describe the last collective.
        """
        return self._variable.numpy().tolist()

    def enter(self) -> None:
        """Record that a run of a step begins."""
        if self.is_guarded:
            self._move(_ENTER, 1)

    def leave(self) -> None:
        """Record that a run of a step has ended."""
        if self.is_guarded:
            self._move(_LEAVE)

    def begin(self, kind: int, elements: Any, layout: int) -> tf.Tensor:
        """Record that a collective begins; return whether it may run."""
        what = tf.convert_to_tensor([kind, elements, layout], tf.int64)
        return self._move(_BEGIN, 1, what) != _FAILED

    def end(self) -> None:
        """Record that a collective has ended."""
        if self.is_guarded:
            self._move(_END)

    def _move(
        self, states: Sequence[int], begun: int = 0, what: Any = None
    ) -> tf.Tensor:
        """Record an event; return the new state.

        `states` maps the current state to the next. `begun` is added
        to the count. `what` contains the kind, elements and layout of a
        collective that begins; None keeps those of the last collective.
        """
        now = self._variable.read_value()
        state = now[4]
        if self.is_guarded:
            state = tf.gather(tf.constant(states, tf.int64), state)
        what = now[1:4] if what is None else what
        self._variable.assign(
            tf.concat([now[:1] + begun, what, [state]], 0), read_value=False
        )
        return state
