"""The codec's rules for exceptions: same class, same fields, same ``str()``, or one documented stand-in.

An envelope ``exc`` has the keys of a node, and ``chain``, the other nodes. A node has ``t`` class, ``str`` text,
``args``, ``fields`` the attributes that C code and slots hold (``errno``, ``start``), ``state`` the ``__dict__`` with
the notes, ``suppress``, and ``cause``, ``context`` and ``members`` (of a group) as numbers of nodes: 0 is the
exception itself, the rest is in ``chain``. So a shared exception is recorded once, and a long chain is not a deep
tree. A cause or context that leads back into the chain is cut. An exception in an attribute is an envelope ``ref``
with its number.

Restoring runs no code of the user: the object is made by the ``__new__`` and ``__init__`` of its first builtin base
and is then given its state, so constructors with keyword-only or several required parameters do not matter. The class
is looked up by ``registry.exception_class``.

An attribute that cannot be recorded becomes a ``NotRecorded``. The result is tried out at once: an exception whose
class cannot be found again, that cannot be restored, or whose ``str()`` would differ is recorded as a
``RecordedError``. Not kept: tracebacks and the ``obj`` of an ``AttributeError``.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError, core_schema

from dalsegno import registry
from dalsegno.core.codec_classes import state_of
from dalsegno.core.codec_dispatch import (
    MAX_DEPTH,
    Encoder,
    Fault,
    Tree,
    damaged,
    decode_mapping,
    decode_value,
    encode_value,
    envelope,
    is_utf8,
    per_class,
    short_repr,
    too_deep,
)
from dalsegno.errors import CodecError
from dalsegno.registry import NotRecorded

_Node = dict[str, Any]
_STAND_IN = "dalsegno:RecordedError"
_ROUNDS = 20  # each round replaces what could not be restored; afterwards the exception is recorded alone

_args: Any = BaseException.__dict__["args"]
_cause: Any = BaseException.__dict__["__cause__"]
_context: Any = BaseException.__dict__["__context__"]
_suppress: Any = BaseException.__dict__["__suppress_context__"]
_dict: Any = BaseException.__dict__["__dict__"]
_message: Any = BaseExceptionGroup.__dict__["message"]
_members: Any = BaseExceptionGroup.__dict__["exceptions"]


class _Current(threading.local):
    """The exception that this thread is encoding or decoding, for the exceptions inside its attributes."""

    graph: _Graph | None = None
    build: _Build | None = None


_current = _Current()


def make_encoder(cls: type) -> Encoder | None:
    """The encoder of an exception class; ``None`` for any other class."""
    return _encode if issubclass(cls, BaseException) else None


# --- encoding -------------------------------------------------------------------------------------------------------


class _Graph:
    """An exception and all that it leads to, numbered as met."""

    def __init__(self, root: BaseException, depth: int) -> None:
        self.exceptions: list[BaseException] = [root]
        self.numbers: dict[int, int] = {id(root): 0}
        self.nodes: list[_Node] = []
        self.depth = depth + 2  # of a node; its attributes are two levels further down

    def number(self, exc: BaseException) -> int:
        number = self.numbers.setdefault(id(exc), len(self.exceptions))
        if number == len(self.exceptions):
            self.exceptions.append(exc)
        return number

    def complete(self) -> None:
        while len(self.nodes) < len(self.exceptions):
            exc = self.exceptions[len(self.nodes)]
            try:
                node = self.node(exc)
            except Exception:  # whatever an exotic class does when it is looked at, its failure has to be recorded
                node = self.stand_in(exc)
            self.nodes.append(node)

    def node(self, exc: BaseException) -> _Node:
        cls = type(exc)
        name = registry.exception_name(cls)
        text = _text_of(exc)
        if text is None or registry.exception_class(name) is not cls:
            return self.stand_in(exc)
        node: _Node = {"t": name, "str": self.value(text), "args": [self.value(arg) for arg in self.args(exc)]}
        for key, values in (("fields", _fields_of(exc)), ("state", state_of(cls, _dict.__get__(exc)))):
            if values:
                node[key] = self.mapping(values)
        if isinstance(exc, BaseExceptionGroup):
            node["members"] = [self.number(member) for member in _members.__get__(exc)]
            node["message"] = self.value(_message.__get__(exc))
        if cls is ValidationError:
            node["validation"] = self.value(_validation_state(exc))
        return self.linked(node, exc)

    def linked(self, node: _Node, exc: BaseException) -> _Node:
        for key, link in (("cause", _cause), ("context", _context)):
            other = link.__get__(exc)
            if other is not None:
                node[key] = self.number(other)
        if _suppress.__get__(exc):
            node["suppress"] = True
        return node

    def stand_in(self, exc: BaseException, *, bare: bool = False) -> _Node:
        name = registry.exception_name(type(exc))
        text = _text_of(exc)
        message = text if text is not None else "(its str() raises an exception)"
        fields: dict[str, Any] = {} if bare else _all_attributes(exc)
        notes = fields.pop("__notes__", None)
        recorded = {key: self.value(item) for key, item in fields.items() if _is_plain_name(key)}
        if not bare:
            recorded["args"] = {"$": "tuple", "v": [self.value(arg) for arg in fields["args"]]}
        node: _Node = {
            "t": _STAND_IN,
            "str": self.value(f"{name}: {message}"),
            "args": [self.value(name), self.value(message), recorded],
        }
        if notes is not None:
            node["state"] = self.mapping({"__notes__": notes})
        return node if bare else self.linked(node, exc)

    def args(self, exc: BaseException) -> Iterator[Any]:
        """The ``args``, in which the members of a group are not repeated."""
        members = _members.__get__(exc) if isinstance(exc, BaseExceptionGroup) else None
        for arg in _args.__get__(exc):
            same = members is not None and type(arg) in (list, tuple) and len(arg) == len(members)
            if members is not None and same and all(a is b for a, b in zip(arg, members, strict=True)):
                yield _Members(type(arg))
            else:
                yield arg

    def mapping(self, values: dict[str, Any]) -> Tree:
        """The tree of a dict whose values are recorded one by one."""
        if not all(map(_is_plain_name, values)):
            return self.value(values)
        return {key: self.value(item) for key, item in values.items()}

    def value(self, item: object) -> Tree:
        if type(item) is _Members:
            return {"$": "members", "v": item.kind.__name__}
        try:
            return encode_value(item, self.depth + 2)
        except (Fault, RuntimeError):
            return encode_value(_not_recorded(item), self.depth + 2)


def _is_plain_name(key: object) -> bool:
    return type(key) is str and key != "$" and is_utf8(key)


class _Members:
    """Stands for the sequence of the members of a group in its ``args``."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


