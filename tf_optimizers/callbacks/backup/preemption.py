"""Makes all workers stop at the same point once one has received SIGTERM.

    worker 0    step 10    step 11             │ back up, exit
    worker 1    step 10    step 11   SIGTERM   │ back up, exit

All workers count the points where a run can stop: after a step, an epoch, a
batch of validation, or the whole `fit`. About once a second, a thread of each
worker checks whether any worker has received SIGTERM. If so, each thread
publishes the next point that its worker will reach, and all workers stop at the
latest of these points. Until the latest point is known, each worker waits at
the next point that it reaches. Steps send no messages for this.

TensorFlow's `PreemptionCheckpointHandler` works in a similar way, but cannot be
used here: it must call each step itself, in place of `fit`, and it saves a
`tf.train.Checkpoint`, which lacks each replica's own state.
"""

import atexit
import contextlib
import inspect
import itertools
import os
import select
import signal
import sys
import threading
import time
from typing import Any

import tensorflow as tf

from tf_optimizers.forks import restore_in_forks
from tf_optimizers.replicas import ReplicaGroup

# A shell reports this exit code for a process that SIGTERM killed.
EXIT_CODE = 128 + signal.SIGTERM
_LOOKING_SECONDS = 1.0  # Time between two checks for SIGTERM to any worker.
_READING_SECONDS = 0.2  # The timeout for reading one published value.
_WAITING_SECONDS = 60.0  # The longest wait for the points of all workers.

_serial = itertools.count()
_running: "Preemption | None" = None


