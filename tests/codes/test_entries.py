"""The encoding of entries: its size in bits, and lossless transfer."""

import math

import numpy as np
import pytest
import tensorflow as tf
from cases import with_long

from tf_optimizers.codes.entries import (
    Entries,
    pack_entries,
    packed_bits,
    packed_words,
    unpack_entries,
    whole_bytes,
)
from tf_optimizers.codes.layout import CHUNK, Layout, chunk_count
from tf_optimizers.codes.positions import (
    position_bits,
    read_positions,
    write_positions,
)
from tf_optimizers.codes.values import CODES


def test_position_takes_as_few_bits_as_a_code_can():
    """12 bits at 0.1%, 8 for one in 64; for many, a bit per element."""
    size = 4_000_000
    for count, each in ((4000, 11.96), (62_500, 8), (250_000, 6)):
        bits = position_bits(size, count)
        assert bits == pytest.approx(each * count, rel=1e-3)
        density = count / size
        entropy = -math.log2(density) - (1 / density - 1) * math.log2(
            1 - density
        )
        assert entropy < bits / count < entropy + 0.61
    for count in (1_000_000, 2_000_000, size):
        assert position_bits(size, count) == size


def drawn(rng, size, count, missing):
    """Return random positions; the first `missing` are -1."""
    found = np.sort(rng.choice(size, count - missing, replace=False))
    return np.append(np.full(missing, -1), found)


PLACES = {
    "one": (1, 1, 0),
    "one that is none": (1, 1, 1),
    "all": (300, 300, 0),
    "none": (300, 0, 0),
    "many": (5000, 2500, 0),
    "many, of which most are none": (5000, 2500, 2400),
    "many, of which all are none": (64, 40, 40),
    "few": (200_000, 200, 0),
    "few, of which most are none": (200_000, 200, 190),
    "few more": (200_000, 190, 5),
    "of another density": (70_000, 3000, 1),
}


@pytest.mark.parametrize("rows", [1, 3])
def test_positions_arrive_at_any_density(rows):
    """Several tensors at once, with different positions in every row."""
    rng = np.random.default_rng(0)
    sizes, counts, _ = zip(*PLACES.values(), strict=True)
    expected = [
        np.stack([drawn(rng, *place) for _ in range(rows)])
        for place in PLACES.values()
    ]
    bits = tf.concat(write_positions(expected, sizes), 1)
    assert bits.shape == [rows, sum(map(position_bits, sizes, counts))]
    found = read_positions(bits, sizes, counts)
    for name, part, places in zip(PLACES, found, expected, strict=True):
        np.testing.assert_array_equal(part, places, err_msg=name)


def test_positions_beyond_32_bits_arrive():
    size = 2**33 + 5
    places = [[0, 255, 256, 2**31 - 1, 2**31, 2**32 + 1, size - 1]]
    bits = write_positions([np.array(places)], [size])
    (found,) = read_positions(tf.concat(bits, 1), [size], [7])
    np.testing.assert_array_equal(found, places)
    # Addresses over several tensors may need 64 bits, even if no position does.
    sizes, places = [2**31 - 2, 2**30], [[[5, 2**31 - 3]], [[0, 2**30 - 1]]]
    bits = write_positions([np.array(each) for each in places], sizes)
    found = read_positions(tf.concat(bits, 1), sizes, [2, 2])
    np.testing.assert_array_equal(found, places)


@pytest.mark.parametrize("share", [1, 4, 64, 2**32])
@pytest.mark.parametrize("code", with_long(CODES, list(CODES)[1:]))
def test_more_entries_than_32_bits_count_have_shapes(code, share):
    """Only trace: no machine has the memory."""
    size = 2**33
    count = size // share

    @tf.function
    def send(values, positions):
        (sent,) = CODES[code].round(
            [values[tf.newaxis]], Layout([positions[None]])
        )
        entries = [Entries(sent[0], positions, size, code)]
        words = pack_entries(entries)
        assert words.shape == [1, packed_words(entries)]
        return unpack_entries(words, entries)

    graph = send.get_concrete_function(
        tf.TensorSpec([count]), tf.TensorSpec([count], tf.int64)
    ).graph
    (found,) = graph.structured_outputs
    assert found.values.shape == found.positions.shape == [count]
    assert found.positions.dtype == tf.int64


