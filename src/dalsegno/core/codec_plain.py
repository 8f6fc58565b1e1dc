"""The codec's rules for plain values: numbers, text, containers, dates and times; the refusal of what has none."""

from __future__ import annotations

import base64
import functools
import math
import zoneinfo
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import orjson
from pydantic_core import TzInfo

from dalsegno.core.codec_canonical import canonical
from dalsegno.core.codec_dispatch import (
    INT_MAX,
    INT_MIN,
    MAX_DEPTH,
    AnyDict,
    Encoder,
    Fault,
    Tree,
    damaged,
    decode_value,
    encode_dict,
    encode_list,
    encode_value,
    envelope,
    is_utf8,
    short_repr,
    too_deep,
)
from dalsegno.errors import CodecError

# --- numbers, text, bytes -------------------------------------------------------------------------------------------

_DECIMAL_BITS = 2000  # longer ints are written in base 16, which is quick and has no limit on digits


def _itself(value: Any, depth: int) -> Tree:
    return value  # type: ignore[no-any-return]


def _encode_int(value: int, depth: int) -> Tree:
    if INT_MIN <= value <= INT_MAX:
        return value
    return {"$": "int", "v": str(value) if value.bit_length() <= _DECIMAL_BITS else hex(value)}


@envelope("int")
def _decode_int(tree: dict[str, Any]) -> int:
    return int(_text(tree), 16 if "0x" in tree["v"] else 10)


def _encode_float(value: float, depth: int) -> Tree:
    return value if math.isfinite(value) else {"$": "float", "v": str(value)}


@envelope("float")
def _decode_float(tree: dict[str, Any]) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[tree["v"]]


def _encode_str(value: str, depth: int) -> Tree:
    if value.isascii() or is_utf8(value):
        return value
    return {"$": "str", "v": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}


@envelope("str")
def _decode_str(tree: dict[str, Any]) -> str:
    return base64.b64decode(_text(tree), validate=True).decode("utf-8", "surrogatepass")


def _encode_bytes(value: bytes, depth: int) -> Tree:
    return {"$": "bytes", "v": base64.b64encode(value).decode()}


@envelope("bytes")
def _decode_bytes(tree: dict[str, Any]) -> bytes:
    return base64.b64decode(_text(tree), validate=True)


def _encode_decimal(value: Decimal, depth: int) -> Tree:
    return {"$": "decimal", "v": str(value)}


@envelope("decimal")
def _decode_decimal(tree: dict[str, Any]) -> Decimal:
    return Decimal(_text(tree))


def _encode_uuid(value: UUID, depth: int) -> Tree:
    return {"$": "uuid", "v": str(value)}


@envelope("uuid")
def _decode_uuid(tree: dict[str, Any]) -> UUID:
    return UUID(_text(tree))


def _text(tree: dict[str, Any]) -> str:
    text = tree["v"]
    if type(text) is not str:
        raise damaged(tree, "its 'v' must be text")
    return text


# --- containers -----------------------------------------------------------------------------------------------------


def _encode_tuple(value: tuple[Any, ...], depth: int) -> Tree:
    return {"$": "tuple", "v": encode_list(value, depth + 1)}


