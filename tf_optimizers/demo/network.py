"""The network that classifies the digits."""

from functools import lru_cache

import keras
import numpy as np

HIDDEN_UNITS = (128, 128)
# The name of the last layer, for which Muon uses AdamW.
LAST = "logits"


def build_model(
    seed: int, hidden_units: tuple[int, ...] = HIDDEN_UNITS
) -> keras.Model:
    """Return the network with the initial weights of `seed`."""
    widths = (*hidden_units, 10)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    for layer, width in enumerate(widths):
        is_last = layer == len(hidden_units)
        model.add(
            keras.layers.Dense(
                width,
                activation=None if is_last else "relu",
                name=LAST if is_last else None,
                kernel_initializer=keras.initializers.HeNormal(
                    seed=seed * len(widths) + layer
                ),
            )
        )
    return model


@lru_cache
def initial_weights(
    seed: int, hidden_units: tuple[int, ...] = HIDDEN_UNITS
) -> list[np.ndarray]:
    """Return the initial weights of `seed`, the same for every optimizer."""
    return build_model(seed, hidden_units).get_weights()
