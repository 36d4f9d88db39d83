"""Backups are restored, or rejected without any change."""

import errno
import itertools
import os
import stat

import cases
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal
from backups import (
    NONE,
    make_archive,
    restore,
    scramble,
    state,
)
from local import copies

from tf_optimizers.callbacks.backup.archive import Archive
from tf_optimizers.callbacks.backup.files import Folder, digest
from tf_optimizers.callbacks.backup.state import State
from tf_optimizers.replicas import ReplicaGroup, replicas_of


@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
@pytest.mark.parametrize("old", ["one", "two"])
@pytest.mark.parametrize("new", ["one", "two"])
def test_sums_of_replicas_are_conserved(tmp_path, strategies, old, new):
    source, model = make_archive(tmp_path, strategies[old])
    scramble(model, 0)
    source.save({"epoch": 3, "batch": 2})
    target, other = make_archive(tmp_path, strategies[new])
    content = restore(target)
    assert (content["epoch"], content["batch"]) == (3, 2)
    if old == new:
        assert_equal(state(other), state(model))
    pairs = zip(
        [*model.variables, *model.optimizer.variables],
        [*other.variables, *other.optimizer.variables],
        strict=True,
    )
    for a, b in pairs:
        parts, mine = copies(strategies[old], a), copies(strategies[new], b)
        if a.aggregation == "sum":
            total = np.sum(parts, 0, dtype="float64")
            found = np.sum(mine, 0, dtype="float64")
            np.testing.assert_allclose(found, total, rtol=2e-7, atol=2e-6)
            assert np.abs(total).max() > 1
        else:
            expected = parts[0]
            if old != new and tf.as_dtype(a.dtype).is_floating:
                expected = np.mean(parts, 0, dtype="float64")
            np.testing.assert_array_equal(
                mine[0], expected.astype(parts[0].dtype)
            )


def moved_and_held(model):
    """Return the residuals summed over replicas, by variable."""
    optimizer, strategy = model.optimizer, model.distribute_strategy

    def mean(variable):
        return np.mean(copies(strategy, variable), 0, dtype="float64")

    rounds = optimizer._rounds
    totals = [
        mean(base) - mean(variable)
        for (variable, _), base in zip(
            rounds._starts, rounds._bases, strict=True
        )
    ]
    for i, residual in optimizer._compressor._residuals.items():
        totals[i] += np.sum(
            copies(strategy, residual.variable), 0, dtype="float64"
        )
    return totals


@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
@pytest.mark.parametrize("old", ["one", "two"])
@pytest.mark.parametrize("new", ["one", "two"])
@pytest.mark.parametrize("rounds", ["rounds", "rounds ahead"])
def test_movements_of_local_steps_are_conserved(
    tmp_path, strategies, old, new, rounds
):
    """The backup is made in the middle of a round, when weights differ."""
    source, model = make_archive(tmp_path, strategies[old], rounds)
    scramble(model, 0)
    local = strategies[old].experimental_local_results
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        if variable.trainable or "base_weight" in variable.path:
            for i, part in enumerate(local(variable.value)):
                part.assign(part * (i + 1))
    for part in local(model.optimizer._rounds._taken.value):
        part.assign(tf.constant(2, part.dtype))
    source.save({"epoch": 1, "batch": 2})
    target, other = make_archive(tmp_path, strategies[new], rounds)
    restore(target)
    if old == new:
        assert_equal(state(other), state(model))
    assert not other.optimizer.is_synchronized
    for found, expected in zip(
        moved_and_held(other), moved_and_held(model), strict=True
    ):
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic")
def test_states_of_inner_optimizers_are_averaged(tmp_path, strategies):
    source, model = make_archive(tmp_path, strategies["two"], "rounds")
    scramble(model, 0)
    local = strategies["two"].experimental_local_results
    inner = model.optimizer.inner_optimizer.variables
    floats = [i for i, v in enumerate(inner) if "float" in v.dtype]
    for i in floats:
        for j, part in enumerate(local(inner[i].value)):
            part.assign(tf.fill(part.shape, 1.0 + 2 * j))
    source.save({"epoch": 1, "batch": 2})
    target, other = make_archive(tmp_path, optimizer="rounds")
    restore(target)
    assert len(floats) > 2
    for i in floats:
        found = other.optimizer.inner_optimizer.variables[i].numpy()
        np.testing.assert_array_equal(found, np.full(found.shape, 2.0))


