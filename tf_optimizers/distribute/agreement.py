"""What all workers must have in common, compared before they depend on it.

Workers whose graphs differ wait for each other in different collectives, for
ever. So they compare notes first, through TensorFlow's coordination service:
it needs no collective, and a worker that says nothing is noticed.
"""

import contextlib
import itertools
import json
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Coordination

# Once all have spoken, nobody needs longer than this to listen.
_LISTENING_SECONDS = 10.0

_serial = itertools.count()


def check_agreement(
    subject: str,
    statement: dict[str, Any],
    worker: int,
    workers: int,
    timeout: float,
) -> None:
    """Raise on every worker unless all make the same statement.

    Every worker must call this equally often, in the same order.

    Args:
        subject: What the statement is about.
        statement: Values by what they are. Of what JSON cannot hold, the
            class is compared.
        worker: This process.
        workers: Their number.
        timeout: Seconds to wait for the others.

    Raises:
        RuntimeError: If a worker says otherwise, or nothing in time.
    """
    store = Coordination()
    key = f"tf_optimizers/agreement/{next(_serial)}"
    mine = json.dumps({"subject": subject} | statement, default=_class_name)
    store.write(f"{key}/{worker}", mine)
    difference = None
    for other in range(workers):
        theirs = store.read(f"{key}/{other}", timeout)
        if theirs is None:
            raise RuntimeError(
                f"All workers must come to {subject}. Received nothing from "
                f"worker {other} in {timeout:g} s. See its output, and start "
                "the same script on every worker."
            )
        if difference is None and theirs != mine:
            difference = _difference(mine, worker, theirs, other)
    if difference is None:
        return
    # A worker that raised at once might take the store away from the others.
    with contextlib.suppress(tf.errors.OpError):
        store.meet(key, _LISTENING_SECONDS)
    raise RuntimeError(
        f"All workers must have {subject} in common. Received: {difference}. "
        "Start the same script with the same arguments on every worker, and "
        "restore the same checkpoint."
    )


def _difference(mine: str, worker: int, theirs: str, other: int) -> str:
    """Name the first thing that two workers say differently."""
    said, other_said = json.loads(mine), json.loads(theirs)
    name = next(
        name
        for name in [*said, *other_said]
        if said.get(name) != other_said.get(name)
    )
    return (
        f"{name}={said.get(name)!r} on worker {worker}, "
        f"{name}={other_said.get(name)!r} on worker {other}"
    )


def _class_name(value: Any) -> str:
    return type(value).__name__
