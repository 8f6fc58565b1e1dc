"""Agents: what is declared wrongly fails where it is declared, with a message that says what to write instead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dalsegno import Agent, DefinitionError, Event, InputEvent, OutputEvent, RunnerContext, action
from dalsegno.agent import check_agent
from tests.helpers import Scripted, Tools, World, run


class Base(Event):
    n: int


class Derived(Base):
    m: int = 0


class Other(Event):
    pass


async def nothing(self: Any, event: InputEvent, ctx: RunnerContext) -> None:
    pass


@pytest.fixture
def world(tmp_path: Any) -> World:
    return World("memory", tmp_path)


@pytest.mark.parametrize("event_type", [int, "InputEvent", None, InputEvent(input=1), Event | None])
def test_what_is_no_event_class_cannot_trigger_an_action(event_type: Any) -> None:
    with pytest.raises(DefinitionError, match=r"not an event: give event classes"):
        action(event_type)


def test_an_action_without_brackets_is_told_to_write_them() -> None:
    with pytest.raises(DefinitionError, match=r"@action on 'nothing' names no event: write @action\(InputEvent\)"):
        action(nothing)  # type: ignore[arg-type]


def test_an_action_without_event_types_is_an_error() -> None:
    with pytest.raises(DefinitionError, match=r"@action\(\) names no event"):
        action()


def test_an_output_event_triggers_nothing_and_says_so() -> None:
    with pytest.raises(DefinitionError, match=r"@action\(OutputEvent\) can never run"):
        action(OutputEvent)


@pytest.mark.parametrize("wrapped", [staticmethod(nothing), classmethod(nothing), print, 3, Tools])
def test_only_a_plain_method_is_an_action(wrapped: Any) -> None:
    with pytest.raises(DefinitionError, match="marks a plain method"):
        action(InputEvent)(wrapped)


def test_an_action_must_take_self_event_and_context() -> None:
    async def too_few(self: Any, event: InputEvent) -> None: ...
    async def too_many(self: Any, event: InputEvent, ctx: RunnerContext, more: int) -> None: ...
    async def keyword(self: Any, event: InputEvent, *, ctx: RunnerContext) -> None: ...

    for function in (too_few, too_many, keyword):
        with pytest.raises(DefinitionError, match=r"must take \(self, event, ctx\), but is declared as"):
            action(InputEvent)(function)


def test_more_parameters_with_defaults_are_allowed() -> None:
    async def fine(self: Any, event: InputEvent, ctx: RunnerContext, more: int = 3) -> None: ...

    assert action(InputEvent)(fine) is fine


def test_an_action_that_yields_is_told_to_send_events() -> None:
    def generator(self: Any, event: InputEvent, ctx: RunnerContext) -> Any:
        yield 1

    async def async_generator(self: Any, event: InputEvent, ctx: RunnerContext) -> Any:
        yield 1

    for function in (generator, async_generator):
        with pytest.raises(DefinitionError, match=r"uses yield.*ctx\.send_event"):
            action(InputEvent)(function)


def test_two_actions_of_one_method_name_are_an_error_not_one_action() -> None:
    with pytest.raises(DefinitionError, match="two actions are named 'act'"):

        class Twice(Agent):
            @action(InputEvent)
            async def act(self, event: InputEvent, ctx: RunnerContext) -> None: ...

            @action(Other)  # type: ignore[no-redef]
            async def act(self, event: Other, ctx: RunnerContext) -> None: ...  # noqa: F811


def test_two_actions_of_one_recorded_name_are_an_error() -> None:
    with pytest.raises(DefinitionError, match="has two actions named 'one'"):

        class Twice(Agent):
            @action(InputEvent)
            async def one(self, event: InputEvent, ctx: RunnerContext) -> None: ...

            @action(Other, name="one")
            async def two(self, event: Other, ctx: RunnerContext) -> None: ...


def test_a_definition_error_is_also_a_type_error() -> None:
    with pytest.raises(TypeError):
        action()


def test_actions_keep_the_order_of_their_definition() -> None:
    class Ordered(Agent):
        @action(InputEvent)
        async def zebra(self, event: InputEvent, ctx: RunnerContext) -> None: ...

        @action(InputEvent, Other)
        async def ape(self, event: Event, ctx: RunnerContext) -> None: ...

    assert [spec.name for spec in Ordered().handlers(InputEvent)] == ["zebra", "ape"]
    assert [spec.name for spec in Ordered().handlers(Other)] == ["ape"]


def test_an_action_for_an_event_class_also_gets_its_subclasses() -> None:
    class Wide(Agent):
        @action(Base)
        async def base(self, event: Base, ctx: RunnerContext) -> None: ...

        @action(Derived)
        async def derived(self, event: Derived, ctx: RunnerContext) -> None: ...

    assert [spec.name for spec in Wide().handlers(Derived)] == ["base", "derived"]
    assert [spec.name for spec in Wide().handlers(Base)] == ["base"]


def test_a_subclass_inherits_replaces_and_removes_actions() -> None:
    class Parent(Agent):
        @action(InputEvent)
        async def kept(self, event: InputEvent, ctx: RunnerContext) -> None: ...

        @action(InputEvent)
        async def replaced(self, event: InputEvent, ctx: RunnerContext) -> None: ...

        @action(InputEvent)
        async def removed(self, event: InputEvent, ctx: RunnerContext) -> None: ...

    class Child(Parent):
        @action(InputEvent)
        async def replaced(self, event: InputEvent, ctx: RunnerContext) -> None: ...

        removed = None  # type: ignore[assignment]

    assert set(Child.actions) == {"kept", "replaced"}
    assert Child.actions["replaced"].function is Child.replaced
    assert set(Parent.actions) == {"kept", "replaced", "removed"}


def test_an_action_of_a_mixin_counts() -> None:
    class Mixin:
        @action(InputEvent)
        async def mixed_in(self, event: InputEvent, ctx: RunnerContext) -> None: ...

    class Mixed(Mixin, Agent):
        pass

    assert set(Mixed.actions) == {"mixed_in"}


def test_the_recorded_name_of_a_class_and_an_action_can_be_kept_when_they_are_renamed() -> None:
    class New(Agent, name="Old"):
        @action(InputEvent, name="old")
        async def new(self, event: InputEvent, ctx: RunnerContext) -> None: ...

    class Heir(New):
        pass

    assert New.name == "Old"
    assert set(New.actions) == {"old"}
    assert Heir.name == "Heir"


def test_the_class_is_not_taken_for_an_agent() -> None:
    with pytest.raises(DefinitionError, match=r"give an instance of the agent, Scripted\(\), not the class"):
        check_agent(Scripted)


@pytest.mark.parametrize("wrong", [None, 3, "agent", Tools()])
def test_what_is_no_agent_is_refused(wrong: Any) -> None:
    with pytest.raises(DefinitionError, match=r"an agent is an instance of a subclass of dalsegno\.Agent"):
        check_agent(wrong)


def test_an_agent_that_nothing_would_trigger_is_refused() -> None:
    class Deaf(Agent):
        @action(Other)
        async def act(self, event: Other, ctx: RunnerContext) -> None: ...

    with pytest.raises(DefinitionError, match="'Deaf' has no action for InputEvent"):
        check_agent(Deaf())


def test_an_event_refuses_unknown_fields_and_wrong_types() -> None:
    for fields in ({"n": 1, "typo": 2}, {"n": "many"}, {}):
        with pytest.raises(ValueError, match="validation error"):
            Base(**fields)


# --- what an action says wrongly at run time ------------------------------------------------------------------------


def failure_of(world: World, body: Any) -> BaseException:
    """What makes the action with *body* fail."""
    with pytest.raises(Exception, match="act") as caught:
        run(world.runner(Scripted(body)), [1])
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


@pytest.mark.parametrize("wrong", [3, None, {"n": 1}, Base])
def test_only_events_can_be_sent(world: World, wrong: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.send_event(wrong)

    assert "send_event takes an event" in str(failure_of(world, body))


def test_an_event_that_no_action_handles_is_not_lost_in_silence(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.send_event(Base(n=1))

    error = failure_of(world, body)
    assert isinstance(error, DefinitionError)
    assert "no action of agent 'Scripted' handles Base, so the event would be lost" in str(error)


def test_a_context_that_outlives_its_action_refuses_everything(world: World) -> None:
    kept: list[RunnerContext] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        kept.append(ctx)

    run(world.runner(Scripted(body)), [1])
    (ctx,) = kept
    for use in (
        lambda: ctx.send_event(OutputEvent(output=1)),
        lambda: ctx.durable_execute(print),
        lambda: ctx.short_term_memory.get("a"),
        lambda: ctx.short_term_memory.set("a", 1),
        lambda: ctx.sensory_memory.exists("a"),
    ):
        with pytest.raises(RuntimeError, match="used after its action had ended"):
            use()


def test_an_action_says_who_and_what_it_runs_for(world: World) -> None:
    seen: list[tuple[str, Any, str]] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        seen.append((ctx.job, ctx.key, ctx.message_id))

    run(world.runner(Scripted(body), "reviews"), [{"k": ("a", 1)}, {"k": "b"}], key="k")
    assert seen == [("reviews", ("a", 1), "0"), ("reviews", "b", "1")]


class Plain(Agent):
    """An action that is a plain ``def``."""

    def __init__(self, body: Any) -> None:
        self.body = body

    @action(InputEvent)
    def act(self, event: InputEvent, ctx: RunnerContext) -> Any:
        return self.body(event.input, ctx)


def test_a_plain_action_that_awaits_is_told_to_be_async(world: World) -> None:
    def body(value: Any, ctx: RunnerContext) -> Any:
        return ctx.durable_execute(print)

    with pytest.raises(Exception, match=r"plain def, where nothing can be awaited.*durable_execute_sync") as caught:
        run(world.runner(Plain(body)), [1])
    assert isinstance(caught.value.__cause__, DefinitionError)


def test_an_async_action_that_blocks_is_told_to_await(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.durable_execute_sync(print)

    assert "write await ctx.durable_execute(...)" in str(failure_of(world, body))


def test_a_plain_action_that_returns_a_coroutine_is_not_taken_for_done(world: World) -> None:
    ran: list[int] = []

    def body(value: Any, ctx: RunnerContext) -> Any:
        async def later() -> None:
            ran.append(1)

        return later()

    with pytest.raises(Exception, match="returns an awaitable, which nobody awaits: declare it with async def"):
        run(world.runner(Plain(body)), [1])
    assert ran == []


def test_actions_of_other_events_run_after_those_of_the_input_in_the_order_of_sending(world: World) -> None:
    order: list[str] = []

    class Chain(Agent):
        @action(InputEvent)
        async def first(self, event: InputEvent, ctx: RunnerContext) -> None:
            order.append("first")
            ctx.send_event(Base(n=1))
            ctx.send_event(Base(n=2))
            await asyncio.sleep(0.01)

        @action(InputEvent)
        async def second(self, event: InputEvent, ctx: RunnerContext) -> None:
            order.append("second")
            ctx.send_event(Other())

        @action(Base)
        async def third(self, event: Base, ctx: RunnerContext) -> None:
            order.append(f"base {event.n}")

        @action(Other)
        async def fourth(self, event: Other, ctx: RunnerContext) -> None:
            order.append("other")

    run(world.runner(Chain()), [1])
    assert order == ["first", "second", "base 1", "base 2", "other"]


def test_each_action_gets_a_copy_of_the_event_of_its_own(world: World) -> None:
    seen: list[Any] = []

    class Greedy(Agent):
        @action(InputEvent)
        async def spoil(self, event: InputEvent, ctx: RunnerContext) -> None:
            event.input.append("spoilt")

        @action(InputEvent)
        async def look(self, event: InputEvent, ctx: RunnerContext) -> None:
            seen.append(event.input)

    given = ["a"]
    run(world.runner(Greedy()), [given])
    assert seen == [["a"]]
    assert given == ["a"]
