"""What is recorded of the action tasks of one message, as the executor goes through it.

The action tasks of a message come in an order that its events determine, so each one due must be the next one
recorded. Where the code has changed and is to go on all the same (*rerun*), each is looked for by its identity instead;
a recorded action that is gone is taken for the one of the same event that is new, if there is just one of each: it was
renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dalsegno.core import divergence
from dalsegno.core.identity import task_id
from dalsegno.core.records import TaskActionState


class Due(NamedTuple):
    """An action task that is due, in the code as it is now."""

    identity: str
    message: str
    sender: str
    position: int
    """Of the event among those of its sender."""
    action: str
    event: str
    """The name of the event's type, for messages."""
    handlers: Sequence[str]
    """The names of all actions for the event."""
    place: str
    """Where the action is defined, for messages."""

    def identity_of(self, action: str) -> str:
        """What the identity is if *action* is run for the event."""
        return task_id(self.message, self.sender, self.position, action)


class RecordedTasks:
    """What is *left* of the history of one message. *where* says which message it is, in errors."""

    def __init__(self, history: Sequence[TaskActionState], rerun: bool) -> None:
        self.left = list(history)
        self._history = history
        self._rerun = rerun
        self._order: list[str] = []
        self.moved: list[str] = []
        """What did not fit, for people."""

    @property
    def order(self) -> list[str] | None:
        """The action tasks that were taken, in this order, if those are not the recorded ones in theirs."""
        return self._order if self.moved or self.left else None

    def take(self, due: Due, where: str) -> TaskActionState | None:
        """What is recorded of *due*, None if nothing is; to be asked only as long as something is left.

        Raises `DivergenceError` for what does not fit.
        """
        found = self._find(due, where)
        if found is not None:
            self.left.remove(found)
        self._order.append(found.task if found is not None else due.identity)
        return found

    def _find(self, due: Due, where: str) -> TaskActionState | None:
        first = self.left[0]
        if first.task == due.identity:
            return first
        unfit = divergence.unfit_action(where, first, due.action, due.event, due.place)
        if not self._rerun:
            raise unfit
        self.moved.append(unfit.what)
        return next((state for state in self.left if state.task == due.identity), None) or self._renamed(due, where)

    def _renamed(self, due: Due, where: str) -> TaskActionState | None:
        gone = [
            state
            for state in self.left
            if (state.sender, state.index) == (due.sender, due.position) and state.action not in due.handlers
        ]
        if not gone:
            return None
        known = {state.task for state in self._history}
        new = [name for name in due.handlers if due.identity_of(name) not in known]
        if len(gone) > 1 or len(new) > 1:
            raise divergence.ambiguous_rename(where, gone, due.action, due.event)
        return gone[0]
