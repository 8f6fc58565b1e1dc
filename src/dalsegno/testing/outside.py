"""What an agent does to the world: the stand-in for it in tests, and the look-out for what is done behind the record.

The look-out is an audit hook of the interpreter (`sys.addaudithook`), which cannot be removed; while no agent is being
crashed it returns at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from dalsegno.effects import current_call
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
    process does not happen.
    """

    def __init__(self) -> None:
        self.deeds: list[Deed] = []
        self._lock = threading.Lock()

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
                self.deeds.append(deed)

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
            self.deeds.clear()


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
