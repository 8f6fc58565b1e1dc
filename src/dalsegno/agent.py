"""Agents: a class whose methods, marked with `action`, run for certain events.

::

    class ReviewAgent(Agent):
        @action(InputEvent)
        async def score(self, event: InputEvent, ctx: RunnerContext) -> None: ...

What is declared wrongly fails when the class is defined, with a `DefinitionError`. The action's name is part of the
identity of everything it records; the agent's ``name`` (the class name unless given, as ``class A(Agent, name="a")``
or as ``name = "a"`` in its body) is part of the job's.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from dalsegno.errors import DefinitionError
from dalsegno.events import Event, InputEvent, OutputEvent
from dalsegno.registry import register_reachable, register_signature

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__dalsegno_action__"
_RESERVED = frozenset({"name", "actions", "handlers"})
"""What every agent has; an action in its place would be lost, or break the agent."""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One action of an agent: its name, the event types that trigger it, and its function."""

    name: str
    event_types: tuple[type[Event], ...]
    function: Callable[..., Any]
    is_async: bool
    given_name: str | None = None
    """The name that the decorator was given, if any."""


def check_name(name: object, what: str) -> None:
    """Raise `DefinitionError` unless *name* can be recorded; *what* says whose name it is."""
    if not isinstance(name, str) or not name:
        raise DefinitionError(
            f"{what} must be a non-empty string, because it is recorded, but is {name!r}: give a string, or leave it "
            "out"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DefinitionError(
            f"{what} must be a non-empty string that UTF-8 can encode, because it is recorded, but {name!r} has a "
            "lone surrogate: give another"
        ) from None


def action(*event_types: type[Event], name: str | None = None) -> Callable[[F], F]:
    """Mark a method ``(self, event, ctx)`` of an `Agent` as an action for *event_types* and their subclasses.

    *name* keeps the recorded name when the method is renamed; it is the method's own name unless given. Stacked on one
    method, the decorators mark one action for the event types of all of them.
    Raises `DefinitionError` when no event type is given, one is not a subclass of `Event`, or *name* is no name.
    """
    if len(event_types) == 1 and inspect.isfunction(event_types[0]):
        raise DefinitionError(
            f"@action on {event_types[0].__qualname__!r} names no event: write @action(InputEvent), with the event "
            "types in brackets"
        )
    if not event_types:
        raise DefinitionError("@action() names no event: write @action(InputEvent), or the event types that trigger it")
    for event_type in event_types:
        _check_event_type(event_type)
    if name is not None:
        check_name(name, "@action(..., name=...)")

    def mark(function: F) -> F:
        spec = _spec(function, event_types, name)
        setattr(function, _MARK, spec)
        return function

    return mark


def _check_event_type(event_type: object) -> None:
    if not (isinstance(event_type, type) and issubclass(event_type, Event)):
        raise DefinitionError(
            f"@action got {event_type!r}, which is not an event: give event classes, that is subclasses of "
            "dalsegno.Event"
        )
    if issubclass(event_type, OutputEvent):
        raise DefinitionError(
            "@action(OutputEvent) can never run: an OutputEvent leaves the agent; send an event class of your own to "
            "trigger another action"
        )


def _spec(function: Callable[..., Any], event_types: tuple[type[Event], ...], name: str | None) -> ActionSpec:
    if not inspect.isfunction(function):
        raise DefinitionError(
            f"@action marks a plain method, not {function!r}; put @action outermost and do not use staticmethod or "
            "classmethod"
        )
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        raise DefinitionError(
            f"action {function.__qualname__!r} must take (self, event, ctx), but is declared as "
            f"{function.__name__}{inspect.signature(function)}"
        ) from None
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise DefinitionError(
            f"action {function.__qualname__!r} uses yield: an action sends its events with ctx.send_event(...)"
        )
    stacked = getattr(function, _MARK, None)
    if isinstance(stacked, ActionSpec):
        event_types = tuple(dict.fromkeys(event_types + stacked.event_types))
        name = _one_name(function, stacked.given_name, name)
    return ActionSpec(name or function.__name__, event_types, function, inspect.iscoroutinefunction(function), name)


def _one_name(function: Callable[..., Any], inner: str | None, outer: str | None) -> str | None:
    if inner is not None and outer is not None and inner != outer:
        raise DefinitionError(
            f"action {function.__qualname__!r} is given two names, {inner!r} and {outer!r}, by stacked @action "
            "decorators, but is recorded under one: give name= once"
        )
    return inner if outer is None else outer


class _Namespace(dict[str, Any]):
    """The body of an agent class: a second action of one name is an error, where Python would drop the first."""

    def __setitem__(self, key: str, value: Any) -> None:
        if hasattr(self.get(key), _MARK):
            raise DefinitionError(
                f"two actions are named {key!r} in one agent; the first would be lost: give each method a name of "
                "its own"
            )
        super().__setitem__(key, value)


class _AgentMeta(ABCMeta):  # so that an agent may also derive from an abstract base class
    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **kwargs: Any) -> _Namespace:
        return _Namespace()

    def __new__(metacls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs: Any) -> _AgentMeta:
        return super().__new__(metacls, name, bases, dict(namespace), **kwargs)


