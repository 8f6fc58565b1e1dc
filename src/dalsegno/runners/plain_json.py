"""Outputs as plain JSON for people and other programs; not for reading back into the same Python values.

==============================  ==========================================================================
None, bool, int, float, str     themselves; NaN and the infinities as ``"NaN"``, ``"Infinity"``, ``"-Infinity"``
list, tuple                     array
set, frozenset                  sorted array
dict                            object; keys that are not text as their JSON text. An array of ``[key, value]``
                                pairs if two keys would be the same
pydantic model                  what it dumps itself as in JSON mode; if it cannot, its fields by these rules
dataclass, named tuple          object of its fields
enum member                     its value; its name, if the value has no plain form
datetime, date, time            ISO 8601;   timedelta: ISO 8601 duration;   time zone: its name
Decimal, UUID, path             text
bytes                           base64
exception                       ``{"type": ..., "message": ...}``
==============================  ==========================================================================

Whatever can be recorded has a plain form, so an output never stops a job here. Other types are a CodecError.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Set
from datetime import date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from pydantic import BaseModel, TypeAdapter

from dalsegno.errors import CodecError

_DURATION = TypeAdapter(timedelta)


def to_plain_json(value: object, *, root: str = "output") -> object:
    """Convert a value to what :func:`json.dumps` writes as standard JSON. CodecError names what has no plain form."""
    try:
        return _plain(value)
    except _NoPlainFormError as error:
        path = root + "".join(f"[{step!r}]" for step in reversed(error.path))
        raise CodecError(
            f"{path} cannot be written as JSON: a {error.type_name} has no plain form. Emit text, numbers, lists, "
            "dicts, dataclasses or pydantic models."
        ) from error.__cause__
    except RecursionError:
        raise CodecError(
            f"{root} cannot be written as JSON: it is nested too deeply or contains itself. Emit a flatter value."
        ) from None


def to_json_line(value: object, *, root: str = "output") -> bytes:
    """Write a value as one line of plain JSON in UTF-8, with its newline."""
    plain = to_plain_json(value, root=root)
    try:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # lone surrogates exist in JSON as escapes only
        return json.dumps(plain, allow_nan=False).encode() + b"\n"
    except RecursionError:
        raise CodecError(f"{root} cannot be written as JSON: it is nested too deeply. Emit a flatter value.") from None


class _NoPlainFormError(Exception):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.type_name = type(value).__qualname__
        self.path: list[object] = []


def _plain(value: Any) -> object:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is dict:
        return _object(value)
    if kind is list or kind is tuple:
        return _array(value)
    if kind is int:
        return _integer(value)
    if kind is float:
        return _number(value)
    return _other(value)


def _array(values: Iterable[object]) -> list[object]:
    result: list[object] = []
    try:
        for value in values:
            result.append(_plain(value))
    except _NoPlainFormError as error:
        error.path.append(len(result))
        raise
    return result


def _object(values: Mapping[Any, object]) -> object:
    result: dict[str, object] = {}
    key: object = None
    try:
        for key, value in values.items():
            result[key if type(key) is str else _key(key)] = _plain(value)
    except _NoPlainFormError as error:
        error.path.append(key)
        raise
    if len(result) == len(values):
        return result
    return [[_plain(key), _plain(value)] for key, value in values.items()]


def _key(key: object) -> str:
    plain = _plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _integer(value: int) -> object:
    try:
        value.__repr__()
    except ValueError:  # more digits than Python is allowed to convert
        return hex(value)
    return int(value)


def _number(value: float) -> object:
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _set(values: Iterable[object]) -> list[object]:
    plain = _array(values)
    try:
        return sorted(plain)  # type: ignore[type-var]
    except TypeError:
        return sorted(plain, key=lambda value: json.dumps(value, sort_keys=True))


def _model(model: BaseModel) -> object:
    try:
        return _plain(model.model_dump(mode="json", warnings=False))
    except Exception:
        fields = {name: getattr(model, name) for name in type(model).model_fields if hasattr(model, name)}
        return _object(fields | (model.model_extra or {}))


def _member(member: Enum) -> object:
    try:
        return _plain(member.value)
    except _NoPlainFormError:
        return member.name


def _fields(value: Any) -> object:
    return _object(
        {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
    )


def _exception(error: BaseException) -> object:
    return {"type": f"{type(error).__module__}:{type(error).__qualname__}", "message": str(error)}


def _iso(value: date | time) -> str:
    return value.isoformat()


# The first type that fits counts: what a class is besides (an enum that is a str too) must not hide what it is.
_BY_TYPE: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (Enum, _member),
    (BaseModel, _model),
    (BaseException, _exception),
    (datetime, _iso),
    (date, _iso),
    (time, _iso),
    (timedelta, lambda value: _DURATION.dump_python(value, mode="json")),
    (tzinfo, str),
    (Decimal, str),
    (UUID, str),
    (PurePath, str),
    (bytes, lambda value: base64.b64encode(value).decode()),
    (bytearray, lambda value: base64.b64encode(value).decode()),
    (str, str.__str__),
    (int, _integer),
    (float, _number),
    (Mapping, _object),
    (Set, _set),
    (list, _array),
)


def _other(value: Any) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return _array(value) if names is None else _object(dict(zip(names, value, strict=True)))
    for kind, convert in _BY_TYPE:
        if isinstance(value, kind):
            return convert(value)
    raise _NoPlainFormError(value)
