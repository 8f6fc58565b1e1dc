"""The canonical form of a tree: the bytes that stand for it wherever identity is at stake.

JSON in UTF-8 with sorted keys and without white space, as Python's ``json`` writes it. These bytes and their digests
are kept in records, so **they never change between releases**: ``tests/test_codec.py`` pins them.

``json`` is the definition and orjson the quick way to the same bytes. orjson writes floats in another way (``1e16`` for
``1e+16``), so it gets the trees that hold none, which are nearly all. Whether the installed release writes those as
``json`` does is tried out on a fixed set of trees when this module is imported; if not, ``json`` writes all of them.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable, Iterable

import orjson

from dalsegno.core.codec_dispatch import Tree, short_repr
from dalsegno.errors import CodecError

_json = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)


def _make_text() -> Callable[[Tree], str]:
    """``_json.encode``, without making the library's encoder anew for each value, which costs most of it."""
    make = getattr(json.encoder, "c_make_encoder", None)
    text = getattr(json.encoder, "c_encode_basestring", None)
    if make is None or text is None:  # not CPython
        return _json.encode
    encode = make(None, _json.default, text, None, ":", ",", True, False, False)
    return lambda tree: "".join(encode(tree, 0))


_text = _make_text()


def by_definition(tree: Tree) -> bytes:
    """The canonical form, written by ``json``."""
    try:
        return _text(tree).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"cannot write {short_repr(tree)}: {error}; only trees can be written") from error


_dumps = orjson.dumps
_SORTED = orjson.OPT_SORT_KEYS
_ALIKE = frozenset({str, int, bool, type(None)})


def quick(tree: Tree) -> bytes:
    """The canonical form, written by orjson where that is safe."""
    try:
        if _is_alike(tree):
            return _dumps(tree, None, _SORTED)
    except (TypeError, RecursionError):  # too large, too deep or no tree: the definition knows what it is
        pass
    return by_definition(tree)


def _is_alike(tree: Tree) -> bool:
    """Whether orjson and ``json`` write *tree* alike: it is made of str, int, bool, None, lists and dicts alone."""
    items: Iterable[Tree]
    if type(tree) is dict:
        items = tree.values()
    elif type(tree) is list:
        items = tree
    else:
        return type(tree) in _ALIKE
    for item in items:  # noqa: SIM110 - a generator would cost more than all the rest
        if type(item) not in _ALIKE and not _is_alike(item):
            return False
    return True


def _samples() -> list[Tree]:
    """What JSON writers may differ in: escapes at all offsets, the order of keys, limits of integers, nesting."""
    every = "".join(map(chr, [*range(0x500), 0x2028, 0x2029, 0xD7FF, 0xE000, 0xFFFD, 0xFFFF, 0x10000, 0x10FFFF]))
    nested: Tree = [[], {}, [[{"b": [], "a": {"": {}}}]], None, True, False]
    offsets: list[Tree] = [f"{'.' * length}{mark}" for length in range(70) for mark in ('"', "\n", "\x01", "\\", "ü")]
    keys: Tree = {key: number for number, key in enumerate(["", "a", "B", "aa", "a\0", "a!", *every[::-1]])}
    numbers: list[Tree] = [sign * 2**power - sign for power in range(64) for sign in (1, -1)]
    return [every, nested, offsets, keys, numbers, -(2**63), 0, "", None, True, False]


def agree() -> bool:
    """Whether both ways give the same bytes for all samples."""
    return all(quick(tree) == by_definition(tree) for tree in _samples())


canonical = quick if agree() else by_definition
