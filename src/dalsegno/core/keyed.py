"""Hands the idempotency key of a call on to a function that asks for it in its signature.

The key is added when the function is called, so it is neither among the recorded arguments nor in their fingerprint.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dalsegno.effects import IdempotencyKey, current_call
from dalsegno.errors import DefinitionError

KEY_OPTION = "idempotency_key"


class Place(NamedTuple):
    """A parameter that takes the key."""

    name: str
    position: int | None
    """As the how-manieth positional argument it can be given, too; None if it cannot."""


def marked_places(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> tuple[Place, ...]:
    """The parameters that are annotated with `IdempotencyKey`."""
    return tuple(_marked(function, parameters))


def _marked(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Iterator[Place]:
    for position, parameter in enumerate(parameters.values()):
        annotation = parameter.annotation
        if annotation is parameter.empty or isinstance(annotation, type) or not _is_key(annotation, function):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise DefinitionError(
                f"the parameter {parameter.name!r} of {function!r} takes the idempotency key, which is given by name: "
                "move the / of the signature before it"
            )
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield Place(parameter.name, position if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else None)


def option_place(parameters: Mapping[str, inspect.Parameter] | None) -> Place | None:
    """Where ``idempotency_key=True`` puts the key; None if the function cannot take it."""
    if parameters is None:  # some builtins have no signature
        return Place(KEY_OPTION, None)
    for position, parameter in enumerate(parameters.values()):
        if parameter.kind is parameter.VAR_KEYWORD:
            return Place(KEY_OPTION, None)
        if parameter.name == KEY_OPTION and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            return Place(KEY_OPTION, position)
        if parameter.name == KEY_OPTION and parameter.kind is parameter.KEYWORD_ONLY:
            return Place(KEY_OPTION, None)
    return None


def add_key(function: Callable[..., Any], places: tuple[Place, ...], is_async: bool) -> Callable[..., Any]:
    """*function* with the key of the present call in *places*, unless its caller gave that argument."""

    def more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        missing = [
            place.name
            for place in places
            if place.name not in kwargs and (place.position is None or place.position >= len(args))
        ]
        return kwargs | dict.fromkeys(missing, current_call().idempotency_key)

    async def keyed_async(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **more(args, kwargs))

    def keyed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **more(args, kwargs))

    return keyed_async if is_async else keyed


# --- annotations ----------------------------------------------------------------------------------------------------

_by_text: dict[tuple[str, str], bool] = {}
"""Whether the text of an annotation, in a module, means the key."""


def _is_key(annotation: Any, function: Callable[..., Any]) -> bool:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return _text_is_key(annotation, function)
    if annotation is IdempotencyKey:
        return True
    if type(annotation).__name__ == "TypeAliasType":
        return _is_key(annotation.__value__, function)
    if typing.get_origin(annotation) in _TRANSPARENT:
        return any(_is_key(part, function) for part in typing.get_args(annotation))
    return False


_TRANSPARENT = (typing.Union, type(int | str), typing.Annotated)


def _text_is_key(text: str, function: Callable[..., Any]) -> bool:
    target: Any = inspect.unwrap(getattr(function, "__func__", function))
    target = getattr(target, "func", target)  # of a partial
    place = (getattr(target, "__module__", None) or "", text)
    known = _by_text.get(place)
    if known is not None:
        return known
    try:
        found = eval(text, getattr(target, "__globals__", {}))  # the program's own annotation, never a record
    except Exception:
        # A name that only the type checker sees, or one of an enclosing function.
        return re.search(r"\bIdempotencyKey\b", text) is not None
    known = _by_text[place] = _is_key(found, function)
    return known