@pytest.mark.parametrize(
    "wrapper",
    [
        "alone",
        pytest.param("in LossScaleOptimizer", marks=pytest.mark.long),
        pytest.param("in MultiOptimizer", marks=cases.needs_groups),
    ],
)
@pytest.mark.parametrize(
    ("name", "old"),
    cases.with_long(
        [*itertools.product(["lamb", "adam_offload"], ["one", "two"])],
        [("lamb", "one"), ("adam_offload", "two")],
    ),
)
def test_accumulated_gradients_are_conserved(
    tmp_path, strategies, name, old, wrapper
):
    """Each replica holds a share; on the host, there is one sum."""

    def accumulating(strategy):
        archive, model = make_archive(
            *(tmp_path, strategy, name),
            wrapper=wrapper,
            gradient_accumulation_steps=2,
        )
        variable = next(
            v for v in model.optimizer.variables if "accumulator" in v.path
        )
        return archive, strategy.experimental_local_results(variable.value)

    new = {"one": "two", "two": "one"}[old]
    source, parts = accumulating(strategies[old])
    for i, part in enumerate(parts):
        part.assign(tf.fill(part.shape, 2.0 + i))
    source.save({"epoch": 1, "batch": 3})
    target, others = accumulating(strategies[new])
    restore(target)
    total = sum(part.numpy() for part in parts)
    np.testing.assert_array_equal(sum(p.numpy() for p in others), total)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": truncate,
    "flipped bit": flip,
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("file", ["json", "worker-0.npz"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_backup_is_not_used(tmp_path, file, damage):
    archive, model = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    before = state(model)
    scramble(model, 1)
    archive.save({"epoch": 2, "batch": 0})
    DAMAGE[damage](tmp_path / f"00000002.{file}")
    if (damage, file) == ("missing", "json"):  # It was never complete.
        assert restore(archive)["epoch"] == 1
        return
    with pytest.warns(UserWarning, match="00000002.*Restoring backup 00000001"):
        content = restore(archive)
    assert content["epoch"] == 1
    assert_equal(state(model), before)
    archive.save({"epoch": 3, "batch": 0})
    assert Folder(tmp_path).generations() == [3, 1]
    DAMAGE[damage](tmp_path / f"00000003.{file}")
    DAMAGE[damage](tmp_path / f"00000001.{file}")
    with pytest.raises(RuntimeError, match="00000001.*start from the begin"):
        archive.newest()


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "empty"])
def test_damaged_backup_of_another_run_is_kept(tmp_path, damage):
    other, _ = make_archive(tmp_path, optimizer="lamb", run="other")
    other.save({"epoch": 1, "batch": 0})
    files = sorted(tmp_path.iterdir())
    DAMAGE[damage](tmp_path / "00000001.json")
    archive, _ = make_archive(tmp_path, optimizer="lamb", run="mine")
    assert archive.newest() is None
    archive.save({"epoch": 1, "batch": 0})
    archive.delete()
    assert sorted(tmp_path.iterdir()) == files
    with pytest.raises(RuntimeError, match="00000001.json .*start from the be"):
        other.newest()


def test_damaged_backup_of_an_unknown_run_is_kept(tmp_path):
    """Every run without another backup reports the damage."""
    archive, _ = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    archive.save({"epoch": 2, "batch": 0})
    damaged = sorted(tmp_path.glob("00000002.*"))
    for path in damaged:
        truncate(path)
    with pytest.warns(UserWarning, match="00000002.*Restoring backup 00000001"):
        assert archive.newest()["epoch"] == 1
    archive.save({"epoch": 2, "batch": 0})
    archive.delete()
    assert sorted(tmp_path.iterdir()) == damaged
    with pytest.raises(RuntimeError, match="00000002.json .*start from the be"):
        archive.newest()


def test_backup_holds_no_code(tmp_path):
    """The reader rejects pickled data, even with a valid checksum."""
    archive, _ = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    part = tmp_path / "00000001.worker-0.npz"
    np.savez(part, **{"lasting.0": np.array([print], dtype=object)})
    content = Folder(tmp_path).content(1) | {"parts": [digest(part)]}
    Folder(tmp_path).commit(1, content)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        restore(archive)


def test_backup_that_cannot_be_written_leaves_the_one_before(
    tmp_path, monkeypatch
):
    archive, model = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    before = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RuntimeError, match=r"No space left .*worker 0"):
            archive.save({"epoch": 2, "batch": 0})
    assert sorted(tmp_path.iterdir()) == before
    assert archive.newest()["epoch"] == 1


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_folder_that_cannot_be_synced_takes_backups(
    tmp_path, monkeypatch, error
):
    """Some network file systems do not support `fsync` of folders."""
    sync = os.fsync

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(error, os.strerror(error))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    archive, _ = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    assert archive.newest()["epoch"] == 1