def spread(rng, rows, count):
    """Return values over many orders of magnitude."""
    values = rng.standard_normal([rows, count])
    return (values * np.exp(3 * rng.standard_normal([rows, count]))).astype(
        "float32"
    )


def rounded(code, values, positions=None):
    values = [tf.constant(v, tf.float32) for v in values]
    if positions is None:
        positions = [np.ones(v.shape, "int32") for v in values]
    sent = CODES[code].round(values, Layout([*map(tf.constant, positions)]))
    return [tf.cast(s, tf.float32).numpy() for s in sent]


@pytest.mark.parametrize(
    ("rows", "graph"),
    with_long(
        [(3, True), (1, False), (1, True), (3, False)],
        [(1, False), (1, True), (3, False)],
    ),
)
@pytest.mark.parametrize("code", with_long(CODES, ["bfloat16", "int2"]))
def test_entries_arrive_as_they_were_rounded(code, rows, graph):
    """Try all densities, with some values that are not finite."""
    rng = np.random.default_rng(0)
    tensors = [place for place in PLACES.values() if place[1]]
    positions = [
        np.stack([drawn(rng, *place) for _ in range(rows)]) for place in tensors
    ]
    values = [spread(rng, rows, place[1]) for place in tensors]
    for value, at in zip(values, positions, strict=True):
        value[at < 0] = 0
    for place, value in ((70, np.nan), (900, np.inf), (901, -np.inf)):
        values[3][-1, place] = value

    def send():
        sent = CODES[code].round(
            list(map(tf.constant, values)),
            Layout([*map(tf.constant, positions)]),
        )
        entries = [
            Entries(tf.reshape(s, [-1]), tf.reshape(at, [-1]), place[0], code)
            for s, at, place in zip(sent, positions, tensors, strict=True)
        ]
        words = pack_entries(entries, rows)
        assert words.shape[1] == packed_words(entries, rows)
        return sent, words, unpack_entries(words, entries, rows)

    sent, words, found = (tf.function(send) if graph else send)()
    sizes, counts, _ = zip(*tensors, strict=True)
    bits = [
        packed_bits(*each, code) for each in zip(sizes, counts, strict=True)
    ]
    assert 4 * words.shape[1] == sum(whole_bytes(bits))
    for s, at, entry in zip(sent, positions, found, strict=True):
        np.testing.assert_array_equal(
            tf.cast(entry.values, tf.float32),
            tf.cast(tf.reshape(s, [-1]), tf.float32),
        )
        np.testing.assert_array_equal(
            entry.positions, np.maximum(at, 0).reshape(-1)
        )
    for value, kind in ((70, np.nan), (900, np.inf), (901, -np.inf)):
        found = tf.cast(sent[3], tf.float32).numpy()[-1, value]
        np.testing.assert_equal(found, np.float32(kind))


def test_four_bits_are_steps_of_a_seventh_of_a_chunks_largest():
    values = np.linspace(-1.4, 0, CHUNK)
    values = np.append(values, [0, 7.1, 70.0])[np.newaxis]
    (sent,) = rounded("int4", [values])
    scale = np.repeat([0.2001953125, 10.0], [CHUNK, 3])  # Scales are bfloat16.
    np.testing.assert_array_equal(sent, np.round(values / scale) * scale)
    assert sent.min() == -7 * scale[0] and sent.max() == 70


def test_two_bits_are_a_mean_of_either_side():
    values = np.array([[4.0, -12, 1, -1, 2, 0]])
    positions = np.array([[1, 2, 3, 4, 5, -1]])
    (sent,) = rounded("int2", [values], [positions])
    # The mean of five is 4; missing entries do not count, and stay 0.
    low = tf.cast(tf.constant(4 / 3, tf.bfloat16), tf.float32)
    np.testing.assert_array_equal(sent, [[8, -8, low, -low, low, 0]])


