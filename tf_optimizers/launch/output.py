"""The workers' output: whole lines, each behind its worker's prefix."""

import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO

CHUNK_BYTES = 1 << 16
# How long the output of a worker that is gone may pause, in milliseconds.
PAUSE = 200
# How long the launcher's own last line may take, in seconds.
LAST_LINE = 2


class Output:
    """The launcher's own stdout and stderr, shared line by line.

    Args:
        wake: called when a stream has ended, and when a line cannot be
            written. All later lines to the same place are dropped, as a
            worker whose output nobody takes would wait for ever.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.error: OSError | None = None
        self.wake = wake
        self._lost: set[IO[str]] = set()
        out, err = sys.stdout, sys.stderr
        lock = threading.Lock()
        # With `2>&1`, a long line to one could else end up inside of another.
        same = os.path.sameopenfile(out.fileno(), err.fileno())
        self._locks = {out: lock, err: lock if same else threading.Lock()}
        reader, self._own = os.pipe()
        self._forwarder = Forwarder(
            open(reader, "rb", 0), "[launcher] ", self, err
        )

    def say(self, text: str) -> None:
        """Write a line of the launcher's own to stderr, not waiting for it."""
        os.write(self._own, f"{text}\n".encode())

    def write(self, stream: IO[str], line: bytes) -> None:
        """Write all of a line to the file under `stream`."""
        with self._locks[stream]:
            if stream in self._lost:
                return
            try:
                _write_all(stream.fileno(), line)
            except OSError as error:
                self._lost.add(stream)
                self.error = error
                self.wake()

    def close(self) -> None:
        """Wait a little for what was said."""
        os.close(self._own)
        self._forwarder.join(LAST_LINE)


class Forwarder(threading.Thread):
    """A running thread that takes one stream of one worker to the output."""

    def __init__(
        self, source: IO[bytes], prefix: str, output: Output, stream: IO[str]
    ) -> None:
        # A daemon: a terminal that takes no output must not keep us.
        super().__init__(daemon=True)
        self.is_done = False
        self._source = source
        self._prefix = prefix.encode()
        self._output = output
        self._stream = stream
        self._no_more = threading.Event()
        self.start()

    def run(self) -> None:
        """Forward the stream to its end."""
        try:
            with self._source:
                for line in whole_lines(self._chunks()):
                    line = self._prefix + line + b"\n"
                    self._output.write(self._stream, line)
        finally:
            self.is_done = True
            self._output.wake()

    def finish(self) -> None:
        """Forward what there is, and wait for no more."""
        self._no_more.set()

    def _chunks(self) -> Iterator[bytes]:
        poll = select.poll()
        poll.register(self._source)
        while True:
            if poll.poll(PAUSE):
                chunk = os.read(self._source.fileno(), CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk
            # A process that left the worker's session can hold a stream open.
            elif self._no_more.is_set():
                return


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the lines of a stream without their ends: \n, \r or \r\n.

    The last line may lack its end. Nothing in front of a \r is no line: some
    progress bars write \r before each state, some behind.
    """
    line = bytearray()
    after_return = False
    for chunk in chunks:
        for piece in chunk.splitlines(keepends=True):
            if after_return and piece == b"\n":
                after_return = False
                continue
            line += piece.rstrip(b"\r\n")
            after_return = piece.endswith(b"\r") and bool(line)
            if piece.endswith(b"\n") or after_return:
                yield bytes(line)
                line.clear()
    if line:
        yield bytes(line)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view) :]
        except BlockingIOError:  # Somebody has made our stdout non-blocking.
            select.select([], [file], [])
