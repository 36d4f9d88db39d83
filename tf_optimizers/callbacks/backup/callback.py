"""Backs up a run, and resumes it after an interruption."""

import contextlib
import math
import os
import warnings
from collections import Counter, defaultdict
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

# For each folder, how many calls to `fit` in this process have ended and
# deleted their backups. A restarted script that makes the same calls gets the
# same numbers.
_ENDED: Counter[str] = Counter()
# For each folder, the damaged backups that a `fit` without a name has reported.
# Later calls without a name ignore them: they belong to earlier calls' runs.
_REPORTED: defaultdict[str, set[int]] = defaultdict(set)


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up a run, and resumes it after an interruption.

    `fit` writes backups to `backup_dir`. If any process is killed, start the
    script again: `fit` restores the newest backup and continues from there.

        model.fit(..., epochs=10, callbacks=[
            tfo.callbacks.BackupAndRestore("backup", save_freq=100)])

    You lose only the steps since that backup. If the number of workers and the
    number of replicas on each worker are the same as before, every replica gets
    its own state back. If the data and the random numbers also continue (see
    below), the run continues bit for bit as if it had not been interrupted. To
    resume in the middle of an epoch, `fit` reads and skips the batches before
    the backup.

    With another number of workers or replicas, sums over replicas (u and v of
    `DGCMomentum`, e of `SparseLoCo`, gradient accumulators, metrics) are
    divided evenly; their totals stay the same up to rounding. `ShardedState`
    shards its state again. Other floating-point numbers that differ between
    replicas are replaced with their mean. Examples are the state of
    `SparseLoCo`'s inner optimizer, weights between synchronizations of
    `SparseLoCo`, and the statistics of `BatchNormalization`.

    Under `tfo.SparseMultiWorkerMirroredStrategy`, all workers back up and
    restore together. The folder must be on a file system that all workers
    share. The first worker writes the values that are equal on all replicas,
    and each worker writes the other values of its replicas. The previous backup
    is deleted only once the new backup is complete. Checksums are verified
    before a backup is restored. Backups contain no code.

    If any worker gets SIGTERM, for example before its machine is preempted, all
    workers stop at the same point, back up, and exit with code 143. To resume,
    start the script again. With `--max-restarts`, the launcher does so, unless
    the launcher itself got a signal.

    A resumed epoch uses the same batches as an uninterrupted epoch if the data
    of an epoch do not depend on earlier epochs. So use `shuffle=False`, or a
    `tf.data.Dataset.shuffle` with a `seed` and
    `reshuffle_each_iteration=False`. If `steps_per_epoch` spreads a dataset
    over several epochs, a resumed run reads the dataset from its beginning, as
    with Keras's own `initial_epoch`.

    A constant learning rate is part of the state. If you have changed the rate
    in the script since the backup was made, `fit` uses the new rate, and warns.

    Keras calls callbacks in the order of their list. Put callbacks that change
    the model at the end of an epoch, such as `ReduceLROnPlateau`, before
    `BackupAndRestore`. Put `SwapEMAWeights` after `BackupAndRestore`. `fit`
    calls the other callbacks for skipped batches, too.

    Random numbers of Keras's layers continue where they stopped, and so do
    those of `keras.random` functions without a `seed`. Other random numbers do
    not, such as those of `tf.random`, NumPy and Python. The attributes of other
    callbacks are not backed up.

    A script may call `fit` several times with one folder. By default, a
    restarted script first repeats the calls to `fit` that had ended, and then
    resumes the interrupted call.

    Differs from `keras.callbacks.BackupAndRestore`: this callback works on
    several workers, and restores each replica's own state, random seeds and
    metrics, even in the middle of an epoch. It verifies checksums, and deletes
    only backups from the folder. It raises an error instead of backing up NaN
    or inf in weights or optimizer state. Inf is allowed in non-trainable
    variables that contain inf when `fit` begins.

    Args:
        backup_dir: str or path. A folder on a local or mounted file system,
            which no other script uses at the same time. Created if it does not
            exist.
        save_freq: "epoch" or int >= 1. "epoch" backs up at the end of every
            epoch. An integer is the number of batches from one backup to the
            next, rounded up to whole executions of `steps_per_execution`
            batches. Defaults to `"epoch"`.
        double_checkpoint: bool. Whether to also keep the previous backup. If
            the newest backup is damaged, `fit` restores the previous backup,
            and warns. Defaults to `False`.
        delete_checkpoint: bool. Whether to delete the backups once `fit` has
            ended with finite variables. A backup from a later epoch than the
            last epoch of this `fit` is kept. Defaults to `True`.
        name: str or None. The name of the run. Runs with other names in the
            same folder keep their backups. Defaults to `None`: the first `fit`
            of a process with this folder is "fit 1". Once this `fit` has ended
            and deleted its backups, the next `fit` is "fit 2", and so on. If
            the backups are kept, the next `fit` continues from them.
        on_preemption: bool. Whether SIGTERM to any worker makes all workers
            stop at the same point, back up, and exit with code 143. If the
            script has its own handler for SIGTERM, that handler is called
            instead. SIGTERM is caught only if `fit` runs in the main thread.
            Must be the same on all workers. Defaults to `True`.

    Raises:
        TypeError: If an argument or the strategy has the wrong type.
        ValueError: If an argument is outside its range. In `fit`, if the model
            or an optimizer is not built, or if a backup does not match the run:
            it has another model, optimizer or metrics, was made after more
            batches than an epoch now has, or was made in the middle of an
            execution of `steps_per_execution` batches.
        RuntimeError: In `fit`, if a backup cannot be written or read, if all
            backups are damaged, if a variable to back up is not finite, if
            weights to back up differ between replicas although they must be
            equal, if workers do not share the folder, if a worker does not use
            this callback, or if another process has made a backup of this run
            since `fit` began.
        SystemExit: With code 143, if the run stops because of SIGTERM.

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
        self._has_same_weights: bool | None = None  # None: not known yet.
        self._epoch = self._batch = self._unsaved = 0
        self._skip: Skip | None = None
        self._is_of_longer_run = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Restore the newest backup, if there is one."""
        model = self.model
        if not model.built:
            raise ValueError(
                "A model must be built to be restored. Received: "
                f"{model.name}, which is not built. Give the model an `Input`, "
                "or call the model on a batch before `fit`, in the scope of "
                "its strategy if there is one."
            )
        for name in build_optimizers(model):
            raise ValueError(
                "All optimizers of a model must be built to be restored. "
                f"Received: `{name}` of {model.name}, which is not built. "
                f"Before `fit`, call `model.{name}.build(variables)` with the "
                "variables that the optimizer updates, in the scope of the "
                "model's strategy if there is one."
            )
        state = State(model)
        self._group = replicas_of(model.distribute_strategy)
        path = os.path.realpath(self.backup_dir)
        name = self.name or f"fit {_ENDED[path] + 1}"
        ignored = _REPORTED[path] if self.name is None else ()
        folder = Folder(self.backup_dir, name, ignored)
        backups = 2 if self.double_checkpoint else 1
        self._archive = Archive(folder, state, self._group, backups)
        self._archive.check_shared()
        self._rates = Rates(model, state)
        self._unsaved, self._skip, self._is_of_longer_run = 0, None, False
        self._resumed = self._archive.newest()
        if self.name is None:
            _REPORTED[path].update(self._archive.replaced)
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
        """Plan to skip batches if the backup is from within this epoch."""
        self._forget_start()
        self._rates.note()
        self._epoch, self._batch = epoch, 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["batch"]:
            self._batch = resumed["batch"]
            self._skip = Skip(
                self.model,
                self._batch,
                lambda: self._restore_in_epoch(resumed),
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Back up every `save_freq` batches, or if the run must stop here."""
        # Keras counts an epoch's last execution as full, even if it is shorter.
        seen = min(batch + 1, self._steps or batch + 1)
        is_new = seen > self._batch  # Otherwise, the batch was skipped.
        if self._skip is not None and self._skip.remaining <= 0:
            # Callbacks may have changed the state while batches were skipped.
            self._skip.restore()
            self._skip = None
        if is_new:
            self._unsaved += seen - self._batch
            self._batch = seen
        due = self.save_freq
        is_due = not isinstance(due, str) and self._unsaved >= due
        self._save_if(is_new and is_due, is_new)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Remember the training metrics, which validation resets."""
        if self._preemption is not None:
            self._metrics_of_training = self._state.metrics()
            self._sums, self._has_same_weights = self._sums_of_weights(), None

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """If the run must stop here, restore metrics, back up and exit."""
        if self._preemption is None:
            return
        if self._has_same_weights is None:
            self._has_same_weights = self._sums == self._sums_of_weights()
        # `SwapEMAWeights` may have replaced the weights. If so, the run stops
        # only after the validation.
        if self._has_same_weights and self._preemption.reach():
            for component, value in self._metrics_of_training:
                component.assign(value)
            # While batches are skipped, the last backup is still up to date.
            self._leave(self._skip is None or self._skip.remaining <= 0)

    def _sums_of_weights(self) -> list[float]:
        """Return the sum of each trainable weight, to detect changes."""
        weights = self.model.trainable_weights
        return [float(keras.ops.sum(weight)) for weight in weights]

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Back up if `save_freq="epoch"`, or if the run must stop here."""
        is_new = self._end_epoch(epoch)
        self._save_if(is_new and self.save_freq == "epoch", is_new)

    def on_train_end(self, logs: Logs = None) -> None:
        """Back up and exit if the run must stop here; else delete backups.

        Backups are kept if `delete_checkpoint` is False, if they are from a
        longer run, or if a variable is not finite.
        """
        self._forget_start()
        self._rates.note()
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
        """End an epoch; return False if it ended before the backup's batch."""
        skip, self._skip = self._skip, None
        if skip is not None:
            skip.end()
            # An execution is `steps_per_execution` batches, but an epoch's last
            # execution may be shorter. If the length of the epoch was unknown,
            # the backup counted the last execution as full. So a few batches
            # may remain to be skipped.
            if skip.remaining >= self.model.steps_per_execution:
                # The epoch has fewer batches than before, or a callback has
                # stopped the training. The last backup is still up to date.
                if not self.model.stop_training:
                    check_batches(self._batch - skip.remaining, self._batch)
                return False
        if self.model.stop_training and self._batch < (self._steps or 0):
            self.model.reset_metrics()  # Validation may have changed them.
        else:
            self._epoch, self._batch = epoch + 1, 0
        return True

    def _save_if(self, is_due: bool, is_new: bool) -> None:
        """Back up if `is_due`, and exit if the run must stop here.

        Before an exit, a new state is backed up even if no backup is due.
        """
        if is_due:
            self._save()
        if self._preemption is not None and self._preemption.reach():
            self._leave(is_new and not is_due)

    def _leave(self, is_unsaved: bool = True) -> None:
        """Back up if `is_unsaved`, then exit together with all workers."""
        if is_unsaved:
            self._save()
        # Worker 0 must not exit before all workers have read its last message.
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            gather(self._group, "the end")
        self._warn(
            "A worker received SIGTERM. All workers exit with code "
            f"{EXIT_CODE}, after a backup in {self.backup_dir!r}. Start the "
            "script again to resume."
        )
        if self._preemption is not None:
            self._preemption.end(is_leaving=True)
        raise SystemExit(EXIT_CODE)

    def _restore(self, content: dict[str, Any]) -> None:
        for batches in gather(self._group, self._steps):
            if batches is not None:
                check_batches(batches, content["batch"])
        if content["batch"] < (self._steps or math.inf):
            steps = self.model.steps_per_execution
            check_executions(steps, content["batch"])
        self._archive.restore(content, "lasting")
        self._archive.restore_seed(content)
        change = self._rates.set(content)
        if change:
            self._warn(change)
        start_at_epoch(self.model, content["epoch"])
        undo_before_training(self.model, self._forget_start)
        epochs = (self.params or {}).get("epochs", math.inf)
        for message in warnings_of_lengths(content, epochs, self._steps):
            self._warn(message)
        # A backup from after the end of this `fit` belongs to a longer run. In
        # this case, `fit` takes no step, and does not delete the backup.
        seen = content["epoch"], content["batch"]
        self._is_of_longer_run = seen > (epochs, 0)

    def _restore_in_epoch(self, content: dict[str, Any]) -> None:
        """Restore the state again, and the metrics, in the resumed epoch.

        Callbacks may have changed the state since `fit` began, for example the
        learning rate. Keras resets the metrics when an epoch begins.
        """
        self._archive.restore(content, "lasting")
        self._rates.set(content)
        self._archive.restore(content, "metrics")

    def _forget_start(self) -> None:
        """Make the next `fit` start at its own `initial_epoch` again."""
        cancel_undoing(self.model)
        start_at_epoch(self.model, None)

    def _warn(self, message: str) -> None:
        if self._group.worker == 0:
            warnings.warn(message, stacklevel=4)

    @property
    def _steps(self) -> int | None:
        """The number of batches in an epoch, or None if it is unknown."""
        # A custom training loop need not set `params`.
        return (self.params or {}).get("steps")

    def _save(self) -> None:
        position = {
            "epoch": self._epoch,
            "batch": self._batch,
            "steps": self._steps,
            "rates": self._rates.given,
        }
        self._archive.save(position)
        self._unsaved = 0
