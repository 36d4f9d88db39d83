"""DGCMomentum under a strategy, fed with a gradient per replica."""

import keras
import numpy as np
import tensorflow as tf

import tf_optimizers as tfo


class Run:
    """An optimizer and its variables under a strategy.

    Args:
        strategy: Of any kind.
        values: What the variables start from, by name.
        learning_rate: Of the optimizer.
        kwargs: Of the optimizer; every variable is compressed by default.
    """

    def __init__(self, strategy, values, learning_rate=0.1, **kwargs):
        self.strategy = strategy
        with strategy.scope():
            self.variables = [
                keras.Variable(np.array(value, "float32"), name=name)
                for name, value in values.items()
            ]
            kwargs = {"min_compress_size": 1} | kwargs
            self.optimizer = tfo.DGCMomentum(learning_rate, **kwargs)
            self.optimizer.build(self.variables)
        self._apply = tf.function(self._apply_each, autograph=False)

    def _apply_each(self, gradients):
        self.strategy.run(self.optimizer.apply, (gradients, self.variables))

    def step(self, gradients, eager=False):
        """Apply `gradients[replica][variable]`, NumPy arrays."""
        per_replica = [
            self.strategy.experimental_distribute_values_from_function(
                lambda context, i=i: tf.constant(
                    gradients[context.replica_id_in_sync_group][i]
                )
            )
            for i in range(len(self.variables))
        ]
        (self._apply_each if eager else self._apply)(per_replica)

    def weights(self):
        return [variable.numpy() for variable in self.variables]

    def memory(self, name):
        """Return u ("momentum") or v ("residual"): [variable][replica]."""
        return [
            [
                component.numpy()
                for component in self.strategy.experimental_local_results(
                    getattr(memory, name).value
                )
            ]
            for memory in self.optimizer._memories
        ]


def make_gradients(step, shapes, replicas, seed=0):
    """Return the 1/N-scaled gradients of a step: [replica][variable]."""
    rng = np.random.default_rng([seed, step])
    return [
        [
            (rng.standard_normal(shape) / replicas).astype("float32")
            for shape in shapes
        ]
        for _ in range(replicas)
    ]
