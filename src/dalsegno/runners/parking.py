"""Parked messages: set aside until somebody decides about them or their time has come, then taken up again.

The later messages of a parked message's key wait behind it.
"""

from __future__ import annotations

import asyncio
import logging

from dalsegno.core import codec
from dalsegno.core.environment import Environment
from dalsegno.core.executor import Parked
from dalsegno.runners.inbox import Entry, Held, Inbox, KeyState
from dalsegno.runners.report import ParkedMessage, RunReport
from dalsegno.stores.base import Decision, TaskActionStore

_LISTEN_SECONDS = 0.5

_logger = logging.getLogger("dalsegno")


class Parking:
    """The parked messages of one run, and what people decided about messages, which goes to *environment*."""

    def __init__(self, store: TaskActionStore, environment: Environment, inbox: Inbox, report: RunReport) -> None:
        self._store = store
        self._environment = environment
        self._inbox = inbox
        self._report = report
        self._keys: dict[bytes, KeyState] = {}
        """The keys with a parked message."""
        self._told: list[ParkedMessage] | None = None
        """What `messages` gives, until that changes: it is asked for many times a second, and may be long."""
        self._decided = 0
        """The number of the last decision that was taken in."""
        self.news = asyncio.Event()
        """Set when a message was parked or taken up again."""

    def messages(self) -> list[ParkedMessage]:
        """Those that are parked now."""
        if self._told is None:
            self._told = [
                ParkedMessage(
                    codec.decode(state.key), state.parked.message, state.parked.park.reason, state.parked.park.why
                )
                for state in self._keys.values()
                if state.parked is not None
            ]
        return self._told

    @property
    def waits_for_signal(self) -> bool:
        """Whether one of them waits for a signal."""
        return any(state.parked and state.parked.park.why == "waiting" for state in self._keys.values())

    def park(self, state: KeyState, entry: Entry, result: Parked) -> None:
        """Set the message aside; the key's later ones wait behind it, and take no room."""
        if result.park.why != "waiting":
            _logger.warning(
                "message %r of key %r is parked: %s", entry.message.id, entry.message.key, result.park.reason
            )
        entry.parked = result.park.reason
        entry.changed = True  # the inbox is to hold the reason
        state.parked = Held(entry.ordinal, entry.message.id, result.park, result.until)
        # It may have to be replayed in this process, from what is recorded by then.
        state.claimed, state.history = False, {}
        self._keys[state.key] = state
        self._inbox.set_aside(state)
        self._changed()

    async def read_decisions(self) -> list[Decision]:
        """Take in what was decided since the last time."""
        made = await self._store.decisions(self._decided)
        for number, decision in made:
            self._decided = number
            known = self._environment.decisions.setdefault((decision.key, decision.message), {})
            known[decision.target] = decision.body
        return [decision for _, decision in made]

    async def listen(self) -> None:
        """Look now and then for what can be taken up again, until it is cancelled."""
        while True:
            await asyncio.sleep(_LISTEN_SECONDS)
            await self.take_up()

    async def take_up(self) -> None:
        """Take up again the messages that somebody decided about, and those whose time has come."""
        for decision in await self.read_decisions():
            self._take_up_message(decision.key, decision.message)
        for key, message in [*self._environment.late.newly_ended()]:
            self._take_up_message(key, message)
        now = self._environment.clock()
        for state in [*self._keys.values()]:
            if state.parked is not None and state.parked.until is not None and state.parked.until <= now:
                self._take_up_key(state)

    def _take_up_message(self, key: bytes, message: str) -> None:
        state = self._keys.get(key)
        if state is not None and state.parked is not None and state.parked.message == message:
            self._take_up_key(state)

    def _take_up_key(self, state: KeyState) -> None:
        """Let the key's parked message run again, and then those that wait behind it."""
        held = state.parked
        if held is None or self._environment.stopping:
            return
        del self._keys[state.key]
        state.parked, state.behind = None, held.ordinal
        self._report.waiting += 1
        self._changed()
        self._inbox.bring_back(state)

    def _changed(self) -> None:
        self._told = None
        self.news.set()
