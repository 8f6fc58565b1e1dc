"""Names, decorators and options that are declared wrongly fail before anything runs; those that make sense work."""

from __future__ import annotations

import abc
import asyncio
import types
from dataclasses import dataclass
from typing import Any

import pytest

from dalsegno import ActionError, Agent, DefinitionError, Event, InputEvent, OutputEvent, RunnerContext, action
from tests.helpers import Scripted, World, run

WRONG_NAMES = [5, b"reviews", "", "\ud800", ["reviews"], True, 0]


class Other(Event):
    pass


class Third(Event):
    pass


@pytest.fixture
def world(tmp_path: Any) -> World:
    return World("memory", tmp_path)


async def act(self: Any, event: Event, ctx: RunnerContext) -> None:
    pass


def fresh() -> Any:
    """An unmarked function ``act``."""

    async def act(self: Any, event: Event, ctx: RunnerContext) -> None:
        ctx.send_event(OutputEvent(output=type(event).__name__))

    return act


# --- attributes of Agent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attribute", ["name", "actions", "handlers"])
def test_an_action_cannot_take_the_place_of_an_attribute_that_every_agent_has(attribute: str) -> None:
    with pytest.raises(DefinitionError, match=rf"'{attribute}' is an attribute of every agent.*name='{attribute}'"):
        types.new_class("Wrong", (Agent,), exec_body=lambda body: body.update({attribute: action(InputEvent)(fresh())}))


@pytest.mark.parametrize("mixin_first", [True, False])
def test_an_action_of_a_mixin_cannot_either(mixin_first: bool) -> None:
    mixin = type("Mixin", (), {"handlers": action(InputEvent)(fresh())})
    bases = (mixin, Agent) if mixin_first else (Agent, mixin)
    with pytest.raises(DefinitionError, match="'handlers' is an attribute of every agent"):
        types.new_class("Wrong", bases)


def test_such_a_name_can_still_be_recorded() -> None:
    class Fine(Agent):
        act = action(InputEvent, name="handlers")(fresh())

    assert [spec.name for spec in Fine().handlers(InputEvent)] == ["handlers"]


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_name_in_the_class_body_is_the_recorded_name() -> None:
    class Named(Agent):
        name = "reviews"

    class Both(Agent, name="reviews"):
        name = "reviews"

    class Heir(Named):
        pass

    assert (Named.name, Both.name, Heir.name) == ("reviews", "reviews", "Heir")


def test_two_names_for_one_agent_are_an_error() -> None:
    with pytest.raises(DefinitionError, match="agent 'Torn' is named 'a' in its body and 'b' by its keyword"):

        class Torn(Agent, name="b"):
            name = "a"


def test_a_class_that_is_made_anew_by_a_decorator_keeps_its_name_and_actions() -> None:
    @dataclass(slots=True)
    class Data(Agent, name="old"):
        size: int = 3

        act = action(InputEvent)(fresh())

    assert Data.name == "old"
    assert set(Data.actions) == {"act"}
    assert Data(4).size == 4


@pytest.mark.parametrize("wrong", [*WRONG_NAMES, None, property(lambda self: "reviews")])
def test_a_wrong_name_in_a_class_body_is_an_error(wrong: Any) -> None:
    with pytest.raises(DefinitionError, match="name of agent 'Wrong' must be a non-empty string"):

        class Wrong(Agent):
            name = wrong


@pytest.mark.parametrize("wrong", WRONG_NAMES)
def test_a_wrong_name_keyword_of_a_class_is_an_error(wrong: Any) -> None:
    with pytest.raises(DefinitionError, match="name of agent 'Wrong' must be a non-empty string"):

        class Wrong(Agent, name=wrong):
            pass


@pytest.mark.parametrize("wrong", WRONG_NAMES)
def test_a_wrong_name_of_an_action_is_an_error(wrong: Any) -> None:
    with pytest.raises(DefinitionError, match=r"@action\(\.\.\., name=\.\.\.\) must be a non-empty string"):
        action(InputEvent, name=wrong)


# --- decorators -----------------------------------------------------------------------------------------------------


