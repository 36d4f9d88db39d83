"""Whether entries are gathered, or summed by shards."""

from collections.abc import Sequence

from tf_optimizers.compression.gathered import GatheredExchange
from tf_optimizers.compression.sharded import ShardedExchange
from tf_optimizers.compression.wire import Exchange, Wire

# So many times the bytes of shards must the gathered ones be, a message
# counting as many as 100 Mbit/s carry while it is on its way: 2.5 ms, as
# measured. It is one to one other replica, of N - 1 that leave in a round; what
# that costs in all, `ROUND_BYTES` of distribute/dense.py, is of four of these.
_WORTH = 2
_MESSAGE = 1 << 15


def choose_exchange(
    wire: Wire,
    sizes: Sequence[int],
    counts: Sequence[int],
    kind: str | None = None,
) -> Exchange:
    """Return what exchanges the entries of some variables.

    `GatheredExchange` sends the entries of each to all; what a replica
    receives grows with their number, N. `ShardedExchange` sends of K entries
    in all some K / N to every other replica, and then as many sums, whatever N
    is. As these are two messages instead of one, and sums are selected again,
    it is for those who thereby save half of the bytes, of which a message,
    whatever is in it, counts M = 32,768:

        (all entries) + M > 2 (entries for one + its sums + 2 M)

    Args:
        wire: How entries travel.
        sizes: Of the variables, in elements.
        counts: How many entries of each are selected.
        kind: "gathered", "sharded", or None for what takes less. Only our
            strategy has shards.
    """
    gathered = GatheredExchange(wire, sizes, counts)
    if kind == "gathered" or not wire.is_packed or not sizes:
        return gathered
    sharded = ShardedExchange(wire, sizes, counts)
    by_shards = _WORTH * (sharded.bytes_for_one + 2 * _MESSAGE)
    if kind == "sharded" or gathered.bytes_for_one + _MESSAGE > by_shards:
        return sharded
    return gathered
