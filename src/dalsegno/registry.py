"""Which classes may be recorded and loaded, and under which stable name.

A recorded value of a user's class carries the *name* of the class, never code. Loading looks the name up here and
nowhere else: nothing is imported, and a class that this process has not registered is a ``CodecError``.

A class comes in by one of two ways:

* ``@register`` above the class (outermost decorator), or ``register(cls)`` for a class of another package;
* it is reachable from a type annotation: ``register_reachable(annotation)``, ``register_signature(function)``. Unions,
  generics and the fields of reachable classes are followed. A forward reference that cannot be resolved yet is
  tried again when a class is missed.

Dataclasses, pydantic models, enums, named tuples and exception classes can be registered. Exception classes need not
be: they are also found in modules that are already imported (``exception_class``).

The name is ``"module:qualname"``. The module ``__main__`` goes by the name that it has when it is imported
(``module_name``), so a script that is one file has the same names in every process. ``register(cls, name=...)`` gives
another name, for instance the old one after a class was renamed; every name that a class ever had in this process
still loads it.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar, get_args, get_origin, overload

import pydantic

from dalsegno.errors import CodecError, DefinitionError

__all__ = [
    "NotRecorded",
    "RecordedError",
    "class_name",
    "exception_class",
    "exception_name",
    "is_current",
    "is_named_tuple",
    "module_name",
    "name_of",
    "register",
    "register_reachable",
    "register_signature",
    "resolve",
]

_Class = TypeVar("_Class", bound=type)
_MAIN_MODULES = ("__main__", "__mp_main__")  # the second is the main module in a spawned multiprocessing child


# --- names ----------------------------------------------------------------------------------------------------------


def module_name(module: str) -> str:
    """The name of a module that is the same in every process, also when the module is the script that was started."""
    if module not in _MAIN_MODULES:
        return module
    main = sys.modules.get(module)
    spec_name = getattr(getattr(main, "__spec__", None), "name", None)
    if isinstance(spec_name, str) and spec_name not in _MAIN_MODULES:
        return spec_name
    file = getattr(main, "__file__", None)
    return PurePath(file).stem if isinstance(file, str) else module


def class_name(cls: type) -> str:
    """``"module:qualname"`` of a class; a parametrised pydantic model names its parameters with their modules."""
    generic = cls.__dict__.get("__pydantic_generic_metadata__")
    if generic and generic.get("origin"):
        parameters = ",".join(_parameter_name(argument) for argument in generic["args"])
        return f"{class_name(generic['origin'])}[{parameters}]"
    return f"{module_name(cls.__module__)}:{cls.__qualname__}"


def _parameter_name(annotation: object) -> str:
    if annotation is None or annotation is types.NoneType:
        return "None"
    origin = get_origin(annotation)
    if origin is not None:
        return f"{_parameter_name(origin)}[{','.join(_parameter_name(argument) for argument in get_args(annotation))}]"
    if isinstance(annotation, type):
        return annotation.__qualname__ if annotation.__module__ == "builtins" else class_name(annotation)
    return str(annotation)


# --- the kinds of classes that can be recorded ------------------------------------------------------------------------


def is_named_tuple(cls: type) -> bool:
    """Whether ``cls`` was made by ``NamedTuple`` or ``namedtuple``."""
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


def _is_recordable(cls: type) -> bool:
    return (
        issubclass(cls, (Enum, pydantic.BaseModel, BaseException))
        or dataclasses.is_dataclass(cls)
        or is_named_tuple(cls)
    )


# --- registration ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Where the text of an annotation is evaluated."""

    globals: dict[str, Any]
    locals: Mapping[str, Any]


_NO_SCOPE = _Scope({}, {})


