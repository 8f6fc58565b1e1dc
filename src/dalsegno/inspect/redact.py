"""Redaction: what is shown of a recorded value without the secrets in it. Pure; what is stored stays as it is.

A value is hidden for its *name*: the key of a dict, the field of an object, the first item of a pair or the ``name``
beside a ``value``, as in HTTP headers, or any name on the path of a memory update. Names are compared by their words,
so ``api_key`` also finds ``apiKey``, ``X-Api-Key`` and ``OPENAI_API_KEY``, and ``token`` finds ``access_token``, not
``max_tokens``.

What has no name is shown: a positional argument, or a secret in the middle of a text. To keep secrets from the files
themselves, encrypt them, or leave them out of what is recorded.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

MARK = "[redacted]"

SENSITIVE_NAMES = (
    *("password", "passwd", "passphrase", "pwd", "pin", "otp"),
    *("secret", "secrets", "credential", "credentials", "private_key", "api_key", "apikey", "access_key"),
    *("token", "bearer", "jwt", "authorization", "auth", "cookie", "session_id"),
    *("connection_string", "dsn", "card_number", "cvv", "iban", "ssn"),
)
"""Names whose values are always hidden."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")


class Redactor:
    """Hides values by their names: `SENSITIVE_NAMES` and *names*, each a name or a regular expression.

    A name counts wherever its words occur next to each other; an expression is searched for in the name as it is.
    """

    def __init__(self, names: Iterable[str | re.Pattern[str]] = ()) -> None:
        given = (*SENSITIVE_NAMES, *names)
        self._patterns = [name for name in given if isinstance(name, re.Pattern)]
        self._names = [f" {words} " for name in given if isinstance(name, str) and (words := _words(name))]

    def is_sensitive(self, name: str) -> bool:
        """Whether the value of that name is hidden."""
        words = f" {_words(name)} "
        return any(part in words for part in self._names) or any(p.search(name) for p in self._patterns)

    def redact(self, tree: Any) -> Any:
        """A copy of *tree* in which each value under a sensitive name is `MARK`.

        Takes trees of the codec, alone or nested in lists and dicts, as a record's body is.
        """
        if isinstance(tree, dict):
            return self._redact_dict(tree)
        if isinstance(tree, list):
            return self._redact_list(tree)
        return tree

    def _redact_dict(self, tree: dict[str, Any]) -> Any:
        kind = tree.get("$")
        if kind == "dict" and isinstance(tree.get("v"), dict):
            return {**tree, "v": {k: self._value(_loaded(k), value) for k, value in tree["v"].items()}}
        if kind is not None:  # the names in an envelope are the codec's own
            return {name: self.redact(value) for name, value in tree.items()}
        redacted = {name: self._value(name, value) for name, value in tree.items()}
        if "value" in tree and any(map(self._names_secret, [tree.get("name"), *_listed(tree.get("path"))])):
            redacted["value"] = MARK
        return redacted

    def _value(self, name: Any, value: Any) -> Any:
        return MARK if self._names_secret(name) else self.redact(value)

    def _redact_list(self, tree: list[Any]) -> Any:
        if len(tree) == 2 and self._names_secret(tree[0]):
            return [tree[0], MARK]
        return [self.redact(item) for item in tree]

    def _names_secret(self, tree: Any) -> bool:
        if isinstance(tree, dict) and tree.get("$") == "bytes":
            tree = _text(tree.get("v"))
        return isinstance(tree, str) and self.is_sensitive(tree)


def redact_tree(tree: Any, names: Iterable[str | re.Pattern[str]] = ()) -> Any:
    """*tree* with the values under sensitive names hidden; *names* are added to `SENSITIVE_NAMES`."""
    return Redactor(names).redact(tree)


@functools.lru_cache(maxsize=4096)
def _words(name: str) -> str:
    return " ".join(_WORD.findall(name)).lower()


def _loaded(key: str) -> Any:
    """The tree of a key that is not plain text: it is written as JSON."""
    try:
        return json.loads(key)
    except ValueError:
        return key


def _listed(path: Any) -> list[Any]:
    return path if isinstance(path, list) else []


def _text(encoded: Any) -> str:
    try:
        return base64.b64decode(encoded).decode(errors="replace")
    except (binascii.Error, TypeError, ValueError):
        return ""
