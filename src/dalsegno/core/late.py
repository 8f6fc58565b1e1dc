"""Calls with effect ``once`` whose functions still run in threads of this process after their time limit.

While one runs, nobody can tell whether it will have happened: neither its ``reconcile`` nor a person. When it ends, it
says so itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dalsegno.core.time_limit import Watched

MessagePlace = tuple[bytes, str]
"""Key and id of a message."""
CallPlace = tuple[str, int, int]
"""Action task, number and attempt of a call."""


@dataclass(slots=True)
class LateCall:
    """One call, and why its message is parked meanwhile."""

    watched: Watched
    reason: str
    told: bool = False


class LateCalls:
    """Those of one job. It outlives a run, as the threads do."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[MessagePlace, dict[CallPlace, LateCall]] = {}

    def add(self, message: MessagePlace, call: CallPlace, watched: Watched, reason: str) -> None:
        self._calls.setdefault(message, {})[call] = LateCall(watched, reason)

    def take(self, message: MessagePlace, call: CallPlace) -> LateCall | None:
        """The call, None if it is none of these; once it has ended, it is given only once."""
        calls = self._calls.get(message)
        late = calls.get(call) if calls else None
        if calls and late is not None and not late.watched.runs:
            del calls[call]
            if not calls:
                del self._calls[message]
        return late

    def forget_ended(self) -> None:
        """A new run begins: of what ended between two runs, ``reconcile`` is asked, as after a restart."""
        for message, calls in list(self._calls.items()):
            running = {place: call for place, call in calls.items() if call.watched.runs}
            if running:
                self._calls[message] = running
            else:
                del self._calls[message]

    def newly_ended(self) -> Iterator[MessagePlace]:
        """Each message with a call that has ended since this was last asked, unless another one of it still runs."""
        for message, calls in self._calls.items():
            if any(call.watched.runs for call in calls.values()) or all(call.told for call in calls.values()):
                continue
            for call in calls.values():
                call.told = True
            yield message
