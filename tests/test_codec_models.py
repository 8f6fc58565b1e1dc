"""The quick way for pydantic models gives what the codec's rules give."""

from __future__ import annotations

import collections
import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, PrivateAttr

from dalsegno import registry
from dalsegno.core import codec_models
from dalsegno.core.codec import MISSING, decode_field, dumps, from_tree, restored, to_tree
from dalsegno.core.codec_dispatch import ENCODERS
from dalsegno.errors import CodecError
from dalsegno.registry import register


@register
class Plain(BaseModel):
    """Whatever is put into it, nothing is validated."""

    a: Any
    b: Any = None


@register
class Deep(Plain):
    c: Any = 3


@register
class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: Any = 1


@register
class Color(enum.Enum):
    RED = 1


@register
class Secret(BaseModel):
    a: Any
    _note: str = PrivateAttr("x")


parts = st.recursive(
    st.one_of(st.integers(), st.text(), st.booleans(), st.none(), st.floats(allow_nan=False), st.binary()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner)),
    max_leaves=6,
)
models = st.recursive(
    parts,
    lambda inner: st.builds(
        lambda cls, fields, given: cls.model_construct(_fields_set=given, **fields),
        st.sampled_from([Plain, Deep, Secret, Open]),
        st.dictionaries(st.sampled_from(["a", "b", "c", "other"]), inner),
        st.none() | st.sets(st.sampled_from(["a", "b", "c"])),
    ),
    max_leaves=4,
)


def state(value: Any) -> Any:
    """All that a model consists of, with the types and the order of its parts."""
    if isinstance(value, BaseModel):
        extra, private = value.__pydantic_extra__, value.__pydantic_private__
        return type(value), state(value.__dict__), value.__pydantic_fields_set__, state(extra), state(private)
    if isinstance(value, dict):
        return dict, [(key, state(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [state(item) for item in value]
    return type(value), value


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(models)
def test_the_quick_way_for_models_gives_what_the_rules_give(value: Any) -> None:
    with quick_ways_off():
        tree = to_tree(value)
        by_rule = from_tree(tree)
    assert dumps(to_tree(value)) == dumps(tree)
    assert state(from_tree(tree)) == state(by_rule) == state(value)


@contextlib.contextmanager
def quick_ways_off() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_models, "_simple_fields", collections.defaultdict(lambda: None))
        patch.setattr(ENCODERS, "makers", [make for make in ENCODERS.makers if make is not codec_models.make_encoder])
        encoders = {cls: ENCODERS.pop(cls) for cls in list(ENCODERS) if issubclass(cls, BaseModel)}
        yield
        for cls in [cls for cls in ENCODERS if issubclass(cls, BaseModel)]:
            del ENCODERS[cls]
        ENCODERS.update(encoders)


@pytest.mark.parametrize(
    "change",
    [
        {"f": {"a": 1}},
        {"f": {"b": 1, "a": 2}},
        {"f": {"a": 1, "b": 2, "gone": 3}},
        {"f": {"a": 1, "gone": 2}},
        {"f": [1, 2]},
        {"f": "ab"},
        {"f": None},
        {"t": "nobody:Nothing"},
        {"t": ["a"]},
        {"t": None},
        {"t": registry.name_of(Color)},
        {"set": ["a"]},
        {"other": 1},
        {"extra": {"x": 1}},
    ],
    ids=str,
)
def test_the_quick_way_for_models_leaves_the_rest_to_the_rules(change: dict[str, Any]) -> None:
    tree = {"$": "model", "t": registry.name_of(Plain), "f": {"a": 1, "b": "x"}} | change
    outcomes = []
    for way in (quick_ways_off, contextlib.nullcontext):
        with way():
            try:
                outcomes.append(state(from_tree(tree)))
            except CodecError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_a_field_is_read_without_its_model() -> None:
    inner = {"n": [1, (2,)]}
    tree = to_tree(Plain(a=inner, b=2))
    found = decode_field(tree, Plain, "a")
    assert found == inner
    assert found is not inner
    assert decode_field(tree, Plain, "b") == 2


@pytest.mark.parametrize("value", [Deep(a=1, b=2, c=3), Plain(a=1), Secret(a=1), Open(a=1), 3, [1], {"a": 1}, None])
def test_a_field_that_takes_the_rules_is_missing(value: Any) -> None:
    assert decode_field(to_tree(value), Plain, "a") is MISSING
    assert decode_field(to_tree(value), Secret, "a") is MISSING


def test_a_restored_model_is_one_that_was_made() -> None:
    made = restored(Deep, {"a": 1, "b": [2], "c": None})
    assert state(made) == state(Deep(a=1, b=[2], c=None))
    assert made == Deep(a=1, b=[2], c=None)
    assert made.model_copy(deep=True) == made
    made.a = 5
    assert made.model_dump() == {"a": 5, "b": [2], "c": None}
