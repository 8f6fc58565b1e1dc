"""Agents: a class whose methods, marked with `action`, run for certain events.

::

    class ReviewAgent(Agent):
        @action(InputEvent)
        async def score(self, event: InputEvent, ctx: RunnerContext) -> None: ...

What is declared wrongly fails when the class is defined, with a `DefinitionError`. The action's name is part of the
identity of everything it records; the agent's ``name`` (the class name unless given) is part of the job's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from dalsegno.errors import DefinitionError
from dalsegno.events import Event, InputEvent, OutputEvent
from dalsegno.registry import register_reachable, register_signature

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__dalsegno_action__"


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One action of an agent: its name, the event types that trigger it, and its function."""

    name: str
    event_types: tuple[type[Event], ...]
    function: Callable[..., Any]
    is_async: bool


def action(*event_types: type[Event], name: str | None = None) -> Callable[[F], F]:
    """Mark a method ``(self, event, ctx)`` of an `Agent` as an action for *event_types* and their subclasses.

    *name* keeps the recorded name when the method is renamed; it is the method's own name unless given.
    Raises `DefinitionError` when no event type is given or one is not a subclass of `Event`.
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
    return ActionSpec(name or function.__name__, event_types, function, inspect.iscoroutinefunction(function))


class _Namespace(dict[str, Any]):
    """The body of an agent class: a second action of one name is an error, where Python would drop the first."""

    def __setitem__(self, key: str, value: Any) -> None:
        if hasattr(self.get(key), _MARK):
            raise DefinitionError(
                f"two actions are named {key!r} in one agent; the first would be lost: give each method a name of "
                "its own"
            )
        super().__setitem__(key, value)


class _AgentMeta(type):
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
        cls.name = name or cls.__name__
        cls.actions = _collect(cls)

    def handlers(self, event_type: type[Event]) -> Sequence[ActionSpec]:
        """The actions that *event_type* triggers, in the order of their definition."""
        return _handlers(type(self), event_type)


@functools.cache
def _handlers(agent: type[Agent], event_type: type[Event]) -> list[ActionSpec]:
    return [spec for spec in agent.actions.values() if issubclass(event_type, spec.event_types)]


def _collect(cls: type[Agent]) -> dict[str, ActionSpec]:
    methods: dict[str, ActionSpec] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            methods.pop(attribute, None)
            spec = getattr(value, _MARK, None)
            if isinstance(spec, ActionSpec):
                methods[attribute] = spec
    actions: dict[str, ActionSpec] = {}
    for spec in methods.values():
        if spec.name in actions:
            raise DefinitionError(
                f"agent {cls.__name__!r} has two actions named {spec.name!r}; give each a name of its own"
            )
        actions[spec.name] = spec
    return actions


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
