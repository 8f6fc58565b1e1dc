"""The codec's rules for enums, dataclasses, pydantic models and named tuples of registered classes.

An object is recorded by its state, not by its constructor, and is restored without running ``__init__``,
``__post_init__`` or a validator, as unpickling would do it:

===========  ==========================================================================================================
``enum``     ``t`` class, ``v`` name of the member
``flag``     ``t`` class, ``v`` value (a combination of flags has no name)
``data``     dataclass: ``t`` class, ``f`` fields, ``unset`` names of fields without a value, ``x`` other attributes
``model``    pydantic model: ``t``, ``f``, ``unset``, ``x`` as above, ``set`` names of the fields that were given unless
             all of ``f`` were, ``extra`` extra values, ``private`` private attributes, ``private_unset`` those without
             a value
``named``    named tuple: ``t`` class, ``f`` fields, ``x`` other attributes
===========  ==========================================================================================================

A field that the class has gained since takes its default. A gained field without one, and a recorded field that the
class no longer has, is a ``CodecError`` that names class and field. The cached values of
``functools.cached_property`` are no state.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from typing import Any, NoReturn

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dalsegno import registry
from dalsegno.core.codec_dispatch import (
    Encoder,
    Fault,
    Tree,
    damaged,
    decode_mapping,
    decode_value,
    encode_fields,
    encode_list,
    encode_value,
    envelope,
    per_class,
    short_repr,
)
from dalsegno.errors import CodecError

_NO_DEFAULT = object()
_Members = dict[str, types.MemberDescriptorType]


def make_encoder(cls: type) -> Encoder | None:
    """The encoder of a class of one of these kinds; ``None`` for any other class, ``Fault`` if it is not registered."""
    found = _kind_of(cls)
    if found is None:
        return None
    kind, encode = found
    if registry.name_of(cls) is None:
        raise Fault(
            f"its class {registry.class_name(cls)!r} ({kind}) is not registered; decorate it with @dalsegno.register, "
            f"call dalsegno.register({cls.__name__}), or name it in the annotations of the function it comes from"
        )
    _check_layout(cls, kind)
    return functools.partial(encode, cls)


def _kind_of(cls: type) -> tuple[str, Callable[[type, Any, int], Tree]] | None:
    if issubclass(cls, Flag):
        return "an enum", _encode_flag
    if issubclass(cls, Enum):
        return "an enum", _encode_enum
    if issubclass(cls, BaseModel):
        return "a pydantic model", _encode_model
    if registry.is_named_tuple(cls):
        return "a named tuple", _encode_named
    if dataclasses.is_dataclass(cls):
        return "a dataclass", _encode_data
    return None


def _check_layout(cls: type, kind: str) -> None:
    """Refuse a dataclass that is also a dict, a list, an int ...: what that base holds is not in its attributes."""
    if kind == "a dataclass":
        try:
            object.__new__(cls)
        except TypeError as error:
            raise Fault(
                f"{registry.class_name(cls)!r} is a dataclass on top of a builtin type ({error}); make that a field"
            ) from None


def _recorded_name(cls: type) -> str:
    name = registry.name_of(cls)
    if name is None or not registry.is_current(cls, name):
        raise Fault(
            f"its class {registry.class_name(cls)!r} was defined again, so it would come back as another class; make "
            "the value from the newest definition, and do not both run and import one file"
        )
    return name


def _recorded_class(tree: dict[str, Any], base: Callable[[type], bool], kind: str) -> type:
    cls = registry.resolve(tree["t"])
    if not base(cls):
        raise CodecError(f"cannot load a recorded {kind} as {tree['t']!r}: that class is no {kind} any more")
    return cls


# --- enums ----------------------------------------------------------------------------------------------------------


def _encode_enum(cls: type[Enum], value: Enum, depth: int) -> Tree:
    name = value._name_
    if cls.__members__.get(name) is not value:
        raise Fault(f"{short_repr(value)} is not a declared member of {registry.class_name(cls)!r}; declare it")
    return {"$": "enum", "t": _recorded_name(cls), "v": name}


@envelope("enum", "t v")
def _decode_enum(tree: dict[str, Any]) -> Enum:
    cls: type[Enum] = _recorded_class(tree, lambda cls: issubclass(cls, Enum), "enum")
    member = cls.__members__.get(tree["v"])
    if member is None:
        raise CodecError(
            f"cannot load the member {tree['v']!r} of the enum {tree['t']!r}: it has {list(cls.__members__)} now; "
            "bring the member back, as an alias if it was renamed"
        )
    return member


def _encode_flag(cls: type[Flag], value: Flag, depth: int) -> Tree:
    return {"$": "flag", "t": _recorded_name(cls), "v": encode_value(value._value_, depth + 1)}


@envelope("flag", "t v")
def _decode_flag(tree: dict[str, Any]) -> Flag:
    cls: type[Flag] = _recorded_class(tree, lambda cls: issubclass(cls, Flag), "flag")
    try:
        member = cls(decode_value(tree["v"]))
    except ValueError as error:
        raise CodecError(f"cannot load a value of the flag {tree['t']!r}: {error}; bring the flag back") from error
    if type(member) is not cls:
        raise CodecError(
            f"cannot load a value of the flag {tree['t']!r}: {tree['v']!r} is not one of its values any more"
        )
    return member


# --- attributes of any object -----------------------------------------------------------------------------------------


@per_class
def slots_of(cls: type) -> _Members:
    """The attributes that instances keep in slots; the descriptors are C code and run none of the user's."""
    found: _Members = {}
    for base in cls.__mro__:
        for name, descriptor in base.__dict__.items():
            if type(descriptor) is types.MemberDescriptorType and not name.startswith("__pydantic_"):
                found.setdefault(name, descriptor)
    return found


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object, in slots and in its ``__dict__``, without cached properties."""
    found: dict[str, Any] = {}
    for name, slot in slots_of(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # an empty slot
            continue
    found.update(state_of(type(value), _dict_of(value) or {}))
    return found


def state_of(cls: type, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that are state: not the cache of a ``cached_property``, nor the mark that ``Generic`` leaves."""
    no_state = _no_state(cls)
    if no_state.isdisjoint(attributes):
        return attributes
    return {name: item for name, item in attributes.items() if name not in no_state}