@pytest.mark.parametrize("code", ["int4", "int2"])
def test_rounding_again_changes_nothing(code):
    """Otherwise, v would lose values that are not sent."""
    rng = np.random.default_rng(0)
    values = [spread(rng, 2, count) for count in (1, 63, 64, 65, 20_000)]
    values += [values[-1] * np.float32(scale) for scale in (1e-36, 1e30)]
    values.append(np.ones([2, 100], "float32"))
    values.append(np.array([[3.4e38, 3.39e38, 1e-38, 1e-44]] * 2, "float32"))
    sent = rounded(code, values)
    for again, once in zip(rounded(code, sent), sent, strict=True):
        np.testing.assert_array_equal(again, once)
        assert np.isfinite(once).all()


@pytest.mark.parametrize("code", ["int4", "int2"])
def test_rounding_follows_the_scale_of_values(code):
    rng = np.random.default_rng(0)
    values = rng.standard_normal([1, 1000]).astype("float32")
    (sent,) = rounded(code, [values])
    worst = {"int4": 0.3, "int2": 2.6}[code]
    assert 0.1 < np.abs(sent - values).max() < worst
    for exponent in (-100, -30, 30, 100, 125):
        (scaled,) = rounded(code, [values * np.float32(2.0**exponent)])
        np.testing.assert_array_equal(scaled, sent * 2.0**exponent)


@pytest.mark.parametrize("code", ["int4", "int2"])
def test_a_chunk_holds_only_one_tensor(code):
    rng = np.random.default_rng(0)
    small, large = rng.standard_normal([2, 1, 40]).astype("float32")
    both = rounded(code, [small, 1e6 * large])
    np.testing.assert_array_equal(both[0], rounded(code, [small])[0])


@pytest.mark.parametrize("code", ["int4", "int2"])
@pytest.mark.parametrize("counts", [(0, 1, 64, 0, 65, 7), (200, 0, 63), (3, 2)])
def test_a_chunk_holds_only_one_of_the_joined_tensors(code, counts):
    """Rows have different counts, and begin with missing entries."""
    rng = np.random.default_rng(0)
    ends = np.cumsum([300] * len(counts)).tolist()
    rows = [[40, *counts], [40, *counts[::-1]]]
    positions, values, expected = [], [], []
    for none, *each in rows:
        at, own, arriving = [np.full(none, -1)], [np.zeros(none)], []
        for i, count in enumerate(each):
            inside = np.sort(rng.choice(300, count, replace=False))
            at.append(inside + 300 * i)
            own.append(rng.standard_normal(count) * 1e6 ** (-i % 3))
        # Missing entries belong to the first tensor, and shift its chunks.
        at[:2], own[:2] = [np.hstack(at[:2])], [np.hstack(own[:2])]
        for place, value in zip(at, own, strict=True):
            if len(place):
                (alone,) = rounded(code, [value[None]], [place[None]])
                arriving.append(alone[0])
        positions.append(np.hstack(at))
        values.append(np.hstack(own))
        expected.append(np.hstack(arriving))
    at = tf.constant(np.stack(positions))
    values = tf.constant(np.stack(values), tf.float32)
    (sent,) = CODES[code].round([values], Layout([at], [ends]))
    np.testing.assert_array_equal(sent, np.stack(expected))
    flat = [tf.reshape(sent, [-1]), tf.reshape(at, [-1])]
    entries = [Entries(*flat, ends[-1], code, tuple(ends))]
    words = pack_entries(entries, len(rows))
    assert words.shape[1] == packed_words(entries, len(rows))
    (found,) = unpack_entries(words, entries, len(rows))
    np.testing.assert_array_equal(found.values, flat[0])
    np.testing.assert_array_equal(found.positions, np.maximum(flat[1], 0))


@pytest.mark.parametrize("tensors", [1, 2, 5])
def test_there_are_as_many_chunks_as_any_counts_need(tensors):
    for count in [*range(200), 1000]:
        # All tensors but one have one entry at most, in its own chunk.
        singles = min(tensors - 1, max(count - 1, 0))
        most = singles + -(-(count - singles) // CHUNK)
        assert chunk_count(count, tensors) == most


def test_parts_share_bytes_and_the_last_fills_a_word():
    assert whole_bytes([]) == []
    assert whole_bytes([1, 8, 7, 3]) == [1, 1, 0, 2]
    assert whole_bytes([30, 33]) == [4, 4]
