"""The tables of docs/horovod.md are complete; test_guide.py runs their code."""

import json
import re
import shlex

import horovod_stub
import pytest
from scripts import moved

from tf_optimizers.launch.__main__ import parse

# The names of `horovod.tensorflow.keras`, its callbacks and options.
HOROVOD = """
    init rank size local_rank local_size DistributedOptimizer compression
    Compression.fp16 backward_passes_per_step op Average Sum Adasum
    gradient_predivide_factor sparse_as_dense num_groups groups process_set
    HOROVOD_FUSION_THRESHOLD DistributedGradientTape allreduce allgather
    broadcast broadcast_variables BroadcastGlobalVariablesCallback
    broadcast_object allgather_object MetricAverageCallback
    LearningRateWarmupCallback LearningRateScheduleCallback
    BestModelCheckpoint load_model SyncBatchNormalization elastic.KerasState
    CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback
    elastic.run join barrier shutdown mpirun HOROVOD_TIMELINE
    HOROVOD_GPU_OPERATIONS=NCCL
""".split()
PYTORCH = """
    init_process_group DistributedDataParallel torchrun deepspeed
    DistributedSampler no_sync convert_sync_batchnorm fp16_compress_hook
    PowerSGDState OneBitAdam ZeroOneAdam OneBitLamb PostLocalSGDOptimizer
    LocalSGD DiLoCo ZeroRedundancyOptimizer WarmupDecayLR
""".split()
ROWS = list(moved.rows())


@pytest.mark.parametrize("name", [*HOROVOD, *PYTORCH, "horovodrun -np"])
def test_every_name_has_a_row(name):
    assert sum(name in names for names, _, _ in ROWS) == 1


def test_a_row_has_code_that_runs_or_says_why_none_is_needed():
    for names, code, reason in ROWS:
        has_none = reason.startswith(("none needed: ", "no counterpart: "))
        assert bool(code) != has_none, names
        is_known = code in moved.EFFECTS or code.startswith(moved.COMMAND)
        assert is_known or not code, code
    assert set(moved.EFFECTS) <= {code for _, code, _ in ROWS}


def test_commands_are_those_of_the_launcher(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    commands = {c for _, c, _ in ROWS if c.startswith(moved.COMMAND)}
    assert len(commands) == 3
    place = {"type": "worker", "index": 0}
    cluster = {"cluster": {"worker": ["127.0.0.1:12345"]}, "task": place}
    for command in commands:
        monkeypatch.delenv("TF_CONFIG", raising=False)
        if "--cluster" in command:
            monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
        options = parse(shlex.split(command.removeprefix(moved.COMMAND)))
        assert options.command == ["train.py"]
        assert options.workers == (1 if "--cluster" in command else 2)


def script_before():
    return re.search(r"```py\n(.*?)```", moved.PAGE.read_text(), re.S)[1]


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_script_before_runs_with_a_stub(rank, size, monkeypatch, tmp_path):
    """Its Keras code runs, and its calls fit Horovod's names and arguments.

    The stub exchanges nothing. So this does not show that workers start with
    equal variables, sum gradients or average metrics, nor that the script runs
    with real Horovod and the TensorFlow and Keras that Horovod supports.
    """
    horovod_stub.install(monkeypatch, rank, size)
    monkeypatch.chdir(tmp_path)
    exec(script_before(), space := {})
    model, rows = space["model"], 1024 // size
    assert space["x"].shape == (rows, 32)
    assert model.optimizer.iterations == 3 * rows // 32
    assert float(model.optimizer.learning_rate) == pytest.approx(0.001 * size)
    first, *_, last = model.history.history["loss"]
    assert last < first
    assert (tmp_path / "model.keras").exists() == (rank == 0)


def test_script_before_and_after_train_the_same_model():
    before, after = (
        re.search(r"= keras\.Sequential\((.*?)\)\n", text, re.S)[1]
        for text in (
            script_before(),
            moved.blocks()[0],
        )
    )
    assert before == after
