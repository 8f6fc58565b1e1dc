"""Events: what triggers actions.

An agent's own events are subclasses of `Event`, which is a pydantic model::

    class Scored(Event):
        product: str
        score: int

Every event class is registered for recording when it is defined. An action always receives a fresh copy of the event,
decoded from its record, in the first run as in every replay.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from dalsegno.registry import register


class Event(BaseModel):
    """Base of all events; unknown fields are refused when an event is made."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        register(cls)


class InputEvent(Event):
    """One input record, as the source read it."""

    input: Any


class OutputEvent(Event):
    """A result of the agent; it leaves through the sink and triggers no action."""

    output: Any
