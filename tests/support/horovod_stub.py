"""`horovod.tensorflow.keras`, with the names that docs/horovod.md uses.

Names and arguments are those of Horovod 0.28. Nothing is exchanged: a process
has any rank and size that a test gives it.
"""

import sys
import types

import keras

_world = {}


def install(monkeypatch, rank, size):
    """Make this module importable as Horovod, before `hvd.init()`."""
    parents = {
        name: types.ModuleType(name)
        for name in ("horovod", "horovod.tensorflow")
    }
    modules = parents | {"horovod.tensorflow.keras": sys.modules[__name__]}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    _world.clear()
    _world["later"] = {"rank": rank, "size": size}


def init():
    _world.update(_world["later"])


def rank():
    return _world["rank"]  # As in Horovod, an error before `init`.


def size():
    return _world["size"]


def DistributedOptimizer(optimizer, name=None):  # noqa: N802
    return optimizer


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    def __init__(self, root_rank, device="", local_variables=None):
        super().__init__()
        assert 0 <= root_rank < size()


class MetricAverageCallback(keras.callbacks.Callback):
    def __init__(self, device=""):
        super().__init__()


class LearningRateWarmupCallback(keras.callbacks.Callback):
    def __init__(self, initial_lr, warmup_epochs=5):
        super().__init__()
        self._rate, self._epochs = initial_lr, warmup_epochs

    def on_epoch_begin(self, epoch, logs=None):
        done = min(1, epoch / self._epochs)
        share = (1 + (size() - 1) * done) / size()
        self.model.optimizer.learning_rate = self._rate * share


callbacks = types.SimpleNamespace(
    BroadcastGlobalVariablesCallback=BroadcastGlobalVariablesCallback,
    MetricAverageCallback=MetricAverageCallback,
    LearningRateWarmupCallback=LearningRateWarmupCallback,
)
