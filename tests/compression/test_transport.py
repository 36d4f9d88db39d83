"""DGCMomentum and SparseLoCo in real workers, under each kind of strategy.

The transport never changes the mathematics, and no gradient is lost.
"""

import dgc
import numpy as np
import pytest
import real_workers
from cases import error
from scripts import transport

pytestmark = pytest.mark.slow


# For two workers: the devices of each, the set of dtypes and settings, and the
# strategies in order. In a process, TensorFlow's must be the first.
GROUPS = [
    pytest.param((1, "some", "sparse"), id="1 device"),
    pytest.param(
        (1, "all", "stock", "sparse"), id="both", marks=pytest.mark.long
    ),
    pytest.param((2, "all", "sparse"), id="2 devices", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=GROUPS)
def group(request):
    return request.param


@pytest.fixture(scope="module")
def devices(group):
    return group[0]


@pytest.fixture(scope="module")
def which(group):
    return group[1]


@pytest.fixture(scope="module")
def transports(group, tmp_path_factory):
    """Return the same run of DGCMomentum under each kind of strategy, by name.

    A run has a report of each worker.
    """
    devices, which, *kinds = group
    folder = tmp_path_factory.mktemp("transport")
    results = real_workers.results(
        "transport", folder, 2, which, *kinds, devices=devices
    )
    return {kind: [result[kind] for result in results] for kind in kinds}


@pytest.fixture(scope="module")
def expected(mirrored, devices, which):
    """Return the same runs without transport.

    The devices of a host act as one replica with the sum of their gradients.
    """
    return transport.train_all(mirrored, 2 * devices, which)


def test_transport_never_changes_the_mathematics(transports, which, expected):
    ways = ["weights", "rounds"]
    ways += ["eager", "loco"] if which == "all" else []
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
    """Only the optimizer rounds; TensorFlow gathers other dtypes as float32."""
    half = expected["half"]
    first, second, *_ = half.values()
    assert error(first, second) > 1e-4
    for dtype, of_one in half.items():
        if devices > 1 and dtype.startswith("int"):
            continue  # A chunk holds entries of one device.
        for kind, results in transports.items():
            for result in results:
                assert error(result["half"][dtype], of_one) < 1e-6, (
                    kind,
                    dtype,
                )


def test_many_entries_are_sent_densely(transports, devices, expected):
    for kind, results in transports.items():
        for result in results:
            if kind == "stock":
                collectives = result["collectives of most"]
                assert set(collectives) == {"CollectiveReduceV2"}
            else:
                # 4 bytes per element, for one replica or for two.
                size = sum(map(np.prod, transport.SHAPES.values()))
                sent = result["bytes of most"]["sent"]["CollectiveGatherV2"]
                assert sent == devices * 4 * size
            assert error(result["most"], expected["most"]) < 1e-6, kind


def test_workers_agree_to_the_bit(transports):
    for kind, (first, *others) in transports.items():
        for way in {"weights", "loco", "rounds", "half"} & set(first):
            assert [other[way] for other in others] == [first[way]], kind


def test_state_of_the_host_steps_as_any_other(
    transports, devices, which, expected
):
    if (devices, which) != (1, "all"):
        pytest.skip("all settings of one device each tell")
    for result in transports["sparse"]:
        assert error(result["hosted"], result["unhosted"]) < 1e-5
        assert error(result["hosted"], expected["loco"]) > 1e-2


def test_nothing_is_lost_by_any_transport(transports):
    """Sum of everything sent + sum of v = sum of everything accumulated."""
    for kind, results in transports.items():
        for settings in results[0]["balance"]:
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
                assert found["equal"] and found["finite"], of


def test_replicas_of_a_host_hold_the_same(transports):
    """They are bitwise equal, or replicas would select different entries."""
    for kind, results in transports.items():
        for result in results:
            for balance in result["balance"].values():
                assert balance["equal"], kind
    first, second = (r["balance"]["plain"] for r in transports["sparse"])
    assert error(first["unsent"], second["unsent"]) > 0.1


def test_devices_of_a_host_send_the_bytes_of_one(transports, devices):
    """Each device sends half of the entries, rounded up, in its own code."""
    # A small variable of 5 elements is sent with them.
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
    """There are two compressed variables, and a small one.

    With several devices per host, there is one more sum on the host.
    """
    for result in transports["sparse"]:
        gathers = 1 if devices == 1 else 2 * devices
        assert result["collectives"] == {"CollectiveGatherV2": gathers}
    for result in transports.get("stock", []):
        assert result["collectives"]["CollectiveGatherV2"] >= 6


def test_local_steps_exchange_nothing(transports):
    """All exchanges are in branches of the graph."""
    for result in transports["sparse"]:
        found = result["bytes outside of rounds"]
        assert found["sent"] == {}
        assert found["collectives"]["CollectiveGatherV2"] > 0


def test_statistics_are_averaged_over_all_replicas(transports, devices):
    for result in transports["sparse"]:
        mean = (2 * devices - 1) / 2
        assert result["statistics"] == devices * [3 * [mean]]


def test_logs_of_a_step_are_reduced_together(transports, devices):
    """All means take one collective per replica; the sum, another one."""
    values = {1: [0.5, 5.0, 7.0, 10.0], 2: [1.5, 15.0, 7.0, 60.0]}[devices]
    for result in transports["sparse"]:
        assert result["logs"] == {
            "values": values,
            "collectives": {"CollectiveGatherV2": 2 * devices},
        }


def test_steps_leave_no_threads_behind(transports):
    """A collective with a timeout leaves a thread until the timeout is over."""
    for result in transports["sparse"]:
        assert result["new_threads"] < transport.STEPS


@pytest.mark.long
def test_golden_of_four_replicas(tmp_path):
    """One process runs four replicas, each with its own u and v.

    The comparison starts with compression: before, ours clips large tensors and
    Paddle's does not, which is an intended difference.
    """
    (errors,) = real_workers.results(
        "transport", tmp_path, 1, "golden", devices=4
    )
    assert max(errors) < 3e-5
