"""Requests messages before the other workers send them.

In TensorFlow, the receiver of a message sends a request to the sender, which
replies when the message is ready. If all workers begin a gather at the same
time, the gather takes a round trip. If the requests arrive before the messages
are ready, the gather takes only half a round trip:

    receiver   request ──▶              ◀── message    next request ──▶
    sender                    message ready

For each kind of message, two threads, called lanes, take turns. As soon as a
lane has ended an exchange, it requests the messages of its next exchange. So
there are requests to all other workers even during a gather, and gathers can
follow each other at intervals of half a round trip. When a process exits, the
requests to it fail. Then TensorFlow aborts all collectives of the other
workers, even collectives between local devices.
"""

import functools
import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers.workers.collectives.all_reduce import (
    SparseCollectiveAllReduce,
)
from tf_optimizers.workers.collectives.launcher import (
    FEWEST_IN_LEVELS,
    Group,
    KeyedLauncher,
)
from tf_optimizers.workers.collectives.progress import (
    GATHER,
    instance_key,
    kind_number,
)
from tf_optimizers.workers.collectives.runs import BackgroundCall, close

# The offset of group keys for pairs of replicas. It must be larger than the
# offsets in `launcher.py`.
_PAIR_KEYS = 1 << 29
_LANES = 2
# The capacity of a queue. A queue never fills up, since a replica runs its
# gathers one after another.
_QUEUE_SIZE = 8


class Kind(NamedTuple):
    """What the messages of all replicas have in common.

    Attributes:
        key: The instance key of the messages.
        elements: The number of elements of a message.
        dtype: The dtype of the elements.
    """

    key: int
    elements: int
    dtype: tf.DType


class AheadGather:
    """Gathers messages of one kind, and requests each message in advance.

    Args:
        owner: An object. The threads end when this object is deleted, and at
            exit.
        device: This replica's device.
        everyone: The group of all replicas.
        replica: The index of this replica among all replicas.
        kind: The kind of the messages.
    """

    # The first error that has ended a lane, or None.
    error: Exception | None = None

    def __init__(
        self,
        owner: object,
        device: str,
        everyone: Group,
        replica: int,
        kind: Kind,
    ) -> None:
        self._device, self._everyone = device, everyone
        self._replica, self._kind = replica, kind
        with tf.init_scope(), tf.device("CPU:0"):
            self._sent, self._arrived = (
                tf.queue.FIFOQueue(_QUEUE_SIZE, [kind.dtype]) for _ in range(2)
            )
            # A lane may send the next message if its queue has an element.
            self._turns = [
                tf.queue.FIFOQueue(1, [tf.bool], [()]) for _ in range(_LANES)
            ]
            self._turns[0].enqueue(True)
        threads = [BackgroundCall(owner) for _ in self._turns]
        # Finalizers run in reverse order at exit. So the queues are closed
        # before `BackgroundCall` joins the threads.
        for queue in (self._sent, *self._turns):
            weakref.finalize(owner, close, queue)
        for lane, thread in enumerate(threads):
            thread.call(functools.partial(self._exchange_all, lane))

    def gather(self, message: tf.Tensor) -> tf.Tensor:
        """Return the messages of all replicas: [replicas, elements]."""
        with tf.device("CPU:0"):
            sent = self._sent.enqueue(message)
            with tf.control_dependencies([] if sent is None else [sent]):
                messages = self._arrived.dequeue()
            shape = [self._everyone.size, self._kind.elements]
            return tf.ensure_shape(messages, shape)

    def _exchange_all(self, lane: int) -> None:
        """Exchange messages until an exchange fails or a queue is closed."""
        exchange = tf.function(
            functools.partial(self._exchange, lane), autograph=False
        )
        try:
            while True:
                exchange()
        except Exception as error:
            self.error = self.error or error
            self._arrived.close()

    def _exchange(self, lane: int) -> list[tf.Tensor]:
        """Exchange messages with the other replicas; return the sends."""
        everyone = range(self._everyone.size)
        others = [i for i in everyone if i != self._replica]
        with tf.device("CPU:0"):
            with tf.control_dependencies([self._turns[lane].dequeue()]):
                own = self._sent.dequeue()
            with tf.control_dependencies([own]):
                self._turns[(lane + 1) % _LANES].enqueue(True)
            own = tf.ensure_shape(own, [self._kind.elements])
        with tf.device(self._device):
            # The receives do not depend on the queues, so they begin at once.
            messages = [self._receive(i, lane) for i in others]
            sends = [self._send(own, i, lane) for i in others]
        messages.insert(self._replica, own)
        with tf.device("CPU:0"):
            self._arrived.enqueue(tf.stack(messages))
        # TensorFlow would prune sends that the function does not return.
        return sends

    def _send(self, message: tf.Tensor, receiver: int, lane: int) -> tf.Tensor:
        pair = self._pair(self._replica, receiver, lane)
        return tf.raw_ops.CollectiveBcastSendV2(input=message, **pair)

    def _receive(self, sender: int, lane: int) -> tf.Tensor:
        return tf.raw_ops.CollectiveBcastRecvV2(
            T=self._kind.dtype,
            shape=[self._kind.elements],
            **self._pair(sender, self._replica, lane),
        )

    def _pair(self, sender: int, receiver: int, lane: int) -> dict[str, int]:
        """Return the group and key of messages from a sender to a receiver."""
        key, size = self._everyone
        place = (lane * size + sender) * size + receiver
        return {
            "group_size": 2,
            "group_key": key + _PAIR_KEYS + place,
            "instance_key": self._kind.key,
        }


class AheadLauncher(KeyedLauncher):
    """A launcher whose gathers request messages in advance.

    Gathers do so only on CPUs, among fewer than `FEWEST_IN_LEVELS` replicas,
    and if the message's size is known statically and not 0.

    Attributes:
        gathers: The gathers that have begun to request messages, by kind.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gathers: dict[Kind, AheadGather] = {}

    def gather(
        self, input_tensor: Any, options: Any, layout: int = 0
    ) -> tf.Tensor:
        """Concatenate the replicas' tensors along the first axis."""
        tensor = tf.convert_to_tensor(input_tensor)
        elements = tensor.shape.num_elements()
        is_supported = "CPU" in self._device and (
            1 < self._everyone.size < FEWEST_IN_LEVELS
        )
        if not (is_supported and elements):
            return super().gather(tensor, options, layout)
        number = kind_number(GATHER, tensor.dtype)
        key = instance_key(number, elements, layout)
        ahead = self._ahead(Kind(key, elements, tensor.dtype))
        with tf.control_dependencies([tensor]):
            begun = self.progress.begin(number, elements, layout)
        with tf.control_dependencies([begun]):
            messages = ahead.gather(tf.reshape(tensor, [-1]))
        with tf.control_dependencies([messages]):
            self.progress.end()
        first, *others = tensor.shape
        return tf.reshape(messages, [self._everyone.size * first, *others])

    def _ahead(self, kind: Kind) -> AheadGather:
        if kind not in self.gathers:
            replica = self._ranks.index(self._rank)
            self.gathers[kind] = AheadGather(
                self, self._device, self._everyone, replica, kind
            )
        return self.gathers[kind]


class AheadCollectives(SparseCollectiveAllReduce):
    """Collectives whose gathers request messages in advance."""

    launcher = AheadLauncher

    @property
    def error(self) -> Exception | None:
        """The error of a gather whose thread has failed, or None."""
        gathers = [
            each for own in self._launchers for each in own.gathers.values()
        ]
        return next((each.error for each in gathers if each.error), None)
