"""Calls the function of a durable call, or its ``reconcile``, with the call's arguments as they are recorded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from dalsegno import effects
from dalsegno.core import codec
from dalsegno.core.callee import Callee
from dalsegno.core.identity import idempotency_key
from dalsegno.core.journal import Call
from dalsegno.core.place import Place
from dalsegno.core.time_limit import Watched, in_time
from dalsegno.effects import CurrentCall


async def invoke(
    place: Place, call: Call, function: Callable[..., Any], is_async: bool, *, settles: bool = False
) -> Any:
    """What *function* returns or raises, for *call* of the action task at *place*; a sync one runs in a thread.

    *settles* says that it is the call's reconcile.
    """
    state = call.state
    args = codec.from_tree(state.args)
    kwargs = codec.from_tree(state.kwargs) if state.kwargs else {}
    attempt = state.attempt
    watch = place.environment.watch
    if watch is not None:
        around = watch.reconcile if settles else watch.call
        function = around(place, call, function, is_async)
    token = effects.running.set(lambda: _current_call(place, call, attempt))
    try:
        if is_async:
            return await function(*args, **kwargs)
        result = await place.environment.run_in_thread(functools.partial(function, *args, **kwargs))
        return await result if inspect.isawaitable(result) else result
    finally:
        try:  # noqa: SIM105  suppress() is slow
            effects.running.reset(token)
        except ValueError:
            pass  # the coroutine is closed from elsewhere, where nothing was set


async def invoke_in_time(place: Place, call: Call, function: Callable[..., Any], callee: Callee, seconds: float) -> Any:
    """The same within *seconds*; raises as `in_time` does."""
    watched = None if callee.is_async else Watched(function)
    attempt = invoke(place, call, watched or function, callee.is_async)
    return await in_time(attempt, seconds, call.state.name, watched)


def _current_call(place: Place, call: Call, attempt: int) -> CurrentCall:
    job, message, state = place.environment.job, place.message, call.state
    key = idempotency_key(
        job, message.key_bytes, message.id, place.identity, state.name, state.arguments, call.occurrence
    )
    return CurrentCall(job, state.name, attempt, key)
