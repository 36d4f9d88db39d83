"""Keras callbacks: backups, monitors, and `ChiefOnly` for other callbacks."""

from tf_optimizers.callbacks.backup.callback import BackupAndRestore
from tf_optimizers.callbacks.chief_only import ChiefOnly
from tf_optimizers.callbacks.monitors import (
    CompressionMonitor,
    OffloadMonitor,
    ShardingMonitor,
    TrustRatioMonitor,
)

__all__ = [
    "BackupAndRestore",
    "ChiefOnly",
    "CompressionMonitor",
    "OffloadMonitor",
    "ShardingMonitor",
    "TrustRatioMonitor",
]
