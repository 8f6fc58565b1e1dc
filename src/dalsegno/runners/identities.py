"""Who is who in a job: gives messages their ids and numbers, and finds after a restart which ones are recorded.

The *number* of a message is its place in the inbox; messages of one key go on in the order of their numbers. Where ids
are positions, it is the number of the input record, and so the id. Otherwise it is the next one beyond the inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dalsegno.core import codec
from dalsegno.core.claims import Recorded
from dalsegno.core.executor import Message
from dalsegno.core.identity import fingerprint
from dalsegno.core.records import TaskActionState
from dalsegno.errors import RestoreError
from dalsegno.runners.checkpoints import Checkpoint, CheckpointFile, InboxEntry
from dalsegno.runners.intake import Intake, OnBadInput
from dalsegno.runners.message_ids import CONTENT, POSITION, SOURCE, KeyOf, MessageIds
from dalsegno.runners.recovery import Recovery, RecoveryById, Turns, content_of
from dalsegno.runners.report import RunReport
from dalsegno.runners.sources import Source


class Covering(NamedTuple):
    """Ids of recorded messages that a checkpoint covers."""

    leftovers: list[str]
    """What a crash left in the store."""
    retained: list[str]
    """What is kept in the store."""


class Identities:
    """If the source may reorder, *release* is given each admitted entry when it is its turn, and *fail* what fails.

    *held* says of a key whether messages of it may be set aside and not in memory. So many checkpoints are kept.
    """

    def __init__(
        self,
        job: str,
        ids: MessageIds,
        source: Source,
        key_of: KeyOf,
        on_bad_input: OnBadInput,
        report: RunReport,
        checkpoints: CheckpointFile,
        *,
        release: Callable[[Any], None],
        fail: Callable[[BaseException], None],
        held: Callable[[bytes], bool],
        kept_checkpoints: int = 1,
    ) -> None:
        self._job = job
        self._ids = ids
        self._source = source
        self._checkpoints = checkpoints
        self._held = held
        self.by_position = ids.kind == POSITION
        self.end_of_inbox = 0
        """Where ids are no positions, numbers from this one on are given in this run."""
        self._last_number = -1
        self._last_id = -1
        self.recovery = (
            Recovery(job) if ids.kind in (POSITION, SOURCE) else RecoveryById(job, key_of_content=key_of.is_of_content)
        )
        self.turns = None if source.replays_in_order else Turns(job, release, fail)
        self.intake = Intake(
            source,
            key_of.of,
            ids,
            on_bad_input,
            report,
            recovery=self.recovery,
            turns=self.turns,
            next_id=self._next_id,
            find_set_aside=self._find_set_aside,
            checkpoints=kept_checkpoints,
        )
        self.known = self.intake.known
        self._read_before = 0
        self._listed: set[tuple[bytes, str]] = set()
        """The messages that the last checkpoint lists as covered."""

    @property
    def recorded(self) -> str:
        """What a checkpoint remembers of how ids are made."""
        return self._ids.recorded

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def begun(self) -> int:
        """Messages before this number may have been begun by the last process, if it had none read beyond."""
        return self._read_before if self.by_position else self.end_of_inbox

    # After a restart.

    def check_kind(self, last: Checkpoint, any_recorded: bool) -> None:
        """Raise `RestoreError` if the job, which goes on from *last*, made ids of another kind."""
        self._ids.check_change(self._job, last.ids, begun=bool(last.read or any_recorded), in_flight=False)

    def restore(self, last: Checkpoint) -> None:
        self._read_before = last.read
        if self.by_position:
            return
        self.end_of_inbox = self._checkpoints.end_of_inbox()
        self._last_number, self._last_id = self.end_of_inbox - 1, last.numbered - 1
        listed = self._checkpoints.covered()
        self._listed = {covered[:2] for covered in listed}
        if self.known is not None:
            oldest = self._checkpoints.oldest()
            of_kept = self._checkpoints.covered_since(oldest)
            for number in range(oldest, last.number):
                self.known.restore(of_kept.get(number, ()))
            self.known.restore(listed)

    def sort_out(self, key: bytes, history: Mapping[str, list[TaskActionState]]) -> Covering:
        """Take in what is recorded of a key, in recorded order; the ids of what the last checkpoint covers already."""
        covering, recorded = Covering([], []), []
        for message, states in history.items():
            if self._in_inbox(key, message):
                recorded.append(Recorded(message, None))
            elif self._is_covered(key, message):
                retained = self._checkpoints.find_finished(key, message)
                (covering.leftovers if retained is None or retained.pruned else covering.retained).append(message)
            else:
                self.recovery.expect(key, message, states)
                recorded.append(Recorded(message, content_of(states) if self._ids.kind == CONTENT else None))
        if recorded and self.turns is not None:
            self.turns.expect(key, recorded)
        return covering

    def settle(self, before: str) -> None:
        """All that is recorded was sorted out. Ids were made as *before* says, and are from now on made as they are.

        Raises `RestoreError` if that may not change now.
        """
        in_flight = bool(self.recovery.missing or self._checkpoints.inbox(-1, 1))
        self._ids.check_change(self._job, before, begun=False, in_flight=in_flight)
        if before != self._ids.recorded:
            self._checkpoints.set_ids(self._ids.recorded)

    def _in_inbox(self, key: bytes, message: str) -> bool:
        """Whether a recorded message was unfinished at the last checkpoint."""
        if self.by_position:
            return self._checkpoints.in_inbox(self._number(message))
        return self._checkpoints.find_in_inbox(key, message) is not None

    def _is_covered(self, key: bytes, message: str) -> bool:
        """Whether the last checkpoint covers a recorded message that it has not in its inbox."""
        if self.by_position:
            return self._number(message) < self._read_before
        if self._ids.kind == CONTENT:  # a number that is recorded is not given to another message
            self._last_id = max(self._last_id, self._number(message))
        return (key, message) in self._listed or self._checkpoints.find_finished(key, message) is not None

    def _number(self, message: str) -> int:
        if not message.isdecimal():
            raise RestoreError(
                f"the store has records of job {self._job!r} with the message id {message!r}, which the local "
                "runner did not give: another runner made them. Give this job another name"
            )
        return int(message)

    def cut_input(self, read: int) -> RestoreError:
        """The error of an input that ended after *read* records, with recorded messages yet to come."""
        first, missing = self.recovery.first_missing(), self.recovery.missing
        if self.by_position:
            what = (
                f"before a crash this job had read at least {int(first) + 1:,} of it, and message {first!r} is recorded"
            )
        elif missing == 1:
            what = f"message {first!r}, which is recorded, did not come again"
        else:
            what = f"{missing:,} messages that are recorded did not come again, the first of them {first!r}"
        return RestoreError(
            f"the input {self._source.describe()} ended after {read:,} records, but {what}: the input was cut or "
            "replaced. Put it back and run the job again, or give the job a new name to start afresh"
        )

    # To the checkpoint file and back.

    def fill(self, checkpoint: Checkpoint, covered: list[tuple[bytes, str]], *, retain: bool) -> None:
        """Put into a checkpoint that covers the messages *covered* what is needed to tell who is who after it.

        *retain* says whether they are to be retained in the store, see `dalsegno.runners.retention`.
        """
        checkpoint.ids, checkpoint.numbered = self._ids.recorded, self._last_id + 1
        listed = self.intake.covering(covered) if retain or not self.by_position else []
        checkpoint.covered = [] if self.by_position else listed
        checkpoint.retained = listed if retain else None
        checkpoint.bad_input, self.intake.bad = self.intake.bad, []

    def inbox_entry(self, number: int, message: Message, parked: str | None) -> InboxEntry:
        return InboxEntry(number, message.key_bytes, message.tree, parked, None if self.by_position else message.id)

    def message_in(self, entry: InboxEntry) -> Message:
        identity = str(entry.ordinal) if entry.message is None else entry.message
        message = Message(codec.decode(entry.key), entry.key, identity, entry.tree)
        if self.known is not None:
            self.known.add(message, fingerprint(entry.tree))
        return message

    def _find_set_aside(self, key: bytes, message: str) -> str | None:
        """The content of a message that `known` was told to forget."""
        found = self._checkpoints.find_in_inbox(key, message) if self._held(key) else None
        return None if found is None else fingerprint(found.tree)