@envelope("tuple")
def _decode_tuple(tree: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(_items(tree))


def _encode_set(kind: str, value: set[Any] | frozenset[Any], depth: int) -> Tree:
    if depth + 1 >= MAX_DEPTH:
        raise too_deep()
    by_bytes: dict[bytes, Tree] = {}
    for item in value:
        try:
            member = encode_value(item, depth + 2)
        except Fault as fault:
            fault.path.append(f"{{{short_repr(item)}}}")
            raise
        by_bytes[canonical(member)] = member
    if len(by_bytes) != len(value):
        raise Fault(f"two members of the {kind} are recorded alike, such as two NaNs; keep one of them")
    return {"$": kind, "v": [by_bytes[key] for key in sorted(by_bytes)]}


@envelope("set")
def _decode_set(tree: dict[str, Any]) -> set[Any]:
    return _distinct(tree)


def _distinct(tree: dict[str, Any]) -> set[Any]:
    found = set(_items(tree))
    if len(found) != len(tree["v"]):
        raise damaged(tree, "a member occurs twice")
    return found


@envelope("frozenset")
def _decode_frozenset(tree: dict[str, Any]) -> frozenset[Any]:
    return frozenset(_distinct(tree))


def _items(tree: dict[str, Any]) -> list[Any]:
    items = tree["v"]
    if type(items) is not list:
        raise damaged(tree, "its 'v' must be a list")
    return decode_value(items)  # type: ignore[return-value]


def _encode_any_dict(value: dict[Any, Any], depth: int) -> Tree:
    out: dict[str, Tree] = {}
    key: object = None
    try:
        for key, item in value.items():
            out[canonical(encode_value(key, depth + 2)).decode()] = encode_value(item, depth + 2)
    except Fault as fault:
        fault.path.append(f"[{short_repr(key)}]")
        raise
    if len(out) != len(value):
        raise Fault("two keys of the dict are recorded alike, such as two NaNs; keep one of them")
    return {"$": "dict", "v": out}


@envelope("dict")
def _decode_any_dict(tree: dict[str, Any]) -> dict[Any, Any]:
    found = {decode_value(orjson.loads(key)): decode_value(item) for key, item in tree["v"].items()}
    if len(found) != len(tree["v"]):
        raise damaged(tree, "a key occurs twice")
    return found


# --- dates, times, zones --------------------------------------------------------------------------------------------


def _encode_datetime(value: datetime, depth: int) -> Tree:
    tree: dict[str, Tree] = {"$": "datetime", "v": value.replace(tzinfo=None).isoformat()}
    return _with_zone(value, tree, depth)


def _encode_time(value: time, depth: int) -> Tree:
    tree: dict[str, Tree] = {"$": "time", "v": value.replace(tzinfo=None).isoformat()}
    return _with_zone(value, tree, depth)


def _with_zone(value: datetime | time, tree: dict[str, Tree], depth: int) -> Tree:
    if value.tzinfo is not None:
        try:
            tree["tz"] = encode_value(value.tzinfo, depth + 1)
        except Fault as fault:
            fault.path.append(".tzinfo")
            raise
    if value.fold:
        tree["fold"] = 1
    return tree


@envelope("datetime", optional="tz fold")
def _decode_datetime(tree: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(tree["v"]).replace(tzinfo=_zone(tree), fold=tree.get("fold", 0))


@envelope("time", optional="tz fold")
def _decode_time(tree: dict[str, Any]) -> time:
    return time.fromisoformat(tree["v"]).replace(tzinfo=_zone(tree), fold=tree.get("fold", 0))


def _zone(tree: dict[str, Any]) -> tzinfo | None:
    found = decode_value(tree.get("tz"))
    if found is not None and not isinstance(found, tzinfo):
        raise damaged(tree, "its 'tz' must be a zone")
    return found


def _encode_date(value: date, depth: int) -> Tree:
    return {"$": "date", "v": value.isoformat()}


@envelope("date")
def _decode_date(tree: dict[str, Any]) -> date:
    return date.fromisoformat(tree["v"])


def _encode_timedelta(value: timedelta, depth: int) -> Tree:
    return {"$": "timedelta", "v": [value.days, value.seconds, value.microseconds]}


@envelope("timedelta")
def _decode_timedelta(tree: dict[str, Any]) -> timedelta:
    days, seconds, microseconds = tree["v"]
    return timedelta(days, seconds, microseconds)


def _encode_timezone(value: timezone, depth: int) -> Tree:
    tree: dict[str, Tree] = {"$": "timezone", "v": time(tzinfo=value).isoformat()[8:]}
    name = value.tzname(None)
    if name != timezone(value.utcoffset(None)).tzname(None):
        tree["name"] = _encode_str(name, depth + 1)
    return tree


@envelope("timezone", optional="name")
def _decode_timezone(tree: dict[str, Any]) -> timezone:
    offset = time.fromisoformat("00:00:00" + tree["v"]).utcoffset()
    if offset is None:
        raise damaged(tree, "its 'v' must be an offset such as '+02:00'")
    return timezone(offset, decode_value(tree["name"])) if "name" in tree else timezone(offset)  # type: ignore[arg-type]


def _encode_pydantic_zone(value: TzInfo, depth: int) -> Tree:
    return {"$": "timezone.pydantic", "v": (value.utcoffset(None) or timedelta()) // timedelta(seconds=1)}


@envelope("timezone.pydantic")
def _decode_pydantic_zone(tree: dict[str, Any]) -> TzInfo:
    return TzInfo(tree["v"])


def _encode_zoneinfo(value: ZoneInfo, depth: int) -> Tree:
    if value.key is None:
        raise Fault("a ZoneInfo without a key cannot be found again; use ZoneInfo('Area/City')")
    _find_zone(value.key)
    return {"$": "zoneinfo", "v": value.key}


@envelope("zoneinfo")
def _decode_zoneinfo(tree: dict[str, Any]) -> ZoneInfo:
    try:
        return _find_zone(_text(tree))
    except Fault as fault:
        raise CodecError(f"cannot load a time: {fault.reason}") from None


def _find_zone(key: str) -> ZoneInfo:
    try:
        return ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise Fault(f"the time zone {key!r} is not known here; install the package 'tzdata'") from error


# --- what has no rule -----------------------------------------------------------------------------------------------

_CONVERSIONS: tuple[tuple[type, str], ...] = (
    (int, "int(...)"),
    (float, "float(...)"),
    (str, "str(...)"),
    (bytes, "bytes(...)"),
    (bytearray, "bytes(...)"),
    (memoryview, "bytes(...)"),
    (dict, "dict(...)"),
    (list, "list(...)"),
    (tuple, "tuple(...)"),
    (frozenset, "frozenset(...)"),
    (set, "set(...)"),
    (datetime, "datetime.combine(value.date(), value.timetz())"),
    (date, "date.fromordinal(value.toordinal())"),
    (timedelta, "timedelta(seconds=value.total_seconds())"),
    (tzinfo, "a datetime.timezone or a zoneinfo.ZoneInfo, as in value.astimezone(timezone.utc)"),
    (Decimal, "Decimal(...)"),
    (UUID, "UUID(str(value))"),
)


def refuse(cls: type) -> Encoder:
    name = f"{cls.__module__}.{cls.__qualname__}"
    conversion = next((text for base, text in _CONVERSIONS if issubclass(cls, base)), None)
    if conversion is None and hasattr(cls, "item") and hasattr(cls, "dtype"):
        conversion = "value.item()"
    if conversion is not None:
        raise Fault(f"its type {name!r} would be lost; convert it first: {conversion}")
    raise Fault(
        f"a value of the type {name!r} cannot be recorded; return what is needed of it as plain values, a dataclass "
        "or a pydantic model"
    )


#: The encoder of each plain type.
PLAIN: dict[type, Encoder] = {
    type(None): _itself,
    bool: _itself,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: _encode_bytes,
    list: encode_list,
    dict: encode_dict,
    AnyDict: _encode_any_dict,
    tuple: _encode_tuple,
    set: functools.partial(_encode_set, "set"),
    frozenset: functools.partial(_encode_set, "frozenset"),
    Decimal: _encode_decimal,
    UUID: _encode_uuid,
    datetime: _encode_datetime,
    date: _encode_date,
    time: _encode_time,
    timedelta: _encode_timedelta,
    timezone: _encode_timezone,
    ZoneInfo: _encode_zoneinfo,
    TzInfo: _encode_pydantic_zone,
}
