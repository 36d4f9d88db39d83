"""What a worker sends and waits for: rings, as TensorFlow's exchanges are."""

from collections.abc import Callable
from typing import NamedTuple


class Exchange(NamedTuple):
    """What a worker does for an exchange.

    Args:
        traffic: Takes the parameters, the density and the workers; returns the
            rounds and the bytes that a worker sends.
        selects: Whether entries are selected.
    """

    traffic: Callable
    selects: bool


def dense(size: int) -> Exchange:
    """Return the ring all-reduce of values of a size in bytes."""
    return Exchange(
        lambda n, density, workers: (
            2 * (workers - 1),
            2 * (workers - 1) / workers * n * size,
        ),
        selects=False,
    )


def all_gather(pair: float) -> Exchange:
    """Return the ring all-gather of pairs of a size in bytes.

    What takes more that way travels densely, as in compression/gathered.py.
    """

    def traffic(n: int, density: float, workers: int) -> tuple[int, float]:
        pairs = n * density * pair
        if workers * pairs > 2 * n * 4:
            return dense(4).traffic(n, density, workers)
        return workers - 1, (workers - 1) * pairs

    return Exchange(traffic, selects=True)


def reduce_scatter(pair: float) -> Exchange:
    """Return the all-to-all of pairs, and the all-gather of float32 sums.

    Every worker sums the pairs of its shard of the tensor, and passes on the
    largest, as in compression/sharded.py.
    """

    def traffic(n: int, density: float, workers: int) -> tuple[int, float]:
        share = n * density / workers
        sent = (share + 3 * share**0.5) * pair + share * 6
        return 2 * (workers - 1), (workers - 1) * sent

    return Exchange(traffic, selects=True)
