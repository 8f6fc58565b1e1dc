"""Where the outputs of a job go, and what of them counts after a crash.

A runner calls ``belongs_to`` and ``open``, then ``write_for`` for each output in order, ``snapshot`` with each
checkpoint it takes, ``flush`` of that snapshot before the checkpoint commits, ``deliver`` of it after that, and
``close``. After a crash a sink is opened with the snapshot of the last completed checkpoint, which is delivered, and
everything that was written after it is written again. An *exactly-once* sink takes back what it holds beyond that
snapshot; for that, a runner commits a first checkpoint after ``open(None)`` and before the first ``write_for``. A sink
that is not exactly once has then passed some outputs on twice.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from dalsegno.errors import DefinitionError, RestoreError, StoreError
from dalsegno.runners.lines import TAIL_BYTES, count_in, digest
from dalsegno.runners.plain_json import to_json_line, to_plain_json

try:
    import fcntl
except ImportError:  # not on Windows; there, nothing keeps two jobs from one output file
    fcntl = None  # type: ignore[assignment]

__all__ = ["CallableSink", "JsonLinesSink", "NullSink", "Sink", "StdoutSink", "open_sink", "to_plain_json"]


class Sink(ABC):
    """An ordered destination of outputs."""

    exactly_once: ClassVar[bool]
    """Whether each output counts once however often the job crashes. If not, some can be passed on again."""

    goes_back: ClassVar[bool] = True
    """Whether it can be opened with the snapshot in an older checkpoint than the last completed one."""
    checkpoint_interval: ClassVar[float | None] = None
    """Seconds between checkpoints that fit the sink, for a runner that is not given any; None: it does not matter."""

    def belongs_to(self, job: str) -> None:  # noqa: B027
        """Told before each ``open`` whose outputs these are."""

    @abstractmethod
    def describe(self) -> str:
        """Name the sink for people."""

    @abstractmethod
    def open(self, state: dict[str, Any] | None) -> None:
        """Get ready to write after ``state``, the snapshot in the last completed checkpoint (None: there is none).

        Takes back what was written after that, if the sink can. Raises RestoreError if the sink no longer holds what
        ``state`` says, and StoreError if it cannot be written to; nothing is changed then. Runs in a thread.
        """

    def check(self, output: object, output_id: str) -> None:  # noqa: B027
        """Raise DalSegnoError for an output that can never be written, while its action can still fail for that.

        Quick; runs on the event loop, from ``open`` on.
        """

    @abstractmethod
    def write(self, output: object, output_id: str) -> None:
        """Write one output; runs on the event loop, so it must be quick.

        ``output_id`` is the same in every replay. Raises StoreError if the output could not be written; it then counts
        as not written at all.
        """

    def write_for(self, key: object, output: object, output_id: str) -> None:
        """``write`` for a sink that wants to know the key of the message whose output it is."""
        self.write(output, output_id)

    @property
    def is_full(self) -> bool:
        """Whether no message is to be admitted before the next checkpoint, which makes room."""
        return False

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Say what has been written so far, as a JSON-able dict. Quick; runs on the event loop."""

    @abstractmethod
    def flush(self, state: dict[str, Any]) -> None:
        """Make all that ``state``, a snapshot, covers durable, or raise StoreError. Runs in a thread, beside writes."""

    def deliver(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """The checkpoint that has ``state`` is durable: pass on what it keeps for that, exactly once.

        Also called after ``open``, as it is not known then how far that came. Gives what the checkpoint is to have as
        the sink's state from now on, None if that stays. May wait for a service; runs in a thread, beside writes.
        Raises StoreError if it cannot be passed on now; it is tried again after the next ``open``.
        """
        return None

    def interrupt(self, seconds: float) -> None:  # noqa: B027
        """The run is to end: what waits in ``open`` or ``deliver`` may do so for so many seconds more. Any thread."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what writing holds; nothing is made durable. Safe to call more than once."""


class JsonLinesSink(Sink):
    """A file of plain JSON values (see :mod:`dalsegno.runners.plain_json`), one a line, exactly once.

    Lines that are not yet in a checkpoint can be seen in the file and are cut off and written again after a crash. The
    file belongs to one job: it is locked while open, what is before the checkpointed length must be what this job
    wrote, and what is after it is cut off. So a new job refuses a file that holds something, unless it is told to
    ``append``; the job that wrote the file before must then not be run again, for it would cut off what was appended.
    """

    exactly_once = True

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        self.path = Path(path)
        self._append = append
        self._fd: int | None = None
        self._length = 0
        self._tail = b""
        self._broken: OSError | None = None

    def describe(self) -> str:
        return str(self.path)

    def open(self, state: dict[str, Any] | None) -> None:
        self.close()
        length = count_in(state, "length", self.describe(), other="sink was written") if state is not None else None
        with _closing_on_error(self._open_file(length or 0)) as fd:
            self._check_regular(fd)
            self._lock(fd)
            end = self._checked_end(fd, state, length)
            with self._store_errors("be cut back to its checkpoint"):
                os.ftruncate(fd, end)
                os.lseek(fd, end, os.SEEK_SET)
            self._fd, self._length, self._broken = fd, end, None

    def write(self, output: object, output_id: str) -> None:
        line = to_json_line(output, root=f"the output {output_id!r}")
        fd = self._open_fd()
        try:
            _write_all(fd, line)
        except OSError as error:
            self._take_back(fd, error)
            raise StoreError(
                f"The output {output_id!r} cannot be written to {self.describe()!r}: {error.strerror}. Nothing of it "
                "is kept. Make room or repair the file system, then start the job again; it goes on at its checkpoint."
            ) from error
        self._length += len(line)
        self._tail = (self._tail + line)[-TAIL_BYTES:]

    def snapshot(self) -> dict[str, Any]:
        return {"length": self._length, "tail": digest(self._tail)}

    def flush(self, state: dict[str, Any]) -> None:
        fd = self._open_fd()
        self._check_in_place(fd, state["length"])
        try:
            os.fsync(fd)
        except OSError as error:
            # The kernel may have dropped what it failed to write; a second fsync would succeed without it.
            self._broken = error
            raise self._unusable(error) from error

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open_file(self, length: int) -> int:
        with self._store_errors("be opened"):
            try:
                return os.open(self.path, _FLAGS)
            except FileNotFoundError:
                if length:
                    raise self._missing(length, 0) from None
            fd = os.open(self.path, _FLAGS | os.O_CREAT, 0o666)
            with _closing_on_error(fd):
                _sync_directory(self.path.parent)
            return fd

    def _check_regular(self, fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreError(
                f"{self.describe()!r} is not a regular file, so outputs could not be taken back after a crash. Give a "
                "regular file, or '-' for standard output (at least once)."
            )

    def _lock(self, fd: int) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks
            raise StoreError(
                f"{self.describe()!r} is being written by another job or an earlier run of this one. Wait until that "
                "has ended or stop it, or give this job another output file."
            ) from error

    def _checked_end(self, fd: int, state: dict[str, Any] | None, length: int | None) -> int:
        size = os.fstat(fd).st_size
        if length is not None and size < length:
            raise self._missing(length, size)
        end = size if length is None else length
        self._tail = _read_before(fd, end)
        if state is None:
            self._check_new(size)
        elif (found := digest(self._tail)) != (wanted := state.get("tail")):
            raise RestoreError(
                f"{self.describe()!r} is not what this job has written: the {len(self._tail):,} bytes before byte "
                f"{end:,} have the digest {found!r}, and the checkpoint says {wanted!r}. Put the job's own file back, "
                "or give the job a new name and another output file."
            )
        return end

    def _check_new(self, size: int) -> None:
        if size and not self._append:
            raise RestoreError(
                f"{self.describe()!r} already holds {size:,} bytes, which this job has not written: it is a new job, "
                "and an output file belongs to one job. Give another file, or remove it. To append to it, use --append "
                "or JsonLinesSink(path, append=True), and do not run the job that wrote it again."
            )
        if self._tail and not self._tail.endswith(b"\n"):
            raise RestoreError(
                f"The last line of {self.describe()!r} has no newline, so it may be half written and a new job cannot "
                "append to it. Complete or remove the line, or give another output file."
            )

    def _missing(self, length: int, size: int) -> RestoreError:
        return RestoreError(
            f"This job has written {length:,} bytes to {self.describe()!r}, but {length - size:,} of them are missing: "
            f"the file {f'has only {size:,} bytes' if size else 'is empty or gone'}. Put the file back, or give the "
            "job a new name to write everything again."
        )

    def _check_in_place(self, fd: int, length: int) -> None:
        here = os.fstat(fd)
        try:
            in_place = os.path.samestat(here, self.path.stat())
        except OSError:
            in_place = False
        if not in_place:
            raise StoreError(
                f"{self.describe()!r} was moved, removed or replaced while this job writes to it, so its outputs "
                "cannot be committed. Put the file back and start the job again."
            )
        if here.st_size < length:
            raise StoreError(
                f"{self.describe()!r} has been cut to {here.st_size:,} bytes while this job writes to it; it has "
                f"written {length:,}. Start the job again with the whole file, or with a new name."
            )

    def _take_back(self, fd: int, error: OSError) -> None:
        try:
            os.ftruncate(fd, self._length)
            os.lseek(fd, self._length, os.SEEK_SET)
        except OSError:
            self._broken = error

    def _open_fd(self) -> int:
        if self._broken is not None:
            raise self._unusable(self._broken) from self._broken
        if self._fd is None:
            raise StoreError(f"{self.describe()!r} is not open for writing. Call open() first.")
        return self._fd

    def _unusable(self, error: OSError) -> StoreError:
        return StoreError(
            f"Outputs to {self.describe()!r} could not be made durable: {error.strerror}. What is in the file is not "
            "known until the job is started again; it then goes on at its last checkpoint."
        )

    @contextlib.contextmanager
    def _store_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"The output file {self.describe()!r} cannot {what}: {error.strerror}. "
                "Check the path and its permissions."
            ) from error


class _PassingSink(Sink):
    """A sink that passes outputs on at once and keeps nothing of them."""

    exactly_once = False

    def open(self, state: dict[str, Any] | None) -> None:
        if state and state.get("outputs"):
            raise RestoreError(
                f"The last checkpoint keeps {len(state['outputs']):,} outputs that {state.get('kind', 'its sink')!r} "
                f"may not have yet, and they would be lost with {self.describe()} as the sink. Run the job with its "
                "sink once more, or give it a new name."
            )

    def snapshot(self) -> dict[str, Any]:
        return {}

    def flush(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class StdoutSink(_PassingSink):
    """Plain JSON lines on standard output, at least once: what is printed cannot be taken back after a crash."""

    def describe(self) -> str:
        return "standard output (at least once)"

    def write(self, output: object, output_id: str) -> None:
        line = to_json_line(output, root=f"the output {output_id!r}")
        try:
            _print(line)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"The output {output_id!r} cannot be written to standard output: {error}. Whatever reads it has "
                "probably ended; start the job again with something that reads to the end."
            ) from error


class CallableSink(_PassingSink):
    """Calls ``fn(output)``, or ``fn(output, output_id)`` with ``with_id=True``, at least once for each output.

    The id of an output is the same each time, so the receiver can tell a repetition. ``fn`` runs on the event loop.
    """

    def __init__(self, fn: Callable[..., object], *, with_id: bool = False) -> None:
        if isinstance(fn, type):
            raise DefinitionError(f"A sink does not call classes such as {fn!r}. Give an object or a function.")
        if inspect.iscoroutinefunction(fn):
            raise DefinitionError(f"The sink {_name(fn)!r} is async and would never be awaited. Give a plain function.")
        self._fn = fn
        self._with_id = with_id

    def describe(self) -> str:
        return f"{_name(self._fn)} (at least once)"

    def write(self, output: object, output_id: str) -> None:
        try:
            result = self._fn(output, output_id) if self._with_id else self._fn(output)
        except Exception as error:
            raise StoreError(
                f"The sink {_name(self._fn)!r} failed with {error!r} on the output {output_id!r}. The job goes on at "
                "its checkpoint when it is started again."
            ) from error
        if isinstance(result, Awaitable):
            if inspect.iscoroutine(result):
                result.close()
            raise DefinitionError(f"The sink {_name(self._fn)!r} gave back an awaitable, which is never awaited.")


class NullSink(_PassingSink):
    """Drops all outputs; they stay in the job's records only."""

    exactly_once = True

    def describe(self) -> str:
        return "nowhere"

    def write(self, output: object, output_id: str) -> None:
        pass


def open_sink(spec: object) -> Sink:
    """Find the sink for None (drop outputs), ``"-"`` (standard output), a path (JSON Lines), a callable, or
    ``kafka://HOST:PORT/TOPIC``.

    A :class:`Sink` is given back as it is; anything else is a DefinitionError.
    """
    if spec == "":
        raise DefinitionError("The path of the sink is empty. Give a path, or '-' for standard output.")
    if spec is None:
        return NullSink()
    if isinstance(spec, Sink):
        return spec
    if spec == "-":
        return StdoutSink()
    if isinstance(spec, str) and spec.startswith("kafka://"):
        from dalsegno.runners.kafka_client import sink_of

        return sink_of(spec)
    if isinstance(spec, str | os.PathLike):
        return _open_path(Path(spec))
    if callable(spec):
        return CallableSink(spec)
    raise DefinitionError(
        f"A sink cannot be made of {spec!r}, a {type(spec).__name__}. Give a path, '-' for standard output, a "
        "function, None to drop outputs, or a Sink."
    )


def _open_path(path: Path) -> Sink:
    if path.suffix.lower() in (".csv", ".tsv"):
        raise DefinitionError(f"Outputs are written as JSON Lines, and {str(path)!r} names a table. Name it '.jsonl'.")
    return JsonLinesSink(path)


_FLAGS = os.O_RDWR | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def _closing_on_error(fd: int) -> Iterator[int]:
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read_before(fd: int, end: int) -> bytes:
    os.lseek(fd, max(0, end - TAIL_BYTES), os.SEEK_SET)
    return os.read(fd, min(end, TAIL_BYTES))


def _sync_directory(path: Path) -> None:
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _print(line: bytes) -> None:
    stream = sys.stdout
    if stream is None:
        raise ValueError("it is closed")
    text = line.decode()
    # The stream itself may be set to replace what its encoding lacks, which is not JSON; JSON can escape everything.
    if not _encodable(text, getattr(stream, "encoding", None)):
        text = json.dumps(json.loads(text)) + "\n"
    stream.write(text)
    stream.flush()


def _encodable(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
