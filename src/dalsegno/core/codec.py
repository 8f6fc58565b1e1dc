"""Values to trees to bytes, and back: exact in both directions and safe to load.

::

    value --to_tree--> tree --dumps--> bytes (storage)         encode = dumps . to_tree
    value <-from_tree- tree <-loads--- bytes                   decode = from_tree . loads
                       tree --canonical--> bytes (identity)

What can be recorded: ``None``, ``bool``, ``int`` of any size, ``float`` with NaN and infinities, any ``str``,
``bytes``, ``list``, ``tuple``, ``set``, ``frozenset``, ``dict`` with any recordable keys, ``datetime``, ``date``,
``time``, ``timedelta``, ``timezone``, ``ZoneInfo``, ``Decimal``, ``UUID`` (``codec_plain``); enums, dataclasses,
pydantic models and named tuples of registered classes (``codec_classes``, ``dalsegno.registry``); exceptions
(``codec_exceptions``). All else is a ``CodecError`` that names the path, the type and the remedy.

A value comes back equal and of the same type, in fresh containers. Not kept: which parts of a value were one object,
the payload bits of a NaN, the ``is_safe`` mark of a UUID.

Loading imports no module and runs no code of the user but the look-up of enum members, the default factories of
fields that a class has gained since, and the hash and equality of dict keys and set members.

``canonical`` sorts keys: equal trees give equal bytes in every process and with every release of this library and of
those below it (``codec_canonical``). Two values have equal trees if they are equal and
of equal types throughout; for a pydantic model this includes which of its fields were given.
"""

from __future__ import annotations

from typing import Any

import orjson

from dalsegno.core import codec_classes, codec_exceptions, codec_models, codec_plain
from dalsegno.core.codec_canonical import canonical
from dalsegno.core.codec_dispatch import ATOMS, ENCODERS, MAX_DEPTH, Fault, Tree, damaged, decode_value, short_repr
from dalsegno.core.codec_models import MISSING, decode_field, restored
from dalsegno.errors import CodecError

__all__ = [
    "MAX_DEPTH",
    "MISSING",
    "Tree",
    "canonical",
    "decode",
    "decode_exception",
    "decode_field",
    "dumps",
    "encode",
    "encode_exception",
    "from_tree",
    "loads",
    "restored",
    "to_tree",
]

_STORAGE = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS

ENCODERS.update(codec_plain.PLAIN)
ENCODERS.makers[:] = [
    codec_exceptions.make_encoder,
    codec_models.make_encoder,
    codec_classes.make_encoder,
    codec_plain.refuse,
]


# --- the interface --------------------------------------------------------------------------------------------------


def to_tree(value: object, root: str = "value") -> Tree:
    """The tree of a value, in fresh containers.

    ``root`` is what messages call the value: ``cannot record result['a'][3].b: ...`` for ``root="result"``.
    """
    try:
        return ENCODERS[type(value)](value, 0)
    except Fault as fault:
        raise CodecError(fault.message(root)) from None
    except RecursionError:
        raise CodecError(f"cannot record {root}: it is nested too deeply, or contains itself") from None
    except RuntimeError as error:  # a dict or set that another thread changes meanwhile
        raise CodecError(f"cannot record {root}: it changed while it was recorded ({error}); record a copy") from error


def from_tree(tree: Tree) -> Any:
    """The value of a tree, in fresh containers; ``CodecError`` for what is no tree of this codec."""
    if type(tree) in ATOMS:
        return tree
    try:
        return decode_value(tree)
    except RecursionError:
        raise CodecError("cannot load a recorded value: it is nested too deeply to be one") from None


def dumps(tree: Tree) -> bytes:
    """The storage form: JSON in UTF-8; the order of dicts is kept. Takes what ``to_tree`` gives, alone or nested."""
    try:
        return orjson.dumps(tree, option=_STORAGE)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise CodecError(f"cannot write {short_repr(tree)}: {error}; only trees can be written") from error


def loads(data: bytes | bytearray | memoryview | str) -> Tree:
    """The tree of its storage form."""
    try:
        return orjson.loads(data)  # type: ignore[no-any-return]
    except (orjson.JSONDecodeError, TypeError) as error:
        raise CodecError(f"cannot read {short_repr(data)}: it is not a recorded value ({error})") from error


def encode(value: object, root: str = "value") -> bytes:
    """The storage form of a value."""
    return dumps(to_tree(value, root))


def decode(data: bytes | bytearray | memoryview | str) -> Any:
    """The value of its storage form."""
    return from_tree(loads(data))


def encode_exception(exc: BaseException) -> Tree:
    """The tree of an exception, with its causes, contexts and notes.

    An exception that cannot be restored as what it is becomes a ``RecordedError``. Signals (``CancelledError``,
    ``KeyboardInterrupt``, ``SystemExit``) are refused with a ``CodecError``: they are never the outcome of a call.
    """
    return to_tree(exc, "the exception")


def decode_exception(tree: Tree) -> Exception:
    """The exception of a tree that ``encode_exception`` gave; without traceback."""
    found = from_tree(tree)
    if not isinstance(found, Exception):
        raise damaged(tree, "an exception was expected")
    return found
