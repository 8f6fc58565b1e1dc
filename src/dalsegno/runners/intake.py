"""From input records to messages: their keys and ids, what is bad, and what came again.

A message that comes again while it is known, with the same id and content, is the same message: it is not taken in a
second time. With other content it is a bad record. It is *known* until a checkpoint after the one that covers it. So
long the checkpoint file lists it as covered, and what the store may still have of it is told from what a later message
with its id has recorded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

from dalsegno.core.executor import Message
from dalsegno.core.identity import fingerprint
from dalsegno.errors import CodecError, InputError
from dalsegno.runners.checkpoints import BadRecord, CoveredMessage
from dalsegno.runners.message_ids import CONTENT, POSITION, MessageIds
from dalsegno.runners.recovery import Recovery, Turns
from dalsegno.runners.report import RunReport
from dalsegno.runners.sources import BadInput, Source, SourceItem

OnBadInput = Literal["stop", "skip", "park"]
FindSetAside = Callable[[bytes, str], str | None]
"""The content of a message that was set aside and is not in memory, by key and id."""

_logger = logging.getLogger("dalsegno")


class KnownMessages:
    """The messages, by key and id, that must not be taken in a second time, with the fingerprints of their contents."""

    def __init__(self, checkpoints: int) -> None:
        self._checkpoints = checkpoints
        """How many can be restored; a message must be known as long as one of them does not cover it."""
        self._contents: dict[tuple[bytes, str], str] = {}
        self._covered: deque[list[tuple[bytes, str]]] = deque()
        """Those that the last completed checkpoints were the first to cover, one list for each of these."""

    def find(self, key: bytes, message: str) -> str | None:
        return self._contents.get((key, message))

    def add(self, message: Message, content: str) -> None:
        self._contents[message.key_bytes, message.id] = content

    def forget(self, message: Message) -> None:
        """It can be found in the inbox of the last checkpoint."""
        self._contents.pop((message.key_bytes, message.id), None)

    def restore(self, covered: Iterable[CoveredMessage]) -> None:
        """What one checkpoint was the first to cover; those of earlier ones first."""
        listed = [*covered]
        self._contents.update({(key, message): content or "" for key, message, content in listed})
        self._covered.append([(key, message) for key, message, _ in listed])

    def completed(self, messages: list[tuple[bytes, str]]) -> None:
        """A checkpoint that lists *messages* as covered is completed."""
        self._covered.append(messages)
        while len(self._covered) > self._checkpoints:
            for which in self._covered.popleft():
                self._contents.pop(which, None)


class Intake:
    """Makes messages of one source's records.

    *next_id* gives a number that no message of the job had as its id; *find_set_aside* finds messages that `known` was
    told to forget; so many *checkpoints* can be restored.
    """

    def __init__(
        self,
        source: Source,
        key_of: Callable[[SourceItem], Any],
        ids: MessageIds,
        on_bad_input: OnBadInput,
        report: RunReport,
        *,
        recovery: Recovery,
        turns: Turns | None,
        next_id: Callable[[], int],
        find_set_aside: FindSetAside,
        checkpoints: int,
    ) -> None:
        self._source = source
        self._key_of = key_of
        self._ids = ids
        self._by_position = ids.kind == POSITION
        self._on_bad_input = on_bad_input
        self._report = report
        self._recovery = recovery
        self._turns = turns
        self._next_id = next_id
        self._find_set_aside = find_set_aside
        self.known = KnownMessages(checkpoints) if ids.kind not in (POSITION, CONTENT) else None
        """None if ids are made so that no two messages have the same."""
        self.bad: list[BadRecord] = []
        """Records that were set aside since the last checkpoint."""

    def message_of(self, item: SourceItem) -> Message | None:
        """The message of an input record, None if it came again, or is bad and that is not to stop the job."""
        value = item.value
        if not isinstance(value, BadInput):
            try:
                if self._by_position:
                    return self._recovery.met(Message.of(self._key_of(item), str(item.ordinal), value), "")
                return self._identified(item)
            except (CodecError, InputError) as error:
                value = BadInput(f"{self._source.describe()}, {_place(item)}", str(error), repr(value)[:2000])
        self._refuse(item, value)
        return None

    def covering(self, messages: Iterable[tuple[bytes, str]]) -> list[CoveredMessage]:
        """What a checkpoint that is the first to cover *messages* is to list."""
        find = self.known.find if self.known is not None else _unknown
        return [CoveredMessage(key, message, find(key, message)) for key, message in messages]

    def _identified(self, item: SourceItem) -> Message | None:
        nameless = Message.of(self._key_of(item), "", item.value)
        content = fingerprint(nameless.tree)
        message = nameless._replace(id=self._id(item, nameless.key_bytes, content))
        if self.known is not None:
            if self._is_known(message, content):
                self._report.repeated += 1
                return None
            self.known.add(message, content)
        return self._recovery.met(message, content)

    def _id(self, item: SourceItem, key: bytes, content: str) -> str:
        if self._ids.of is not None:
            return self._ids.of(item)
        claimed = self._turns.claim(key, content) if self._turns is not None else None
        return str(self._next_id()) if claimed is None else claimed

    def _is_known(self, message: Message, content: str) -> bool:
        assert self.known is not None
        found = self.known.find(message.key_bytes, message.id) or self._find_set_aside(message.key_bytes, message.id)
        if found not in (None, content):
            raise InputError(
                f"the message id {message.id!r} of key {message.key!r} came before with other content, and that message"
                " is not yet covered by a checkpoint: two messages of one key need two ids"
            )
        return found is not None

    def _refuse(self, item: SourceItem, bad: BadInput) -> None:
        if self._on_bad_input == "stop":
            raise InputError(
                f"{bad.where}: {bad.reason}. Nothing was read past it: mend the record, or set it aside with "
                f"--on-bad-input park (skip to ignore it). The record: {bad.raw[:200]!r}"
            )
        if self._on_bad_input == "skip":
            self._report.skipped += 1
            _logger.warning("%s: %s; skipped", bad.where, bad.reason)
        else:
            self._report.set_aside += 1
            _logger.warning("%s: %s; set aside", bad.where, bad.reason)
            self.bad.append(BadRecord(item.ordinal, bad.where, bad.reason, bad.raw))


def _unknown(key: bytes, message: str) -> None:
    return None


def _place(item: SourceItem) -> str:
    if item.id is not None:
        return f"record {item.id}"
    return f"line {item.position['line']}" if "line" in item.position else f"record {item.ordinal + 1}"