def _encode(value: BaseException, depth: int) -> Tree:
    if _current.graph is not None:
        return {"$": "ref", "v": _current.graph.number(value)}
    if not isinstance(value, Exception):
        raise Fault(f"{type(value).__name__} is a signal to this process, never an outcome; let it pass")
    if depth + 8 > MAX_DEPTH:
        raise too_deep()
    graph = _Graph(value, depth)
    _current.graph = graph
    try:
        graph.complete()
        _try_out(graph)
    finally:
        _current.graph = None
    _cut_cycles(graph.nodes)
    root, *chain = graph.nodes
    return {"$": "exc", **root, **({"chain": chain} if chain else {})}


def _try_out(graph: _Graph) -> None:
    """Replace by stand-ins what would not come back with the same ``str()``."""
    for _ in range(_ROUNDS):
        broken = _broken(graph.nodes)
        if not broken:
            return
        for number in broken:
            bare = graph.nodes[number]["t"] == _STAND_IN
            graph.nodes[number] = graph.stand_in(graph.exceptions[number], bare=bare)
        graph.complete()
    graph.nodes[:] = [graph.stand_in(graph.exceptions[0], bare=True)]


def _broken(nodes: list[_Node]) -> list[int]:
    try:
        found = _Build(nodes).run()
    except _NodeFault as fault:
        return [fault.number]
    return [n for n, exc in enumerate(found) if _text_of(exc) != decode_value(nodes[n]["str"])]


def _cut_cycles(nodes: list[_Node]) -> None:
    """Remove each cause and context that leads back to an exception it was reached from."""
    fresh, open_, done = 0, 1, 2
    marks = [fresh] * len(nodes)
    for start in range(len(nodes)):
        stack = [(start, iter(("cause", "context")))] if marks[start] == fresh else []
        marks[start] = max(marks[start], open_)
        while stack:
            number, keys = stack[-1]
            key = next(keys, None)
            if key is None:
                marks[number] = done
                stack.pop()
                continue
            target = nodes[number].get(key)
            if target is not None and marks[target] == open_:
                del nodes[number][key]
            elif target is not None and marks[target] == fresh:
                marks[target] = open_
                stack.append((target, iter(("cause", "context"))))


