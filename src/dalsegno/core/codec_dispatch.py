"""What a tree is, and how a value finds the function that turns it into one.

A *tree* holds what JSON holds exactly: ``None``, ``bool``, ``int`` within signed 64 bits, finite ``float``, ``str``
that encodes to UTF-8, lists, and dicts with ``str`` keys without the key ``"$"``. All other values become an
*envelope*: a dict whose key ``"$"`` names its kind. What stands under the other keys of an envelope is a tree again,
so whoever walks over a tree needs no knowledge of the envelopes.

Two tables hold the rules: ``ENCODERS`` by the exact type of a value (a subclass is never taken for its base, its type
would be lost), ``DECODERS`` by the kind of an envelope. ``codec_plain``, ``codec_classes`` and ``codec_exceptions``
hold the rules.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from dalsegno.errors import CodecError

Tree: TypeAlias = "bool | int | float | str | list[Tree] | dict[str, Tree] | None"
Encoder: TypeAlias = Callable[[Any, int], Tree]
Decoder: TypeAlias = Callable[[dict[str, Any]], object]

#: Levels of lists and dicts in a tree. The storage form allows 254; what is left is for the record around the tree.
MAX_DEPTH = 200

INT_MIN, INT_MAX = -(2**63), 2**63 - 1


_T = TypeVar("_T")


def per_class(function: Callable[[type], _T]) -> Callable[[type], _T]:
    """Keep what a function has found out about a class."""
    return functools.cache(function)


class Fault(Exception):
    """A value that cannot be encoded; collects the path to it on the way out. Never leaves the codec."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []  # innermost part first

    def message(self, root: str) -> str:
        parts = self.path[::-1]
        if len(parts) > 12:
            parts = [*parts[:8], "...", *parts[-2:]]
        return f"cannot record {root}{''.join(parts)}: {self.reason}"


class _Encoders(dict[type, Encoder]):
    """Type -> encoder; a type that is met for the first time is asked of the ``makers`` in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.makers: list[Callable[[type], Encoder | None]] = []

    def __missing__(self, cls: type) -> Encoder:
        for make in self.makers:
            encoder = make(cls)
            if encoder is not None:
                self[cls] = encoder
                return encoder
        raise Fault(f"no rule for {cls!r}")


ENCODERS = _Encoders()
DECODERS: dict[str, Decoder] = {}
ATOMS = frozenset({type(None), bool, int, float, str})


def envelope(kind: str, required: str = "v", optional: str = "") -> Callable[[Decoder], Decoder]:
    """Declare the function that opens envelopes of ``kind``; the keys are separated by spaces."""
    least = frozenset(required.split()) | {"$"}
    most = least | frozenset(optional.split())

    def declare(function: Decoder) -> Decoder:
        def decode(tree: dict[str, Any]) -> object:
            keys = tree.keys()
            if not (least <= keys and keys <= most):
                raise damaged(tree, f"its keys must be {sorted(least)}")
            try:
                return function(tree)
            except (CodecError, RecursionError, MemoryError):
                raise
            except Exception as error:
                raise damaged(tree, f"{type(error).__name__}: {error}") from error

        DECODERS[kind] = decode
        return function

    return declare


# --- values to trees ------------------------------------------------------------------------------------------------


def encode_value(value: object, depth: int) -> Tree:
    """The tree of a value that is ``depth`` levels down; raises ``Fault``."""
    return ENCODERS[type(value)](value, depth)


def _item_place(key: object) -> str:
    return f"[{short_repr(key)}]"


def field_place(name: object) -> str:
    return f".{name}"


def encode_dict(value: dict[Any, Any], depth: int, place: Callable[[object], str] = _item_place) -> Tree:
    """The tree of a dict; *place* is how the path to an item is shown if it cannot be encoded."""
    if depth >= MAX_DEPTH:
        raise too_deep()
    out: dict[str, Tree] = {}
    key: object = None
    try:
        for key, item in value.items():
            if type(key) is not str or key == "$" or not (key.isascii() or is_utf8(key)):
                break
            cls = type(item)
            if (cls is str and item.isascii()) or (cls is int and INT_MIN <= item <= INT_MAX):
                out[key] = item
            else:
                out[key] = ENCODERS[cls](item, depth + 1)
        else:
            return out
    except Fault as fault:
        fault.path.append(place(key))
        raise
    return ENCODERS[AnyDict](value, depth)


class AnyDict:
    """Stands in ``ENCODERS`` for the dicts that JSON cannot hold."""


def encode_list(value: list[Any] | tuple[Any, ...], depth: int) -> list[Tree]:
    if depth >= MAX_DEPTH:
        raise too_deep()
    out: list[Tree] = []
    try:
        for item in value:
            cls = type(item)
            out.append(item if cls is str and item.isascii() else ENCODERS[cls](item, depth + 1))
    except Fault as fault:
        fault.path.append(f"[{len(out)}]")
        raise
    return out


def encode_fields(value: dict[str, Any], depth: int) -> Tree:
    """Like ``encode_dict``, for the attributes of an object: the path says ``.name``."""
    return encode_dict(value, depth, field_place)


def is_utf8(text: str) -> bool:
    """Whether a string has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def too_deep() -> Fault:
    return Fault(f"it is nested more than {MAX_DEPTH} levels deep, or contains itself; record a flatter value")


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 200


def short_repr(value: object, limit: int = 60) -> str:
    """A ``repr`` for messages that is short and never raises."""
    try:
        text = _repr.repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, its repr() raises {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


# --- trees to values ------------------------------------------------------------------------------------------------


def decode_value(tree: Tree) -> object:
    """The value of a tree; raises ``CodecError``, or ``RecursionError`` for a tree that no encoder has made."""
    if type(tree) is dict:
        if "$" in tree:
            kind = tree["$"]
            decode = DECODERS.get(kind) if type(kind) is str else None
            if decode is None:
                raise _unknown(kind)
            return decode(tree)
        found: dict[str, Any] = tree.copy()  # quicker than to build it up: most items are atoms
        for key, item in tree.items():
            if type(item) not in ATOMS:
                found[key] = decode_value(item)
        return found
    if type(tree) is list:
        for item in tree:
            if type(item) not in ATOMS:
                return [item if type(item) in ATOMS else decode_value(item) for item in tree]
        return tree.copy()
    if type(tree) in ATOMS:
        return tree
    raise CodecError(
        f"cannot load {short_repr(tree)}: a tree holds no {type(tree).__name__}; it is not a recorded value"
    )


def _unknown(kind: object) -> CodecError:
    return CodecError(
        f"cannot load a recorded value of the kind {short_repr(kind)}: this release does not know it; the record "
        "is damaged, or was written by a newer release, which can read it"
    )


def damaged(tree: Tree, reason: str) -> CodecError:
    return CodecError(f"cannot load the recorded value {short_repr(tree, 120)}: it is damaged or foreign ({reason})")


def decode_mapping(tree: Tree) -> dict[str, Any]:
    """Decode the attributes of an object: a dict with ``str`` keys."""
    found = decode_value(tree)
    if type(found) is not dict or any(type(key) is not str for key in found):
        raise damaged(tree, "names with values were expected")
    return found