class _Registry:
    """Names and classes; one per process."""

    def __init__(self) -> None:
        self.by_name: dict[str, type] = {}
        self.by_class: dict[type, str] = {}
        self.unresolved: dict[tuple[str, int], _Scope] = {}
        self.visited: set[type] = set()
        self.lock = threading.RLock()

    def add(self, cls: type, name: str) -> None:
        with self.lock:
            known = self.by_name.get(name)
            if known is not None and known is not cls and class_name(known) != class_name(cls):
                raise DefinitionError(
                    f"the name {name!r} is taken by the class {class_name(known)!r}, so {class_name(cls)!r} cannot be "
                    "registered under it: records of the two would be mixed up; give one of them another name=..."
                )
            self.by_name[name] = cls
            self.by_class[cls] = name

    def add_reachable(self, cls: type) -> None:
        name = class_name(cls)
        if cls not in self.by_class and (name not in self.by_name or class_name(self.by_name[name]) == name):
            self.add(cls, name)

    def walk(self, annotation: object, scope: _Scope) -> None:
        """Register what is reachable from ``annotation``; each class is followed once."""
        with self.lock:
            todo: list[tuple[object, _Scope]] = [(annotation, scope)]
            seen: dict[object, object] = {}  # values keep the objects alive whose id is a key
            while todo:
                item, scope = todo.pop()
                key = (item, id(scope.globals)) if isinstance(item, str) else id(item)
                if key not in seen:
                    seen[key] = item
                    todo.extend(self.step(item, scope))

    def step(self, item: object, scope: _Scope) -> Iterator[tuple[object, _Scope]]:
        if isinstance(item, typing.ForwardRef):
            item = item.__forward_arg__
        if isinstance(item, str):
            yield from self.evaluate(item, scope)
        elif isinstance(item, type) and get_origin(item) is None:
            yield from self.visit(item)
        else:
            for part in _parts(item):
                yield part, scope

    def evaluate(self, text: str, scope: _Scope) -> Iterator[tuple[object, _Scope]]:
        key = (text, id(scope.globals))
        try:
            found = eval(text, scope.globals, dict(scope.locals))  # the program's own annotation, never a record
        except Exception:
            if scope is not _NO_SCOPE:
                self.unresolved[key] = scope
        else:
            self.unresolved.pop(key, None)
            yield found, scope

    def visit(self, cls: type) -> Iterator[tuple[object, _Scope]]:
        if cls in self.visited or cls.__module__ == "builtins":
            return
        self.visited.add(cls)
        if _is_recordable(cls):
            self.add_reachable(cls)
        elif not (issubclass(cls, dict) and hasattr(cls, "__required_keys__")):  # a TypedDict of any library
            return
        yield from _fields_of(cls)

    def retry(self) -> None:
        """Try the forward references again that could not be resolved when they were met."""
        with self.lock:
            for (text, _), scope in list(self.unresolved.items()):
                self.walk(text, scope)


def _parts(item: object) -> Iterable[object]:
    """The annotations that the annotation ``item`` is made of."""
    origin = get_origin(item)
    if origin is typing.Literal:
        return [type(argument) for argument in get_args(item) if isinstance(argument, Enum)]
    if origin is typing.Annotated:
        return get_args(item)[:1]
    if origin is not None:
        return (origin, *get_args(item))
    if isinstance(item, (list, tuple)):  # the parameters of a Callable
        return item
    if isinstance(item, TypeVar):
        return (item.__bound__, *item.__constraints__)
    if isinstance(item, typing.NewType):
        return (item.__supertype__,)
    try:
        return (item.__value__,) if type(item).__name__ == "TypeAliasType" else ()  # type: ignore[attr-defined]
    except Exception:  # the lazily evaluated value of a `type` statement names something that does not exist
        return ()


def _fields_of(cls: type) -> Iterator[tuple[object, _Scope]]:
    """The annotations of the fields of a class, each with the scope that its text belongs to."""
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        if base.__module__ == "builtins" or module is None or base is pydantic.BaseModel:
            continue
        scope = _Scope(vars(module), {cls.__name__: cls, base.__name__: base})
        for annotation in _annotations(base).values():
            yield annotation, scope
        for field in base.__dict__.get("__pydantic_fields__", {}).values():
            yield field.annotation, scope
    generic = cls.__dict__.get("__pydantic_generic_metadata__") or {}
    for argument in generic.get("args", ()):
        yield argument, _NO_SCOPE


def _annotations(owner: Any) -> dict[str, Any]:
    """The annotations written on a class (without its bases) or a function, unevaluated where they are text."""
    try:
        found = vars(owner).get("__annotations__", {}) if isinstance(owner, type) else owner.__annotations__
        if not found and sys.version_info >= (3, 14):
            import annotationlib

            found = annotationlib.get_annotations(owner, format=annotationlib.Format.FORWARDREF)
    except Exception:
        return {}
    return dict(found) if isinstance(found, dict) else {}


_registry = _Registry()

CLASSES: Mapping[str, type] = _registry.by_name
"""The class that each name loads. A live view for those who cannot afford a call; what is missed may yet `resolve`."""
NAMES: Mapping[type, str] = _registry.by_class
"""The name that records give to each class, as live as `CLASSES`; what is missed may yet have a `name_of`."""


@overload
def register(cls: _Class, *, name: str | None = None) -> _Class: ...
@overload
def register(cls: None = None, *, name: str | None = None) -> Callable[[_Class], _Class]: ...
def register(cls: _Class | None = None, *, name: str | None = None) -> _Class | Callable[[_Class], _Class]:
    """Allow values of a class to be recorded and loaded; a decorator, with or without parentheses, or a function.

    The classes of its fields come with it. ``name`` replaces ``"module:qualname"`` in records. A second class under
    a taken name is a ``DefinitionError``, unless it is a new definition of the same class.
    """
    if cls is None:
        return functools.partial(register, name=name)
    if not isinstance(cls, type):
        raise DefinitionError(f"register() takes a class, not {cls!r}; write @register or register(cls, name='...')")
    if name is not None and (type(name) is not str or not name):
        raise DefinitionError(f"the name of a registered class is a non-empty string, not {name!r}")
    if not _is_recordable(cls):
        raise DefinitionError(
            f"the class {class_name(cls)!r} cannot be recorded: only dataclasses, pydantic models, enums, named "
            "tuples and exceptions can; make it a dataclass, and put @register above @dataclass"
        )
    _registry.add(cls, name or class_name(cls))
    for annotation, scope in _fields_of(cls):
        _registry.walk(annotation, scope)
    return cls