class Preemption:
    """Catches SIGTERM during one `fit`, and finds the point at which to stop.

    SIGTERM is caught only if `fit` runs in the main thread, and if the script
    has set no handler for SIGTERM.

    Args:
        group: The replicas. All workers must create their `Preemption` objects
            in the same order.

    Attributes:
        is_asked: Whether this worker has received SIGTERM.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self.is_asked = False
        self._group = group
        # Only a `fit` on several workers gets a number, so that each `fit` has
        # the same number on all of its workers.
        self._prefix = (
            f"preemption/{next(_serial)}" if group.workers > 1 else ""
        )
        self._lock = threading.Lock()
        self._passed = 0
        self._is_at_end = self._has_stated = self._is_over = False
        self._last: int | None = None
        self._decided = threading.Event()
        self._is_catching = False
        # This process's PID, once `end(is_leaving=True)` has been called.
        self._leaving: int | None = None

    def begin(self) -> None:
        """Catch SIGTERM from now on, and watch for SIGTERM to other workers."""
        global _running
        if _running is not None:
            _running.end()  # For example, an exception ended its `fit`.
        _running = self
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        is_default = handler is signal.SIG_DFL or isinstance(
            getattr(handler, "__self__", None), Preemption
        )
        self._is_catching = is_main and is_default
        self._caller = _caller_of("on_train_begin")
        if self._is_catching:
            signal.signal(signal.SIGTERM, self._ask)
        if self._group.workers == 1:
            return
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        if self._is_catching:
            # Python calls no signal handler during a step, but it writes the
            # signal's number to this pipe immediately.
            self._former = signal.set_wakeup_fd(
                self._sender, warn_on_full_buffer=False
            )
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def reach(self) -> bool:
        """Count a point where the run can stop; return whether it must stop."""
        with self._lock:
            self._passed += 1
            is_open = not self._has_stated
        if self._group.workers == 1:
            return self.is_asked
        if is_open:
            return False
        self._decided.wait()
        return self._last == self._passed

    def finish(self) -> bool:
        """Count `fit`'s end as a stopping point; return whether to exit."""
        with self._lock:
            self._passed += 1
            self._is_at_end = True
            is_pending = self._has_stated or self.is_asked
        hint = "Pass the same `on_preemption` on every worker."
        statements = self._group.agree("the end of `fit`", is_pending, hint)
        if not any(statements):
            return False
        if self._group.workers > 1:
            self._decided.wait()
        return self._group.workers == 1 or self._last == self._passed

    def end(self, is_leaving: bool = False) -> None:
        """Stop the thread.

        Unless `is_leaving`, also stop catching SIGTERM. A SIGTERM that was
        caught earlier then ends the process.

        Args:
            is_leaving: Whether the process is about to exit. If so, the handler
                ignores SIGTERM from now on: the launcher sends SIGTERM once
                another worker has exited, but this worker may still run
                `finally` blocks and exit handlers.
        """
        global _running
        _running = None
        if self._group.workers > 1 and not self._is_over:
            self._is_over = True
            if self._is_catching:
                signal.set_wakeup_fd(self._former)
            os.write(self._sender, b"\0")
            self._thread.join()
            os.close(self._sender)
            os.close(self._receiver)
        if is_leaving:
            self._leaving = os.getpid()
        elif self._is_catching:
            self.release()
            if self.is_asked:
                os.kill(os.getpid(), signal.SIGTERM)

    def release(self) -> None:
        """Let SIGTERM end this process again."""
        if signal.getsignal(signal.SIGTERM) == self._ask:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _ask(self, _: int, frame: Any) -> None:
        if self._is_training(frame):
            self.is_asked = True
        elif self._leaving != os.getpid():
            # An exception has ended `fit` without `on_train_end`, or the parent
            # of this process was leaving when it forked this process.
            self.release()
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_training(self, frame: Any) -> bool:
        """Return whether `fit` or the user's training loop is on the stack."""
        while frame is not None and frame.f_code is not self._caller:
            frame = frame.f_back
        return frame is not None

    def _watch(self) -> None:
        try:
            while not self._is_over:
                self._listen()
                if self.is_asked:
                    self._group.check_alive()
                    with contextlib.suppress(tf.errors.AlreadyExistsError):
                        self._group.post(f"{self._prefix}/asked", "")
                if (
                    self._group.read(f"{self._prefix}/asked", _READING_SECONDS)
                    is None
                ):
                    continue
                self._decide()
                return
        except tf.errors.OpError:  # Another worker is gone, or is silent.
            if self.is_asked:
                # The main thread may be waiting for the other worker. A backup
                # would need all workers, so exit without a backup.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(EXIT_CODE)
        finally:
            self._decided.set()

    def _listen(self) -> None:
        """Wait up to `_LOOKING_SECONDS` for a signal; update `is_asked`.

        If the script has its own wakeup descriptor, forward the signals to it.
        """
        poll = select.poll()  # `select.select` needs descriptors below 1024.
        poll.register(self._receiver, select.POLLIN)
        if poll.poll(1000 * _LOOKING_SECONDS):
            signals = os.read(self._receiver, 4096)
            main = threading.main_thread().ident
            frame = sys._current_frames().get(main or 0)
            if signal.SIGTERM in signals and self._is_training(frame):
                self.is_asked = True
            if self._is_catching and self._former >= 0:
                os.write(self._former, signals.replace(b"\0", b""))

    def _decide(self) -> None:
        """Publish this worker's next point; find the latest of all points.

        If a point is still missing after `_WAITING_SECONDS`, this worker
        continues its run.
        """
        with self._lock:
            self._has_stated = True
            point = self._passed + (not self._is_at_end)
        self._group.post(f"{self._prefix}/{self._group.worker}", str(point))
        until = time.monotonic() + _WAITING_SECONDS
        points: list[int] = []
        while len(points) < self._group.workers:
            if self._is_over or time.monotonic() > until:
                return
            key = f"{self._prefix}/{len(points)}"
            note = self._group.read(key, _READING_SECONDS)
            if note is not None:
                points.append(int(note))
            else:
                self._group.check_alive()
        self._last = max(points)


def _caller_of(name: str) -> Any:
    """Return the code of the outermost caller of a function named `name`.

    There may be several callers, for example if the `on_train_begin` of a
    callback calls that of another callback.
    """
    frame: Any = inspect.currentframe()
    caller = None
    while frame is not None:
        if frame.f_code.co_name == name:
            caller = frame.f_back
        frame = frame.f_back
    return caller and caller.f_code


def _release_in_child() -> None:
    global _running
    if _running is not None and _running._is_catching:
        _running.release()
        signal.set_wakeup_fd(-1)
    _running = None


def _end_at_exit() -> None:
    # While Python exits, no thread may run TensorFlow code.
    running = _running
    if running is not None:
        running.end(is_leaving=True)
        # An exception has ended `fit`. TensorFlow may take seconds to shut
        # down, and Python runs no signal handlers during that time. So let
        # SIGTERM end the process.
        running.release()


# Without this, a forked child that receives SIGTERM would write to this
# process's pipe, and so end the run.
restore_in_forks(_release_in_child)
atexit.register(_end_at_exit)
