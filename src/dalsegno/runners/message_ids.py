"""How the messages of a job get their ids. A job's messages get them in one way for as long as the job lives.

=========== ====================================================================================
``ids``     the id of a message
=========== ====================================================================================
`POSITION`  the number of its input record; for a source that brings all records in the same order again
`SOURCE`    what the source gave it, see `Source.gives_ids`
`CONTENT`   a number that a recorded message of the same content is given again, see `dalsegno.core.claims`; for a
            source that may bring the records in another order
`GIVEN`     a field of the record, or what a function makes of it; followed by ``field NAME`` or ``function``
=========== ====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dalsegno.errors import DefinitionError, InputError, RestoreError
from dalsegno.runners.sources import Source, SourceItem

POSITION, SOURCE, CONTENT, GIVEN = "position", "source", "content", "given"
_WORDS = {
    POSITION: "the numbers of the input records",
    SOURCE: "given by the source",
    CONTENT: "claimed by content",
    GIVEN: "given with message_id (--message-id)",
}

FieldOrFunction = str | Callable[[Any], Any] | None


class KeyOf(NamedTuple):
    """How messages get their keys."""

    of: Callable[[SourceItem], Any]
    """The key of an input record; raises `InputError` if it has none."""
    is_of_content: bool
    """Whether it is a function of the record's value."""

    @classmethod
    def choose(cls, key: FieldOrFunction, source: Source) -> KeyOf:
        """The way for a job with this *key* option and *source*; raises `DefinitionError` for a wrong option."""
        if key is None and source.gives_keys:
            return cls(lambda item: item.key, False)
        of_value = field_or_function(key, "key")
        return cls(lambda item: of_value(item.value), True)


class MessageIds(NamedTuple):
    """One way to make ids. *kind* and *name* are what a checkpoint remembers of it."""

    kind: str
    name: str
    of: Callable[[SourceItem], str] | None
    """The id of an input record, where that is made of the record; raises `InputError` if it has none."""

    @property
    def recorded(self) -> str:
        return f"{self.kind} {self.name}".rstrip()

    @classmethod
    def choose(cls, message_id: FieldOrFunction, source: Source) -> MessageIds:
        """The way for a job with this *message_id* option and *source*; raises `DefinitionError` for a wrong option."""
        if message_id is not None:
            name = "function" if callable(message_id) else f"field {message_id}"
            of_record = field_or_function(message_id, "message_id")
            return cls(GIVEN, name, lambda item: id_text(of_record(item.value)))
        if source.gives_ids:
            return cls(SOURCE, "", lambda item: id_text(item.id))
        return cls(POSITION if source.replays_in_order else CONTENT, "", None)

    def check_change(self, job: str, before: str, begun: bool, in_flight: bool) -> None:
        """Raise `RestoreError` if ids that were made as *before* says may not be made in this way from now on.

        Ids of two kinds could meet: a message would get the history, or a call the idempotency key, of another one.
        """
        kind = before.partition(" ")[0]
        if kind != self.kind and begun:
            raise RestoreError(
                f"job {job!r}: the ids of its messages are {_WORDS.get(kind, kind)}, and would now be "
                f"{_WORDS[self.kind]}; that cannot change once a job has read input, as ids of both kinds could be the "
                "same. Go back to what was given, or give the job a new name to start afresh"
            )
        if before != self.recorded and in_flight:
            raise RestoreError(
                f"job {job!r}: message ids were made of the {before.partition(' ')[2]!r} of a record, and would now be "
                f"made of the {self.name!r}; that cannot change while messages are in flight, as their records would "
                "not be found. Go back to what was given until they are done, or give the job a new name"
            )


def id_text(value: object) -> str:
    """A message id as it is recorded; an int is the same id as its decimal digits. Raises `InputError`."""
    if type(value) is str and value:
        return value
    if type(value) is int:
        return str(value)
    if value is None or value == "":
        raise InputError("the message id is missing: it is " + ("None (null)" if value is None else "an empty text"))
    raise InputError(
        f"the message id {value!r} is a {type(value).__name__}: give a string or an int, which a function can make of "
        "other values"
    )


def field_or_function(spec: FieldOrFunction, what: str) -> Callable[[Any], Any]:
    """The function of a record that the option *what* means; raises `InputError` for a record that it fails on."""
    if spec is None:
        return lambda value: None
    if isinstance(spec, str):
        return _of_field(spec)
    if not callable(spec):
        raise DefinitionError(f"{what}={spec!r}: give the name of a field, or a function of the record")

    def called(value: Any) -> Any:
        try:
            return spec(value)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"the {what} function raised {type(error).__name__}: {error}") from error

    return called


def _of_field(field: str) -> Callable[[Any], Any]:
    def of_field(value: Any) -> Any:
        if not isinstance(value, dict):
            raise InputError(
                f"the record has no field {field!r}, because it is a {type(value).__name__}, not an object"
            )
        try:
            return value[field]
        except KeyError:
            raise InputError(
                f"the record has no field {field!r}; its fields are {', '.join(map(repr, list(value)[:20])) or 'none'}"
            ) from None

    return of_field
