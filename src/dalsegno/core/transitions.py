"""Every legal transition of a durable call, in one table.

A call's state is what its records add up to. A record that does not fit the state is damage, never ignored.

========== =========================================================================================
state      meaning
========== =========================================================================================
new        nothing is recorded
open       a `read` call that was seen in flight; it may or may not have run
requested  the request is durable, the outcome is not known
failed     the last attempt raised and is to be tried again, or the exception left the action: not final
completed  the outcome, a result or an exception that the action caught, is recorded: final, unless that exception
           turns out to have left the action
abandoned  the action cancelled the call and went on without an outcome: final, unless an exception left the action
           which may have been the reason
========== =========================================================================================
"""

from __future__ import annotations

from enum import StrEnum

from dalsegno.errors import RecordError


class CallStatus(StrEnum):
    NEW = "new"
    OPEN = "open"
    REQUESTED = "requested"
    FAILED = "failed"
    COMPLETED = "completed"
    ABANDONED = "abandoned"


_S = CallStatus
CALL_TRANSITIONS: dict[tuple[CallStatus, str], CallStatus] = {
    (_S.NEW, "open"): _S.OPEN,
    (_S.NEW, "requested"): _S.REQUESTED,
    (_S.NEW, "called"): _S.COMPLETED,
    (_S.NEW, "failed"): _S.FAILED,
    (_S.NEW, "abandoned"): _S.ABANDONED,
    (_S.OPEN, "open"): _S.OPEN,
    (_S.OPEN, "requested"): _S.REQUESTED,
    (_S.OPEN, "called"): _S.COMPLETED,
    (_S.OPEN, "failed"): _S.FAILED,
    (_S.OPEN, "abandoned"): _S.ABANDONED,
    (_S.REQUESTED, "requested"): _S.REQUESTED,
    (_S.REQUESTED, "failed"): _S.FAILED,
    (_S.REQUESTED, "completed"): _S.COMPLETED,
    (_S.REQUESTED, "abandoned"): _S.ABANDONED,
    (_S.COMPLETED, "failed"): _S.FAILED,
    (_S.COMPLETED, "slept"): _S.COMPLETED,
    (_S.COMPLETED, "abandoned"): _S.ABANDONED,
    (_S.FAILED, "requested"): _S.REQUESTED,
    (_S.FAILED, "failed"): _S.FAILED,
    (_S.FAILED, "completed"): _S.COMPLETED,
    (_S.FAILED, "abandoned"): _S.ABANDONED,
    (_S.ABANDONED, "reopened"): _S.REQUESTED,
    (_S.ABANDONED, "requested"): _S.REQUESTED,
    (_S.ABANDONED, "failed"): _S.FAILED,
    (_S.ABANDONED, "abandoned"): _S.ABANDONED,
    (_S.ABANDONED, "completed"): _S.COMPLETED,
}


def advance(status: CallStatus, kind: str, where: str) -> CallStatus:
    """The state after a record of *kind*; raises `RecordError` when the table has no such transition."""
    try:
        return CALL_TRANSITIONS[status, kind]
    except KeyError:
        raise RecordError(
            f"{where}: a {kind!r} record cannot follow the state {str(status)!r}; the record is damaged or was "
            "written by two processes"
        ) from None
