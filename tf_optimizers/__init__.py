"""Keras 3 optimizers for training that has outgrown Adam on one machine."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_optimizers import callbacks, schedules
    from tf_optimizers.adam_offload import AdamOffload
    from tf_optimizers.base.exclusions import BIAS_AND_NORM
    from tf_optimizers.dgc_momentum import DGCMomentum
    from tf_optimizers.lamb import Lamb
    from tf_optimizers.lans import LANS
    from tf_optimizers.sharded_state import ShardedState
    from tf_optimizers.sparse_loco import SparseLoCo
    from tf_optimizers.workers.strategy import SparseMultiWorkerMirroredStrategy

__version__ = "0.2.0"

__all__ = [
    "BIAS_AND_NORM",
    "AdamOffload",
    "DGCMomentum",
    "LANS",
    "Lamb",
    "ShardedState",
    "SparseLoCo",
    "SparseMultiWorkerMirroredStrategy",
    "callbacks",
    "schedules",
]

_MODULES = {
    "BIAS_AND_NORM": "base.exclusions",
    "AdamOffload": "adam_offload",
    "DGCMomentum": "dgc_momentum",
    "LANS": "lans",
    "Lamb": "lamb",
    "ShardedState": "sharded_state",
    "SparseLoCo": "sparse_loco",
    "SparseMultiWorkerMirroredStrategy": "workers.strategy",
    "callbacks": "callbacks",
    "schedules": "schedules",
}
# Import these names on first access: the optimizers must work without the
# private modules of `tf.distribute` that only the strategy needs. Import all
# other names immediately, because Keras can load a saved object only after the
# module of its class is imported.
_LATER = ("SparseMultiWorkerMirroredStrategy", "callbacks")


def _load(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if _MODULES[name] != name:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _runs_command() -> bool:
    """Return whether Python is about to run one of our commands with `-m`.

    Python then imports the package before the command, and this import must not
    load TensorFlow. The launcher does not need TensorFlow, and the demo shows
    its progress before it loads TensorFlow. While Python looks for the command,
    `sys.argv` begins with "-m".
    """
    commands = ("tf_optimizers.launch", "tf_optimizers.demo")
    return sys.argv[:1] == ["-m"] and any(
        argument.endswith(commands) for argument in sys.orig_argv
    )


if not TYPE_CHECKING:  # With `__getattr__`, a type checker accepts any name.
    __getattr__ = _load

if not _runs_command():
    for _name in _MODULES:
        if _name not in _LATER:
            _load(_name)
