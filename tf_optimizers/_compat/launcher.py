"""The collectives of one replica, under numbers that say what they are.

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
is ahead finds nobody under the number, and waits.

TensorFlow's collectives are rings, of N - 1 rounds for a gather and twice as
many for a sum. On CPUs its all-to-all, which sends all at once, makes one round
of a gather, and two of a sum, with the bytes of the rings.

Workers that want to exchange different things wait for each other for ever.
So each notes what it has come to, for `distribute/standstill.py` to compare.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils

from tf_optimizers._compat.progress import Progress

# By TensorFlow's names.
_REDUCE = "CollectiveReduceV2"
_GATHER = "CollectiveGatherV2"
_ALL_TO_ALL = "CollectiveAllToAllV2"
_KINDS = (_REDUCE, _GATHER, _ALL_TO_ALL)  # Whichever does the work.
DTYPES = (
    *(tf.bfloat16, tf.float16, tf.float32, tf.float64),
    *(tf.int32, tf.int64),
)

# Of the 31 bits of a number, those of the elements. Smaller numbers are left to
# TensorFlow, which counts from 100.
_ELEMENT_BITS = 26
_STRIDE = 40_503_001  # Tells sizes apart that differ by a multiple of 2^26.

# TensorFlow (2.21) writes two ranks as one number: from 1 to 11 as from 11 to
# 1. A process that has both of them aborts, or would take one for the other.
_LOCAL_REPLICAS_AT_ONCE = 10


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


class KeyedLauncher(cross_device_utils.CollectiveReplicaLauncher):
    """Runs a replica's collectives under fixed numbers, on flat tensors.

    Args:
        *args: As TensorFlow's takes them.
        local_replicas: How many this process has.
    """

    def __init__(self, *args: Any, local_replicas: int) -> None:
        super().__init__(*args)
        self._has_at_once = (
            "CPU" in self._device
            and self._group_size > 2  # Rings of two are as short.
            and local_replicas <= _LOCAL_REPLICAS_AT_ONCE
        )
        self.progress = Progress(
            self._device, is_guarded=self._group_size > local_replicas
        )

    def all_reduce(
        self, input_tensor: Any, control_input: Any = None, options: Any = None
    ) -> tf.Tensor:
        """Sum a tensor over all replicas."""
        tensor = tf.convert_to_tensor(input_tensor)
        flat = tf.reshape(tensor, [-1])
        with self._control_input(control_input):
            if self._has_at_once:
                total = self._sum_by_shards(flat, options)
            else:
                what = _REDUCE, _elements(flat), 0
                total = self._run(
                    *(_REDUCE, flat, what, options),
                    merge_op="Add",
                    final_op="Id",
                )
        return tf.reshape(total, _shape(tensor))

    def _all_gather(self, input_tensor: Any, options: Any) -> tf.Tensor:
        # All of TensorFlow's own gathers lead through here.
        return self.gather(input_tensor, options)

    def gather(
        self, input_tensor: Any, options: Any, layout: int = 0
    ) -> tf.Tensor:
        """Concatenate tensors along the first axis; see `instance_key`."""
        tensor = tf.convert_to_tensor(input_tensor)
        flat = tf.reshape(tensor, [-1])
        what = _GATHER, _elements(flat), layout
        if self._has_at_once:
            gathered = self._gather_at_once(flat, what, options)
        else:
            gathered = self._run(_GATHER, flat, what, options)
        shape = tf.concat([[-1], _shape(tensor)[1:]], 0)
        return tf.reshape(gathered, shape)

    def all_to_all(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Send every replica a row; return the rows that came.

        TensorFlow has the collective, but no launcher or strategy uses it.
        """
        rows = tf.reshape(tensor, [self._group_size, -1])
        what = _ALL_TO_ALL, _elements(rows), 0
        received = self._run(_ALL_TO_ALL, rows, what, options)
        return tf.reshape(received, _shape(tensor))

    def _gather_at_once(
        self, flat: tf.Tensor, what: tuple[str, Any, int], options: Any
    ) -> tf.Tensor:
        rows = tf.tile(flat[tf.newaxis], [self._group_size, 1])
        received = self._run(
            _ALL_TO_ALL, rows, what, options, name="gather_at_once"
        )
        return tf.reshape(received, [-1])

    def _sum_by_shards(self, flat: tf.Tensor, options: Any) -> tf.Tensor:
        """Let each replica sum a part, in the order of `tf.add_n`."""
        size, count = _elements(flat), self._group_size
        # TensorFlow (2.21) ends the process if there is nothing to exchange.
        each = -(-size // count)
        each = tf.maximum(each, 1) if tf.is_tensor(each) else max(each, 1)
        rows = tf.pad(flat, [[0, each * count - size]])
        rows = tf.reshape(rows, [count, each])
        what = _REDUCE, size, 0
        received = self._run(
            _ALL_TO_ALL, rows, what, options, name="sum_by_shards"
        )
        own = tf.add_n(tf.unstack(received, num=count))
        return self._gather_at_once(own, (_GATHER, each, 0), options)[:size]

    def _run(
        self,
        operation: str,
        tensor: tf.Tensor,
        what: tuple[str, Any, int],
        options: Any,
        **attributes: str,
    ) -> tf.Tensor:
        """Run an operation of TensorFlow.

        Args:
            operation: Its name.
            tensor: What is passed to it.
            what: Kind of the collective that it does the work of, elements
                that are passed to that, and their layout. They determine the
                tensor's shape.
            options: Of communication.
            **attributes: Of the operation.
        """
        options = self._options.merge(options)
        with tf.device(self._device):
            kind, elements, layout = what
            # An error before it, as at the end of data, means that it never
            # began, although nothing but its input may wait for that.
            with tf.control_dependencies([tensor]):
                key, token = self._begin(
                    group_of(kind, tensor.dtype), elements, layout
                )
            received = getattr(tf.raw_ops, operation)(
                input=tensor,
                group_size=self._group_size,
                group_key=self._group_key,
                instance_key=key,
                ordering_token=token,
                communication_hint=options.implementation.value.lower(),
                timeout_seconds=self._timeout(options, bool(token)),
                **attributes,
            )
            if token:
                self.progress.end()
            return received

    def _timeout(self, options: Any, is_noted: bool) -> float | None:
        """Return the seconds after which TensorFlow is to end a collective.

        None if `distribute/standstill.py` does so, which watches the strategy's
        timeout. TensorFlow (2.21) frees what a collective still uses, so that
        the process may die of it, and keeps a thread for each timeout.
        """
        is_watched = is_noted and self.progress.is_guarded
        seconds = options.timeout_seconds
        if is_watched and seconds == self._options.timeout_seconds:
            return None
        return seconds

    def _begin(
        self, group: int, elements: Any, layout: int
    ) -> tuple[Any, list[Any]]:
        """Return the number and the ordering token of a collective."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            # A graph of TensorFlow 1 has no ordering tokens. It is built
            # once, and alike on all workers, so that numbers may count up.
            return self._next_instance_key(), []
        waited_for = self.progress.begin(group, elements, layout)
        with tf.device("CPU:0"), tf.control_dependencies(waited_for):
            key = instance_key(group, elements, layout)
            key = tf.identity(tf.convert_to_tensor(key, tf.int32))
        return key, [self.progress.token]


def _elements(tensor: tf.Tensor) -> Any:
    known = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if known is None else known


def _shape(tensor: tf.Tensor) -> Any:
    is_known = tensor.shape.is_fully_defined()
    return tensor.shape if is_known else tf.shape(tensor)
