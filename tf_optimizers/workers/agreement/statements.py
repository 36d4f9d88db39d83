"""Compares statements (JSON values) of all workers.

Workers with different graphs would wait for each other forever, in different
collectives. So workers first compare their settings, through TensorFlow's
coordination service. The service needs no collective, and detects dead workers.
"""

import contextlib
import itertools
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.workers._compat import coordination
from tf_optimizers.workers.agreement.watchdog import has_gone_on

START_THE_SAME = (
    "See the output of all workers, and start the same script with the same "
    "arguments on every worker, from the same checkpoint."
)
_SAME_BATCHES = "Draw the same number of batches on every worker."
_MORE_SECONDS = (
    "If a worker is only late, raise the strategy's `agreement_seconds`."
)
# Seconds between health checks of a silent worker, and the timeout of a check.
_ASKING_SECONDS = 5.0
ANSWERING_SECONDS = 10.0
# Seconds until a waiting worker shows a warning.
_PATIENCE_SECONDS = 60.0
# Seconds to wait for a write, and for all workers to raise an error together.
# A first worker that has begun late also has this many extra seconds to answer.
_LISTENING_SECONDS = 10.0

# Names of the calls that this worker is making alone.
_alone: list[str] = []
_serial = itertools.count()
_disagreements = itertools.count()


def gather_statements(
    strategy: Any,
    subject: str,
    statement: Any,
    hint: str = START_THE_SAME,
    rule: str | None = None,
) -> list[Any]:
    """Exchange statements between workers; return them in worker order.

    Every worker must make the same calls, in the same order. The first worker
    collects the statements, and sends them to all workers.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        subject: The subject of the statement, for errors.
        statement: This worker's statement, a nest of JSON values. Other values
            are replaced by the name of their class.
        hint: Advice for the error if a worker does not make this call, or makes
            another call. Defaults to `START_THE_SAME`.
        rule: The first sentence of an error. Defaults to `None`: all workers
            must reach the subject.

    Raises:
        RuntimeError: If, with several workers, a worker makes no statement in
            time, or a statement about another subject; or if this worker calls
            the function within `acting_alone`.
        tf.errors.OpError: If a worker has died or cannot be reached.
    """
    if strategy.extended.workers == 1:
        return [statement]
    rule = rule or f"All workers must reach {subject}."
    if _alone:
        raise RuntimeError(
            f"{rule} Received: a call by {_alone[-1]}, which runs on one "
            "worker only. Make the call on every worker."
        )
    note = json.dumps(
        [subject, statement], default=lambda value: type(value).__name__
    )
    notes = _gather(strategy, note, f"{subject}. {hint}")
    absent = [
        f"worker {i}{'' if note is None else ' (waiting in another exchange)'}"
        for i, note in enumerate(notes)
        if not note
    ]
    if absent:
        how, remedy = "", _SAME_BATCHES
        if None in notes:
            how = f" within {strategy.agreement_seconds:g} s"
            remedy = _MORE_SECONDS
        raise RuntimeError(
            f"{rule} Received nothing from {', '.join(absent)}{how}. {hint} "
            f"{remedy}"
        )
    received = [json.loads(note) for note in notes if note]
    for other, (others_subject, _) in enumerate(received):
        if others_subject != received[0][0]:
            raise_together(
                f"{rule} Received: worker 0 has reached {received[0][0]}, "
                f"worker {other} has reached {others_subject}. {hint}"
            )
    return [statement for _, statement in received]


@contextlib.contextmanager
def acting_alone(name: str) -> Iterator[None]:
    """With several workers, make `gather_statements` raise in this context.

    Args:
        name: The call that this worker makes alone, for the error message.
    """
    _alone.append(name)
    try:
        yield
    finally:
        _alone.pop()