def test_worker_that_cannot_write_raises_before_training(tmp_path, monkeypatch):
    """The rule holds for every worker, not only for the first."""
    archive, _ = make_archive(tmp_path, optimizer="lamb")
    monkeypatch.setattr(ReplicaGroup, "worker", 1)
    monkeypatch.setattr(
        archive._group, "agree", lambda _, mine, hint: [["mark", None], mine]
    )

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Folder, "leave_mark", refuse)
    with pytest.raises(RuntimeError, match=r"Permission denied \(worker 1\)"):
        archive.check_shared()


def test_second_process_in_a_folder_is_noticed(tmp_path):
    """The second process gets the error."""
    archives = [make_archive(tmp_path, optimizer="lamb")[0] for _ in range(2)]
    for archive in archives:
        assert archive.newest() is None
    for epoch in (1, 2):
        archives[0].save({"epoch": epoch, "batch": 0})
    with pytest.raises(RuntimeError, match="to one run at a time.*its own"):
        archives[1].save({"epoch": 1, "batch": 0})
    assert archives[0].newest()["epoch"] == 2


def test_backups_that_cannot_be_deleted_do_not_end_a_run(tmp_path, monkeypatch):
    """The run has finished, and still has to save its model."""
    archive, _ = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})

    def refuse(*_, **__):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    with pytest.warns(UserWarning, match="resource busy.*before you start"):
        assert archive.delete()


@pytest.mark.parametrize("method", ["generations", "next_generation"])
def test_folder_that_cannot_be_listed_is_an_error_of_all(
    tmp_path, monkeypatch, method
):
    """Workers that get no error would wait for the others."""
    archive, _ = make_archive(tmp_path, optimizer="lamb")

    def fail(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Folder, method, fail)
    with pytest.raises(RuntimeError, match=r"Stale file handle \(worker 0\)"):
        archive.newest()
        archive.save({"epoch": 1, "batch": 0})


def test_separate_folders_of_workers_are_rejected(tmp_path, monkeypatch):
    archive, _ = make_archive(tmp_path, optimizer="lamb")
    monkeypatch.setattr(Folder, "sees", lambda *_: False)
    with pytest.raises(RuntimeError, match="all workers share.*worker 0 does"):
        archive.check_shared()
    assert list(tmp_path.iterdir()) == []


def test_stock_strategy_of_several_workers_is_rejected():
    with pytest.raises(TypeError, match="SparseMultiWorkerMirroredStrategy"):
        _ = replicas_of(tf.distribute.MultiWorkerMirroredStrategy()).worker


@pytest.mark.parametrize("kept", [1, 2])
def test_older_backups_are_deleted(tmp_path, kept):
    (tmp_path / "notes.txt").write_text("mine")
    archive, model = make_archive(tmp_path, optimizer="lamb")
    archive = Archive(Folder(tmp_path), State(model), replicas_of(NONE), kept)
    (tmp_path / "00000001.worker-0.npz.partial").write_bytes(b"killed")
    for epoch in range(4):
        archive.save({"epoch": epoch, "batch": 0})
        assert archive.newest()["epoch"] == epoch
    assert Folder(tmp_path).generations() == [4, 3][:kept]
    assert len(list(tmp_path.iterdir())) == 1 + 2 * kept
    archive.delete()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"optimizer": "lans"}, "optimizer is LANS in this run, and Lamb"),
        (
            {"optimizer": "lans", "wrapper": "in LossScaleOptimizer"},
            r"Optimizer\(LANS\) in this run, and LossScaleOptimizer\(Lamb",
        ),
        ({"width": 5}, r"dense_\d*/?kernel is .*8, 5.*8, 16|kernel is"),
    ],
    ids=["optimizer", "wrapped optimizer", "shape"],
)
def test_backup_of_another_training_is_rejected(tmp_path, kwargs, message):
    saved = {"optimizer": "lamb", "wrapper": kwargs.get("wrapper", "alone")}
    make_archive(tmp_path, **saved)[0].save({"epoch": 1, "batch": 0})
    archive, model = make_archive(tmp_path, **saved | kwargs)
    before = state(model)
    with pytest.raises(ValueError, match=message):
        restore(archive)
    assert_equal(state(model), before)
