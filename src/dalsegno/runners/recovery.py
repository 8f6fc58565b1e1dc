"""After a restart: which recorded messages are yet to come again, and in which order they go on.

`Recovery` knows the messages that are recorded and were not read before the last checkpoint. It finds that one of them
came under another key, and what never came.

`Turns` is for sources that may bring messages in another order than before: it holds messages of a key back until those
that were recorded before them have come. The wait is bounded by count and by time, because what is waited for may never
come. Then it warns, and they go on: what does not fit the record is found when it is played back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from dalsegno.core import codec
from dalsegno.core.claims import Claims, Recorded
from dalsegno.core.executor import Message
from dalsegno.core.records import TaskActionState
from dalsegno.errors import DivergenceError

_logger = logging.getLogger("dalsegno")

WAITING_IN_MEMORY = 10_000
"""Messages that may wait for their turn, of all keys together."""
WAIT_SECONDS = 60.0
"""How long the messages of a key may wait for their turn."""


class Recovery:
    """Recorded messages that are yet to be read again, with ids that no two messages of the job have."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._keys: dict[str, bytes] = {}

    def expect(self, key: bytes, message: str, history: Iterable[TaskActionState]) -> None:
        """The message is recorded with *history*, and was not read before the last checkpoint."""
        self._keys[message] = key

    def met(self, message: Message, content: str) -> Message:
        """The message came, and is given back; raises `DivergenceError` if it is recorded under another key."""
        if self._keys:
            recorded = self._keys.pop(message.id, message.key_bytes)
            if recorded != message.key_bytes:
                raise self._other_key(message, recorded)
        return message

    @property
    def missing(self) -> int:
        return len(self._keys)

    def first_missing(self) -> str:
        return min(self._keys, key=lambda message: (len(message), message))

    def _other_key(self, message: Message, recorded: bytes) -> DivergenceError:
        return DivergenceError(
            f"job {self._job!r}: message {message.id!r} has the key {message.key!r}, but was recorded with "
            f"{codec.decode(recorded)!r} before the restart: the key function or the input was changed. Put it "
            "back until the messages in flight are done, or give the job a new name to start afresh"
        )


class RecoveryById(Recovery):
    """The same with ids of any kind. With *key_of_content* equal contents have one key, which is checked."""

    def __init__(self, job: str, *, key_of_content: bool) -> None:
        super().__init__(job)
        self._key_of_content = key_of_content
        self._expected: dict[tuple[bytes, str], None] = {}
        self._key_of: dict[str, bytes] = {}

    def expect(self, key: bytes, message: str, history: Iterable[TaskActionState]) -> None:
        self._expected[key, message] = None
        content = content_of(history)
        if content is not None and self._key_of_content:
            self._key_of[content] = key

    def met(self, message: Message, content: str) -> Message:
        if not self._expected:
            return message
        recorded = self._key_of.get(content, message.key_bytes)
        if recorded != message.key_bytes:
            raise self._other_key(message, recorded)
        self._expected.pop((message.key_bytes, message.id), None)
        if not self._expected:
            self._key_of.clear()
        return message

    @property
    def missing(self) -> int:
        return len(self._expected)

    def first_missing(self) -> str:
        return next(iter(self._expected))[1]


def content_of(history: Iterable[TaskActionState]) -> str | None:
    """The fingerprint of a recorded message's content."""
    return next((state.content for state in history if state.content), None)


class Entry(Protocol):
    """What is held back: an admitted message."""

    message: Message
    waits: bool


class Turns:
    """Gives *release* each admitted entry when it is its turn, and *fail* what that raises when nobody called.

    Runs on the event loop.
    """

    def __init__(self, job: str, release: Callable[[Any], None], fail: Callable[[BaseException], None]) -> None:
        self._job = job
        self._release = release
        self._fail = fail
        self._claims: dict[bytes, Claims[Entry]] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        """Of each key that has entries which wait, in the order in which they began to."""
        self.waiting = 0

    def expect(self, key: bytes, recorded: Iterable[Recorded]) -> None:
        """What is recorded of a key, in recorded order; contents only of those that are to be claimed by them."""
        self._claims[key] = Claims(recorded)

    def claim(self, key: bytes, content: str) -> str | None:
        """The id that a message takes over, None if it is new."""
        claims = self._claims.get(key)
        return None if claims is None else claims.claim(content)

    def arrive(self, entry: Entry) -> None:
        """Release the entry and what waited for it, or hold it back."""
        key = entry.message.key_bytes
        claims = self._claims.get(key)
        if claims is None:
            self._release(entry)
            return
        before = claims.waiting
        ready = claims.arrive(entry.message.id, entry)
        entry.waits = entry not in ready
        self._let_go(key, claims, before, ready)
        while self.waiting > WAITING_IN_MEMORY:
            self._give_up(next(iter(self._timers)), f"{WAITING_IN_MEMORY:,} messages wait for their turn")

    def close(self) -> None:
        """Nothing more arrives: what waits goes on in the next run."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _let_go(self, key: bytes, claims: Claims[Entry], before: int, ready: list[Entry]) -> None:
        self.waiting += claims.waiting - before
        timer = self._timers.pop(key, None) if not claims.waiting else None
        if timer is not None:
            timer.cancel()
        elif claims.waiting and key not in self._timers:
            self._timers[key] = asyncio.get_running_loop().call_later(WAIT_SECONDS, self._time_is_up, key)
        for entry in ready:
            self._release(entry)

    def _time_is_up(self, key: bytes) -> None:
        try:
            self._give_up(key, f"{WAIT_SECONDS:g} seconds have passed")
        except BaseException as error:
            self._fail(error)

    def _give_up(self, key: bytes, why: str) -> None:
        claims = self._claims[key]
        before = claims.waiting
        missing, ready = claims.give_up()
        self._timers.pop(key).cancel()  # what still waits gets a time of its own
        _logger.warning(
            "job %r, key %r: %d messages go on without %d that were recorded before them and did not come again, as %s;"
            " the first of those is %r",
            self._job,
            codec.decode(key),
            len(ready),
            len(missing),
            why,
            missing[0],
        )
        self._let_go(key, claims, before, ready)
