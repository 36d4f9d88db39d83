"""Sums by shards: their entries, the sums sent on, and conservation."""

import itertools

import dgc
import numpy as np
import pytest
import real_workers
import reference
import tensorflow as tf
from scripts import scatter, transport

from tf_optimizers.codes.entries import Entries, pack_entries, unpack_entries
from tf_optimizers.compression.exchanges import choose_exchange
from tf_optimizers.compression.sharded_exchange import ShardedExchange
from tf_optimizers.compression.shards import Shards, fill, slots_of
from tf_optimizers.compression.sparsity_schedule import sent_count
from tf_optimizers.compression.wire import Wire

SIZES = (3000, 504, 70_000)


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_every_entry_has_one_shard_and_its_own_address(count):
    shards = Shards(SIZES, (1, 1, 1), count)
    positions = [np.arange(size) for size in SIZES]
    addresses = shards.addresses(positions).numpy()
    assert len(set(addresses)) == sum(SIZES)
    # Addresses increase within a shard, and shards are equally large.
    for shard in range(count):
        own = addresses[addresses // shards.span == shard]
        assert (np.diff(own) > 0).all()
        assert len(own) <= sum(-(-size // count) for size in SIZES)


def test_positions_are_found_again():
    rng = np.random.default_rng(0)
    shards = Shards(SIZES, (4, 2, 9), 8)
    positions = [rng.integers(0, s, 200) for s in SIZES]
    parts = np.split(shards.addresses(positions).numpy(), [200, 400])
    rows, expected = [], [[], [], []]
    for shard in range(8):
        for t, part in enumerate(parts):
            own = np.flatnonzero(part // shards.span == shard)[: shards.sums[t]]
            rows.append(part[own])
            expected[t].append(positions[t][own])
    addresses = tf.reshape(tf.constant(np.concatenate(rows)), [8, -1])
    for found, part in zip(shards.positions(addresses), expected, strict=True):
        np.testing.assert_array_equal(found, np.concatenate(part))


@pytest.mark.parametrize("width", [8, 64, 1000, 1414])
def test_a_column_is_spread_over_all_shards(width):
    shards = Shards((width * 1000,), (1,), 8)
    column = np.arange(3, width * 1000, width)
    counts = np.bincount(shards.addresses([column]).numpy() // shards.span)
    assert len(counts) == 8
    # The capacity of a shard; see `ShardedExchange.capacity`.
    assert counts.max() < 125 + 3 * 125**0.5


def test_the_largest_of_each_bin_fit():
    nan, inf = np.nan, np.inf
    values = [1, -3, 2, 3, 0, 5, nan, -inf, 7, 0.5]
    bins = [0, 0, 0, 0, 1, 1, 3, 3, 3, 3]
    slots = slots_of(
        tf.constant(values, tf.float32), tf.constant(bins), (2, 3, 1, 2)
    )
    nowhere = 8
    expected = [8, 0, 8, 1, 8, 4, 6, 7, 8, 8]
    np.testing.assert_array_equal(slots, expected)
    filled = fill(slots, tf.range(10), nowhere)
    np.testing.assert_array_equal(filled, [1, 3, 0, 0, 5, 0, 6, 7])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shards_send_their_largest_sums_on(dtype):
    """This test does the all-to-all itself."""
    rng = np.random.default_rng(0)
    capacity, counts = 90, (12, 4, 160)
    wire = Wire(4, dtype, is_packed=True)
    shards = ShardedExchange(wire, SIZES, counts).shards
    assert shards.sums == (3, 1, 40)
    first = shards.first_groups
    per_replica = []
    for _ in range(4):
        values = rng.integers(-9, 9, [4, capacity])
        groups = np.sort(rng.integers(0, first[-1] // 5, [4, capacity]) * 5, 1)
        # One sum per address; missing ones come first.
        groups[np.diff(groups, prepend=-1) == 0] = -1
        groups.sort(axis=1)
        values *= groups >= 0
        per_replica.append((values, groups))
    entries = [
        Entries(
            tf.reshape(tf.cast(values, dtype), [-1]),
            tf.constant(groups.reshape(-1)),
            shards.span,
            dtype,
        )
        for values, groups in per_replica
    ]
    rows = tf.stack([pack_entries([each], 4) for each in entries], 1)
    for shard in range(4):
        sums = np.zeros(first[-1])
        for values, groups in per_replica:
            np.add.at(sums, groups[shard], values[shard])
        (received,) = unpack_entries(rows[shard], [entries[shard]], 4)
        found = shards.largest_sums(received)
        for t, (values, groups, *_) in enumerate(found):
            own = sums[first[t] : first[t + 1]]
            largest = np.sort(np.abs(own))[::-1][: shards.sums[t]]
            np.testing.assert_array_equal(
                np.sort(np.abs(values))[::-1], largest
            )
            is_any = groups.numpy() >= 0
            np.testing.assert_array_equal(is_any, values.numpy() != 0)
            np.testing.assert_array_equal(own[groups[is_any]], values[is_any])
            assert (np.diff(groups[is_any]) > 0).all()


@pytest.mark.parametrize(
    ("millions", "dtype", "most"),
    [
        (4, "float32", 1024),
        (20, "float32", 40),
        (100, "float32", 4),
        (100, "float16", 7),
        (100, "int4", 14),
        (10_000, "float32", 4),
        (10_000, "bfloat16", 5),
    ],
)
def test_few_replicas_gather_and_many_have_shards(millions, dtype, most):
    """The number of replicas depends on the bytes to send."""
    sizes, counts = 2 * [millions * 500_000], 2 * [millions * 500]

    def has_shards(replicas, is_packed=True):
        wire = Wire(replicas, dtype, is_packed)
        exchange = choose_exchange(wire, sizes, counts)
        return isinstance(exchange, ShardedExchange)

    assert not any(has_shards(n) for n in range(2, most + 1))
    assert all(has_shards(n) for n in range(most + 1, 300) if most < 300)
    assert not has_shards(100, is_packed=False)


def test_bytes_do_not_grow_with_replicas():
    def passed_on(replicas):
        wire = Wire(replicas, "float32", is_packed=True)
        exchange = ShardedExchange(wire, [10**8], [10**5])
        return (replicas - 1) * exchange.peer_bytes

    gathered = 7 * Wire(8, "float32", True).entry_bits(10**8, 10**5) / 8
    assert passed_on(8) < gathered / 3.5
    assert passed_on(64) < 1.2 * passed_on(8)


BALANCES = {"few steps", "many steps", "loco", "two bits"}
SOME = {
    "scales",
    "scales of gathered",
    "few steps",
    "bytes",
    "drain",
    "not finite",
}
OTHERS = {"loco", "many steps", "two bits", "bytes of few bits"}
OTHERS |= {"not finite in two bits"}
GROUPS = [
    # An odd number, which divides no size.
    pytest.param((1, 3, "some"), id="3 devices"),
    pytest.param((1, 3, "all"), id="all of 3 devices", marks=pytest.mark.long),
    pytest.param((2, 2, "all"), id="2 workers of 2", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=GROUPS)
def group(request, tmp_path_factory):
    """Return the workers' reports, and the numbers of workers and devices."""
    count, devices, which = request.param
    folder = tmp_path_factory.mktemp("scatter")
    results = real_workers.results(
        "scatter", folder, count, which, devices=devices
    )
    expected = SOME | OTHERS if which == "all" else SOME
    assert all(result.keys() == expected for result in results)
    return results, count, devices


@pytest.mark.slow
def test_training_matches_reference(group):
    results, count, devices = group
    replicas = count * devices
    residuals = count if count > 1 else devices
    share = replicas // residuals
    shapes = list(transport.SHAPES.values())[:2]
    wire = Wire(replicas, "float32", True, share)
    sizes = [int(np.prod(shape)) for shape in shapes]
    counts = [sent_count(size, 0.93) for size in sizes]
    oracle = reference.ShardedDGC(
        [np.zeros(s) for s in shapes],
        residuals,
        replicas,
        ShardedExchange(wire, sizes, counts).capacity,
        1.0,
        0.93,
    )
    for step in range(scatter.STEPS):
        drawn = dgc.make_gradients(step, transport.SHAPES.values(), replicas)
        sums = [
            [sum(parts) for parts in zip(*drawn[i : i + share], strict=True)][
                :2
            ]
            for i in range(0, replicas, share)
        ]
        oracle.step(sums)
    for result in results:
        for found, expected in zip(
            result["few steps"]["sent"], oracle.ws, strict=True
        ):
            assert np.abs(expected).max() > 1
            np.testing.assert_allclose(found, -expected, atol=1e-5)
    for t in range(2):
        unsent = sum(np.array(r["few steps"]["unsent"][t]) for r in results)
        expected = sum(v[t] for v in oracle.vs)
        np.testing.assert_allclose(unsent, expected, atol=1e-5)


@pytest.mark.slow
def test_replicas_agree_to_the_bit(group):
    """Weights agree on all replicas; residuals, on those of a worker."""
    results, count, _ = group
    for result in results:
        assert result["not finite"]["equal"]
        for name in BALANCES & set(result):
            assert result[name]["sent"] == results[0][name]["sent"]
            assert result[name]["equal"] is (count > 1)


@pytest.mark.slow
def test_nothing_is_lost(group):
    """Sum of everything sent + sum of v = sum of everything accumulated.

    This needs many steps with float16 values and without masking, and more with
    two bits.
    """
    results, *_ = group
    for name in BALANCES & set(results[0]):
        balances = [result[name] for result in results]
        dgc.assert_nothing_is_lost(balances, atol=4e-4)


@pytest.mark.slow
def test_nothing_is_lost_next_to_variables_of_other_scales(group):
    """Sum by shards, and by a gather with codes of a few bits."""
    results, *_ = group
    for name in ("scales", "scales of gathered"):
        for dtype in results[0][name]:
            processes = [result[name][dtype] for result in results]
            dgc.assert_all_scales_are_conserved(processes, dtype)


@pytest.mark.slow
def test_entries_beyond_a_shards_capacity_follow_largest_first(group):
    results, *_ = group
    found = results[0]["drain"]
    total, weights = np.array(found["total"]), np.array(found["weights"])
    order = np.argsort(-np.abs(total), kind="stable")
    for step, after in enumerate(weights):
        expected = total.copy()
        expected[order[(step + 1) * found["kept"] :]] = 0
        np.testing.assert_allclose(after, expected, rtol=1e-6)
    assert found["left"] == 0


@pytest.mark.slow
def test_not_finite_is_seen_by_all_and_not_kept(group):
    results, *_ = group
    names = {"not finite", "not finite in two bits"}
    for result, name in itertools.product(results, names & set(results[0])):
        found = result[name]
        weights = np.array(found["weights"])
        assert np.isnan(weights[17]) and weights[1234] == -np.inf
        assert np.isfinite(weights).sum() == 3998
        assert found["equal"] and found["finite"]


@pytest.mark.slow
def test_a_step_is_two_collectives_of_the_reported_bytes(group):
    """Small variables travel in the gather. A worker's own sum is one more."""
    results, count, devices = group
    for result in results:
        for name in {"bytes", "bytes of few bits"} & set(result):
            found = result[name]
            assert found["collectives"] == {
                "CollectiveAllToAllV2": devices,
                "CollectiveGatherV2": devices * (1 + (min(count, devices) > 1)),
            }
            assert found["said"] == sum(found["sent"].values())
