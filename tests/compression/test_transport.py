"""DGCMomentum, SparseLoCo in real workers, under each kind of strategy.

Transport never changes the mathematics, and no gradient is lost.
"""

import dgc
import numpy as np
import pytest
import real_workers
from cases import error
from scripts import transport

pytestmark = pytest.mark.slow


# Of each of two workers: the devices, which dtypes and settings are tried, and
# the strategies in turn, of which TensorFlow's must be the first of a process.
GROUPS = [
    pytest.param((1, "some", "sparse"), id="1 device"),
    pytest.param(
        (1, "all", "stock", "sparse"), id="both", marks=pytest.mark.long
    ),
    pytest.param((2, "all", "sparse"), id="2 devices", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=GROUPS)
def group(request, tmp_path_factory):
    """The same run of DGCMomentum under each kind of strategy, by name.

    And how many devices each worker has, and which settings are tried.
    """
    devices, which, *kinds = request.param
    folder = tmp_path_factory.mktemp("transport")
    results = real_workers.results(
        "transport", folder, 2, which, *kinds, devices=devices
    )
    by_kind = {kind: [result[kind] for result in results] for kind in kinds}
    return by_kind, devices, which


@pytest.fixture(scope="module")
def transports(group):
    return group[0]


@pytest.fixture(scope="module")
def devices(group):
    return group[1]


@pytest.fixture(scope="module")
def which(group):
    return group[2]


@pytest.fixture(scope="module")
def expected(mirrored, devices, which):
    """The same without any transport.

    The devices of a host are one replica with the sum of their gradients.
    """
    return transport.train_all(mirrored, 2 * devices, which)


def test_transport_never_changes_the_mathematics(transports, which, expected):
    ways = ["weights", "loco", "rounds"] + ["eager"] * (which == "all")
    for kind, results in transports.items():
        for result in results:
            for way in ways:
                found = error(result[way], expected[way])
                assert found < 1e-6, (kind, way)


def test_several_dtypes_are_summed_on_a_worker_at_once(transports):
    for result in transports["sparse"]:
        found, expected = result["mixed"]
        assert found == expected
        assert np.ptp(expected[2]) > 0.1


def test_no_transport_rounds(transports, devices, expected):
    """The optimizer does; what TensorFlow cannot gather travels as float32."""
    half = expected["half"]
    first, second, *_ = half.values()
    assert error(first, second) > 1e-4
    for dtype, of_one in half.items():
        if devices > 1 and dtype.startswith("int"):
            continue  # Chunks are of what one device sends.
        for kind, results in transports.items():
            for result in results:
                assert error(result["half"][dtype], of_one) < 1e-6, (
                    kind,
                    dtype,
                )


def test_much_is_sent_densely(transports, devices, expected):
    for kind, results in transports.items():
        for result in results:
            if kind == "stock":
                collectives = result["collectives of most"]
                assert set(collectives) == {"CollectiveReduceV2"}
            else:
                # 4 bytes of every element, of one replica or of two.
                size = sum(map(np.prod, transport.SHAPES.values()))
                sent = result["bytes of most"]["sent"]["CollectiveGatherV2"]
                assert sent == devices * 4 * size
            assert error(result["most"], expected["most"]) < 1e-6, kind


def test_workers_agree_to_the_bit(transports):
    for kind, (first, *others) in transports.items():
        for way in ("weights", "loco", "rounds", "half"):
            assert [other[way] for other in others] == [first[way]], kind


def test_state_of_the_host_steps_as_any_other(
    transports, devices, which, expected
):
    if (devices, which) != (1, "all"):
        pytest.skip("all settings of one device each tell")
    for result in transports["sparse"]:
        assert error(result["hosted"], result["unhosted"]) < 1e-5
        assert error(result["hosted"], expected["loco"]) > 1e-2


@pytest.fixture(scope="module")
def balances(mirrored, which):
    """Those of one process, without any transport."""
    return transport.balances(mirrored, which)


def test_nothing_is_lost_by_any_transport(transports, balances):
    """Sum of everything sent + sum of v = sum of everything accumulated."""
    without = [{"balance": balances}]
    for settings in balances:
        for kind, results in [*transports.items(), ("none", without)]:
            found = [result["balance"][settings] for result in results]
            of = f"{settings}, {kind}"
            dgc.assert_nothing_is_lost(found, atol=2e-4, err_msg=of)


def test_not_finite_is_seen_by_all_in_its_step_and_not_kept(transports):
    for kind, results in transports.items():
        for result in results:
            for dtype, found in result["not finite"].items():
                of = kind, dtype
                weights = np.array(found["weights"])
                assert np.isnan(weights[17]) and weights[1234] == -np.inf, of
                assert np.isfinite(weights).sum() == 3998, of
                assert found["alike"] and found["finite"], of


def test_replicas_of_a_host_hold_the_same(transports):
    """To the bit, or they would not select the same."""
    for kind, results in transports.items():
        for result in results:
            for balance in result["balance"].values():
                assert balance["alike"], kind
    first, second = (r["balance"]["plain"] for r in transports["sparse"])
    assert error(first["unsent"], second["unsent"]) > 0.1


def test_devices_of_a_host_send_together_what_one_would(transports, devices):
    """Each half of the entries, rounded up, and a count of its own."""
    # A small variable of 5 elements goes with them.
    expected = {
        "float32": {1: 1160 + 20, 2: 2 * (600 + 20)},
        "int4": {1: 312 + 20, 2: 2 * (176 + 20)},
        "int2": {1: 260 + 20, 2: 2 * (152 + 20)},
    }
    for result in transports["sparse"]:
        found = result["bytes of few bits"] | {"float32": result["bytes"]}
        for dtype, each in found.items():
            sent = each["sent"]["CollectiveGatherV2"]
            assert each["said"] == sent == expected[dtype][devices]


def test_a_step_is_one_all_gather(transports, devices):
    """Two compressed variables, and a small one; TensorFlow's needs more.

    And, if a host has several devices, one sum there, of as little.
    """
    for result in transports["sparse"]:
        gathers = 1 if devices == 1 else 2 * devices
        assert result["collectives"] == {"CollectiveGatherV2": gathers}
    for result in transports.get("stock", []):
        assert result["collectives"]["CollectiveGatherV2"] >= 6


def test_local_steps_exchange_nothing(transports):
    """All that workers tell each other is in branches of the graph."""
    for result in transports["sparse"]:
        found = result["bytes outside of rounds"]
        assert found["sent"] == {}
        assert found["collectives"]["CollectiveGatherV2"] > 0


def test_statistics_are_averaged_over_all_replicas(transports, devices):
    for result in transports["sparse"]:
        mean = (2 * devices - 1) / 2
        assert result["statistics"] == devices * [3 * [mean]]


def test_logs_of_a_step_are_reduced_together(transports, devices):
    """The means in one collective of each replica, the sum in another."""
    values = {1: [0.5, 5.0, 7.0, 10.0], 2: [1.5, 15.0, 7.0, 60.0]}[devices]
    for result in transports["sparse"]:
        assert result["logs"] == {
            "values": values,
            "collectives": {"CollectiveGatherV2": 2 * devices},
        }


def test_steps_leave_no_threads_behind(transports):
    """A collective with a timeout leaves one, until the timeout is over."""
    for result in transports["sparse"]:
        assert result["new_threads"] < transport.STEPS


@pytest.mark.long
def test_golden_of_four_replicas(tmp_path):
    """In one process, where each has a memory of its own.

    From the step on with which compression begins: before, ours clips large
    tensors and Paddle's does not, so that the two part, by intent.
    """
    (errors,) = real_workers.results(
        "transport", tmp_path, 1, "golden", devices=4
    )
    assert max(errors) < 3e-5
