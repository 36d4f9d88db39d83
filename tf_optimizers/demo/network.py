"""The network that classifies the digits."""

from functools import lru_cache

import keras
import numpy as np

HIDDEN_UNITS = (128, 128)


def build_model(
    seed: int, hidden_units: tuple[int, ...] = HIDDEN_UNITS
) -> keras.Model:
    """Return the network with the initial weights of `seed`."""
    widths = (*hidden_units, 10)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    for layer, width in enumerate(widths):
        model.add(
            keras.layers.Dense(
                width,
                activation="relu" if layer < len(hidden_units) else None,
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
