"""Stable names for message keys, messages, action tasks and calls.

No name comes from ``id()``, ``hash()``, ``repr()``, a clock, a random number, or the order in which concurrent work
finishes. Digests are BLAKE2b (RFC 7693) of 128 bits over an unambiguous JSON list.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import orjson

from dalsegno.core import codec
from dalsegno.errors import DefinitionError
from dalsegno.registry import module_name

_new_hash = blake2b(digest_size=16).copy  # quicker than to give the size each time


def digest(*parts: Any) -> str:
    """32 hexadecimal characters that stand for *parts* (strings, integers, bytes as text)."""
    found = _new_hash()
    try:
        found.update(orjson.dumps(parts))
    except TypeError:  # a lone surrogate, in a message id; escaped, it is still another text than any other
        found.update(json.dumps(parts, separators=(",", ":")).encode())
    return found.hexdigest()


def key_bytes(key: object) -> bytes:
    """The message key as canonical bytes: equal keys of one type give equal bytes; ``1``, ``"1"``, ``True`` differ."""
    if type(key) is str and key.isascii():  # as nearly all are; such a text is its own tree
        return codec.canonical(key)
    return codec.canonical(codec.to_tree(key, root="message key"))


def fingerprint(tree: codec.Tree) -> str:
    """What stands for a value when it is compared with a recorded one."""
    found = _new_hash()
    found.update(codec.canonical(tree))
    return found.hexdigest()


def task_id(message: str, sender: str, index: int, action: str) -> str:
    """The action task that runs *action* for the *index*-th event of the task *sender*, which is "" for the input."""
    return digest(message, sender, index, action)


def idempotency_key(job: str, key: bytes, message: str, task: str, name: str, arguments: str, occurrence: int) -> str:
    """A string that is equal in every attempt of one call and differs for every other call; legal in an HTTP header."""
    return digest(job, key.decode(), message, task, name, arguments, occurrence)


@functools.lru_cache(maxsize=4096)
def _function_name(function: Callable[..., Any]) -> str | None:
    target = function.__func__ if inspect.ismethod(function) else function
    qualname = getattr(target, "__qualname__", None)
    module = getattr(target, "__module__", None)
    if isinstance(target, type) or not isinstance(qualname, str) or "<lambda>" in qualname:
        return None
    if getattr(target, "__closure__", None) and "<locals>" in qualname:
        return None
    if not (inspect.isroutine(target) or hasattr(target, "__wrapped__")):
        return None
    if inspect.ismethod(function) and not isinstance(function.__self__, type):
        # An inherited method of two subclasses is two callables.
        owner = type(function.__self__)
        return f"{module_name(owner.__module__)}:{owner.__qualname__}.{function.__name__}"
    return f"{module_name(module) if isinstance(module, str) else 'builtins'}:{qualname}"


def callable_name(function: Callable[..., Any]) -> str:
    """``module:qualname`` of a function or method; raises `DefinitionError` for what has no stable name of its own."""
    try:
        name = _function_name(function)
    except TypeError:  # an unhashable callable object, or a method of an unhashable object
        name = _function_name.__wrapped__(function)
    if name is None:
        raise DefinitionError(
            f"{function!r} has no name that is the same in every process (it is a lambda, partial, closure, class or "
            "callable object): "
            f'give the call one, as in ctx.durable_execute(..., name="send-invoice")'
        )
    return name
