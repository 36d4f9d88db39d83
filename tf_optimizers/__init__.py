"""Optimizers for Keras 3 where plain Adam on one machine is not enough."""

from tf_optimizers import callbacks, schedules
from tf_optimizers.adam_offload import AdamOffload
from tf_optimizers.dgc_momentum import DGCMomentum
from tf_optimizers.distribute.strategy import SparseMultiWorkerMirroredStrategy
from tf_optimizers.lamb import Lamb
from tf_optimizers.lans import LANS
from tf_optimizers.weight_decay import BIAS_AND_NORM

__version__ = "0.1.0"

__all__ = [
    "BIAS_AND_NORM",
    "AdamOffload",
    "DGCMomentum",
    "LANS",
    "Lamb",
    "SparseMultiWorkerMirroredStrategy",
    "callbacks",
    "schedules",
]
