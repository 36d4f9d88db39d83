"""What a worker sends, and waits for."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tf_optimizers.codes.entries import packed_bits
from tf_optimizers.workers.collectives.launcher import Group, levels


class Traffic(NamedTuple):
    """What a worker has to do with the network in a step."""

    messages: int  # That it sends.
    bytes: float  # In them.
    rounds: int  # In how many turns: those of one leave together.


class Exchange(NamedTuple):
    """What a worker does for an exchange.

    Args:
        traffic: Returns it, of parameters, density and workers.
        selects: Whether entries are selected.
    """

    traffic: Callable[[int, float, int], Traffic]
    selects: bool


def dense(size: int, at_once: bool = False) -> Exchange:
    """Return the sum of values of a size in bytes.

    By TensorFlow's ring, or at once: to the worker that sums a part, and back,
    as our strategy does.
    """

    def traffic(n: int, density: float, workers: int) -> Traffic:
        messages = rounds = 2 * (workers - 1)
        sent = messages / workers * n * size
        if at_once:
            messages, rounds = _through_one(workers)
        return Traffic(messages, sent, rounds)

    return Exchange(traffic, selects=False)


def all_gather(code: str, one_level: bool = False) -> Exchange:
    """Return the all-gather of entries, whose values travel in a code.

    What takes more that way travels densely, as in compression/exchanges.py.
    It goes in two levels where our strategy does so, unless in `one_level`.
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
    """Return the all-to-all of entries, and the all-gather of float32 sums.

    Every worker sums the entries of its shard of the tensor, and passes on the
    largest, as in compression/sharded_exchange.py.
    """

    def traffic(n: int, density: float, workers: int) -> Traffic:
        share, size = n * density / workers, n / workers
        sent = _bytes(size, share + 3 * share**0.5, code)
        sent += _bytes(size, share, "float32")
        messages, rounds = _through_one(workers)
        return Traffic(messages, (workers - 1) * sent, rounds)

    return Exchange(traffic, selects=True)


def _bytes(n: float, count: float, code: str) -> float:
    """Return the bytes of `count` of n entries."""
    return packed_bits(round(n), round(count), code) / 8


def _through_one(workers: int) -> tuple[int, int]:
    """Return what takes all to the worker that sums a part, and back."""
    there, back = _at_once([workers]), _gather(workers)
    return there[0] + back[0], there[1] + back[1]


def _gather(workers: int) -> tuple[int, int]:
    """Return the messages and the rounds of a gather of our strategy."""
    groups = levels(Group(0, workers), 0)
    return _at_once([group.size for group in groups])


def _at_once(groups: Sequence[int]) -> tuple[int, int]:
    """Return the messages of gathers in groups, and the rounds."""
    sent = [size - 1 for size in groups]
    return sum(sent), sum(map(bool, sent))