def register_reachable(annotation: object) -> None:
    """Register the classes that a type annotation mentions, and those that their fields mention.

    A forward reference in ``annotation`` itself has no scope to be looked up in and is ignored; those in fields are
    resolved in the module of their class.
    """
    _registry.walk(annotation, _NO_SCOPE)


def register_signature(function: object) -> None:
    """Register what is reachable from the parameter and return annotations of a callable; never raises."""
    try:
        target = _underlying_function(function)
        if target is not None and target not in _signatures:
            _signatures.add(target)
            scope = _Scope(getattr(target, "__globals__", {}), _closure_of(target))
            for annotation in _annotations(target).values():
                _registry.walk(annotation, scope)
    except Exception:  # annotations are arbitrary objects; a value that is missed for it gets a clear CodecError later
        return


_signatures: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def _underlying_function(function: Any) -> Callable[..., Any] | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(function, types.FunctionType):
        return function
    call = inspect.getattr_static(type(function), "__call__", None)
    return call if isinstance(call, types.FunctionType) else None


def _closure_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The outer variables a nested function uses; one that is not assigned yet is left out."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, getattr(function, "__closure__", None) or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


# --- look-up --------------------------------------------------------------------------------------------------------


def name_of(cls: type) -> str | None:
    """The name that records give to ``cls``; ``None`` if it is not registered."""
    name = _registry.by_class.get(cls)
    if name is None and _registry.unresolved:
        _registry.retry()
        name = _registry.by_class.get(cls)
    return name


def is_current(cls: type, name: str) -> bool:
    """Whether ``name`` loads exactly ``cls``, not a newer definition of it."""
    return _registry.by_name.get(name) is cls


def resolve(name: str) -> type:
    """The class registered under ``name``; ``CodecError`` if there is none. Imports nothing."""
    cls = _registry.by_name.get(name)
    if cls is None and _registry.unresolved:
        _registry.retry()
        cls = _registry.by_name.get(name)
    if cls is None:
        raise CodecError(
            f"the record holds a value of the class {name!r}, which is not registered in this process; decorate the "
            "class with @dalsegno.register or name it in the annotation of an action or a called function; if it was "
            f"renamed or moved, use @dalsegno.register(name={name!r})"
        )
    return cls


def exception_name(cls: type[BaseException]) -> str:
    """The name that records give to an exception class, registered or not."""
    return _registry.by_class.get(cls) or class_name(cls)


def exception_class(name: str) -> type[BaseException] | None:
    """The exception class of that name: a registered one, or one of a module that is imported already.

    A class is accepted only if ``name`` is its own name: an alias in another module is not. Neither an import nor a
    module's ``__getattr__`` is triggered.
    """
    cls = _registry.by_name.get(name)
    if cls is None:
        module, _, qualname = name.partition(":")
        places = [main for main in _MAIN_MODULES if module_name(main) == module]
        cls = next((c for place in (*places, module) if (c := _class_in(place, qualname, name)) is not None), None)
    return cls if cls is not None and issubclass(cls, BaseException) else None


def _class_in(module: str, qualname: str, name: str) -> type | None:
    found: object = builtins if module == "builtins" else sys.modules.get(module)
    for part in qualname.split("."):
        try:
            found = object.__getattribute__(found, "__dict__").get(part)
        except AttributeError:
            return None
    return found if isinstance(found, type) and class_name(found) == name else None


# --- what stands in for what cannot be recorded -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class NotRecorded:
    """Stands for an attribute of an exception that cannot be recorded, such as an open response.

    ``type_name`` is the ``"module:qualname"`` of its class, ``text`` its ``repr``, shortened and without memory
    addresses.
    """

    type_name: str
    text: str

    def __repr__(self) -> str:
        return f"<not recorded: {self.type_name} {self.text}>"


class RecordedError(Exception):
    """Stands for an exception that cannot be recorded and loaded as what it is, already in the first run.

    ``type_name`` is the ``"module:qualname"`` of its class, ``message`` its ``str()``, ``fields`` its attributes.
    """

    def __init__(self, type_name: str, message: str, fields: dict[str, object] | None = None) -> None:
        super().__init__(type_name, message, {} if fields is None else fields)

    @property
    def type_name(self) -> str:
        return typing.cast(str, self.args[0])

    @property
    def message(self) -> str:
        return typing.cast(str, self.args[1])

    @property
    def fields(self) -> dict[str, object]:
        return typing.cast("dict[str, object]", self.args[2])

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


_registry.add(NotRecorded, "dalsegno:NotRecorded")
_registry.add(RecordedError, "dalsegno:RecordedError")
