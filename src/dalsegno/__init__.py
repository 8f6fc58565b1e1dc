"""Dal Segno: AI agents on streams that are safe to crash.

Every model call, tool call, memory update and output event of an agent is recorded once and played back after a
failure, never done twice.

What to read, in this order:

* `dalsegno.agent`, `dalsegno.events`, `dalsegno.context`, `dalsegno.memory`, `dalsegno.effects`, `dalsegno.retry`: what
  an agent is written with.
* `dalsegno.runners.local`: how it is run.
* `dalsegno.core.executor` and `dalsegno.core.task`: how a message is run or played back; `dalsegno.core.attempts` and
  `dalsegno.core.settlement`: how a call is made, and what becomes of one in doubt; `dalsegno.core.journal` and
  `dalsegno.core.strands`: how calls are matched with their record, also those that are in flight together;
  `dalsegno.core.records`: what is recorded; `dalsegno.core.commit`: when it is durable.
* `dalsegno.stores.base`: the contract of a store; `dalsegno.cipher`: encryption of what is kept.
* `dalsegno.operate.operator`: how people see what waits, and decide.
* `dalsegno.runners.pipeline`: one run; `dalsegno.runners.inbox`: backpressure, order per key, what is set aside;
  `dalsegno.runners.checkpointer`: when a checkpoint is taken; `dalsegno.runners.parking`: how parked messages go on.
"""

TYPE_CHECKING = False  # importing it takes as long as all the rest of this module
if TYPE_CHECKING:
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

# A name is loaded when it is first asked for: the command must see to Ctrl-C before all of the library is there.
_NAMES = {
    "agent": "Agent action",
    "cipher": "AesGcmCipher PayloadCipher",
    "context": "RunnerContext",
    "effects": "DidNotHappen Happened IdempotencyKey Unknown current_call",
    "errors": (
        "ActionError AlreadyDecidedError CodecError DalSegnoError DefinitionError DivergenceError "
        "FencedError InDoubtError InputError InspectError MemoryPathError OwnershipError RecordError "
        "RestoreError StoreError"
    ),
    "events": "Event InputEvent OutputEvent",
    "memory": "MemoryObject",
    "operate.operator": "Operator",
    "registry": "register",
    "retry": "RetryPolicy",
    "runners.local": "LocalRunner",
    "runners.report": "RunReport",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # for a type checker, it would make any name one of the package

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
