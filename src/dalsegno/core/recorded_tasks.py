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

    def identity(self, action: str) -> str:
        return task_id(self.message, self.sender, self.position, action)


class RecordedTasks:
    """What is *left* of the history of one message. *where* says which message it is, in errors."""

    def __init__(self, history: Sequence[TaskActionState], rerun: bool) -> None:
        self.left = list(history)
        self._known = {state.task for state in history}
        self._rerun = rerun
        self._order: list[str] = []
        self.moved: list[str] = []
        """What did not fit, for people."""

    @property
    def order(self) -> list[str] | None:
        """The action tasks that were taken, in this order, if those are not the recorded ones in theirs."""
        return self._order if self.moved or self.left else None

    def take(self, due: Due, identity: str, where: str) -> TaskActionState | None:
        """What is recorded of *due*, None if nothing is. Raises `DivergenceError` for what does not fit."""
        found = self._find(due, identity, where)
        if found is not None:
            self.left.remove(found)
        self._order.append(found.task if found is not None else identity)
        return found

    def _find(self, due: Due, identity: str, where: str) -> TaskActionState | None:
        if not self.left:
            return None
        first = self.left[0]
        if first.task == identity:
            return first
        unfit = divergence.unfit_action(where, first, due.action, due.event, due.place)
        if not self._rerun:
            raise unfit
        self.moved.append(unfit.what)
        return next((state for state in self.left if state.task == identity), None) or self._renamed(due, where)

    def _renamed(self, due: Due, where: str) -> TaskActionState | None:
        gone = [
            state
            for state in self.left
            if (state.sender, state.index) == (due.sender, due.position) and state.action not in due.handlers
        ]
        new = [name for name in due.handlers if due.identity(name) not in self._known]
        if not gone:
            return None
        if len(gone) > 1 or len(new) > 1:
            raise divergence.ambiguous_rename(where, gone, due.action, due.event)
        return gone[0]
