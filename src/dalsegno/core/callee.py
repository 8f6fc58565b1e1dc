"""What must be known of a function before it is called: its stable name, and whether its arguments are clear."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dalsegno.agent import check_name
from dalsegno.context import CallOptions
from dalsegno.core.identity import callable_name
from dalsegno.effects import EFFECTS
from dalsegno.errors import DefinitionError
from dalsegno.registry import register_signature

_OPTIONS = frozenset({"effect", "reconcile", "name", "kwargs"})


@dataclass(frozen=True, slots=True)
class Callee:
    """*name* is None for what has no stable name; *is_async* says whether calling it needs no thread."""

    name: str | None
    is_async: bool
    colliding: frozenset[str]
    """Parameters of the function that are named like an option of ``durable_execute``."""


_known: dict[tuple[Any, type | None], Callee] = {}


def describe(function: Callable[..., Any]) -> Callee:
    """The `Callee` of *function*, remembered for functions that live as long as their module."""
    target, owner = function, None
    if inspect.ismethod(function):
        target, owner = function.__func__, type(function.__self__)
    if not inspect.isfunction(target) or "<" in target.__qualname__:  # <locals> and <lambda> come anew each time
        return _describe(function)
    known = _known.get((target, owner))
    if known is None:
        known = _known[target, owner] = _describe(function)
    return known


def _describe(function: Callable[..., Any]) -> Callee:
    if not callable(function):
        raise DefinitionError(
            f"durable_execute calls a function, but got {function!r}; pass the function itself and its arguments "
            "after it"
        )
    register_signature(function)
    try:
        name: str | None = callable_name(function)
    except DefinitionError:
        name = None
    try:
        parameters = frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = frozenset()
    return Callee(name, inspect.iscoroutinefunction(function), parameters & _OPTIONS)


def check_options(
    function: Callable[..., Any], callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
) -> str:
    """The name of the call. Raises `DefinitionError` for a wrong option, a missing name, an ambiguous argument."""
    if callee.colliding:  # first, since an argument taken for an option is nearly always a wrong option too
        _check_collisions(function, callee, args, kwargs, options)
    if options.name is not None:
        check_name(options.name, "durable_execute(..., name=...)")
    if options.effect not in EFFECTS:
        raise DefinitionError(f"effect={options.effect!r} is not one of {', '.join(map(repr, EFFECTS))}")
    if options.reconcile is not None:
        _check_reconcile(options)
    return options.name or callee.name or callable_name(function)


def _check_reconcile(options: CallOptions) -> None:
    if not callable(options.reconcile):
        raise DefinitionError(
            f"reconcile={options.reconcile!r} cannot be called: pass the function itself, which is called with the "
            "call's arguments after a crash and says whether the call happened"
        )
    if options.effect != "once":
        raise DefinitionError(
            f"reconcile= is only asked about a call with effect='once'; this one has {options.effect!r} and is "
            "simply made again after a crash"
        )


def _check_collisions(
    function: Callable[..., Any], callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
) -> None:
    given = {
        option for option in callee.colliding if getattr(options, option, None) != getattr(CallOptions(), option, None)
    }
    bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    for option in sorted(given - bound.keys()):
        raise DefinitionError(
            f"{option}= is an option of durable_execute and a parameter of {function!r}: "
            f"pass the function's in kwargs={{{option!r}: ...}}, so that it is clear which one is meant"
        )
