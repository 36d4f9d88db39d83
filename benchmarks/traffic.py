"""What a worker sends, and waits for."""

from collections.abc import Callable
from typing import NamedTuple


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
        messages = 2 * (workers - 1)
        rounds = min(messages, 2) if at_once else messages
        return Traffic(messages, messages / workers * n * size, rounds)

    return Exchange(traffic, selects=False)


def all_gather(pair: float, levels: int = 1) -> Exchange:
    """Return the all-gather of pairs of a size in bytes, at once.

    What takes more that way travels densely, as in compression/gathered.py.
    In two levels, it goes to a group, and then to one worker of each other.
    """

    def traffic(n: int, density: float, workers: int) -> Traffic:
        pairs = n * density * pair
        if workers * pairs > 2 * n * 4:
            return dense(4, at_once=True).traffic(n, density, workers)
        messages, rounds = _at_once(workers, levels)
        return Traffic(messages, (workers - 1) * pairs, rounds)

    return Exchange(traffic, selects=True)


def reduce_scatter(pair: float, levels: int = 1) -> Exchange:
    """Return the all-to-all of pairs, and the all-gather of float32 sums.

    Every worker sums the pairs of its shard of the tensor, and passes on the
    largest, as in compression/sharded.py. In two levels, pairs are passed on
    once on their way.
    """

    def traffic(n: int, density: float, workers: int) -> Traffic:
        share = n * density / workers
        sent = levels * (share + 3 * share**0.5) * pair + share * 6
        messages, rounds = _at_once(workers, levels)
        return Traffic(2 * messages, (workers - 1) * sent, 2 * rounds)

    return Exchange(traffic, selects=True)


def _at_once(workers: int, levels: int) -> tuple[int, int]:
    """Return a worker's messages until it has reached all, and the rounds."""
    group = round(workers**0.5) if levels == 2 else 1
    sent = [size - 1 for size in (group, -(-workers // group))]
    return sum(sent), sum(map(bool, sent))
