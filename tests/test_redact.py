"""Redaction hides what lies under a sensitive name, wherever that is in a tree, and changes nothing else."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dalsegno import register
from dalsegno.core import codec
from dalsegno.inspect.redact import MARK, SENSITIVE_NAMES, Redactor, redact_tree

SECRET = "hush-hush"


@register
@dataclass
class Login:
    user: str
    password: str


@register
class Client(BaseModel):
    name: str
    api_key: str


@register
class Pair(NamedTuple):
    user: str
    token: str


class Refused(Exception):
    def __init__(self, reason: str, authorization: str) -> None:
        super().__init__(reason)
        self.authorization = authorization


@pytest.mark.parametrize(
    "value",
    [
        {"password": SECRET},
        {"deep": [{"er": {"Authorization": SECRET}}]},
        {"password": {"nested": [SECRET]}},
        {"apiKey": SECRET, "X-Api-Key": SECRET, "OPENAI_API_KEY": SECRET, "api key": SECRET, "x.api.key": SECRET},
        {"accessToken": SECRET, "refresh_token": SECRET, "Set-Cookie": SECRET, "clientSecret": SECRET},
        {1: "a", "password": SECRET},
        {b"authorization": SECRET, 1: 2},
        {"$": "data", "password": SECRET},
        Login("ann", SECRET),
        [Client(name="ann", api_key=SECRET)],
        (Pair("ann", SECRET),),
        [("Authorization", SECRET), ("Accept", "*")],
        [[b"authorization", SECRET]],
        [{"name": "Authorization", "value": SECRET}],
        {"kwargs": {"token": SECRET}, "args": [1]},
        Refused("no", SECRET),
    ],
    ids=repr,
)
def test_a_value_under_a_sensitive_name_is_hidden(value: Any) -> None:
    redacted = json.dumps(redact_tree(codec.to_tree(value)))
    assert SECRET not in redacted
    assert MARK in redacted


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "prompt_tokens",
        "tokenizer",
        "secretary",
        "author",
        "pinned",
        "spin",
        "user",
        "passworded",
        "",
        "é",
    ],
)
def test_a_name_that_only_looks_alike_hides_nothing(name: str) -> None:
    assert redact_tree({name: "shown"}) == {name: "shown"}


@pytest.mark.parametrize("name", SENSITIVE_NAMES)
def test_each_sensitive_name_counts_in_every_way_to_write_it(name: str) -> None:
    words = name.split("_")
    for written in (name, name.upper(), "-".join(words), "".join(word.title() for word in words), f"my_{name}_2"):
        assert redact_tree({written: SECRET}) == {written: MARK}, written


def test_own_names_and_patterns_are_added() -> None:
    redactor = Redactor(["customer_no", re.compile(r"^x-internal"), "größe"])
    tree = {"customerNo": 1, "x-internal-id": 2, "id": 3, "password": 4, "Größe": 5}
    assert redactor.redact(tree) == {
        "customerNo": MARK,
        "x-internal-id": MARK,
        "id": 3,
        "password": MARK,
        "Größe": MARK,
    }


@pytest.mark.parametrize("name", ["", "-", "_ ."])
def test_a_name_without_words_hides_nothing(name: str) -> None:
    assert redact_tree({"id": 1, "": 2}, [name]) == {"id": 1, "": 2}


def test_memory_updates_are_hidden_by_their_path() -> None:
    updates: Any = [
        {"op": "set", "path": ["user", "password"], "value": SECRET},
        {"op": "set", "path": ["token", "of", "ann"], "value": {"x": SECRET}},
        {"op": "set", "path": ["user", "name"], "value": "ann"},
        {"op": "delete", "path": ["password"]},
    ]
    redacted: Any = redact_tree(updates)
    assert [update.get("value") for update in redacted] == [MARK, MARK, "ann", None]


def test_the_tree_itself_is_left_alone() -> None:
    tree: Any = codec.to_tree({"password": SECRET, "list": [{"token": SECRET}], 1: (2, 3)})
    before = copy.deepcopy(tree)
    redact_tree(tree)
    assert tree == before


def test_damaged_envelopes_are_walked_like_any_other_dict() -> None:
    for tree in ({"$": "dict", "v": 1}, {"$": "bytes"}, {"$": None}, [{"$": "bytes", "v": 3}, 1], {"$": "dict"}):
        assert redact_tree(tree) == tree
    assert redact_tree({"$": "dict", "v": {"not JSON": 1}}) == {"$": "dict", "v": {"not JSON": 1}}


_names = st.text("abcX_- 1é", max_size=8)
_trees = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | _names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=12,
)


@given(_trees)
def test_without_sensitive_names_nothing_changes(tree: Any) -> None:
    assert redact_tree(tree) == tree
