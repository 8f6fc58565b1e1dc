"""Every error that Dal Segno raises, in one tree.

::

    DalSegnoError
    ├── DefinitionError          an agent, an action or an option is declared wrongly (also a TypeError)
    ├── CodecError               a value or a class cannot be recorded, or a recorded value cannot be loaded
    ├── MemoryPathError          a memory path is malformed, or runs through a value that is not an object
    ├── RecordError              a record is damaged, foreign or too new
    ├── DivergenceError          code or input no longer fits what is recorded
    ├── InDoubtError             a call was requested, its outcome is unknown and nobody could tell
    ├── ActionError              an action failed; ``__cause__`` is what it raised
    ├── InputError               an input record cannot be read
    ├── InspectError             what is looked for in a store is not there, is ambiguous, or is not to be decided
    │   └── AlreadyDecidedError  the question has another answer, which stays
    ├── RestoreError             a checkpoint, its source, its sink and its store do not fit together
    └── StoreError               the task action store failed
        ├── OwnershipError       another process runs this job
        └── FencedError          this process lost ownership; nothing it writes is accepted any more

A message says what happened, where, why it cannot go on and what to do. All errors survive pickling.
"""

from __future__ import annotations

from types import FrameType


class DalSegnoError(Exception):
    """Root of all errors of this library."""


class DefinitionError(DalSegnoError, TypeError):
    """An agent, an action, a call or an option is declared wrongly; raised where it is declared."""


class CodecError(DalSegnoError, ValueError):
    """A value cannot be recorded exactly, or a recorded value cannot be loaded."""


class MemoryPathError(DalSegnoError, LookupError):
    """A memory path is malformed, or runs through a value that is not an object."""


class RecordError(DalSegnoError):
    """A record is damaged, foreign or of a newer format; it is never read as "nothing recorded"."""


class DivergenceError(DalSegnoError):
    """The code or the input no longer fits the record of a message that is being replayed.

    *what* says what does not fit, without where it is and what to do.
    """

    def __init__(self, message: str = "", what: str = "") -> None:
        super().__init__(message)
        self.what = what


class InDoubtError(DalSegnoError):
    """A call was requested before a crash, its outcome is not recorded, and nobody could tell it."""


class ActionError(DalSegnoError):
    """An action failed. ``__cause__`` is the exception that left it."""


class InputError(DalSegnoError):
    """An input record cannot be read; names the source, the position and the reason."""


class RestoreError(DalSegnoError):
    """What a checkpoint needs to go on (source, sink, store) is not what it was."""


class InspectError(DalSegnoError):
    """What is looked for in a store is not there, is ambiguous, or is nothing that can be decided now."""


class AlreadyDecidedError(InspectError):
    """Somebody has answered the question before, and that answer stays; nothing was written."""


class StoreError(DalSegnoError):
    """The task action store could not do what it was asked to do."""


class OwnershipError(StoreError):
    """Another process runs this job on this store."""


class FencedError(StoreError):
    """This process lost the ownership of the job or key; the write was refused."""


def raised_at(error: BaseException) -> str:
    """Where in the user's code *error* was raised, as ``, at FILE:LINE in FUNCTION``; empty if that is not known."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_of_the_user(traceback.tb_frame):
            place = f", at {code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return place


def is_of_the_user(frame: FrameType) -> bool:
    """Whether *frame* runs code of neither this library, nor one that is installed, nor the event loop."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] not in _NOT_THE_USERS and "site-packages" not in frame.f_code.co_filename


_NOT_THE_USERS = ("dalsegno", "asyncio", "concurrent", "contextvars", "importlib", "typer", "click")
