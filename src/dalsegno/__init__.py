"""Dal Segno: AI agents on streams that are safe to crash.

Every model call, tool call, memory update and output event of an agent is recorded once and played back after a
failure, never done twice.

What to read, in this order:

* `dalsegno.agent`, `dalsegno.events`, `dalsegno.context`, `dalsegno.memory`, `dalsegno.effects`, `dalsegno.retry`: what
  an agent is written with.
* `dalsegno.runners.local`: how it is run.
* `dalsegno.core.executor` and `dalsegno.core.task`: how a message is run or played back; `dalsegno.core.journal`: how
  calls are matched with their record; `dalsegno.core.records`: what is recorded; `dalsegno.core.commit`: when it is
  durable.
* `dalsegno.stores.base`: the contract of a store; `dalsegno.cipher`: encryption of what is kept.
* `dalsegno.operate.operator`: how people see what waits, and decide.
* `dalsegno.runners.pipeline`: checkpoints, backpressure, order per key.
"""

from dalsegno.agent import Agent, action
from dalsegno.cipher import AesGcmCipher, PayloadCipher
from dalsegno.context import RunnerContext
from dalsegno.effects import DidNotHappen, Happened, IdempotencyKey, Unknown, current_call
from dalsegno.errors import (
    ActionError,
    AlreadyDecidedError,
    CodecError,
    DalSegnoError,
    DefinitionError,
    DivergenceError,
    FencedError,
    InDoubtError,
    InputError,
    InspectError,
    MemoryPathError,
    OwnershipError,
    RecordError,
    RestoreError,
    StoreError,
)
from dalsegno.events import Event, InputEvent, OutputEvent
from dalsegno.memory import MemoryObject
from dalsegno.operate.operator import Operator
from dalsegno.registry import register
from dalsegno.retry import RetryPolicy
from dalsegno.runners.local import LocalRunner
from dalsegno.runners.report import RunReport

__version__ = "0.1.0"

__all__ = [
    "ActionError",
    "AesGcmCipher",
    "Agent",
    "AlreadyDecidedError",
    "CodecError",
    "DalSegnoError",
    "DefinitionError",
    "DidNotHappen",
    "DivergenceError",
    "Event",
    "FencedError",
    "Happened",
    "IdempotencyKey",
    "InDoubtError",
    "InputError",
    "InputEvent",
    "InspectError",
    "LocalRunner",
    "MemoryObject",
    "MemoryPathError",
    "Operator",
    "OutputEvent",
    "OwnershipError",
    "PayloadCipher",
    "RecordError",
    "RestoreError",
    "RetryPolicy",
    "RunReport",
    "RunnerContext",
    "StoreError",
    "Unknown",
    "action",
    "current_call",
    "register",
]
