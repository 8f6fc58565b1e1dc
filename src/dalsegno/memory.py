"""The memory of an agent: a tree of named values, for one message key or for one message.

Values are copied in and out: what `get` returns can be changed freely, and nothing changes until `set`. A tree is
immutable once its transaction has ended, so a snapshot for a checkpoint is a reference, not a copy.

Paths are strings with dots (``"user.name"``) or tuples of names, where a name may hold dots itself
(``("host.example", "ok")``). A path leads through *objects*; a value, even a dict, has no path below it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dalsegno.errors import CodecError, MemoryPathError

Path = str | Sequence[str]
Update = dict[str, Any]
"""One recorded change: ``{"op": "set" | "delete" | "create", "path": [...], "value": tree}``."""


class ValueCodec(Protocol):
    """What memory needs from the codec: values go in and come out as fresh copies."""

    def to_tree(self, value: object, /, *, root: str) -> Any: ...
    def from_tree(self, tree: Any, /) -> Any: ...


@dataclass(slots=True)
class Leaf:
    """A value of the tree. Nobody changes one; it is not frozen, as that makes it take twice as long to make one."""

    tree: Any


class Node:
    """An object of the tree. Only the transaction that owns it may change it; every other one copies it first."""

    __slots__ = ("fields", "owner")

    def __init__(self, fields: dict[str, Node | Leaf] | None = None, owner: object = None) -> None:
        self.fields = fields if fields is not None else {}
        self.owner = owner


EMPTY = Node()


def to_json(node: Node) -> dict[str, Any]:
    """The tree as plain JSON: an object is ``{"o": {...}}``, a value is ``{"v": tree}``."""
    return {"o": {_write(n): to_json(f) if isinstance(f, Node) else {"v": f.tree} for n, f in node.fields.items()}}


def from_json(data: dict[str, Any]) -> Node:
    return Node({_read(n): from_json(f) if "o" in f else Leaf(f["v"]) for n, f in data["o"].items()})


def _write(name: str) -> str:
    """*name* as JSON can hold it: a lone surrogate is not legal in UTF-8."""
    if name.isascii() and name[0] != "\0":
        return name
    encoded = name.encode(errors="surrogatepass")
    return name if name[0] != "\0" and b"\xed" not in encoded else "\0" + encoded.hex()


def _written(path: tuple[str, ...]) -> list[str]:
    return [_write(path[0])] if len(path) == 1 else [*map(_write, path)]


def _read(written: str) -> str:
    return bytes.fromhex(written[1:]).decode(errors="surrogatepass") if written[0] == "\0" else written


def parse_path(path: Path) -> tuple[str, ...]:
    """The names that *path* leads through; raises `MemoryPathError` when one is empty or not a string."""
    if isinstance(path, str):
        return _parse_dotted(path)
    if isinstance(path, (tuple, list)):
        return _checked(path, tuple(path))
    raise MemoryPathError(f"a memory path is a string or a tuple of names, not {type(path).__name__}: {path!r}")


@functools.lru_cache(maxsize=1024)
def _parse_dotted(path: str) -> tuple[str, ...]:
    return _checked(path, tuple(path.split(".")))


def _checked(path: Path, parts: tuple[Any, ...]) -> tuple[str, ...]:
    if not parts:
        raise MemoryPathError(f"memory path {path!r} leads nowhere: it needs at least one name")
    for part in parts:
        if not (isinstance(part, str) and part):
            raise MemoryPathError(
                f"memory path {path!r} has the name {part!r}: each name is a string of at least one character"
            )
    return parts


class MemoryTransaction:
    """The changes of one action to one tree, kept apart until the action is done.

    `root` is the tree with the changes; `updates` are the changes in order, ready to be recorded.
    """

    def __init__(self, root: Node, codec: ValueCodec, label: str) -> None:
        self.root = root
        self.updates: list[Update] = []
        self._codec = codec
        self._label = label
        self._owner = object()

    def get(self, path: tuple[str, ...]) -> Node | Leaf | None:
        if len(path) == 1:  # as the loop would find it
            return self.root.fields.get(path[0])
        node: Node | Leaf | None = self.root
        for depth, name in enumerate(path):
            if isinstance(node, Leaf):
                raise MemoryPathError(
                    f"{self._label}: {path[:depth]!r} holds a value, not an object, so there is no {path!r}; "
                    f"read the value and look inside it, or make an object with create_object()"
                )
            if node is None:
                return None
            node = node.fields.get(name)
        return node

    def value(self, leaf: Leaf) -> Any:
        return self._codec.from_tree(leaf.tree)

    def set(self, path: tuple[str, ...], value: object) -> None:
        if isinstance(self.get(path), Node):
            raise MemoryPathError(
                f"{self._label}: {path!r} is an object with fields of its own; delete() it before set()"
            )
        try:
            tree = self._codec.to_tree(value, root=self._label)
        except CodecError:
            # Once more, for an error that names the place: to put that into words costs as much as most values.
            tree = self._codec.to_tree(value, root=f"{self._label}[{'.'.join(path)!r}]")
        self._change(path, {"op": "set", "path": _written(path), "value": tree})

    def delete(self, path: tuple[str, ...]) -> None:
        if self.get(path) is not None:
            self._change(path, {"op": "delete", "path": _written(path)})

    def create(self, path: tuple[str, ...]) -> None:
        found = self.get(path)
        if isinstance(found, Leaf):
            raise MemoryPathError(f"{self._label}: {path!r} holds a value; delete() it before create_object()")
        if found is None:
            self._change(path, {"op": "create", "path": _written(path)})

    def replay(self, updates: Sequence[Update]) -> Node:
        """Apply recorded *updates*; returns the new root."""
        for update in updates:
            self._change(tuple(map(_read, update["path"])), update)
        return self.root

    def _change(self, path: tuple[str, ...], update: Update) -> None:
        """Do *update*, whose path is *path* as JSON holds it."""
        node = self.root
        if node.owner is not self._owner:
            self.root = node = self._owned(node)
        name = path[-1]
        for parent in path[:-1]:
            child = node.fields.get(parent)
            owned = self._owned(child if isinstance(child, Node) else EMPTY)
            node.fields[parent] = owned
            node = owned
        op = update["op"]
        if op == "set":
            node.fields[name] = Leaf(update["value"])
        elif op == "create":
            node.fields[name] = Node(owner=self._owner)
        else:
            node.fields.pop(name, None)
        self.updates.append(update)

    def _owned(self, node: Node) -> Node:
        return node if node.owner is self._owner else Node(dict(node.fields), self._owner)


class MemoryObject:
    """A view of one object of the memory tree, the root or one below it.

    Raises `MemoryPathError` for a malformed path or one that runs through a value, `CodecError` for a value that
    cannot be recorded, and `RuntimeError` when it is used after its action has ended.
    """

    __slots__ = ("_base", "_current")

    def __init__(self, current: Callable[[], MemoryTransaction], base: tuple[str, ...] = ()) -> None:
        self._current = current
        self._base = base

    def get(self, path: Path, default: Any = None) -> Any:
        """A copy of the value at *path*, a `MemoryObject` if an object is there, or *default* if nothing is."""
        full = self._base + parse_path(path)
        transaction = self._current()
        found = transaction.get(full)
        if found is None:
            return default
        return MemoryObject(self._current, full) if isinstance(found, Node) else transaction.value(found)

    def set(self, path: Path, value: object) -> None:
        """Put a copy of *value* at *path*; missing objects on the way are made."""
        self._current().set(self._base + parse_path(path), value)

    def delete(self, path: Path) -> None:
        """Remove the value or the whole object at *path*; nothing happens if there is none."""
        self._current().delete(self._base + parse_path(path))

    def create_object(self, path: Path) -> MemoryObject:
        """Make an empty object at *path* unless an object is there already; returns its view."""
        full = self._base + parse_path(path)
        self._current().create(full)
        return MemoryObject(self._current, full)

    def exists(self, path: Path) -> bool:
        return self._current().get(self._base + parse_path(path)) is not None

    __contains__ = exists

    def fields(self) -> list[str]:
        """The names of the fields of this object, in the order in which they were made."""
        found = self._current().get(self._base)
        return list(found.fields) if isinstance(found, Node) else []

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields())
