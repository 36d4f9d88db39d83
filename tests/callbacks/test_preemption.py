"""SIGTERM ends a run after a backup; nothing is lost."""

import contextlib
import fcntl
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import real_workers
from arrays import assert_equal
from backups import (
    OPTIMIZERS,
    Interrupt,
    Interruption,
    X,
    Y,
    fit,
    make_model,
    state,
)
from cases import with_long

import tf_optimizers as tfo
from tf_optimizers.callbacks.backup import preemption
from tf_optimizers.callbacks.backup.files import Folder
from tf_optimizers.callbacks.backup.preemption import EXIT_CODE, Preemption


class Ask(keras.callbacks.Callback):
    """Sends SIGTERM to this process at the n-th call of a method."""

    def __init__(self, method, n):
        super().__init__()
        self.remaining = n
        setattr(self, method, self.ask)

    def ask(self, *_, **__):
        self.remaining -= 1
        if not self.remaining:
            os.kill(os.getpid(), signal.SIGTERM)


def make():
    return make_model(OPTIMIZERS["keras-adam"])


def train(model, folder, *before, save_freq=1000, after=(), **kwargs):
    """Train for three epochs of six batches, with a validation of two."""
    backup = tfo.callbacks.BackupAndRestore(folder, save_freq, **kwargs)
    history = keras.callbacks.History()
    model.fit(
        *(X, Y),
        batch_size=10,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=(X[:20], Y[:20]),
        validation_batch_size=10,
        callbacks=[*before, backup, *after, history],
    )
    return history.history


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    model = make()
    history = train(model, tmp_path_factory.mktemp("alone"))
    return state(model), history


# During an epoch, during a validation, and after each.
SIGNALS = [
    ("on_train_batch_end", 8, 8),
    ("on_test_batch_end", 4, 12),
    ("on_epoch_end", 1, 6),
    ("on_train_end", 1, 18),
]
LONG = [("on_train_batch_end", 12, 12), ("on_test_batch_end", 1, 6)]


@pytest.mark.parametrize(
    ("method", "n", "steps"), with_long([*SIGNALS, *LONG], LONG)
)
@pytest.mark.filterwarnings("ignore:A worker received SIGTERM")
@pytest.mark.filterwarnings("ignore:`epochs` must be greater")
def test_run_continues_from_the_step_of_the_signal(
    tmp_path, expected, method, n, steps
):
    model = make()
    with pytest.raises(SystemExit) as caught:
        train(model, tmp_path, Ask(method, n))
    assert caught.value.code == EXIT_CODE == 143
    assert int(model.optimizer.iterations.numpy()) == steps
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resumed = make()
    history = train(resumed, tmp_path)
    assert_equal(state(resumed), expected[0])
    for name, values in history.items():
        assert values == expected[1][name][3 - len(values) :]
    assert len(history.get("loss", [])) == 3 - steps // 6 + (
        steps < 18 and (steps % 6 == 0 and method != "on_epoch_end")
    )


@pytest.mark.filterwarnings("ignore:A worker received SIGTERM")
def test_averages_of_a_validation_are_not_backed_up(tmp_path):
    def final(folder, *before):
        model = make_model(lambda: keras.optimizers.SGD(0.1, use_ema=True))
        train(model, folder, *before, after=[keras.callbacks.SwapEMAWeights()])
        return state(model)

    with pytest.raises(SystemExit):
        final(tmp_path / "asked", Ask("on_test_batch_begin", 4))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert_equal(final(tmp_path / "asked"), final(tmp_path / "alone"))


def test_second_signal_in_a_resumed_epoch_loses_nothing(tmp_path, expected):
    for n in (8, 2):  # The second one comes while batches are skipped.
        with (
            pytest.raises(SystemExit),
            pytest.warns(UserWarning, match="A worker received SIGTERM"),
        ):
            train(make(), tmp_path, Ask("on_train_batch_end", n))
        # The launcher sends SIGTERM while this process still ends.
        os.kill(os.getpid(), signal.SIGTERM)
    resumed = make()
    train(resumed, tmp_path)
    assert_equal(state(resumed), expected[0])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_death_in_the_last_backup_leaves_the_one_before(
    tmp_path, expected, monkeypatch
):
    commit, committed = Folder.commit, []

    def die(folder, generation, content):
        if committed:
            raise Interruption
        committed.append((content["epoch"], content["batch"]))
        commit(folder, generation, content)

    monkeypatch.setattr(Folder, "commit", die)
    with pytest.raises(Interruption):
        train(make(), tmp_path, Ask("on_train_batch_end", 9), save_freq=8)
    # The kill would have ended this process; the next `fit` must not exit.
    preemption._running.is_asked = False
    monkeypatch.undo()
    assert committed == [(1, 2)]
    resumed = make()
    train(resumed, tmp_path)
    assert_equal(state(resumed), expected[0])


