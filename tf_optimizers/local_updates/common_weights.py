"""Makes weights equal on all replicas before Keras reads them."""

import functools
import math
import warnings
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Logs
from tf_optimizers._compat.hooks import check_saving, insert_callback
from tf_optimizers._compat.keras_internals import layers_of
from tf_optimizers._compat.patches import LOCAL_STEPS, check_names
from tf_optimizers.local_updates.sparse_loco_checks import (
    check_layers,
    check_synchronized,
)
from tf_optimizers.replicas import replicas_of
from tf_optimizers.wrapped import local_steppers, sparse_locos_of

# A run with fewer rounds may end before most updates have been sent.
_FEWEST_ROUNDS = 100


@functools.cache
def watch_models() -> None:
    """Make Keras add each callback below to the models that need it.

    Also make `Model.save`, `save_weights` and `export` check the weights first.
    """
    check_names(LOCAL_STEPS)
    insert_callback(EnoughRounds, lambda model: bool(sparse_locos_of(model)))
    insert_callback(CommonWeights, lambda model: bool(local_steppers(model)))
    check_saving(_check_saved)


def _check_saved(model: keras.Model) -> None:
    for optimizer in local_steppers(model):
        check_synchronized(optimizer)


class CommonWeights(keras.callbacks.Callback):
    """Synchronizes weights after epochs, and before evaluation and prediction.

    Also averages the moving statistics of `BatchNormalization`, unless the
    strategy itself does so.
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        """Raise if replicas would start rounds from different weights."""
        check_layers(layers_of(self.model))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Synchronize weights before other callbacks read them."""
        self._synchronize()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Synchronize weights before an evaluation, alone or in `fit`."""
        self._synchronize()

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Synchronize weights before a prediction."""
        self._synchronize()

    def _synchronize(self) -> None:
        for optimizer in local_steppers(self.model):
            optimizer.synchronize(_statistics(self.model))


class EnoughRounds(keras.callbacks.Callback):
    """Warns if a run has too few rounds to send most of its updates.

    A round is `sync_every` local steps on each replica, followed by an
    exchange. The end of an epoch also ends the round.
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        """Make the next epoch check the run."""
        self._is_checked = False

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Check the run once, if the number of batches per epoch is known."""
        batches = self.params.get("steps")
        if self._is_checked or batches is None:
            return
        self._is_checked = True
        epochs = self.params["epochs"] - epoch
        rounds, sync_every = min(
            (_rounds_of(optimizer, epochs, batches), optimizer.sync_every)
            for optimizer in sparse_locos_of(self.model)
        )
        worker = replicas_of(self.model.distribute_strategy).worker
        if rounds < _FEWEST_ROUNDS and worker == 0:
            lower = "`sync_every` or `sparsity`"
            warnings.warn(
                "A run of `SparseLoCo` with fewer than 100 synchronizations "
                f"may leave many updates unsent. Received: {rounds}, with "
                f"sync_every={sync_every}. To send most updates before the "
                f"run ends, lower {lower if sync_every > 1 else '`sparsity`'}, "
                "or train longer.",
                stacklevel=2,
            )


def _rounds_of(optimizer: Any, epochs: int, batches: int) -> int:
    """Return the number of rounds so far and in `epochs` more epochs.

    `batches` is the number of batches per epoch.
    """
    before = int(tf.convert_to_tensor(optimizer.iterations))
    each = optimizer.gradient_accumulation_steps or 1
    per_epoch = math.ceil(batches / (each * optimizer.sync_every))
    coming = min(epochs * batches // each, epochs * per_epoch)
    return math.ceil(before / optimizer.sync_every) + coming


def _statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the statistics of `BatchNormalization`, even of frozen layers.

    A step that was traced before a layer was frozen still changes the layer's
    statistics. Under `SparseMultiWorkerMirroredStrategy`, the list is empty,
    because the strategy itself averages the statistics.
    """
    if replicas_of(model.distribute_strategy).averages_statistics:
        return []
    return [
        variable
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
