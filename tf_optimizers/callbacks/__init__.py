"""Callbacks for training on several workers."""

from tf_optimizers.callbacks.backup import BackupAndRestore

__all__ = ["BackupAndRestore"]
