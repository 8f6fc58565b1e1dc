"""What must be known of a call before it is made: its stable name, whether its arguments are clear, their record."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from dalsegno.agent import check_name
from dalsegno.context import CallOptions
from dalsegno.core import codec
from dalsegno.core.identity import callable_name, fingerprint
from dalsegno.core.keyed import Place, add_key, marked_places, option_place
from dalsegno.effects import EFFECTS
from dalsegno.errors import CodecError, DefinitionError
from dalsegno.registry import register_signature
from dalsegno.retry import RetryPolicy, is_number

_OPTIONS = frozenset({*CallOptions._fields, "kwargs"})
_LONGEST_TIMEOUT = 366 * 86_400


@dataclass(frozen=True, slots=True)
class Callee:
    """*name* is None for what has no stable name; *is_async* says whether calling it needs no thread."""

    name: str | None
    is_async: bool
    colliding: frozenset[str]
    """Parameters of the function that are named like an option of ``durable_execute``."""
    marked: tuple[Place, ...]
    """Parameters that are annotated with `IdempotencyKey`."""
    option_place: Place | None
    """The parameter that ``idempotency_key=True`` is for."""


_known: dict[Any, Callee] = {}
"""By function, or by the function and the class of a method."""


def describe(function: Callable[..., Any]) -> Callee:
    """The `Callee` of *function*, remembered for functions that live as long as their module."""
    if type(function) is MethodType:
        target: Any = function.__func__
        key: Any = (target, type(function.__self__))
    else:
        key = target = function
    if type(target) is not FunctionType:
        return _describe(function)
    known = _known.get(key)
    if known is None:
        known = _describe(function)
        if "<" not in target.__qualname__:  # <locals> and <lambda> come anew each time
            _known[key] = known
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
    parameters: Mapping[str, inspect.Parameter] | None
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = None
    return Callee(
        name,
        inspect.iscoroutinefunction(function),
        _OPTIONS.intersection(parameters or ()),
        marked_places(function, parameters or {}),
        option_place(parameters),
    )


def with_key(function: Callable[..., Any], callee: Callee, options: CallOptions) -> Callable[..., Any]:
    """*function*, given the idempotency key where its signature or *options* ask for it."""
    places = callee.marked
    if options.idempotency_key and callee.option_place is not None:
        places = (*places, callee.option_place)
    return add_key(function, places, callee.is_async) if places else function


def with_key_for_reconcile(options: CallOptions) -> CallOptions:
    """*options* with a ``reconcile`` that gets the key in the same way as the function that is called."""
    if options.reconcile is None:
        return options
    return options._replace(reconcile=with_key(options.reconcile, describe(options.reconcile), options))


def check_options(
    function: Callable[..., Any], callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
) -> str:
    """The name of the call. Raises `DefinitionError` for a wrong option, a missing name, an ambiguous argument."""
    if callee.colliding:  # first, since an argument taken for an option is nearly always a wrong option too
        _check_collisions(function, callee, args, kwargs, options)
    effect, reconcile, name, retry, timeout, idempotency_key = options  # at once, as this is done for every call
    if name is not None:
        check_name(name, "durable_execute(..., name=...)")
    if effect not in EFFECTS:
        raise DefinitionError(f"effect={effect!r} is not one of {', '.join(map(repr, EFFECTS))}")
    if reconcile is not None:
        _check_reconcile(options)
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise DefinitionError(f"retry={retry!r} is no RetryPolicy: write retry=RetryPolicy(attempts=3), for example")
    if timeout is not None:
        _check_timeout(timeout)
    if idempotency_key is not False:
        _check_key_option(function, callee, options)
    return name or callee.name or callable_name(function)


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


def _check_timeout(timeout: object) -> None:
    if not is_number(timeout, 0, _LONGEST_TIMEOUT) or timeout == 0:
        raise DefinitionError(
            f"timeout={timeout!r}: give the seconds that one attempt of the call may take, a number above 0 and up to "
            "a year, or None for no limit"
        )


def _check_key_option(function: Callable[..., Any], callee: Callee, options: CallOptions) -> None:
    if options.idempotency_key is not True:
        raise DefinitionError(
            f"idempotency_key={options.idempotency_key!r} is not True or False: True gives the function the call's own "
            "key as the argument idempotency_key; one of yours goes into kwargs={'idempotency_key': ...}"
        )
    if callee.option_place is None:
        raise DefinitionError(
            f"idempotency_key=True gives {function!r} the argument idempotency_key, but it has no such parameter: add "
            "one, or leave the option out and ask current_call().idempotency_key inside the function"
        )


def _check_collisions(
    function: Callable[..., Any], callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
) -> None:
    given = {
        option for option in callee.colliding if getattr(options, option, None) != getattr(CallOptions(), option, None)
    }
    if options.idempotency_key is True:
        given.discard("idempotency_key")  # which is what it is for
    bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    for option in sorted(given - bound.keys()):
        raise DefinitionError(
            f"{option}= is an option of durable_execute and a parameter of {function!r}: "
            f"pass the function's in kwargs={{{option!r}: ...}}, so that it is clear which one is meant"
        )


def encode_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any], str]:
    """The arguments as the codec writes them, and their fingerprint; raises `CodecError` if they cannot be recorded."""
    try:
        arguments: Any = codec.to_tree(list(args), root="args")
        keywords: Any = codec.to_tree(kwargs, root="kwargs") if kwargs else {}
    except CodecError as error:
        raise CodecError(f"the call {name} was not made, because an argument cannot be recorded: {error}") from error
    return arguments, keywords, fingerprint({"args": arguments, "kwargs": keywords} if keywords else arguments)