@per_class
def _no_state(cls: type) -> frozenset[str]:
    return frozenset({"__orig_class__"}).union(
        name
        for base in cls.__mro__
        for name, item in base.__dict__.items()
        if isinstance(item, functools.cached_property)
        or isinstance(getattr(item, "wrapped", None), functools.cached_property)
    )


def _dict_of(value: object) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def set_attributes(value: object, attributes: Mapping[str, Any], name: str) -> None:
    """Put attributes into the slots and the ``__dict__`` of an object without running its ``__setattr__``."""
    slots = slots_of(type(value))
    own = _dict_of(value)
    for key, item in attributes.items():
        if key in slots:
            slots[key].__set__(value, item)
        elif own is not None:
            own[key] = item
        else:
            raise CodecError(
                f"cannot load a recorded {name!r}: its attribute {key!r} has no place in the class any more"
            )


def _split(attributes: dict[str, Any], fields: Iterable[str], depth: int) -> dict[str, Tree]:
    """The keys ``f``, ``unset`` and ``x`` of an envelope."""
    known = {name: attributes[name] for name in fields if name in attributes}
    parts: dict[str, Tree] = {"f": encode_fields(known, depth + 1)}
    if len(known) != len(attributes):
        parts["x"] = encode_fields({key: item for key, item in attributes.items() if key not in known}, depth + 1)
    unset = [name for name in fields if name not in attributes]
    if unset:
        parts["unset"] = encode_list(unset, depth + 1)
    return parts


def _join(tree: dict[str, Any], defaults: Mapping[str, Callable[[dict[str, Any]], object]]) -> dict[str, Any]:
    """The attributes of an object from ``f``, ``unset`` and ``x``; ``defaults`` are those of today's fields."""
    found = decode_mapping(tree["f"])
    for name in found:
        if name not in defaults:
            _lost_field(tree["t"], name)
    others = decode_mapping(tree["x"]) if "x" in tree else {}
    unset = _names(tree.get("unset", []))
    for name, default in defaults.items():
        if name not in found and name not in unset and name not in others:
            found[name] = default(found)
            if found[name] is _NO_DEFAULT:
                _gained_field(tree["t"], name)
    return {**{name: found[name] for name in defaults if name in found}, **others}


def _names(tree: Tree) -> list[str]:
    names = decode_value(tree)
    if type(names) is not list or any(type(name) is not str for name in names):
        raise damaged(tree, "a list of names was expected")
    return names


def _lost_field(name: str, field: str) -> NoReturn:
    raise CodecError(
        f"cannot load a recorded {name!r}: its field {field!r} is recorded and the class does not have it any more; "
        "bring the field back until no record holds it"
    )


def _gained_field(name: str, field: str) -> NoReturn:
    raise CodecError(
        f"cannot load a recorded {name!r}: the class has gained the field {field!r}, which is not recorded and has no "
        "default; give it one"
    )


# --- dataclasses ----------------------------------------------------------------------------------------------------


def _encode_data(cls: type, value: object, depth: int) -> Tree:
    return {"$": "data", "t": _recorded_name(cls), **_split(attributes_of(value), _data_defaults(cls), depth)}


@envelope("data", "t f", "unset x")
def _decode_data(tree: dict[str, Any]) -> object:
    cls = _recorded_class(tree, dataclasses.is_dataclass, "dataclass")
    value: object = object.__new__(cls)
    set_attributes(value, _join(tree, _data_defaults(cls)), tree["t"])
    return value


@per_class
def _data_defaults(cls: type) -> dict[str, Callable[[dict[str, Any]], object]]:
    """Each stored field with the function that gives its default; the state of a property lies elsewhere."""
    return {
        field.name: functools.partial(_data_default, field)
        for field in dataclasses.fields(cls)
        if not isinstance(getattr(cls, field.name, None), property)
    }


