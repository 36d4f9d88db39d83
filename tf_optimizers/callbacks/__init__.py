"""Callbacks: monitors, and backups of training on several workers."""

from tf_optimizers.callbacks.backup.callback import BackupAndRestore
from tf_optimizers.callbacks.monitors import OffloadMonitor, ShardingMonitor
from tf_optimizers.callbacks.optimizer_monitors import (
    CompressionMonitor,
    TrustRatioMonitor,
)

__all__ = [
    "BackupAndRestore",
    "CompressionMonitor",
    "OffloadMonitor",
    "ShardingMonitor",
    "TrustRatioMonitor",
]