def _gather(strategy: Any, note: str, purpose: str) -> Sequence[str | None]:
    """Exchange strings between workers; return None for a missing string.

    The string of a worker that waits elsewhere is empty; see `has_gone_on`. If
    the first worker does not answer, the list is `[None]` or `[""]`.
    """
    extended, timeout = strategy.extended, strategy.agreement_seconds
    worker, serial = extended.worker_index, next(_serial)
    prefix = f"tf_optimizers/{serial}"
    until = time.monotonic() + timeout

    def wait_for(who: str, key: str, other: int, until: float) -> str | None:
        warning = f"Waiting for {who} to reach {purpose}"
        return _wait(extended, other, f"{prefix}/{key}", until, warning)

    if worker == 0:
        coordination.write(f"{prefix}/0", note)
        notes = [
            wait_for(f"worker {other}", str(other), other, until)
            for other in range(extended.workers)
        ]
        coordination.write(f"{prefix}/all", json.dumps(notes))
        if serial:
            # Workers that make this call have read the previous call's notes.
            coordination.delete(f"tf_optimizers/{serial - 1}")
        return notes
    # Write and read in parallel, so that both together take one round trip.
    finish_writing = _start_to_write(f"{prefix}/{worker}", note)
    answer = wait_for("all workers", "all", 0, until)
    finish_writing()
    if answer is None:
        # If the first worker began late, it may still wait for other workers.
        if wait_for("worker 0", "0", 0, until + _ASKING_SECONDS) is None:
            return [None]
        until += timeout + _LISTENING_SECONDS
        answer = wait_for("all workers", "all", 0, until)
    return json.loads(answer) if answer else [answer]


def _start_to_write(key: str, text: str) -> Callable[[], None]:
    """Write a string in a thread; return a function that waits for the write.

    The returned function raises the write's error, if there is one. It waits at
    most `_LISTENING_SECONDS`, since a write has no timeout, and blocks while
    the first worker is suspended or cannot be reached.
    """
    errors: list[tf.errors.OpError] = []

    def write() -> None:
        try:
            coordination.write(key, text)
        except tf.errors.OpError as error:
            errors.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()

    def finish() -> None:
        thread.join(_LISTENING_SECONDS)
        if errors:
            raise errors[0]

    return finish


def _wait(
    extended: Any, worker: int, key: str, until: float, warning: str
) -> str | None:
    """Return the string that a worker writes, or None after `until`.

    While waiting, check every few seconds that the worker answers. If the
    worker does not answer, raise TensorFlow's error. If the worker waits
    elsewhere, return an empty string; see `has_gone_on`.
    """
    patience = time.monotonic() + _PATIENCE_SECONDS
    while True:
        left = until - time.monotonic()
        text = coordination.read(key, max(min(left, _ASKING_SECONDS), 0.1))
        if text is not None or left <= _ASKING_SECONDS:
            return text
        if has_gone_on(extended, worker):
            return ""
        coordination.check_alive(extended.tasks[worker], ANSWERING_SECONDS)
        if time.monotonic() > patience:
            # By default, Python shows the same warning only once.
            warnings.warn(warning, stacklevel=2)


def check_equal(
    subject: str,
    statements: Sequence[dict[str, Any]],
    hint: str = START_THE_SAME,
    rule: str | None = None,
    shown: dict[str, str] | None = None,
) -> None:
    """Raise on every worker unless all statements are equal.

    Args:
        subject: The subject of the statements.
        statements: The results of `gather_statements`: for each worker, a
            dictionary of values by name.
        hint: The last sentences of the error message. Defaults to
            `START_THE_SAME`.
        rule: The first sentence of the error message. Defaults to `None`: all
            workers must agree on the subject.
        shown: For names in `statements`, the names to show in the error
            message. Defaults to `None`: the message shows the same names.
    """
    rule = rule or f"All workers must agree on {subject}."
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
    """Raise a `RuntimeError` once all workers have called this function.

    Wait for the other workers at most `_LISTENING_SECONDS`.
    """
    # Worker 0 hosts the key-value store, so it must not exit while others read
    # from the store.
    with contextlib.suppress(tf.errors.OpError):
        key = f"tf_optimizers/disagreement/{next(_disagreements)}"
        coordination.meet(key, _LISTENING_SECONDS)
    raise RuntimeError(message)
