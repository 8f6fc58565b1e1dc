"""Changed code: what the error says, and how a message goes on with ``on_divergence="rerun"``.

A *plan* says which calls an action makes: a letter is a call, in its case the argument; the effect is given with it.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dalsegno import (
    Agent,
    DefinitionError,
    DidNotHappen,
    DivergenceError,
    Event,
    Happened,
    InputEvent,
    LocalRunner,
    OutputEvent,
    RunnerContext,
    action,
)
from dalsegno.operate.decide import questions, resolve
from tests.helpers import Scripted, Tools, World, crashed, for_ever, run


def plan(tools: Tools, calls: str, **options: Any) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> list[Any]:
        return [await ctx.durable_execute(tools.call, what, **{"effect": "once", **options}) for what in calls]

    return Scripted(body)


def killed_in(world: World, tools: Tools, agent: Agent, what: Any, source: Any = ("input",), **options: Any) -> None:
    """Run *agent* until it hangs in the call *what* and all that it has done is recorded, and crash it there."""
    tools.hang_on.add(what)
    store, made = world.store(), len(tools.made)

    def recorded() -> bool:
        outcomes = sum(kind in ("called", "completed") for kind in store.kinds())
        return what in tools.hanging and outcomes == len(tools.made) - made - 1

    crashed(world.runner(agent, store=store, **options), source, world.out, when=recorded)
    tools.hang_on.clear()
    tools.hanging.clear()


def resolved(world: World, happened: bool) -> None:
    """Say whether the one call in doubt happened."""
    with world.store().inspect() as inspector:
        (question,) = questions(inspector, "job", "resolve")
        assert question.call is not None
        assert resolve(inspector, "job", question.call, happened).written


def rerunner(world: World, agent: Agent, **options: Any) -> LocalRunner:
    return world.runner(agent, on_divergence="rerun", **options)


# --- what strict says -----------------------------------------------------------------------------------------------


def test_the_error_shows_what_differs_and_where_the_call_is_made(world: World, tools: Tools) -> None:
    async def before(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, {"to": "a@example.org", "lines": [1, 2, 3]}, effect="read", name="send")
        await ctx.durable_execute(tools.call, "b", effect="read")

    async def send(ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, {"to": "b@example.org", "lines": [1, 2]}, effect="read", name="send")

    async def after(value: Any, ctx: RunnerContext) -> None:
        await send(ctx)

    tools.call = one_by_name(tools)  # type: ignore[method-assign, assignment]
    killed_in(world, tools, Scripted(before), "b")
    with pytest.raises(DivergenceError) as caught:
        run(world.runner(Scripted(after)), ["input"], world.out)
    message = str(caught.value)
    assert "They differ in args[0]['to'] (recorded 'a@example.org', now 'b@example.org'), " in message
    assert "args[0]['lines'][2] (recorded 3, now nothing)" in message
    line = send.__code__.co_firstlineno + 1
    assert f"The call is made at {__file__}:{line} in {send.__qualname__}." in message


def one_by_name(tools: Tools) -> Callable[[Any], Any]:
    async def call(what: Any) -> Any:
        tools.made.append(what)
        if what == "b":
            tools.hanging.add("b")
            await for_ever()

    call.__qualname__, call.__module__ = "call", __name__
    return call


def test_the_place_of_a_call_in_a_task_of_its_own_is_that_of_the_action(world: World, tools: Tools) -> None:
    killed_in(world, tools, plan(tools, "ab"), "b")

    async def body(value: Any, ctx: RunnerContext) -> None:
        await asyncio.create_task(ctx.durable_execute(tools.call, "x", effect="read"))

    with pytest.raises(DivergenceError, match=r"The action is defined at .*helpers\.py:\d+"):
        run(world.runner(Scripted(body)), ["input"], world.out)


def test_an_action_that_ends_too_early_is_named_with_its_place(world: World, tools: Tools) -> None:
    killed_in(world, tools, plan(tools, "abc"), "c")
    with pytest.raises(DivergenceError, match=r"without making it\..*The action is defined at .*helpers\.py:\d+"):
        run(world.runner(plan(tools, "a")), ["input"], world.out)


def test_many_and_long_differences_are_shortened(world: World, tools: Tools) -> None:
    long = {f"field{n}": "x" * 500 for n in range(9)}

    async def before(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call_sync, 1, kwargs=None, effect="read", name="put")
        await ctx.durable_execute(tools.call, "b", effect="read")

    async def after(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call_sync, long, effect="read", name="put")

    killed_in(world, tools, Scripted(before), "b")
    with pytest.raises(DivergenceError) as caught:
        run(world.runner(Scripted(after)), ["input"], world.out)
    assert len(str(caught.value)) < 2_000


def test_the_error_survives_a_pickle() -> None:
    error = DivergenceError("all of it", "what")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.what) == ("all of it", "what")


def test_a_choice_that_is_none_is_refused(world: World, tools: Tools) -> None:
    with pytest.raises(DefinitionError, match="on_divergence='ignore' is not one of 'strict', 'rerun'"):
        world.runner(plan(tools, "a"), on_divergence="ignore")


# --- rerun: calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "after", "executed"),
    [
        ("inserted before all", "xabc", "xc"),
        ("inserted in between", "axbc", "xc"),
        ("removed", "bc", "c"),
        ("swapped", "bac", "c"),
        ("edited", "aBc", "Bc"),
        ("repeated", "aabc", "ac"),
        ("shorter", "a", ""),
        ("all new", "xyz", "xyz"),
        ("moved behind what was in flight", "bca", "c"),
    ],
)
@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_what_the_changed_code_still_calls_keeps_its_answer_and_only_the_rest_is_executed(
    world: World, tools: Tools, change: str, after: str, executed: str, effect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    killed_in(world, tools, plan(tools, "abc", effect=effect), "c")
    tools.made.clear()
    report = run(rerunner(world, plan(tools, after, effect=effect)), ["input"], world.out)
    assert world.outputs() == [[f"done {what}" for what in after]]
    assert "".join(tools.made) == executed
    assert report.diverged == 1
    warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "job 'job', key None, message '0', action 'act': the code no longer fits the record." in warnings[0]


def test_code_that_fits_is_not_said_to_have_diverged(world: World, tools: Tools) -> None:
    killed_in(world, tools, plan(tools, "abc", effect="read"), "c")
    report = run(rerunner(world, plan(tools, "abc", effect="read")), ["input"], world.out)
    assert report.diverged == 0


@pytest.mark.parametrize("crash_in", "xyc")
@pytest.mark.parametrize("strict", [True, False])
def test_what_was_executed_after_the_divergence_is_not_executed_again(
    world: World, tools: Tools, crash_in: str, strict: bool
) -> None:
    """Once it went on from there, the changed code is the code that fits."""
    killed_in(world, tools, plan(tools, "abc", effect="read"), "c")
    changed = plan(tools, "axybc", effect="read")
    killed_in(world, tools, changed, crash_in, on_divergence="rerun")
    made = [*tools.made]
    choice = "strict" if strict and crash_in != "x" else "rerun"  # in x, perhaps nothing of it is recorded yet
    report = run(world.runner(changed, on_divergence=choice), ["input"], world.out)
    assert world.outputs() == [["done a", "done x", "done y", "done b", "done c"]]
    after = "axybc"
    assert "".join(tools.made[len(made) :]) == after[after.index(crash_in) :].replace("b", "")
    assert report.diverged == 0 or crash_in == "x"


def test_equal_calls_before_and_after_the_divergence_keep_their_own_answers(world: World, tools: Tools) -> None:
    """Call ``a`` is made twice with two answers; the code then gets one more of it in front and one behind."""
    answers = iter(range(10))

    async def draw(what: str) -> int:
        tools.made.append(what)
        if what in tools.hang_on:
            tools.hanging.add(what)
            await for_ever()
        return next(answers)

    tools.call = draw  # type: ignore[method-assign]

    def drawing(calls: str) -> Scripted:
        async def body(value: Any, ctx: RunnerContext) -> list[int]:
            return [await ctx.durable_execute(tools.call, what, effect="read", name="draw") for what in calls]

        return Scripted(body)

    killed_in(world, tools, drawing("abac"), "c")  # a=0, b=1, a=2
    changed = drawing("axaaby")
    killed_in(world, tools, changed, "y", on_divergence="rerun")  # a=0, x=3, a=2, a=4, b=1
    run(world.runner(changed), ["input"], world.out)
    assert world.outputs() == [[0, 3, 2, 4, 1, 5]]


def test_the_code_may_change_twice(world: World, tools: Tools) -> None:
    killed_in(world, tools, plan(tools, "abc", effect="read"), "c")
    killed_in(world, tools, plan(tools, "axyd", effect="read"), "d", on_divergence="rerun")
    last = plan(tools, "azxbye", effect="read")
    killed_in(world, tools, last, "e", on_divergence="rerun")
    tools.made.clear()
    run(world.runner(last), ["input"], world.out)
    assert world.outputs() == [[f"done {what}" for what in "azxbye"]]
    assert tools.made == ["e"]


def test_what_was_given_up_behind_a_second_change_keeps_its_answer_too(world: World, tools: Tools) -> None:
    """The second change lies before the point at which the first one gave calls up."""
    killed_in(world, tools, plan(tools, "abc"), "c")
    killed_in(world, tools, plan(tools, "axbz", reconcile=happened_not), "x", on_divergence="rerun")
    last = plan(tools, "dxbcz", reconcile=happened_not)
    killed_in(world, tools, last, "z", on_divergence="rerun")
    run(world.runner(last), ["input"], world.out)
    assert world.outputs() == [[f"done {what}" for what in "dxbcz"]]
    assert "".join(tools.made) == "abc" + "x" + "dxcz" + "z"  # x, c and z were in doubt and had not happened


async def happened_not(what: str) -> DidNotHappen:
    return DidNotHappen()


@pytest.mark.slow
def test_calls_side_by_side_keep_their_answers_too(world: World, tools: Tools) -> None:
    def together(calls: str, then: str) -> Scripted:
        async def body(value: Any, ctx: RunnerContext) -> list[Any]:
            made = [ctx.durable_execute(tools.call, what, effect="read") for what in calls]
            results = await asyncio.gather(*made)
            # Not "read": that one would start before it is durable that the code went on.
            return [*results, await ctx.durable_execute(tools.call, then, effect="idempotent")]

        return Scripted(body)

    killed_in(world, tools, together("abc", "d"), "d")
    changed = together("axc", "e")
    killed_in(world, tools, changed, "e", on_divergence="rerun")
    assert sorted(tools.made) == [*"abcdex"]
    tools.made.clear()
    run(world.runner(changed), ["input"], world.out)
    assert world.outputs() == [["done a", "done x", "done c", "done e"]]
    assert tools.made == ["e"]


# --- rerun: calls that may have happened ------------------------------------------------------------------------------


def test_a_once_call_that_was_made_is_not_made_again(world: World, tools: Tools, caplog: Any) -> None:
    killed_in(world, tools, plan(tools, "abc"), "c")
    tools.made.clear()
    run(rerunner(world, plan(tools, "xba", effect="once")), ["input"], world.out)
    assert tools.made == ["x"]
    assert "What they did to the world stays done: tests.helpers:Tools.call('a')" in caplog.text


def test_a_once_call_in_doubt_that_the_code_no_longer_makes_parks_the_message(world: World, tools: Tools) -> None:
    killed_in(world, tools, plan(tools, "ab"), "b")
    report = run(rerunner(world, plan(tools, "ax")), ["input"], world.out)
    assert [parked.why for parked in report.parked] == ["in_doubt"]
    assert "Tools.call was requested before the code was changed" in report.parked[0].reason
    assert world.outputs() == []
    again = run(rerunner(world, plan(tools, "ax")), ["input"], world.out)
    assert [parked.why for parked in again.parked] == ["in_doubt"]
    assert tools.made == ["a", "b", "x"]


@pytest.mark.parametrize("happened", [True, False])
def test_once_it_is_resolved_the_message_goes_on_without_it(world: World, tools: Tools, happened: bool) -> None:
    killed_in(world, tools, plan(tools, "ab"), "b")
    changed = plan(tools, "ax")
    run(rerunner(world, changed), ["input"], world.out)
    resolved(world, happened)
    report = run(world.runner(changed), ["input"], world.out)
    assert (report.parked, tools.made) == ([], ["a", "b", "x"])
    assert world.outputs() == [["done a", "done x"]]


@pytest.mark.parametrize("happened", [True, False])
def test_a_once_call_in_doubt_that_the_code_still_makes_is_asked_of_its_reconcile(
    world: World, tools: Tools, happened: bool
) -> None:
    killed_in(world, tools, plan(tools, "ab"), "b")

    async def reconcile(what: str) -> Any:
        return Happened(f"found {what}") if happened else DidNotHappen()

    run(rerunner(world, plan(tools, "axb", reconcile=reconcile)), ["input"], world.out)
    assert world.outputs() == [["done a", "done x", "found b" if happened else "done b"]]
    assert tools.count("b") == (1 if happened else 2)


def test_an_input_that_was_edited_is_refused_all_the_same(world: World, tools: Tools) -> None:
    killed_in(world, tools, plan(tools, "ab"), "b")
    with pytest.raises(DivergenceError, match="the input was edited or reordered"):
        run(rerunner(world, plan(tools, "ab")), ["another"], world.out)


# --- rerun: actions -------------------------------------------------------------------------------------------------


class First(Event):
    pass


def steps(
    tools: Tools,
    first: str | None = "first",
    second: str | None = "second",
    more: bool = False,
) -> Agent:
    """``first`` calls a and b and counts, then ``second`` calls c and d; an action named None is left out.

    With *more*, ``extra`` runs before ``first``.
    """
    members: dict[str, Any] = {"__module__": __name__, "__qualname__": "Steps"}

    async def one(self: Agent, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, "a", effect="once")
        await ctx.durable_execute(tools.call, "b", effect="once")
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 1)
        ctx.send_event(OutputEvent(output="one"))
        ctx.send_event(First())

    async def two(self: Agent, event: First, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, "c", effect="once")
        ctx.send_event(OutputEvent(output="two"))
        await ctx.durable_execute(tools.call, "d", effect="read")

    async def extra(self: Agent, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, "e", effect="once")
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 10)
        ctx.send_event(OutputEvent(output="extra"))

    if more:
        members["extra"] = action(InputEvent)(extra)
    if first:
        members["one"] = action(InputEvent, name=first)(one)
    if second:
        members["two"] = action(First, name=second)(two)
    made: type[Agent] = type("Steps", (Agent,), members)
    return made()


@pytest.mark.parametrize("crash_in", ["b", "d"])
def test_a_renamed_action_goes_on_with_the_record_of_the_old_name(world: World, tools: Tools, crash_in: str) -> None:
    killed_in(world, tools, steps(tools), crash_in)

    tools.fail_on["b"] = RuntimeError("made again")
    agent = steps(tools, first="uno", second="due")
    if crash_in == "b":
        report = run(rerunner(world, agent), ["input"], world.out)
        assert [parked.why for parked in report.parked] == ["in_doubt"]
        assert tools.made == ["a", "b"]
        return
    runner = rerunner(world, agent)
    report = run(runner, ["input"], world.out)
    assert tools.made == ["a", "b", "c", "d", "d"]
    assert report.diverged == 1
    assert world.outputs() == ["one", "two"]
    assert dict(runner.memories()) == {None: {"n": 1}}


def test_an_action_that_was_added_runs_beside_what_is_recorded(world: World, tools: Tools) -> None:
    killed_in(world, tools, steps(tools), "d")
    agent = steps(tools, more=True)
    killed_in(world, tools, agent, "d", on_divergence="rerun")
    assert tools.made == ["a", "b", "c", "d", "e", "d"]
    runner = rerunner(world, agent)
    run(runner, ["input"], world.out)
    assert tools.made == ["a", "b", "c", "d", "e", "d", "d"]
    assert sorted(world.outputs()) == ["extra", "one", "two"]
    # What first wrote is played back as it was, over what the new action wrote.
    assert dict(runner.memories()) == {None: {"n": 1}}


def test_an_action_that_was_removed_is_left_out_and_its_effects_are_named(
    world: World, tools: Tools, caplog: pytest.LogCaptureFixture
) -> None:
    killed_in(world, tools, steps(tools), "d")
    report = run(rerunner(world, steps(tools, second=None)), ["input"], world.out)
    assert world.outputs() == ["one"]
    assert report.diverged == 1
    assert "An event First is recorded, but no action of the code handles it" in caplog.text
    assert "The action 'second' for First is recorded, but no event of the code triggers it." in caplog.text
    assert "What they did to the world stays done: tests.helpers:Tools.call('c')" in caplog.text
    assert tools.made == ["a", "b", "c", "d"]


def test_a_removed_action_with_a_call_in_doubt_parks_the_message(world: World, tools: Tools) -> None:
    killed_in(world, tools, steps(tools), "c")
    agent = steps(tools, second=None)
    for _ in range(2):
        report = run(rerunner(world, agent), ["input"], world.out)
        assert [parked.why for parked in report.parked] == ["in_doubt"]
        assert "action 'second'" in report.parked[0].reason
    assert world.outputs() == []
    resolved(world, happened=True)
    run(rerunner(world, agent), ["input"], world.out)
    assert world.outputs() == ["one"]


def test_a_message_that_ended_with_changed_code_is_played_back_as_it_ended(world: World, tools: Tools) -> None:
    """After a crash between its end and the checkpoint: what was left out stays so, whatever the code is then."""
    original = steps(tools, more=True)
    killed_in(world, tools, original, "d")

    async def endless() -> AsyncIterator[Any]:
        yield "input"
        await for_ever()

    store = world.store()
    changed = rerunner(world, steps(tools), store=store)
    crashed(changed, endless(), world.out, when=lambda: any("order" in body for body in store.bodies()))
    runner = world.runner(original)
    run(runner, ["input"], world.out)
    assert world.outputs() == ["one", "two"]
    assert dict(runner.memories()) == {None: {"n": 11}}  # as first left it, which had seen what extra wrote
    assert tools.made == ["e", "a", "b", "c", "d", "d"]


def test_a_rename_that_cannot_be_told_from_others_is_an_error(world: World, tools: Tools) -> None:
    killed_in(world, tools, steps(tools, more=True), "d")

    class Steps(Agent):
        @action(InputEvent)
        async def other(self, event: InputEvent, ctx: RunnerContext) -> None: ...

        @action(InputEvent)
        async def another(self, event: InputEvent, ctx: RunnerContext) -> None: ...

    with pytest.raises(DivergenceError, match="'extra', 'first' are recorded and gone, and 'other' is new"):
        run(rerunner(world, Steps()), ["input"], world.out)
    run(world.runner(steps(tools, more=True)), ["input"], world.out)
    assert world.outputs() == ["extra", "one", "two"]
