"""Compares what workers state outside of steps, and must agree on.

Workers with different graphs wait for each other in different collectives,
forever. So they compare first, through TensorFlow's coordination service: it
needs no collective, and notices a worker that is silent.
"""

import concurrent.futures
import contextlib
import itertools
import json
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.workers._compat import coordination

START_ALIKE = (
    "See their output, and start the same script with the same arguments on "
    "every worker, from the same checkpoint."
)
# How often a silent worker is asked whether it is alive, and how long it may
# take to answer.
_ASKING_SECONDS = 5.0
_ANSWERING_SECONDS = 10.0
# After how long a warning says which worker the others wait for.
_PATIENCE_SECONDS = 60.0
# Once all have made a statement, none needs longer than this to read them.
_LISTENING_SECONDS = 10.0

_serial = itertools.count()
_disagreements = itertools.count()


def gather_statements(
    strategy: Any,
    subject: str,
    statement: Any,
    hint: str = START_ALIKE,
    rule: str | None = None,
) -> list[Any]:
    """Return the statements of all workers, by worker.

    Every worker must call this equally often, in the same order. The first
    one collects the statements, and passes them on to all.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        subject: What the statement is about.
        statement: Anything that JSON can hold; for other values in it, the
            name of their class is sent.
        hint: What to do if a worker does not reach the subject.
        rule: How an error begins; None means that all must reach the subject.

    Raises:
        RuntimeError: If a worker makes no statement in time, or one about
            another subject.
        tf.errors.OpError: If a worker has died.
    """
    if strategy.extended.workers == 1:
        return [statement]
    note = json.dumps(
        [subject, statement], default=lambda value: type(value).__name__
    )
    notes = _gather(strategy, note, f"{subject}. {hint}")
    absent = [f"worker {i}" for i, note in enumerate(notes) if note is None]
    rule = rule or f"All workers must reach {subject}."
    if absent:
        raise RuntimeError(
            f"{rule} Received nothing from {', '.join(absent)} in "
            f"{strategy.agreement_seconds:g} s. {hint} If it is only late, "
            "raise the strategy's `agreement_seconds`."
        )
    received = [json.loads(note) for note in notes if note is not None]
    for other, (others_subject, _) in enumerate(received):
        if others_subject != received[0][0]:
            raise_together(
                f"{rule} Received: worker 0 has reached {received[0][0]}, "
                f"worker {other} has reached {others_subject}. {hint}"
            )
    return [statement for _, statement in received]


def _gather(strategy: Any, note: str, purpose: str) -> Sequence[str | None]:
    """Return the notes of all workers, None for those that wrote none."""
    worker, tasks = strategy.extended.worker_index, strategy.extended.tasks
    timeout = strategy.agreement_seconds
    serial = next(_serial)
    prefix = f"tf_optimizers/{serial}"
    until = time.monotonic() + timeout

    def wait_for(who: str, key: str, other: int, until: float) -> str | None:
        return _wait(
            f"Waiting for {who} to reach {purpose}",
            lambda seconds: coordination.read(f"{prefix}/{key}", seconds),
            lambda: coordination.check_alive(tasks[other], _ANSWERING_SECONDS),
            until,
        )

    if worker == 0:
        coordination.write(f"{prefix}/0", note)
        notes = [
            wait_for(f"worker {other}", str(other), other, until)
            for other in range(len(tasks))
        ]
        coordination.write(f"{prefix}/all", json.dumps(notes))
        if serial:  # All workers are here, so they have read what was before.
            coordination.delete(f"tf_optimizers/{serial - 1}")
        return notes
    # What this worker says and its question travel at once: one round trip.
    with concurrent.futures.ThreadPoolExecutor(1) as writer:
        written = writer.submit(coordination.write, f"{prefix}/{worker}", note)
        answer = wait_for("all workers", "all", 0, until)
        written.result()
    if answer is None:
        # If the first worker has come late, it still waits for others.
        if wait_for("worker 0", "0", 0, until + _ASKING_SECONDS) is None:
            return [None]
        until += timeout + _LISTENING_SECONDS
        answer = wait_for("all workers", "all", 0, until)
    return [None] if answer is None else json.loads(answer)


def _wait(
    warning: str,
    read: Callable[[float], str | None],
    check_alive: Callable[[], None],
    until: float,
) -> str | None:
    """Return what `read` returns, or None when time is up."""
    patience = time.monotonic() + _PATIENCE_SECONDS
    while True:
        left = until - time.monotonic()
        text = read(max(min(left, _ASKING_SECONDS), 0.1))
        if text is not None or left <= _ASKING_SECONDS:
            return text
        check_alive()
        if time.monotonic() > patience:  # Python shows it once.
            warnings.warn(warning, stacklevel=2)


def check_agreement(
    strategy: Any,
    subject: str,
    statement: dict[str, Any],
    hint: str = START_ALIKE,
    rule: str | None = None,
    shown: dict[str, str] | None = None,
) -> None:
    """Raise on every worker unless all make the same statement.

    The arguments are those of `gather_statements`; `statement` maps the name of
    each value to it, and `shown` such names to those that this worker's user
    knows.
    """
    statements = gather_statements(strategy, subject, statement, hint, rule)
    check_alike(subject, statements, hint, rule, shown)


def check_alike(
    subject: str,
    statements: Sequence[dict[str, Any]],
    hint: str = START_ALIKE,
    rule: str | None = None,
    shown: dict[str, str] | None = None,
) -> None:
    """Raise on every worker unless all have made the same statement."""
    rule = rule or f"All workers must have {subject} in common."
    first, *others = statements
    for worker, other in enumerate(others, 1):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                called = (shown or {}).get(name, name)
                raise_together(
                    f"{rule} Received: {called}={first.get(name)!r} on worker "
                    f"0, {called}={other.get(name)!r} on worker {worker}. "
                    f"{hint}"
                )


def raise_together(message: str) -> None:
    """Raise an error that all workers have found, once all are here."""
    # A worker that raised at once might end the store that the others read.
    with contextlib.suppress(tf.errors.OpError):
        key = f"tf_optimizers/disagreement/{next(_disagreements)}"
        coordination.meet(key, _LISTENING_SECONDS)
    raise RuntimeError(message)