def test_handler_of_the_script_stays(tmp_path):
    received = []
    former = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        train(make(), tmp_path, Ask("on_train_batch_end", 2))
    finally:
        signal.signal(signal.SIGTERM, former)
    assert received == [1]


@pytest.mark.parametrize("kwargs", [{}, {"on_preemption": False}])
def test_signal_outside_of_fit_has_its_usual_effect(tmp_path, kwargs):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)

    train(make(), tmp_path, Look(), **kwargs)
    assert set(seen) == {bool(kwargs)}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


AFTER_AN_ERROR = """
import os, signal, sys, time
from backups import Interrupt, Interruption
from test_preemption import make, train
try:
    train(make(), sys.argv[1], Interrupt(3))
except Interruption:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""


def exit_code(script, folder, timeout):
    """Return the exit code of a script of this folder."""
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=os.path.dirname(__file__),
        env=real_workers.quick_python(),
        timeout=timeout,
    ).returncode


def test_signal_after_an_error_in_fit_ends_the_process(tmp_path):
    assert exit_code(AFTER_AN_ERROR, tmp_path, 300) == -signal.SIGTERM


AT_EXIT = """
import atexit, os, signal, sys, time
@atexit.register  # Runs last, when other exit handlers have run.
def exit_slowly():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
from backups import Interrupt
from test_preemption import make, train
train(make(), sys.argv[1], Interrupt(3))
"""


def test_signal_ends_a_process_that_exits_slowly_after_an_error(tmp_path):
    """TensorFlow may need a second to end, and the launcher would wait."""
    assert exit_code(AT_EXIT, tmp_path, 60) == -signal.SIGTERM


def test_fit_after_an_error_catches_the_signal_again(tmp_path):
    model = make()
    with pytest.raises(Interruption):
        fit(model, tmp_path / "a", Interrupt(3))
    with (
        pytest.raises(SystemExit),
        pytest.warns(UserWarning, match="A worker received SIGTERM"),
    ):
        train(make(), tmp_path / "b", Ask("on_train_batch_end", 2))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Early(Preemption):
    """A child gets SIGTERM when it starts, before it restores the handler."""

    def release(self):
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGTERM)
        super().release()


def test_signal_to_a_child_that_starts_ends_the_child_alone():
    """A pool may end processes that it has just started."""
    group = types.SimpleNamespace(workers=2, read=lambda *_: None)
    caught = Early(group)
    caught.parent = os.getpid()

    def on_train_begin():
        caught.begin()

    on_train_begin()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert not select.select([caught._receiver], [], [], 0.1)[0]
        assert not caught.is_asked
    finally:
        caught.is_asked = False  # Else, this process would end.
        caught.end()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_signals_arrive_if_many_files_are_open():
    caught = Preemption(types.SimpleNamespace(workers=2))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    own = os.pipe()
    try:
        caught._receiver = fcntl.fcntl(own[0], fcntl.F_DUPFD, 1024)
        os.write(own[1], bytes([signal.SIGTERM]))
        caught._caller = sys._getframe().f_code
        caught._listen()
    finally:
        for file in (*own, caught._receiver):
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.is_asked


def test_callback_may_call_the_backup_from_any_method():
    class Backup:
        def on_train_begin(self):
            return preemption._caller_of("on_train_begin")

    class Wrapper:
        def on_train_begin(self):
            return self.call()

        def call(self):
            return Backup().on_train_begin()

    def fit():
        return Wrapper().on_train_begin()

    assert fit() is fit.__code__


def test_workers_find_notes_after_one_has_trained_another_model_alone():
    alone, together = (types.SimpleNamespace(workers=n) for n in (1, 2))
    prefixes = [Preemption(g)._prefix for g in (together, alone, together)]
    first, last = (int(prefixes[i].rpartition("/")[2]) for i in (0, -1))
    assert last == first + 1


def free_ports(count):
    """Return the first of `count` consecutive free ports."""
    for first in range(20000 + os.getpid() % 10000, 40000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
        return first
    raise OSError("no free ports")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Run two launchers, as a Slurm step with two tasks per node does.

    A process stands by for the second worker.
    """
    folder = tmp_path_factory.mktemp("launched")
    program = real_workers.SCRIPTS / "preempted.py"
    command = [
        *("--cluster", "auto"),
        *("--port", str(free_ports(2)), "--max-restarts", "1"),
        *("--restart-pause", "0", str(program)),
    ]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in "01":
            variables = {
                "SLURM_STEP_NODELIST": "127.0.0.1",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_PROCID": rank,
            }
            standby = ["--standby", "0"] if rank == "1" else []
            process = subprocess.Popen(
                [*real_workers.LAUNCHER, *standby, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=real_workers.environment(folder) | variables,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0, 0], "\n".join(text[-3000:] for text in outputs)
    results = [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]
    return folder, outputs, results


def test_signal_to_one_worker_ends_all_and_nothing_is_lost(launched):
    _, outputs, results = launched
    for rank, (output, result) in enumerate(zip(outputs, results, strict=True)):
        assert f"index {rank} of 2, workers at 127.0.0.1:" in output
        reason = f"Worker {rank} exited with code {EXIT_CODE}, after SIGTERM."
        assert f"[launcher] {reason} Stopping all workers." in output
        assert result["restart"] == 1
        assert result["stood_by"] == (rank == 1)
        # Short steps continue until the signal is known to all workers.
        assert 8 <= result["begun"] < 18
        assert result["equal"]
    assert results[0]["begun"] == results[1]["begun"]


def test_all_workers_end_within_thirty_seconds_of_the_signal(launched):
    """A worker's script starts again only after the worker has ended."""
    folder, _, results = launched
    signalled = float((folder / "signal").read_text())
    for result in results:
        assert 0 < result["started"] - signalled < 30


def test_trackers_run_only_on_the_chief(launched):
    folder, outputs, results = launched
    lines = (folder / "log.csv").read_text().splitlines()
    names = lines[0].split(",")
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2"]
    assert {"loss", "mae", "val_loss", "sparsity", "sent_bytes"} < {*names}
    written = [path.name.split(".") for path in folder.glob("tb/train/events*")]
    assert len(written) == 2  # Before the signal, and after.
    assert str(results[0]["pid"]) in {pid for name in written for pid in name}
    assert "[worker 0] Epoch 3/3" in outputs[0]
    assert "Epoch" not in outputs[1]


def test_chief_alone_cannot_make_calls_that_need_all_workers(launched):
    *_, (chief, other) = launched
    evaluated, read, stopped = chief["errors"]
    name = "which runs on one worker only. Make the call on every worker."
    for error in (evaluated, read):
        assert f"`NeedsAll` in `ChiefOnly`, {name}" in error
    assert stopped.startswith("All workers must stop training together.")
    assert other["errors"] == []


def test_callback_is_called_without_other_workers(tmp_path):
    calls = []
    inner = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: calls.append(epoch)
    )
    callback = tfo.callbacks.ChiefOnly(inner)
    stop = tfo.callbacks.ChiefOnly(
        keras.callbacks.EarlyStopping("loss", 100, baseline=0, patience=2)
    )
    fit(make(), tmp_path, callback, stop, epochs=5)
    assert calls == [0, 1]
    assert inner.params["epochs"] == 5
    untrained = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    untrained.predict(X, verbose=0, callbacks=[tfo.callbacks.ChiefOnly(inner)])
    # Hooks that the callback lacks stay Keras's, which it does not call.
    assert "on_train_batch_end" not in vars(callback)
    made = tfo.callbacks.ChiefOnly(lambda: inner)
    made.set_model(make())
    made.on_epoch_end(7, logs={})
    assert calls == [0, 1, 7]
    message = "must be a `keras.callbacks.Callback`"
    with pytest.raises(TypeError, match=message):
        tfo.callbacks.ChiefOnly([inner])
    with pytest.raises(TypeError, match=r"a function that returned \[\]"):
        tfo.callbacks.ChiefOnly(list).set_model(make())


@pytest.mark.parametrize("verb", ["training", "evaluating", "predicting"])
def test_chief_alone_cannot_stop(verb):
    def stop(*_, **__):
        setattr(model, f"stop_{verb}", True)

    model = make()
    callback = tfo.callbacks.ChiefOnly(
        keras.callbacks.LambdaCallback(on_epoch_end=stop)
    )
    callback.set_model(model)
    callback._group = types.SimpleNamespace(
        worker=0, workers=2, alone=contextlib.nullcontext
    )
    with pytest.raises(RuntimeError, match=f"All workers must stop {verb}"):
        callback.on_epoch_end(0)


def test_other_code_draws_the_same_as_without_a_tracker_that_starts():
    def draw(logs=None):
        return random.random(), np.random.rand()

    def make_tracker():
        draw()
        return keras.callbacks.LambdaCallback(on_train_begin=draw)

    model = make()
    keras.utils.set_random_seed(1)
    expected = [draw(), draw()]
    keras.utils.set_random_seed(1)
    callback = tfo.callbacks.ChiefOnly(make_tracker)
    callback.set_model(model)
    found = [draw()]
    callback.on_train_begin()
    found.append(draw())
    assert found == expected
