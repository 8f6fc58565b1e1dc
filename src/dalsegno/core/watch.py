"""The seam for those who stand beside an agent while it runs: tests that crash it at a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dalsegno.core.journal import Call
    from dalsegno.core.place import Place


class Watch(Protocol):
    """Told of the steps of all action tasks. What a method raises goes the way of what the agent raises there."""

    def action(self, place: Place, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of the action's *function*; async if that is."""
        ...

    def call(self, place: Place, call: Call, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        """What is called in place of the *function* of a durable call; async if *is_async*."""
        ...

    def reconcile(self, place: Place, call: Call, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        """What is called in place of the *function* that tells whether the call happened; async if *is_async*."""
        ...

    def event(self, place: Place, send: Callable[[], None]) -> None:
        """Calls *send*, which sends an event."""
        ...

    def done(self, place: Place, record: Callable[[], None]) -> None:
        """Calls *record*, which records that the action is done."""
        ...
