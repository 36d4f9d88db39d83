"""Tracks how far a replica is in its collectives, and whether a step failed.

A worker whose step fails, and that goes on with the next, would meet the others
in the wrong place without anybody's notice: numbers of collectives come again
in every step. So each replica notes whether it is in a collective, and in a
run of a step, and does not go on from one that has not ended:

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

from tf_optimizers._compat.replicas import plain_variable

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
        """Return how many collectives have begun, the last one, and the state.

        Of the last one: the group, the elements and their layout.
        """
        return self._variable.numpy().tolist()

    def enter(self) -> None:
        """Note that a run begins, of which collectives are a part."""
        self._move(_ENTER)

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

    def _move(self, states: Sequence[int]) -> None:
        if self.is_guarded:
            now = self._variable.read_value()
            state = tf.gather(tf.constant(states, tf.int64), now[4])
            self._variable.assign(
                tf.concat([now[:4], [state]], 0), read_value=False
            )
