"""DGCMomentum, SparseLoCo in real workers, under each kind of strategy.

Transport never changes the mathematics, and no gradient is lost.
"""

import dgc
import numpy as np
import pytest
import real_workers
from cases import error
from programs import transport

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def transports(tmp_path_factory):
    """The same run of DGCMomentum under each kind of strategy, by name.

    TensorFlow's must be the first of a process.
    """

    def run(*kinds, devices=1):
        folder = tmp_path_factory.mktemp("transport")
        return real_workers.results(
            "transport", folder, 2, *kinds, devices=devices
        )

    one, two = run("stock", "sparse"), run("sparse", devices=2)
    return {
        "sparse": [result["sparse"] for result in one],
        "stock": [result["stock"] for result in one],
        "sparse of 2": [result["sparse"] for result in two],
    }


@pytest.fixture(scope="module")
def expected(mirrored):
    """The same without any transport, by kind.

    The devices of a host are one replica with the sum of their gradients.
    """
    one = transport.train_all(mirrored)
    two = transport.train_all(mirrored, drawn=4)
    # Other gradients give other weights.
    assert error(two["weights"], one["weights"]) > 0.1
    return {"sparse": one, "stock": one, "sparse of 2": two}


def test_transport_never_changes_the_mathematics(transports, expected):
    for kind, results in transports.items():
        for result in results:
            for way in ("weights", "eager", "loco"):
                found = error(result[way], expected[kind][way])
                assert found < 1e-6, (kind, way)


def test_several_dtypes_are_summed_on_a_worker_at_once(transports, expected):
    for kind, results in transports.items():
        for result in results:
            assert result["mixed"] == expected[kind]["mixed"], kind
        assert np.ptp(expected[kind]["mixed"][2]) > 0.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_transport_rounds(transports, expected, dtype):
    """The optimizer does; what TensorFlow cannot gather travels as float32."""
    for kind, results in transports.items():
        half = expected[kind]["half"]
        for result in results:
            assert error(result["half"][dtype], half[dtype]) < 1e-6, kind
        assert error(half["float16"], half["bfloat16"]) > 1e-4


def test_much_is_sent_densely(transports, expected):
    for kind, results in transports.items():
        for result in results:
            if kind == "stock":
                collectives = result["collectives of most"]
                assert set(collectives) == {"CollectiveReduceV2"}
            else:
                # 4 bytes of every element, of one replica or of two.
                size = sum(map(np.prod, transport.SHAPES.values()))
                sent = result["bytes of most"]["sent"]["CollectiveGatherV2"]
                devices = 1 + kind.endswith("2")
                assert sent == devices * 4 * size
            assert error(result["most"], expected[kind]["most"]) < 1e-6, kind


def test_workers_agree_to_the_bit(transports):
    for kind, (first, *others) in transports.items():
        for way in ("weights", "loco"):
            assert [other[way] for other in others] == [first[way]], kind


def test_state_of_the_host_steps_as_any_other(transports, expected):
    for result in transports["sparse"]:
        assert error(result["hosted"], result["unhosted"]) < 1e-5
        assert error(result["hosted"], expected["sparse"]["loco"]) > 1e-2


@pytest.mark.parametrize("settings", ["plain", "loco", "rounded, not masked"])
def test_nothing_is_lost_by_any_transport(transports, mirrored, settings):
    """Sum of everything sent + sum of v = sum of everything accumulated."""
    without = [{"balance": transport.balances(mirrored)}]
    for kind, results in [*transports.items(), ("none", without)]:
        balances = [result["balance"][settings] for result in results]
        dgc.assert_nothing_is_lost(balances, atol=2e-4, err_msg=kind)


def test_replicas_of_a_host_hold_the_same(transports):
    """To the bit, or they would not select the same."""
    for kind, results in transports.items():
        for result in results:
            for balance in result["balance"].values():
                assert balance["alike"], kind
    first, second = (r["balance"]["plain"] for r in transports["sparse of 2"])
    assert error(first["unsent"], second["unsent"]) > 0.1


def test_devices_of_a_host_send_together_what_one_would(transports):
    """Each half of the entries, rounded up, and a count of its own."""
    sent = {}
    for kind in ("sparse", "sparse of 2"):
        for result in transports[kind]:
            said = result["bytes"]["said"]
            sent[kind] = result["bytes"]["sent"]["CollectiveGatherV2"]
            # A word may be half empty, on each of two devices.
            assert said <= sent[kind] <= said + 4, kind
    # A small variable of 5 elements goes with them.
    assert sent["sparse"] == 1480 + 20
    assert sent["sparse of 2"] == 2 * (748 + 20)


def test_a_step_is_one_all_gather(transports):
    """Two compressed variables, and a small one; TensorFlow's needs more.

    And, if a host has several devices, one sum there, of as little.
    """
    for kind, gathers in (("sparse", 1), ("sparse of 2", 2 * 2)):
        for result in transports[kind]:
            assert result["collectives"] == {"CollectiveGatherV2": gathers}
    assert transports["stock"][0]["collectives"]["CollectiveGatherV2"] >= 6


@pytest.mark.parametrize(
    ("kind", "means", "total", "devices"),
    [
        ("sparse", [0.5, 5.0, 7.0], 10.0, 1),
        ("sparse of 2", [1.5, 15.0, 7.0], 60.0, 2),
    ],
    ids=["2 replicas", "4 replicas"],
)
def test_logs_of_a_step_are_reduced_together(
    transports, kind, means, total, devices
):
    """The means in one collective of each replica, the sum in another."""
    for result in transports[kind]:
        assert result["logs"] == {
            "values": [*means, total],
            "collectives": {"CollectiveGatherV2": 2 * devices},
        }


def test_steps_leave_no_threads_behind(transports):
    """A collective with a timeout leaves one, until the timeout is over."""
    for result in transports["sparse"]:
        assert result["new_threads"] < transport.STEPS / 4


def test_golden_of_four_replicas(tmp_path):
    """In one process, where each has a memory of its own.

    From the step on with which compression begins: before, ours clips large
    tensors and Paddle's does not, so that the two part, by intent.
    """
    (errors,) = real_workers.results(
        "transport", tmp_path, 1, "golden", devices=4
    )
    assert max(errors) < 3e-5
