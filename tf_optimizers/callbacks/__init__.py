"""Callbacks: monitors, and backups of training on several workers."""

from tf_optimizers.callbacks.backup import BackupAndRestore
from tf_optimizers.callbacks.compression_monitor import CompressionMonitor
from tf_optimizers.callbacks.monitors import OffloadMonitor
from tf_optimizers.callbacks.trust_ratio_monitor import TrustRatioMonitor

__all__ = [
    "BackupAndRestore",
    "CompressionMonitor",
    "OffloadMonitor",
    "TrustRatioMonitor",
]
