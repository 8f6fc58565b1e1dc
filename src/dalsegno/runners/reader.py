"""The reader: admits messages to the inbox, in input order, as long as there is room.

After a restart those come first that were in flight at the last checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dalsegno.runners.checkpointer import UNCOVERED, Checkpointer, Reading
from dalsegno.runners.identities import Identities
from dalsegno.runners.inbox import Entry, Inbox
from dalsegno.runners.retention import Pruner
from dalsegno.runners.sources import NO_RECORD, Source


class Reader:
    """*all_came* is told the number of the first message before which all recorded messages have come again."""

    def __init__(
        self,
        source: Source,
        identities: Identities,
        inbox: Inbox,
        checkpointer: Checkpointer,
        reading: Reading,
        all_came: Callable[[int], None],
        pruner: Pruner,
    ) -> None:
        self._source = source
        self._identities = identities
        self._inbox = inbox
        self._checkpointer = checkpointer
        self._reading = reading
        self._all_came = all_came
        self._pruner = pruner
        self._turns = identities.turns
        self._admit = inbox.queue if self._turns is None else self._hold_back
        self._reordered: set[bytes] = set()
        """Keys whose messages do not go on in the order of the numbers that they had when they came."""

    async def run(self) -> None:
        """Read to the end of the input."""
        try:
            await self._read_inbox()
            await self._read_source()
        finally:
            if self._turns is not None:
                self._turns.close()
        if self._identities.recovery.missing:
            raise self._identities.cut_input(self._reading.records)

    async def _read_inbox(self) -> None:
        # From its end on are those that got their number in this run.
        end = math.inf if self._identities.by_position else self._identities.end_of_inbox
        for entry in self._inbox.stored(end):
            while self._inbox.is_full:
                await self._wait_for_room()
            self._admit(entry)

    async def _read_source(self) -> None:
        identities, intake, inbox = self._identities, self._identities.intake, self._inbox
        by_position, recovering = identities.by_position, True
        async for item in await self._source.open(self._reading.position):
            message = None if item.value is NO_RECORD else intake.message_of(item)
            if message is not None:
                if intake.known is not None:
                    await self._pruner.make_way(message.key_bytes, message.id)
                while inbox.is_full:
                    await self._wait_for_room()
                ordinal = item.ordinal if by_position else identities.next_number()
                if recovering and not identities.recovery.missing:
                    recovering = False
                    self._all_came(ordinal)
                self._admit(Entry(ordinal, message, stored=False))
            elif len(intake.bad) >= UNCOVERED:
                self._checkpointer.due.set()
            self._reading.position = item.position
            self._reading.records = item.ordinal + 1
            self._checkpointer.changed()

    async def _wait_for_room(self) -> None:
        if self._inbox.is_crowded:
            self._checkpointer.due.set()
        await self._inbox.wait_for_room()

    def _hold_back(self, entry: Entry) -> None:
        """Queue the entry when it is its turn."""
        assert self._turns is not None
        self._inbox.hold_back(entry)
        self._turns.arrive(entry)

    def take_turn(self, entry: Entry) -> None:
        """The entry goes on now; if its key was reordered, it gets a number after those that went on before."""
        if entry.waits:
            self._reordered.add(entry.message.key_bytes)
        if entry.waits or (entry.stored and entry.message.key_bytes in self._reordered):
            self._inbox.renumber(entry, self._identities.next_number())
            self._checkpointer.changed()
        self._inbox.queue(entry)
