"""What differs in every run and is therefore recorded: an action gets the same time, number or id in every replay.

These are `read` calls under names of their own; `RunnerContext` offers them.
"""

from __future__ import annotations

import random
from uuid import UUID, uuid4


async def random_number() -> float:
    """A float from 0 up to, but not including, 1."""
    return random.random()


async def new_uuid() -> UUID:
    """A random UUID (version 4 of RFC 9562)."""
    return uuid4()