def _data_default(field: dataclasses.Field[Any], _: dict[str, Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _NO_DEFAULT if field.default is dataclasses.MISSING else field.default


# --- named tuples ---------------------------------------------------------------------------------------------------


def _encode_named(cls: type[Any], value: tuple[Any, ...], depth: int) -> Tree:
    fields = dict(zip(cls._fields, value, strict=True))
    tree: dict[str, Tree] = {"$": "named", "t": _recorded_name(cls), "f": encode_fields(fields, depth + 1)}
    others = attributes_of(value)
    if others:
        tree["x"] = encode_fields(others, depth + 1)
    return tree


@envelope("named", "t f", "x")
def _decode_named(tree: dict[str, Any]) -> object:
    cls: Any = _recorded_class(tree, registry.is_named_tuple, "named tuple")
    found = decode_mapping(tree["f"])
    for name in found:
        if name not in cls._fields:
            _lost_field(tree["t"], name)
    for name in cls._fields:
        if name not in found and name not in cls._field_defaults:
            _gained_field(tree["t"], name)
    value = tuple.__new__(cls, [found[name] if name in found else cls._field_defaults[name] for name in cls._fields])
    if "x" in tree:
        set_attributes(value, decode_mapping(tree["x"]), tree["t"])
    return value


# --- pydantic models; the quick way for most is in codec_models -------------------------------------------------------


@per_class
def _is_model(cls: type) -> bool:
    return issubclass(cls, BaseModel)


def _encode_model(cls: type[BaseModel], value: BaseModel, depth: int) -> Tree:
    tree: dict[str, Tree] = {
        "$": "model",
        "t": _recorded_name(cls),
        **_split(attributes_of(value), _model_defaults(cls), depth),
    }
    if value.__pydantic_fields_set__ != tree["f"].keys():  # type: ignore[union-attr]
        tree["set"] = encode_list(sorted(value.__pydantic_fields_set__), depth + 1)
    if value.__pydantic_extra__:
        tree["extra"] = encode_fields(value.__pydantic_extra__, depth + 1)
    private = value.__pydantic_private__ or {}
    if private:
        tree["private"] = encode_fields(private, depth + 1)
    unset = [name for name in cls.__private_attributes__ if name not in private]
    if unset:
        tree["private_unset"] = encode_list(unset, depth + 1)
    return tree


@envelope("model", "t f", "unset x set extra private private_unset")
def _decode_model(tree: dict[str, Any]) -> BaseModel:
    cls: type[BaseModel] = _recorded_class(tree, _is_model, "pydantic model")
    value = object.__new__(cls)
    set_attributes(value, _join(tree, _model_defaults(cls)), tree["t"])
    given = _names(tree["set"]) if "set" in tree else decode_mapping(tree["f"])
    object.__setattr__(value, "__pydantic_fields_set__", set(given))
    extra, private = _extra_of(cls, tree), _private_of(cls, tree)
    if not cls.__pydantic_root_model__:  # which has both as attributes of the class
        object.__setattr__(value, "__pydantic_extra__", extra)
        object.__setattr__(value, "__pydantic_private__", private)
    return value


def _model_defaults(cls: type[BaseModel]) -> dict[str, Callable[[dict[str, Any]], object]]:
    found = _model_default_cache.get(cls)
    if found is None:
        found = {name: functools.partial(_model_default, field) for name, field in cls.model_fields.items()}
        if cls.__pydantic_complete__:
            _model_default_cache[cls] = found
    return found


_model_default_cache: dict[type[BaseModel], dict[str, Callable[[dict[str, Any]], object]]] = {}


def _model_default(field: Any, found: dict[str, Any]) -> object:
    if field.is_required():
        return _NO_DEFAULT
    if field.default_factory is None:
        return field.get_default()
    takes_data = getattr(field, "default_factory_takes_validated_data", False)
    return field.default_factory(found) if takes_data else field.default_factory()


def _extra_of(cls: type[BaseModel], tree: dict[str, Any]) -> dict[str, Any] | None:
    found = decode_mapping(tree["extra"]) if "extra" in tree else {}
    allowed = cls.model_config.get("extra") == "allow"
    for name in found:
        if not allowed or name in cls.model_fields:
            raise CodecError(
                f"cannot load a recorded {tree['t']!r}: {name!r} is recorded as an extra value, and the class has made "
                "it a field or allows no extra values any more; allow it until no record holds it"
            )
    return found if allowed else None


def _private_of(cls: type[BaseModel], tree: dict[str, Any]) -> dict[str, Any] | None:
    found = decode_mapping(tree["private"]) if "private" in tree else {}
    for name in found:
        if name not in cls.__private_attributes__:
            _lost_field(tree["t"], name)
    unset = _names(tree.get("private_unset", []))
    for name, attribute in cls.__private_attributes__.items():
        if name not in found and name not in unset:
            default = attribute.get_default()
            if default is not PydanticUndefined:
                found[name] = default
    return found if cls.__private_attributes__ else None