def test_stacked_actions_are_one_action_for_the_events_of_all(world: World) -> None:
    class Stacked(Agent):
        @action(InputEvent)
        @action(Other, InputEvent)
        @action(Third)
        async def act(self, event: Event, ctx: RunnerContext) -> None: ...

    (spec,) = Stacked.actions.values()
    assert spec.name == "act"
    assert spec.event_types == (InputEvent, Other, Third)
    assert spec.function is Stacked.act
    assert [list(Stacked().handlers(event)) for event in (InputEvent, Other, Third)] == [[spec]] * 3


@pytest.mark.parametrize(("outer", "inner"), [("old", None), (None, "old"), ("old", "old")])
def test_stacked_actions_share_the_name_that_one_of_them_gives(outer: str | None, inner: str | None) -> None:
    class Stacked(Agent):
        act = action(InputEvent, name=outer)(action(Other, name=inner)(fresh()))

    assert set(Stacked.actions) == {"old"}


@pytest.mark.parametrize(("outer", "inner"), [("a", "b"), ("act", "b"), ("a", "act")])
def test_stacked_actions_of_two_names_are_an_error(outer: str, inner: str) -> None:
    marked = action(Other, name=inner)(fresh())
    with pytest.raises(DefinitionError, match=f"is given two names, '{inner}' and '{outer}'"):
        action(InputEvent, name=outer)(marked)


@pytest.mark.parametrize("wrapper", [staticmethod, classmethod])
def test_an_action_under_a_staticmethod_or_classmethod_is_an_error(wrapper: Any) -> None:
    with pytest.raises(DefinitionError, match=f"'act' of agent 'Wrong' is a {wrapper.__name__}.*plain method"):

        class Wrong(Agent):
            act = wrapper(action(InputEvent)(fresh()))


def test_other_static_and_class_methods_are_fine() -> None:
    class Fine(Agent):
        act = action(InputEvent)(fresh())

        @staticmethod
        def helper() -> int:
            return 1

        @classmethod
        def make(cls) -> Fine:
            return cls()

    assert set(Fine.make().actions) == {"act"}


def test_an_agent_can_be_an_abstract_base_class(world: World) -> None:
    class Base(Agent, abc.ABC):
        @action(InputEvent)
        async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            ctx.send_event(OutputEvent(output=self.answer()))

        @abc.abstractmethod
        def answer(self) -> int: ...

    class Concrete(Base):
        def answer(self) -> int:
            return 7

    with pytest.raises(TypeError, match="abstract"):
        Base()  # type: ignore[abstract]
    assert isinstance(Concrete(), Base)
    assert run(world.runner(Concrete()), [1]).outputs == 1


# --- options of durable calls ---------------------------------------------------------------------------------------


def failure_of(world: World, ran: list[str], **options: Any) -> BaseException:
    """What a durable call with *options* makes its action fail with, having run nothing."""

    def callee() -> None:
        ran.append("callee")

    async def body(value: Any, ctx: RunnerContext) -> None:
        await asyncio.sleep(0)
        await ctx.durable_execute(callee, **{"name": "callee", **options})

    with pytest.raises(ActionError) as caught:
        run(world.runner(Scripted(body)), [1])
    assert ran == []
    assert isinstance(caught.value.__cause__, DefinitionError)
    return caught.value.__cause__


@pytest.mark.parametrize("wrong", WRONG_NAMES)
def test_a_wrong_name_of_a_call_is_an_error(world: World, wrong: Any) -> None:
    error = failure_of(world, [], name=wrong)
    assert "durable_execute(..., name=...) must be a non-empty string" in str(error)


@pytest.mark.parametrize("wrong", ["hello", 5, False, ["f"]])
@pytest.mark.parametrize("effect", ["once", "read"])
def test_a_reconcile_that_cannot_be_called_is_an_error(world: World, wrong: Any, effect: str) -> None:
    error = failure_of(world, [], reconcile=wrong, effect=effect)
    assert f"reconcile={wrong!r} cannot be called" in str(error)


async def greet(name: int) -> int:
    return name


def test_an_argument_that_is_taken_for_the_name_is_told_where_it_belongs(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(greet, name=5)  # type: ignore[call-overload]

    with pytest.raises(ActionError, match=r"pass the function's in kwargs=\{'name': \.\.\.\}"):
        run(world.runner(Scripted(body)), [1])
