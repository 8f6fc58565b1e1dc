"""The standard streams of a command, which may be closed, full, or without a reader.

A stream that is closed is none that anybody wants: what goes there goes nowhere. That something cannot be written to an
open one is a `CannotPrint`, which tells it from all else that fails, and it never changes what the command has done.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, TextIO

UNTOLD = 4
"""Exit code of a command that has done its work and cannot tell of it."""


class CannotPrint(Exception):
    """Standard output or standard error does not take what was to be printed. *done* is what was to be told, if that
    is kept in any case; *code* is the exit code."""

    def __init__(self, reason: BaseException, done: str = "", code: int = UNTOLD) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.done = done
        self.code = code

    def message(self) -> str | None:
        """What to say of it; None if the reader has gone and nothing but looking was asked for."""
        why = getattr(self.reason, "strerror", None) or str(self.reason)
        if self.done:
            return f"{self.done}, but that cannot be printed: {why}"
        if getattr(self.reason, "errno", None) == errno.EPIPE:
            return None
        return f"what was asked for cannot be printed: {why}"


def make_usable() -> None:
    """Fill in what is closed, so that no file which is opened later becomes a standard stream, and escape what an
    encoding lacks. `sys.stdin` and `sys.stdout` stay None, as records and outputs need real ones."""
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            _fill(number)
    if sys.stderr is None:  # else what is printed there would go to standard output
        sys.stderr = open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fill(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)


def say(text: str) -> None:
    """One line on standard error, if it takes one."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        print(f"dalsegno: {text}", file=sys.stderr, flush=True)


def let_go() -> None:
    """Drop what an open stream does not take: the interpreter would try again when it ends, and change the code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


@contextmanager
def checked() -> Iterator[None]:
    """While this lasts, `CannotPrint` is raised for what standard output does not take."""
    bare = sys.stdout
    if bare is None:
        yield
        return
    sys.stdout = _Checked(bare)
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise
    finally:
        sys.stdout = bare


@contextmanager
def unchecked() -> Iterator[None]:
    """The reverse, for code that is not the command's own."""
    here = sys.stdout
    if not isinstance(here, _Checked):
        yield
        return
    sys.stdout = here.bare
    try:
        yield
    finally:
        sys.stdout = here


@contextmanager
def telling(done: str, code: int = UNTOLD) -> Iterator[None]:
    """What is printed in here tells of *done*. Raises `CannotPrint` with it and *code*."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except CannotPrint as error:
        raise CannotPrint(error.reason, done, code) from error
    except (OSError, ValueError) as error:
        raise CannotPrint(error, done, code) from error


class _Checked:
    """*bare*, but for the error when it does not take something."""

    def __init__(self, bare: TextIO) -> None:
        self.bare = bare

    def write(self, text: str) -> int:
        with _cannot_print():
            return self.bare.write(text)

    def writelines(self, lines: list[str]) -> None:
        with _cannot_print():
            self.bare.writelines(lines)

    def flush(self) -> None:
        with _cannot_print():
            self.bare.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)


@contextmanager
def _cannot_print() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotPrint(error) from error