class Agent(metaclass=_AgentMeta):
    """Base of all agents.

    One instance serves all message keys of a process, many at a time: what an action must remember belongs into
    ``ctx.short_term_memory``, not into attributes of the agent, which are not recorded.
    """

    name: ClassVar[str]
    actions: ClassVar[dict[str, ActionSpec]] = {}

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.actions = _collect(cls)
        cls.name = _agent_name(cls, name)

    def handlers(self, event_type: type[Event]) -> Sequence[ActionSpec]:
        """The actions that *event_type* triggers, in the order of their definition."""
        return _handlers(type(self), event_type)


@functools.cache
def _handlers(agent: type[Agent], event_type: type[Event]) -> list[ActionSpec]:
    return [spec for spec in agent.actions.values() if issubclass(event_type, spec.event_types)]


def _agent_name(cls: type[Agent], keyword: str | None) -> str:
    name = vars(cls).get("name", cls.__name__ if keyword is None else keyword)
    for given in (name, name if keyword is None else keyword):
        check_name(given, f"the name of agent {cls.__name__!r}")
    if keyword is not None and name != keyword:
        raise DefinitionError(
            f"agent {cls.__name__!r} is named {name!r} in its body and {keyword!r} by its keyword name=, but is "
            "recorded under one name: give one of them"
        )
    return str(name)


def _collect(cls: type[Agent]) -> dict[str, ActionSpec]:
    methods: dict[str, ActionSpec] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            methods.pop(attribute, None)
            wrapped = isinstance(value, staticmethod | classmethod)
            spec = getattr(value.__func__ if wrapped else value, _MARK, None)
            if isinstance(spec, ActionSpec):
                _check_method(cls, attribute, value)
                methods[attribute] = spec
    actions: dict[str, ActionSpec] = {}
    for spec in methods.values():
        if spec.name in actions:
            raise DefinitionError(
                f"agent {cls.__name__!r} has two actions named {spec.name!r}; give each a name of its own"
            )
        actions[spec.name] = spec
    return actions


def _check_method(cls: type[Agent], attribute: str, value: object) -> None:
    if attribute in _RESERVED:
        raise DefinitionError(
            f"agent {cls.__name__!r} has an action method named {attribute!r}, but {attribute!r} is an attribute of "
            f"every agent: rename the method; @action(..., name={attribute!r}) keeps the recorded name"
        )
    if isinstance(value, staticmethod | classmethod):
        raise DefinitionError(
            f"action {attribute!r} of agent {cls.__name__!r} is a {type(value).__name__}, but an action is a plain "
            "method (self, event, ctx): remove the decorator"
        )


def check_agent(agent: object) -> Agent:
    """*agent*, ready to run: an instance with an action for `InputEvent` and its event types registered.

    Raises `DefinitionError` otherwise.
    """
    if isinstance(agent, type) and issubclass(agent, Agent):
        raise DefinitionError(f"give an instance of the agent, {agent.__name__}(), not the class")
    if not isinstance(agent, Agent):
        raise DefinitionError(f"an agent is an instance of a subclass of dalsegno.Agent, not {agent!r}")
    if not agent.handlers(InputEvent):
        raise DefinitionError(
            f"agent {agent.name!r} has no action for InputEvent, so no message would ever trigger it: mark one with "
            "@action(InputEvent)"
        )
    for spec in agent.actions.values():
        register_signature(spec.function)
        for event_type in spec.event_types:
            register_reachable(event_type)
    return agent
