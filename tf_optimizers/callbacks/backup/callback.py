"""Lets a run resume after it was killed."""

import contextlib
import math
import os
import sys
import warnings
from collections import Counter
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Logs
from tf_optimizers._compat.keras_internals import start_at_epoch
from tf_optimizers.callbacks.backup.archive import Archive
from tf_optimizers.callbacks.backup.backup_checks import (
    check_folder,
    check_frequency,
    check_name,
    gather,
    warnings_of_lengths,
    warnings_of_others,
)
from tf_optimizers.callbacks.backup.files import Folder
from tf_optimizers.callbacks.backup.preemption import EXIT_CODE, Preemption
from tf_optimizers.callbacks.backup.resuming import (
    Rates,
    Skip,
    cancel_undoing,
    check_batches,
    check_executions,
    undo_before_training,
)
from tf_optimizers.callbacks.backup.state import State
from tf_optimizers.checks import check_boolean
from tf_optimizers.replicas import replicas_of
from tf_optimizers.wrapped import build_optimizers

_UNKNOWN = sys.maxsize
# How many fits of this process have ended and deleted their backups, by folder.
# A restarted script counts its fits in the same way.
_ENDED: Counter[str] = Counter()


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up a run, and resumes it after an interruption.

    `fit` writes backups to `backup_dir`. When it is started again, after any
    of its processes was killed, it restores the newest one and continues from
    there:

        model.fit(..., epochs=10, callbacks=[
            tfo.callbacks.BackupAndRestore("backup", save_freq=100)])

    At most the steps since the last backup are lost. With the same number of
    workers, and of replicas on each, the run continues bit for bit as if
    nothing had happened. Every replica gets its own state back. In the middle
    of an epoch, batches that were already seen are drawn and dropped. With
    another number of workers or replicas, sums over replicas (`DGCMomentum`'s u
    and v, gradient accumulators, metrics) are divided evenly, and conserved to
    float32 accuracy. Other numbers that differ are averaged: the state inside
    `SparseLoCo`, the weights in the middle of its local steps, the statistics
    of `BatchNormalization`.

    Under `tfo.SparseMultiWorkerMirroredStrategy` all workers take part, and
    must see the same folder, on a file system that they share. The first worker
    writes the values that all replicas share, and each worker its replicas' own
    values. A backup replaces the previous one when it is complete. Checksums
    are verified when it is read, and it holds no code.

    If a worker gets SIGTERM, such as before its machine is taken away, all
    workers stop after the same step, write a backup, and exit with code 143.
    Start the script again to resume there; `--max-restarts` of the launcher
    does this for you.

    A resumed epoch sees the same batches as without the interruption, provided
    that an epoch's data do not depend on earlier epochs: `shuffle=False`, or
    `tf.data.Dataset.shuffle` with a `seed` and
    `reshuffle_each_iteration=False`. With `steps_per_epoch` and a dataset
    that spans several epochs, the data start from the beginning, as after
    Keras's own `initial_epoch`.

    The learning rate is part of the state. If the script has changed the
    learning rate since the run began, the new one is used, with a warning.

    Callbacks run in the order of their list. Put those that change the model at
    the end of an epoch, such as `ReduceLROnPlateau`, before this one, and
    `SwapEMAWeights` after it. Other callbacks also see the batches that are
    drawn and dropped.

    Random numbers of Keras's layers and of `keras.random`, seeded or not,
    continue where they were. Random numbers of `tf.random`, NumPy and Python do
    not. The attributes of other callbacks are not backed up.

    A script may call `fit` several times with one folder. When the script is
    started again, it repeats the fits that had ended, and resumes the
    interrupted one.

    Differs from `keras.callbacks.BackupAndRestore`: it works on several
    workers; it restores each replica's own state, random seeds and metrics, in
    the middle of an epoch too; it verifies checksums; NaN and inf raise an
    error instead of being backed up; it deletes only its own files, not others
    in the folder.

    Args:
        backup_dir: str or path. A folder on a local or mounted file system that
            no other script uses; created if it does not exist.
        save_freq: "epoch", or int >= 1. When to back up: at the end of every
            epoch, or each time this many batches have been seen.
            Defaults to `"epoch"`.
        double_checkpoint: bool. Whether to keep the previous backup too. If
            the newest is damaged, the previous one is restored, with a
            warning. Defaults to `False`.
        delete_checkpoint: bool. Whether to delete the backups once `fit` has
            ended with finite variables. Those of a `fit` with more epochs are
            kept. Defaults to `True`.
        name: str or None. Distinguishes runs that share the folder: each leaves
            the others' backups alone. Defaults to `None`: "fit 1"
            for the first `fit` of a process with this folder, "fit 2" after it
            has ended and deleted its backups, and so on. While backups are
            kept, the next `fit` continues from them.
        on_preemption: bool. Whether SIGTERM to any worker ends all workers
            with exit code 143, after a backup at a common step, unless the
            script has its own handler for SIGTERM. Must be the same on all
            workers. Defaults to `True`.

    Raises:
        TypeError: If an argument or the strategy has the wrong type.
        ValueError: If an argument is outside its range; if a backup is of
            another model or optimizer, or has seen more batches of an epoch
            than the epoch now has, or was made in the middle of an
            execution of `steps_per_execution` batches.
        RuntimeError: If a backup cannot be written or read, if all are
            damaged, if a variable is not finite, if weights differ between
            workers, if workers do not share the folder, or if another process
            has made backups there in the meantime.

    Example:
        >>> import tf_optimizers as tfo
        >>> callback = tfo.callbacks.BackupAndRestore("backup")
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike,
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        name: str | None = None,
        on_preemption: bool = True,
    ) -> None:
        super().__init__()
        self.backup_dir = check_folder(backup_dir)
        self.save_freq = check_frequency(save_freq)
        self.double_checkpoint = check_boolean(
            "double_checkpoint", double_checkpoint
        )
        self.delete_checkpoint = check_boolean(
            "delete_checkpoint", delete_checkpoint
        )
        self.name = check_name(name)
        self.on_preemption = check_boolean("on_preemption", on_preemption)
        self._preemption: Preemption | None = None
        self._metrics_of_training: list[tuple[Any, Any]] = []
        self._epoch = self._batch = self._unsaved = 0
        self._skip: Skip | None = None
        self._is_of_longer_run = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Restore the newest backup, if there is one."""
        model = self.model
        if not model.built:
            raise ValueError(
                "A model must be built to be restored. Received: "
                f"{model.name}, which is not built. Give it an `Input`, or "
                "call it on a batch before `fit`."
            )
        for name in build_optimizers(model):
            raise ValueError(
                "All optimizers of a model must be built to be restored. "
                f"Received: `{name}` of {model.name}, not built. Call "
                f"`model.{name}.build(variables)` with the variables that it "
                "updates, before `fit` and in the strategy's scope."
            )
        state = State(model)
        self._group = replicas_of(model.distribute_strategy)
        self._is_first = self._group.worker == 0
        ended = _ENDED[os.path.realpath(self.backup_dir)]
        folder = Folder(self.backup_dir, self.name or f"fit {ended + 1}")
        backups = 2 if self.double_checkpoint else 1
        self._archive = Archive(folder, state, self._group, backups)
        self._archive.check_shared()
        self._rates = Rates(state)
        self._unsaved, self._skip, self._is_of_longer_run = 0, None, False
        self._resumed = self._archive.newest()
        if self._resumed is None:
            for message in warnings_of_others(folder, self.name):
                self._warn(message)
        else:
            self._restore(self._resumed)
        state.accept_infinite()
        self._state = state
        if self.on_preemption:
            self._preemption = Preemption(self._group)
            self._preemption.begin()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Resume in the middle of the epoch, if the backup was made there."""
        self._forget_start()
        self._epoch, self._batch = epoch, 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["batch"]:
            self._batch = resumed["batch"]
            self._skip = Skip(
                *(self.model, self._batch),
                lambda: self._restore_in_epoch(resumed),
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Back up, if a backup is due."""
        # The last execution of an epoch may have fewer batches.
        seen = min(batch + 1, self._steps)
        is_new = seen > self._batch  # Otherwise, the backup has it already.
        if is_new:
            self._unsaved += seen - self._batch
            self._batch = seen
        due = self.save_freq
        is_due = not isinstance(due, str) and self._unsaved >= due
        self._save_if(is_new and is_due, is_new)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Save the metrics of training, which validation resets."""
        if self._preemption is not None:
            self._metrics_of_training = self._state.metrics()

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Back up before validation, if this worker must end."""
        if self._preemption is not None and self._preemption.reach():
            for component, value in self._metrics_of_training:
                component.assign(value)
            # While batches are skipped, the backup is still the newest state.
            self._leave(self._skip is None or self._skip.remaining <= 0)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Back up, if a backup is due."""
        is_new = self._end_epoch(epoch)
        self._save_if(is_new and self.save_freq == "epoch", is_new)

    def on_train_end(self, logs: Logs = None) -> None:
        """Delete the backups, unless they should stay or are still needed."""
        self._forget_start()
        preemption, self._preemption = self._preemption, None
        if preemption is not None and preemption.finish():
            self._preemption = preemption
            self._leave()
        is_over = self.delete_checkpoint and not self._is_of_longer_run
        if is_over and self._archive.delete():
            _ENDED[os.path.realpath(self.backup_dir)] += 1
        if preemption is not None:
            preemption.end()

    def _end_epoch(self, epoch: int) -> bool:
        """Move on to the next epoch; return whether there is a new state."""
        skip, self._skip = self._skip, None
        if skip is not None:
            skip.end()
            # If the length of the epoch was unknown, the last execution counted
            # as a full one.
            if skip.remaining >= self.model.steps_per_execution:
                # The backup is still the newest state.
                if not self.model.stop_training:
                    check_batches(self._batch - skip.remaining, self._batch)
                return False
        if self.model.stop_training and self._batch < self._steps < _UNKNOWN:
            self.model.reset_metrics()  # They hold results of validation.
        else:
            self._epoch, self._batch = epoch + 1, 0
        return True

    def _save_if(self, is_due: bool, is_new: bool) -> None:
        """Back up if it is due, or if the state is new and this is the end."""
        if is_due:
            self._save()
        if self._preemption is not None and self._preemption.reach():
            self._leave(is_new and not is_due)

    def _leave(self, is_unsaved: bool = True) -> None:
        """Back up, and end this process once all workers have done so."""
        if is_unsaved:
            self._save()
        # Worker 0 must not exit before the others have read its last message.
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            gather(self._group, "the end")
        self._warn(
            "A worker received SIGTERM. All workers end with exit code "
            f"{EXIT_CODE}, after a backup in {self.backup_dir!r}. Start the "
            "script again to resume."
        )
        if self._preemption is not None:
            self._preemption.end(is_leaving=True)
        raise SystemExit(EXIT_CODE)

    def _restore(self, content: dict[str, Any]) -> None:
        params = self.params or {}  # A custom training loop sets no `params`.
        for batches in gather(self._group, params.get("steps")):
            if batches is not None:
                check_batches(batches, content["batch"])
        if content["batch"] < self._steps:
            steps = self.model.steps_per_execution
            check_executions(steps, content["batch"])
        self._archive.restore(content, "lasting")
        self._archive.restore_seed(content)
        change = self._rates.set(content)
        if change:
            self._warn(change)
        start_at_epoch(self.model, content["epoch"])
        undo_before_training(self.model, self._forget_start)
        epochs = params.get("epochs", math.inf)
        steps = None if self._steps == _UNKNOWN else self._steps
        for message in warnings_of_lengths(content, epochs, steps):
            self._warn(message)
        # `fit` makes no step, so it does not end the run of the backup.
        seen = content["epoch"], content["batch"]
        self._is_of_longer_run = seen > (epochs, 0)

    def _restore_in_epoch(self, content: dict[str, Any]) -> None:
        """Restore the state once more when the resumed epoch has begun.

        Callbacks may have changed it since, such as the learning rate.
        """
        self._archive.restore(content, "lasting")
        self._rates.set(content)
        self._archive.restore(content, "metrics")

    def _forget_start(self) -> None:
        """Let the next `fit` start at its own `initial_epoch` again."""
        cancel_undoing(self.model)
        start_at_epoch(self.model, None)

    def _warn(self, message: str) -> None:
        if self._is_first:
            warnings.warn(message, stacklevel=4)

    @property
    def _steps(self) -> int:
        """The batches of an epoch; `_UNKNOWN`, a large number, if unknown."""
        steps = (self.params or {}).get("steps")
        return _UNKNOWN if steps is None else steps

    def _save(self) -> None:
        position = {
            "epoch": self._epoch,
            "batch": self._batch,
            "steps": None if self._steps == _UNKNOWN else self._steps,
            "rates": self._rates.given,
        }
        self._archive.save(position)
        self._unsaved = 0
