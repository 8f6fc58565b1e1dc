"""What is said when the code no longer fits the record: what was expected, what was found, how they differ, and where.

Nothing here is used before something does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from dalsegno.core.records import CallState, TaskActionState
from dalsegno.core.transitions import CallStatus
from dalsegno.errors import DivergenceError, is_of_the_user

REMEDY = (
    "Either put the code back as it was until the messages in flight are done, or mark the change with "
    "ctx.patched(...), or run with on_divergence='rerun', or give the job a new name to start afresh; an answer that "
    "is recorded for one call is never given to another."
)
_OTHERWISE = "put the code back until the messages in flight are done, or run with on_divergence='rerun'"
_SHOWN = 300
"""Characters of the arguments of a call."""
_SHOWN_VALUE = 80
_SHOWN_DIFFERENCES = 3


def unfit_call(where: object, expected: Sequence[CallState], found: CallState) -> DivergenceError:
    """The code makes the call *found*, where one of *expected* comes next in the record."""
    differences = _differences(expected[0], found) if len(expected) == 1 else []
    shown = f" They differ in {', '.join(differences)}." if differences else ""
    what = f"Expected the recorded call {' or '.join(map(show, expected))}; found the call {show(found)}.{shown}"
    return DivergenceError(f"{where}: the code no longer fits the record. {what} Nothing was executed. {REMEDY}", what)


def missing_call(where: object, expected: CallState) -> DivergenceError:
    what = f"The record has the call {show(expected)}, but the action ended without making it."
    return DivergenceError(f"{where}: the code no longer fits the record. {what} {REMEDY}", what)


def out_of_order(where: object, expected: CallState, why: str) -> DivergenceError:
    """The outcomes of calls in flight together cannot come in the recorded order, because of the call *expected*."""
    what = (
        "Calls that were in flight together are played back in the order in which their outcomes came. Next is the "
        f"recorded call {show(expected)}, {why}."
    )
    return DivergenceError(f"{where}: the code no longer fits the record. {what} {REMEDY}", what)


def unfit_action(where: str, expected: TaskActionState, found: str, event: str, place: str) -> DivergenceError:
    """The action *found*, which begins at *place*, is due for *event* where the record goes on with another one."""
    what = (
        f"Expected the recorded action {expected.action!r} for {expected.event_type}; found the action {found!r} for "
        f"{event}{place}."
    )
    return DivergenceError(
        f"{where}: the code no longer fits the record. {what} Nothing was executed. If an action was renamed, keep its "
        f"recorded name with @action(..., name={expected.action!r}); {_OTHERWISE}",
        what,
    )


def untriggered_action(where: str, expected: TaskActionState) -> DivergenceError:
    what = (
        f"The action {expected.action!r} for {expected.event_type} is recorded, but no event of the code triggers it."
    )
    return DivergenceError(f"{where}: the code no longer fits the record. {what} To go on, {_OTHERWISE}", what)


def unhandled_event(where: str, event: str) -> DivergenceError:
    what = f"An event {event} is recorded, but no action of the code handles it now, so it would be lost."
    return DivergenceError(f"{where}: the code no longer fits the record. {what} To go on, {_OTHERWISE}", what)


def ambiguous_rename(where: str, expected: Sequence[TaskActionState], found: str, event: str) -> DivergenceError:
    names = ", ".join(repr(state.action) for state in expected)
    return DivergenceError(
        f"{where}: the code no longer fits the record, and on_divergence='rerun' cannot mend it: for one event {event} "
        f"the actions {names} are recorded and gone, and {found!r} is new, so it cannot be told which of them was "
        "renamed. Keep the recorded name of each renamed action with @action(..., name=...)"
    )


def at(error: DivergenceError, place: str) -> DivergenceError:
    """*error* with the *place* in the code, a sentence."""
    return DivergenceError(f"{error}{place}", f"{error.what}{place}")


def harm_of(calls: Sequence[CallState]) -> str:
    """A sentence about those of *calls* that may have done something to the world, empty if none can have."""
    done = [show(call) for call in calls if call.effect != "read"]
    return f" What they did to the world stays done: {', '.join(done)}." if done else ""


def in_doubt(call: CallState) -> bool:
    """Whether a recorded call that the code no longer makes may or may not have happened, where that matters."""
    return call.effect == "once" and call.status is CallStatus.REQUESTED


def lost_in_doubt(call: CallState) -> str:
    """Why a message is parked whose code no longer makes *call*."""
    return (
        f"the call {call.name} was requested before the code was changed, and whether it happened is not recorded; "
        "the code makes it no more, so nothing else can tell: say whether it happened, and the message goes on without "
        "it, or put the code back"
    )


def made_at() -> str:
    """Where the user's code makes the call that is being made, as a sentence; empty if that is not on the stack."""
    frame: FrameType | None = sys._getframe(1)
    # Below the event loop is whoever started it.
    while frame is not None and frame.f_globals.get("__name__") not in _EVENT_LOOPS:
        if is_of_the_user(frame):
            code = frame.f_code
            return f" The call is made at {code.co_filename}:{frame.f_lineno} in {code.co_qualname}."
        frame = frame.f_back
    return ""


def defined_at(function: Callable[..., Any], before: str, behind: str = "") -> str:
    """Where *function* is defined, as ``defined at FILE:LINE`` between two texts; empty if that is not known."""
    code = getattr(function, "__code__", None)
    return f"{before}defined at {code.co_filename}:{code.co_firstlineno}{behind}" if code is not None else ""


def show(state: CallState) -> str:
    """A call with its arguments, shortened."""
    arguments = [f"{argument!r}" for argument in state.args] + [
        f"{name}={value!r}" for name, value in state.kwargs.items()
    ]
    return f"{state.name}({_shorten(', '.join(arguments), _SHOWN)})"


def _differences(expected: CallState, found: CallState) -> list[str]:
    if expected.name != found.name:
        return []
    pairs = [*_differing("args", expected.args, found.args), *_differing("kwargs", expected.kwargs, found.kwargs)]
    shown = [f"{path} (recorded {_value(old)}, now {_value(new)})" for path, old, new in pairs[:_SHOWN_DIFFERENCES]]
    return shown + (["more"] if len(pairs) > _SHOWN_DIFFERENCES else [])


def _differing(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """The places in two codec trees where they differ."""
    if type(old) is type(new) is dict:
        for name in dict.fromkeys([*old, *new]):
            yield from _differing(f"{path}[{name!r}]", old.get(name, _NOTHING), new.get(name, _NOTHING))
    elif type(old) is type(new) is list:
        for index in range(max(len(old), len(new))):
            sides = (side[index] if index < len(side) else _NOTHING for side in (old, new))
            yield from _differing(f"{path}[{index}]", *sides)
    elif type(old) is not type(new) or old != new:
        yield path, old, new


_NOTHING = object()
_EVENT_LOOPS = ("asyncio.events", "asyncio.base_events", "asyncio.runners")


def _value(value: Any) -> str:
    return "nothing" if value is _NOTHING else _shorten(repr(value), _SHOWN_VALUE)


def _shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest] + "…"
