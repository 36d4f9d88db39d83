"""Forwards the workers' output line by line; a prefix names the worker."""

import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO

CHUNK_BYTES = 1 << 16
# Once a worker is gone, its output counts as complete if nothing arrives for
# this many milliseconds.
PAUSE = 200
# The longest wait until the launcher's own last line is written, in seconds.
LAST_LINE = 2


class Output:
    """Writes whole lines of all workers to the launcher's stdout and stderr.

    After a failed write, later lines for the same stream are read and dropped.
    If they were not read, the workers' writes would block.

    Args:
        wake: Called when a worker's stream has ended, and when a line cannot be
            written.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.error: OSError | None = None
        self.wake = wake
        self._lost: set[IO[str]] = set()
        out, err = sys.stdout, sys.stderr
        lock = threading.Lock()
        # With `2>&1`, both streams are one file. With two locks, a line could
        # be written into the middle of another line.
        same = os.path.sameopenfile(out.fileno(), err.fileno())
        self._locks = {out: lock, err: lock if same else threading.Lock()}
        reader, self._own = os.pipe()
        self._forwarder = Forwarder(
            open(reader, "rb", 0), "[launcher] ", self, err
        )

    def say(self, text: str) -> None:
        """Write one of the launcher's own lines to stderr, without waiting."""
        os.write(self._own, f"{text}\n".encode())

    def write(self, stream: IO[str], line: bytes) -> None:
        """Write a whole line to the file descriptor of `stream`."""
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
        """Wait briefly until the launcher's own lines are written."""
        os.close(self._own)
        self._forwarder.join(LAST_LINE)


class Forwarder(threading.Thread):
    """A thread that forwards one stream; the constructor starts the thread."""

    def __init__(
        self, source: IO[bytes], prefix: str, output: Output, stream: IO[str]
    ) -> None:
        # A daemon thread, since a terminal that accepts no output must not
        # prevent the launcher's exit.
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
        """Make the thread end once it has forwarded the remaining output."""
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
            # The stream may never end: a process that has left the worker's
            # process group may have it open.
            elif self._no_more.is_set():
                return


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the lines of a stream without their ends: \n, \r or \r\n.

    The last line may lack an end. An empty line that ends in \r is skipped,
    since a progress bar may write \r before each state instead of after it.
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
        except BlockingIOError:  # Another program made the file non-blocking.
            select.select([], [file], [])
