"""Who is who when the messages of one key come again in another order than they were recorded in.

After a crash a source may bring the same messages again with its partitions merged otherwise. `Claims` has what is
recorded of one key, in recorded order, and answers two questions about each message that comes:

* **Which one is it?** A message without an id of its own *claims* by content: it is the earliest recorded message with
  the same content that nobody has claimed. Messages of one key with the same content stand for one another, so each
  record goes to one message, and to none of other content.
* **Is it its turn?** Recorded messages go on in recorded order, new ones after them in the order in which they come.
  One that comes early waits for those before it. Whoever uses this bounds the wait, and calls `give_up` at the bound:
  what it waited for may never come.

No I/O, no clock, no order that depends on either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Recorded(NamedTuple):
    """A recorded message. *content* is the fingerprint of its content, None if it is not to be claimed by that."""

    message: str
    content: str | None


class Claims(Generic[T]):
    """The recorded messages of one key, in recorded order, and the items, one for each message, that wait."""

    def __init__(self, recorded: Iterable[Recorded]) -> None:
        self._order: list[str] = []
        self._unclaimed: dict[str, deque[str]] = {}
        for message, content in recorded:
            self._order.append(message)
            if content is not None:
                self._unclaimed.setdefault(content, deque()).append(message)
        self._places = {message: place for place, message in enumerate(self._order)}
        self._next = 0
        """The place of the first recorded message that has not come and is waited for."""
        self._early: dict[str, T] = {}
        """Recorded ones that wait."""
        self._new: list[T] = []
        """New ones that wait, in the order in which they came."""

    @property
    def settled(self) -> bool:
        """Whether no recorded message is waited for any more."""
        return self._next == len(self._order)

    @property
    def waiting(self) -> int:
        """How many items wait."""
        return len(self._early) + len(self._new)

    def claim(self, content: str) -> str | None:
        """The id that a message with this content takes over, None if it is new. Each id is given once."""
        ids = self._unclaimed.get(content)
        if ids is None:
            return None
        message = ids.popleft()
        if not ids:
            del self._unclaimed[content]
        return message

    def arrive(self, message: str, item: T) -> list[T]:
        """The message came: the items whose turn it is now, in order. *item* may be among them, or waits."""
        place = self._places.get(message)
        if place is None:
            if self.settled:
                return [item]
            self._new.append(item)
            return []
        if place < self._next:  # it was given up, or came before
            return [item]
        self._early[message] = item
        return self._in_turn()

    def give_up(self) -> tuple[list[str], list[T]]:
        """Wait no longer for the messages that hold up what waits: their ids, and the items whose turn it is now.

        Those that recorded items wait for go first; new items may have to wait on, for what is recorded after those.
        """
        end = 1 + max(map(self._places.__getitem__, self._early), default=len(self._order) - 1)
        passed = self._order[self._next : end]
        given_up = [message for message in passed if message not in self._early]
        ready = [self._early.pop(message) for message in passed if message in self._early]
        self._next = end
        return given_up, ready + self._in_turn()

    def _in_turn(self) -> list[T]:
        ready = []
        while not self.settled and self._order[self._next] in self._early:
            ready.append(self._early.pop(self._order[self._next]))
            self._next += 1
        if self.settled:
            ready += self._new
            self._new = []
        return ready
