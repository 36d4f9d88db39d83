"""The messages, bytes and rounds of exchanges, for cost_model.py."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tf_optimizers.codes.entries import packed_bits
from tf_optimizers.workers.collectives.launcher import Group, levels


class Traffic(NamedTuple):
    """The traffic of one worker in a step."""

    messages: int  # Sent by the worker.
    bytes: float  # In these messages.
    rounds: int  # The messages of a round leave together.


class Exchange(NamedTuple):
    """The work of a worker for an exchange.

    Args:
        traffic: Takes parameters, density and workers; returns the traffic.
        selects: Whether entries are selected.
    """

    traffic: Callable[[int, float, int], Traffic]
    selects: bool


def dense(size: int, at_once: bool = False) -> Exchange:
    """Return the exchange that sums dense tensors of `size` bytes per value.

    The tensors are summed by TensorFlow's ring or, with `at_once`, as our
    strategy sums them: each worker sums a part, and sends the sum to all.
    """

    def traffic(n: int, density: float, workers: int) -> Traffic:
        messages = rounds = 2 * (workers - 1)
        sent = messages / workers * n * size
        if at_once:
            messages, rounds = _through_one(workers)
        return Traffic(messages, sent, rounds)

    return Exchange(traffic, selects=False)


def all_gather(code: str, one_level: bool = False) -> Exchange:
    """Return the exchange that gathers entries, with values in a code.

    Entries are sent as a dense tensor if that takes fewer bytes, as in
    compression/exchanges.py. As in our strategy, many workers gather in two
    levels, unless `one_level`.
    """

    def traffic(n: int, density: float, workers: int) -> Traffic:
        entries = _bytes(n, n * density, code)
        if workers * entries > 2 * n * 4:
            return dense(4, at_once=True).traffic(n, density, workers)
        messages, rounds = (
            _at_once([workers]) if one_level else _gather(workers)
        )
        return Traffic(messages, (workers - 1) * entries, rounds)

    return Exchange(traffic, selects=True)


def reduce_scatter(code: str) -> Exchange:
    """Return the exchange that sums entries by shards, and gathers the sums.

    Every worker sums the entries of its shard of the tensor, and sends the
    largest sums to all, as in compression/sharded_exchange.py.
    """

    def traffic(n: int, density: float, workers: int) -> Traffic:
        share, size = n * density / workers, n / workers
        sent = _bytes(size, share + 3 * share**0.5, code)
        sent += _bytes(size, share, "float32")
        messages, rounds = _through_one(workers)
        return Traffic(messages, (workers - 1) * sent, rounds)

    return Exchange(traffic, selects=True)


def _bytes(n: float, count: float, code: str) -> float:
    """Return the bytes of `count` entries of a tensor of n elements."""
    return packed_bits(round(n), round(count), code) / 8


def _through_one(workers: int) -> tuple[int, int]:
    """Return the messages and rounds if one worker sums each part."""
    there, back = _at_once([workers]), _gather(workers)
    return there[0] + back[0], there[1] + back[1]


def _gather(workers: int) -> tuple[int, int]:
    """Return the messages and rounds of a gather of our strategy."""
    groups = levels(Group(0, workers), 0)
    return _at_once([group.size for group in groups])


def _at_once(groups: Sequence[int]) -> tuple[int, int]:
    """Return the messages and rounds of gathers in nested groups."""
    sent = [size - 1 for size in groups]
    return sum(sent), sum(map(bool, sent))
