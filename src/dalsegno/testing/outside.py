"""What an agent does to the world: the stand-in for it in tests, and the look-out for what is done behind the record.

The look-out is an audit hook of the interpreter (`sys.addaudithook`), which cannot be removed; while no agent is being
crashed it returns at once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dalsegno.effects import current_call
from dalsegno.testing.lines import Lines
from dalsegno.testing.watched import acting, calling
from dalsegno.testing.world import Life


class Deed(NamedTuple):
    """Something that was done: *what*, with which *details*, under which idempotency key (None outside of a call)."""

    what: str
    details: tuple[Any, ...]
    idempotency_key: str | None


class Outside:
    """Stands for the world that an agent's tools act on. Give it to the tools of a test, and to `crash_everywhere`.

    A deed counts once per idempotency key, as with a service that honours it. What a tool does after the crash of its
    process does not happen. With a *folder* the deeds are lines of a file in it, which outlives a process and is seen
    by others.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._deeds: list[Deed] = []
        self._lines = None if folder is None else _lines_in(folder)
        self._lock = threading.Lock()

    @property
    def deeds(self) -> Sequence[Deed]:
        """All that was done, in its order."""
        return [*self._deeds] if self._lines is None else self._lines.all()

    def did(self, what: str, *details: Any) -> None:
        """*what* was done now."""
        life = _watched.life
        if life is not None:
            life.check_alive()
            _watched.judge(f"{what}{details!r}")
        try:
            key = current_call().idempotency_key
        except LookupError:
            key = None
        deed = Deed(what, details, key)
        with self._lock:
            if key is None or deed not in self.deeds:
                (self._deeds if self._lines is None else self._lines).append(deed)

    def has(self, what: str, *details: Any) -> bool:
        """Whether that was done; what a ``reconcile`` of a test asks."""
        return self.times(what, *details) > 0

    def times(self, what: str, *details: Any) -> int:
        """How often *what* was done, with these *details* if any are given."""
        with self._lock:
            return sum(deed.what == what and (not details or deed.details == details) for deed in self.deeds)

    def reset(self) -> None:
        """Nothing was done yet."""
        with self._lock:
            self._deeds.clear()
            if self._lines is not None:
                self._lines.path.unlink(missing_ok=True)

    @contextmanager
    def kept_in(self, folder: Path) -> Iterator[None]:
        """Keep deeds in *folder* for a while, where other processes see them, unless they are kept in one anyway."""
        before = self._lines
        self._lines = before or _lines_in(folder)
        try:
            yield
        finally:
            self._lines = before


def _lines_in(folder: str | os.PathLike[str]) -> Lines:
    return Lines(Path(folder) / "deeds")


_WRITES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile", "shutil.move"}
_REACHES = {"socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "smtplib.send"}


class _LookOut:
    """Judges effects of the agent that runs in *life*."""

    life: Life | None = None
    _installed = False

    def install(self) -> None:
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.life is None or acting.get() is None:
            return
        if event in _WRITES or (event == "open" and _writes(args)):
            self.judge(f"{event}({args[0]!r})")
        elif event in _REACHES and calling.get() is None:
            self.judge(f"{event}({args[0]!r})" if args else event)

    def judge(self, deed: str) -> None:
        """Blame the agent for a *deed* where none may be."""
        action, call = acting.get(), calling.get()
        if self.life is None or action is None:
            return
        if call is None:
            self.life.world.blame(
                "your agent",
                f"{action} does {deed} outside of a durable call, so a replay does it again: put it into a function "
                "and call that with ctx.durable_execute(...)",
            )
        elif call[1] == "read":
            self.life.world.blame(
                "your agent",
                f"{call[0]} has effect 'read' and does {deed}: what it does may be done again after a crash; declare "
                "it 'once' or 'idempotent'",
            )


_watched = _LookOut()


@contextmanager
def looking_out(life: Life) -> Iterator[None]:
    """Judge what is done from here on as done in *life*."""
    _watched.install()
    before, _watched.life = _watched.life, life
    try:
        yield
    finally:
        _watched.life = before


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & 0o3)
