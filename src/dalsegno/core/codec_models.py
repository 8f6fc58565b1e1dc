"""The quick way for pydantic models that have no state but their fields, all of them given: events, nearly always.

It gives what the rules in ``codec_classes`` give, which take every other case: a model with private attributes or extra
values, one with a field that was not given, a record from before a field came or went, a damaged one.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, RootModel

from dalsegno.core import codec_classes
from dalsegno.core.codec_dispatch import (
    DECODERS,
    ENCODERS,
    INT_MAX,
    INT_MIN,
    MAX_DEPTH,
    Encoder,
    Fault,
    Tree,
    decode_value,
    field_place,
)
from dalsegno.registry import CLASSES, NAMES

_Model = TypeVar("_Model", bound=BaseModel)


class _SimpleFields(dict[type, tuple[str, ...] | None]):
    """Class -> the names of its fields; None for what is no model, or has other state besides."""

    def __missing__(self, cls: type) -> tuple[str, ...] | None:
        if not issubclass(cls, BaseModel):
            return None
        if not cls.__pydantic_complete__:  # it may be later
            return None
        simple = not (
            issubclass(cls, RootModel)
            or cls.__private_attributes__
            or cls.model_config.get("extra") == "allow"
            or codec_classes.slots_of(cls)
            or "$" in cls.model_fields
        )
        self[cls] = found = tuple(cls.model_fields) if simple else None
        return found


_simple_fields = _SimpleFields()

_new = object.__new__
# The setters of the slots that every model has; `object.__setattr__` would look them up by name.
_set_dict, _set_given, _set_extra, _set_private = (
    BaseModel.__dict__[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


def restored(cls: type[_Model], fields: dict[str, Any]) -> _Model:
    """A model with all of its *fields*, which are taken over as they are; nothing is validated.

    *cls* has no private attributes and allows no extra values.
    """
    value = _new(cls)
    _set_dict(value, fields)
    _set_given(value, {*fields})
    _set_extra(value, None)
    _set_private(value, None)
    return value


# --- models to trees --------------------------------------------------------------------------------------------------


def make_encoder(cls: type) -> Encoder | None:
    """The encoder of a class of models, ``None`` for any other class, ``Fault`` if it is not registered."""
    if not issubclass(cls, BaseModel):
        return None
    by_rule = codec_classes.make_encoder(cls)
    fields = _simple_fields[cls]
    return by_rule if by_rule is None or fields is None else _quick_encoder(cls, fields, by_rule)


def _quick_encoder(cls: type[BaseModel], fields: tuple[str, ...], by_rule: Encoder) -> Encoder:
    all_given = frozenset(fields)

    def encode(value: BaseModel, depth: int) -> Tree:
        attributes, name = value.__dict__, NAMES[cls]
        if (
            tuple(attributes) != fields
            or value.__pydantic_fields_set__ != all_given
            or CLASSES[name] is not cls
            or depth + 1 >= MAX_DEPTH
        ):
            return by_rule(value, depth)
        out: dict[str, Tree] = {}
        field = ""
        try:
            for field, item in attributes.items():  # as in `encode_dict`, but that the names are known to be good
                kind = type(item)
                if (kind is str and item.isascii()) or (kind is int and INT_MIN <= item <= INT_MAX):
                    out[field] = item
                else:
                    out[field] = ENCODERS[kind](item, depth + 2)
        except Fault as fault:
            fault.path.append(field_place(field))
            raise
        return {"$": "model", "t": name, "f": out}

    return encode


# --- trees to models --------------------------------------------------------------------------------------------------

_by_rule = DECODERS["model"]


def _decode_model(tree: dict[str, Any]) -> object:
    try:
        cls: Any = CLASSES[tree["t"]]
        recorded = tree["f"]
        simple = tuple(recorded) == _simple_fields[cls] and type(recorded) is dict and len(tree) == 3
    except (KeyError, TypeError):  # damaged, or a class that is not known yet
        return _by_rule(tree)
    return restored(cls, decode_value(recorded)) if simple else _by_rule(tree)  # type: ignore[arg-type]


DECODERS["model"] = _decode_model

MISSING = object()
"""What `decode_field` returns where it cannot tell."""


def decode_field(tree: Tree, cls: type[BaseModel], field: str) -> Any:
    """The value of one field of the tree of a *cls*, without making the model; `MISSING` if that takes the rules.

    `MISSING` also for the tree of anything else, even of a subclass. *field* is a field of *cls*.
    """
    envelope: Any = tree
    try:
        recorded = envelope["f"]
        simple = (
            CLASSES[envelope["t"]] is cls
            and tuple(recorded) == _simple_fields[cls]
            and type(recorded) is dict
            and len(envelope) == 3
            and envelope["$"] == "model"
        )
    except (KeyError, TypeError):
        return MISSING
    return decode_value(recorded[field]) if simple else MISSING