# --- what an exception holds ------------------------------------------------------------------------------------------


def _text_of(exc: BaseException) -> str | None:
    try:
        text = str(exc)
    except Exception:  # the user's __str__ needs what is not there
        return None
    return text if type(text) is str else str.__str__(text)


@per_class
def _descriptors(cls: type) -> dict[str, tuple[Any, bool]]:
    """The attributes outside the ``__dict__``, and whether ``None`` in them means unset."""
    found: dict[str, tuple[Any, bool]] = {}
    for base in cls.__mro__:
        if base in (BaseException, BaseExceptionGroup, ExceptionGroup, object):
            continue
        for name, item in base.__dict__.items():
            if type(item) in (types.MemberDescriptorType, types.GetSetDescriptorType) and name not in _IGNORED:
                found.setdefault(name, (item, base.__module__ == "builtins"))
    if issubclass(cls, AttributeError):
        found.pop("obj", None)
    return found


_IGNORED = ("__dict__", "__weakref__")


def _fields_of(exc: BaseException) -> dict[str, Any]:
    found = {}
    for name, (descriptor, none_is_unset) in _descriptors(type(exc)).items():
        try:
            item = descriptor.__get__(exc)
        except Exception:  # not set
            continue
        if item is not None or not none_is_unset:
            found[name] = item
    return found


