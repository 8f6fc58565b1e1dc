"""Where an action task stands: the place of its records, what was decided about it, and what errors say of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dalsegno.core import decisions
from dalsegno.core.environment import Environment
from dalsegno.core.records import as_record, dump_body

if TYPE_CHECKING:
    from dalsegno.core.executor import Message


class Place:
    """One action task in its environment. *header* is what its first record says of it, None if that is recorded."""

    __slots__ = ("_header", "action", "environment", "identity", "message", "written")

    def __init__(
        self, environment: Environment, message: Message, identity: str, action: str, header: dict[str, Any] | None
    ) -> None:
        self.environment = environment
        self.message = message
        self.identity = identity
        self.action = action
        self._header = header
        self.written = False
        """Whether this process recorded something of the action task."""

    def __str__(self) -> str:
        message = self.message
        return f"job {self.environment.job!r}, key {message.key!r}, message {message.id!r}, action {self.action!r}"

    def append(self, body: dict[str, Any]) -> None:
        """Record *body*, with the header if it is the first of the action task."""
        if self._header is not None:
            body["task"] = self._header
            self._header = None
        self.written = True
        message = self.message
        self.environment.log.append(as_record((message.key_bytes, message.id, self.identity, dump_body(body))))

    def decision(self, target: str) -> decisions.Answer | None:
        """What somebody decided about *target*."""
        made = self.environment.decisions.get((self.message.key_bytes, self.message.id))
        body = made.get(target) if made else None
        return decisions.load(target, body) if body is not None else None
