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


_S = CallStatus
CALL_TRANSITIONS: dict[tuple[CallStatus, str], CallStatus] = {
    (_S.NEW, "open"): _S.OPEN,
    (_S.NEW, "requested"): _S.REQUESTED,
    (_S.NEW, "called"): _S.COMPLETED,
    (_S.NEW, "failed"): _S.FAILED,
    (_S.OPEN, "open"): _S.OPEN,
    (_S.OPEN, "requested"): _S.REQUESTED,
    (_S.OPEN, "called"): _S.COMPLETED,
    (_S.OPEN, "failed"): _S.FAILED,
    (_S.REQUESTED, "requested"): _S.REQUESTED,
    (_S.REQUESTED, "failed"): _S.FAILED,
    (_S.REQUESTED, "completed"): _S.COMPLETED,
    (_S.COMPLETED, "failed"): _S.FAILED,
    (_S.FAILED, "requested"): _S.REQUESTED,
    (_S.FAILED, "failed"): _S.FAILED,
    (_S.FAILED, "completed"): _S.COMPLETED,
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
