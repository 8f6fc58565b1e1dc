"""What a durable call does to the world, and how a call in doubt is settled.

========== ===========================================================================================================
effect     after a crash between request and response
========== ===========================================================================================================
read       called again: a model inference, a look-up
idempotent called again with the same idempotency key (``current_call().idempotency_key``)
once       never called again blindly: ``reconcile`` is asked whether it happened; if nobody can tell, its message is
           parked
========== ===========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NewType

Effect = Literal["read", "idempotent", "once"]
EFFECTS: tuple[Effect, ...] = ("read", "idempotent", "once")
"""From harmless to harmful to repeat."""


IdempotencyKey = NewType("IdempotencyKey", str)
"""The type of a parameter that is to get the idempotency key of the call, unless the caller gives it himself.

It is a str. The key is not among the recorded arguments.
"""


@dataclass(frozen=True, slots=True)
class Happened:
    """Answer of a ``reconcile``: the call did happen, with this *result*, which becomes the call's recorded result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """Answer of a ``reconcile``: the call did not happen, so it is made now."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Answer of a ``reconcile``: it cannot tell; the message is parked."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """The durable call that is being executed or reconciled."""

    job: str
    name: str
    attempt: int
    """1 in the first attempt."""
    idempotency_key: str
    """Equal in every attempt and after every restart, different for every other call; legal in an HTTP header."""


running: ContextVar[Callable[[], CurrentCall]] = ContextVar("dalsegno_current_call")
"""Makes the `CurrentCall` when it is asked for; few calls ask."""


def current_call() -> CurrentCall:
    """The durable call that this function is executed for, inside the callee or its ``reconcile``.

    Raises `LookupError` outside of a durable call.
    """
    try:
        return running.get()()
    except LookupError:
        raise LookupError(
            "current_call() is only known inside a function that runs in ctx.durable_execute, or in its reconcile"
        ) from None
