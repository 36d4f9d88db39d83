"""By which rule saved u and v were made, which the other does not read.

With the rate in the momentum they are changes of weights, without it sums of
gradients. What says nothing of it is older, and has sums of gradients.
"""

from typing import Any

import numpy as np

from tf_optimizers._compat.keras import VARIABLES

MARK = "rate_in_momentum"
# What checkpoints call the variables, with the rate in the momentum.
CHECKPOINT_NAMES = {False: VARIABLES, True: "variables_with_rate"}


def check_saved(here: bool, there: bool) -> None:
    """Refuse state that was saved by the other rule."""
    if here != there:
        raise ValueError(
            "`rate_in_momentum` must be what the state was saved with. "
            f"Received: {MARK}={here}, and the state of an optimizer with "
            f"{MARK}={there}. Pass `{MARK}={there}`, or load the weights alone."
        )


def write_mark(store: Any) -> None:
    """Say in a store of Keras that the rate is in the momentum."""
    store[MARK] = np.array(True)


def without_mark(store: Any, here: bool) -> dict[str, Any]:
    """Return the variables of a store of Keras that is of this rule."""
    names = list(store.keys())
    check_saved(here, MARK in names)
    return {name: store[name] for name in names if name != MARK}
