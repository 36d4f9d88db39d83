"""Notes whether steps of `fit` exchange values in the middle of a round.

An optimizer with local steps exchanges values only at the end of a round; see
`local_rounds.py`. But other code in a step may exchange values in every step,
for example a loss that is divided by the sum of a mask, a synchronized
`BatchNormalization`, a variable with `aggregation="mean"`, or an output with an
element for each row.
"""

from typing import Any

import tensorflow as tf

from tf_optimizers.workers.collectives.all_reduce import (
    SparseCollectiveAllReduce,
)
from tf_optimizers.workers.collectives.launcher import KeyedLauncher
from tf_optimizers.workers.data.local_rounds import waits_of_fit
from tf_optimizers.workers.steps.replica_state import replica
from tf_optimizers.workers.steps.share import check_function


class _Launcher(KeyedLauncher):
    def _run(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        check_function()
        note_exchange()
        return super()._run(*args, **kwargs)


class NotedCollectives(SparseCollectiveAllReduce):
    """The collectives of the main channel; each calls `note_exchange`."""

    launcher = _Launcher


def note_exchange() -> None:
    """Set the variable from `waits_of_fit` to True, if there is one.

    Exchanges of an optimizer do not count.
    """
    waits = waits_of_fit() if replica.waits is None else replica.waits
    if waits is not None and not replica.is_applying:
        # Assign now, before the traced step runs for the first time.
        with tf.init_scope():
            waits.assign(True)
