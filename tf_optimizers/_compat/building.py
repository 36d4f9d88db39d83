"""Builds models of Keras without a batch of their data."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import values

from tf_optimizers._compat.patches import replace


@functools.cache
def build_from_specs(
    is_for: Callable[[tf.distribute.Strategy], bool],
) -> None:
    """Let Keras build models of some strategies by what it knows of the data.

    From now on in this process. Keras draws a batch before `fit` and
    `evaluate`, to build the model by its mean over replicas. So a generator
    loses batches, each worker draws different ones ahead, and data that cannot
    be averaged fail. A model without `call` is built by its first step, as
    without a strategy.
    """

    def without_batch(build: Callable) -> Callable:
        @functools.wraps(build)
        def build_without_batch(
            self: Any, iterator: Any = None, data_batch: Any = None
        ) -> None:
            if not is_for(self.distribute_strategy):
                build(self, iterator=iterator, data_batch=data_batch)
                return
            if type(self).call is keras.Model.call:
                # Its `train_step` calls parts, and builds them.
                return
            if iterator is not None:
                spec = iterator._distributed_dataset.element_spec
                data_batch = tf.nest.map_structure(_symbol, spec)
                iterator = None
            build(self, iterator=iterator, data_batch=data_batch)

        return build_without_batch

    replace("_maybe_symbolic_build", without_batch)


def _symbol(spec: Any) -> keras.KerasTensor | None:
    """Return what Keras builds with in place of a value, None of None."""
    if isinstance(spec, values.PerReplicaSpec):
        spec = spec._value_specs[0]  # Of a worker's first replica.
    if not hasattr(spec, "shape"):
        return None
    dtype = keras.backend.standardize_dtype(spec.dtype)
    return keras.KerasTensor(spec.shape, dtype)