def _all_attributes(exc: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = {"args": _args.__get__(exc), **_fields_of(exc), **_dict.__get__(exc)}
    if isinstance(exc, BaseExceptionGroup):
        message = _message.__get__(exc)
        found.update(args=(message,), message=message, exceptions=_members.__get__(exc))
    return found


def _not_recorded(item: object) -> NotRecorded:
    text = re.sub(r" at 0x[0-9A-Fa-f]+", "", short_repr(item, 200))
    return NotRecorded(registry.class_name(type(item)), text)


# --- decoding -------------------------------------------------------------------------------------------------------


class _NodeFault(Exception):
    """Node ``number`` cannot be restored; ``__cause__`` says why."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Build:
    """The exceptions of the nodes: first all objects with their ``args``, then attributes and links between them."""

    def __init__(self, nodes: list[_Node]) -> None:
        self.nodes = nodes
        self.found: dict[int, BaseException] = {}
        self.begun: set[int] = set()

    def run(self) -> list[BaseException]:
        outer, _current.build = _current.build, self
        try:
            for number in range(len(self.nodes)):
                self.get(number)
            for number in range(len(self.nodes)):
                self.guarded(self.fill, number)
        finally:
            _current.build = outer
        return [self.found[number] for number in range(len(self.nodes))]

    def get(self, number: Any) -> BaseException:
        if number not in self.found:
            if type(number) is not int or not 0 <= number < len(self.nodes) or number in self.begun:
                raise CodecError(f"there is no exception {short_repr(number)} in the chain, or its args contain itself")
            self.begun.add(number)
            self.guarded(self.make, number)
        return self.found[number]

    def guarded(self, step: Callable[[int, _Node], None], number: int) -> None:
        try:
            step(number, self.nodes[number])
        except (_NodeFault, MemoryError):
            raise
        except Exception as error:
            raise _NodeFault(number) from error

    def make(self, number: int, node: _Node) -> None:
        cls = registry.exception_class(node["t"])
        if cls is None:
            raise CodecError(
                f"the exception class {node['t']!r} is not loaded in this process; import its module where the agent "
                f"is defined, or use @dalsegno.register(name={node['t']!r}) if it was renamed"
            )
        self.found[number] = self.create(cls, node)

    def create(self, cls: type[BaseException], node: _Node) -> BaseException:
        if cls is ValidationError:
            args = tuple(decode_value(arg) for arg in node["args"])
            exc: BaseException = _make_validation_error(decode_mapping(node["validation"]))
        elif issubclass(cls, BaseExceptionGroup):
            exact: Any = cls
            members = [self.get(member) for member in node["members"]]
            exc = _builtin(exact, "__new__")(cls, decode_value(node["message"]), members)
            args = tuple(self.arg(arg, members) for arg in node["args"])
        else:
            args = tuple(decode_value(arg) for arg in node["args"])
            exc = _construct(cls, args, node)
        if type(exc) is not cls:
            raise CodecError(f"the class {node['t']!r} makes another exception")
        _args.__set__(exc, args)
        return exc

    def arg(self, tree: Tree, members: list[BaseException]) -> object:
        if type(tree) is dict and tree.get("$") == "members":
            return tuple(members) if tree["v"] == "tuple" else list(members)
        return decode_value(tree)

    def fill(self, number: int, node: _Node) -> None:
        exc = self.found[number]
        _set_fields(exc, decode_mapping(node.get("fields", {})))
        _dict.__get__(exc).update(decode_mapping(node.get("state", {})))
        for key, link in (("cause", _cause), ("context", _context)):
            if key in node:
                link.__set__(exc, self.get(node[key]))
        _suppress.__set__(exc, node.get("suppress", False))


def _construct(cls: Any, args: tuple[object, ...], node: _Node) -> BaseException:
    new, init = _builtin(cls, "__new__"), _builtin(cls, "__init__")
    if issubclass(cls, UnicodeError) and "fields" in node:  # the constructor takes nothing but all of them
        fields = decode_mapping(node["fields"])
        args = tuple(fields[name] for name in ("encoding", "object", "start", "end", "reason") if name in fields)
    try:
        exc = new(cls, *args)
        if type(exc) is cls:
            init(exc, *args)
            return typing.cast(BaseException, exc)
    except (
        TypeError,
        ValueError,
    ):  # args were assigned later, or OSError chose a subclass by errno: the fields tell all
        pass
    return typing.cast(BaseException, new(cls))


@functools.cache
def _builtin(cls: Any, name: str) -> Any:
    """The method of that name of the first base that is not written in Python."""
    for base in cls.__mro__:
        method = base.__dict__.get(name)
        if type(method) in (types.BuiltinFunctionType, types.WrapperDescriptorType):
            return method
    raise CodecError(f"the class {cls!r} has no builtin {name}")


def _set_fields(exc: BaseException, fields: dict[str, Any]) -> None:
    descriptors = _descriptors(type(exc))
    for name in fields.keys() - descriptors.keys():
        raise CodecError(f"the class {registry.class_name(type(exc))!r} does not have the attribute {name!r} any more")
    now = _fields_of(exc)
    for name, (descriptor, none_is_unset) in descriptors.items():
        if name in fields and not (type(now.get(name)) in (int, str) and now[name] == fields[name]):
            descriptor.__set__(exc, fields[name])
        elif name in now and name not in fields and none_is_unset:
            descriptor.__set__(exc, None)


@envelope("exc", "t str args", "fields state cause context suppress members message validation chain")
def _decode(tree: dict[str, Any]) -> BaseException:
    root = {key: item for key, item in tree.items() if key not in ("$", "chain")}
    chain = tree.get("chain", [])
    try:
        return _Build([root, *chain]).run()[0]
    except _NodeFault as fault:
        name = short_repr([root, *chain][fault.number].get("t"))
        if isinstance(fault.__cause__, RecursionError):
            raise fault.__cause__ from None
        raise CodecError(f"cannot load a recorded exception {name}: {fault.__cause__}") from fault.__cause__


@envelope("ref")
def _decode_reference(tree: dict[str, Any]) -> BaseException:
    if _current.build is None:
        raise damaged(tree, "it refers to an exception outside of one")
    return _current.build.get(tree["v"])


# --- pydantic's ValidationError, which has no constructor ------------------------------------------------------------

_KNOWN_ERRORS = frozenset(typing.get_args(core_schema.ErrorType))


def _validation_state(exc: Any) -> dict[str, Any]:
    """The lines of the error and the way of rendering that gives its text."""
    lines = exc.errors(include_url=False)
    for mode, hidden in itertools.product(("python", "json"), (False, True)):
        state = {"title": exc.title, "lines": lines, "mode": mode, "hide_input": hidden}
        try:
            if str(_make_validation_error(state)) == str(exc):
                return state
        except Exception:  # not this way; without any, trying it out gives the stand-in
            continue
    return {"title": exc.title, "lines": [], "mode": "python", "hide_input": False}


def _make_validation_error(state: dict[str, Any]) -> ValidationError:
    lines = [_line(line) for line in state["lines"]]
    return ValidationError.from_exception_data(state["title"], lines, state["mode"], state["hide_input"])


def _line(line: dict[str, Any]) -> InitErrorDetails:
    kind: Any = line["type"]
    if kind not in _KNOWN_ERRORS:
        kind = PydanticCustomError(kind, line["msg"], line.get("ctx"))
    details: InitErrorDetails = {"type": kind, "loc": line["loc"], "input": line["input"]}
    if "ctx" in line:
        details["ctx"] = line["ctx"]
    return details
