"""What happens to a call in doubt: by its declared effect, never by a guess."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dalsegno import (
    ActionError,
    Agent,
    DefinitionError,
    DidNotHappen,
    Happened,
    InputEvent,
    LocalRunner,
    RunnerContext,
    RunReport,
    Unknown,
    action,
    current_call,
)
from tests.helpers import Scripted, Tools, World, crashed, run


class Mailer:
    """One call with effect ``once``, and a reconcile whose answer the test sets."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.answer: Any = None
        self.asked: list[tuple[Any, str, int, str]] = []
        self.keys: list[str] = []

    async def send(self, what: Any) -> Any:
        self.keys.append(current_call().idempotency_key)
        return await self.tools.call(what)

    async def find(self, what: Any) -> Any:
        call = current_call()
        self.asked.append((what, call.name, call.attempt, call.idempotency_key))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def find_in_thread(self, what: Any) -> Any:
        return self.answer

    def find_by_coroutine(self, what: Any) -> Any:
        return self.find(what)

    async def body(self, value: Any, ctx: RunnerContext) -> Any:
        what = value["do"] if isinstance(value, dict) else value
        return await ctx.durable_execute(self.send, what, effect="once", reconcile=self.find)


@pytest.fixture
def mailer(tools: Tools) -> Mailer:
    return Mailer(tools)


def crash_in_call(world: World, tools: Tools, body: Any, source: Any, what: Any, **options: Any) -> None:
    tools.hang_on.add(what)
    crashed(world.runner(Scripted(body)), source, world.out, when=lambda: what in tools.hanging, **options)
    tools.hang_on.clear()


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_a_harmless_call_in_doubt_is_made_again(world: World, tools: Tools, effect: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value, effect=effect)

    crash_in_call(world, tools, body, ["a"], "a")
    assert run(world.runner(Scripted(body)), ["a"], world.out).parked == []
    assert tools.made == ["a", "a"]
    assert world.outputs() == ["done a"]


def test_the_idempotency_key_is_the_same_in_every_attempt_and_differs_for_every_other_call(
    world: World, tools: Tools
) -> None:
    keys: dict[Any, list[str]] = {}

    async def send(what: Any, n: int) -> Any:
        keys.setdefault((what, n), []).append(current_call().idempotency_key)
        return await tools.call((what, n))

    async def body(value: Any, ctx: RunnerContext) -> Any:
        for n in (0, 1):
            await ctx.durable_execute(send, value, n, effect="idempotent", name="send")

    crash_in_call(world, tools, body, ["a", "a", "b"], ("b", 1))
    run(world.runner(Scripted(body)), ["a", "a", "b"], world.out)
    run(world.runner(Scripted(body), "other"), ["b"])
    first, second = keys["b", 1][:2]
    assert first == second
    assert len(keys["a", 0]) == 2  # equal calls of two messages
    assert len({key for found in keys.values() for key in found}) == sum(map(len, keys.values())) - 1


def test_equal_calls_of_one_action_have_different_idempotency_keys(world: World, mailer: Mailer) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(mailer.send, "x", effect="idempotent")
        await asyncio.gather(*(ctx.durable_execute(mailer.send, "x", effect="idempotent") for _ in range(3)))

    run(world.runner(Scripted(body)), [1])
    assert len(set(mailer.keys)) == 4


def test_a_call_in_doubt_that_nobody_can_tell_is_parked_and_not_made(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value)

    crash_in_call(world, tools, body, ["a"], "a")
    report = run(world.runner(Scripted(body)), ["a"], world.out)
    assert tools.made == ["a"]
    (parked,) = report.parked
    assert "job 'job', key None, message '0', action 'act': the call tests.helpers:Tools.call was" in parked.reason
    assert "reconcile=" in parked.reason
    assert (parked.key, parked.message_id) == (None, "0")
    assert world.outputs() == []


@pytest.mark.parametrize("result", [None, False, 0, "", [], "sent", {"$": "x"}])
def test_what_happened_is_the_result_and_is_not_asked_again(world: World, mailer: Mailer, result: Any) -> None:
    got: list[Any] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        got.append(await mailer.body(value, ctx))
        await ctx.durable_execute(mailer.tools.call, "later", effect="idempotent")

    crash_in_call(world, mailer.tools, body, ["a"], "a")
    mailer.answer = Happened(result)
    crash_in_call(world, mailer.tools, body, ["a"], "later")
    mailer.answer = DidNotHappen()
    run(world.runner(Scripted(body)), ["a"], world.out)
    assert mailer.tools.made == ["a", "later", "later"]
    assert got == [result, result]
    assert [type(found) for found in got] == [type(result)] * 2
    assert len(mailer.asked) == 1


def test_a_reconcile_knows_the_calls_arguments_name_attempt_and_idempotency_key(world: World, mailer: Mailer) -> None:
    crash_in_call(world, mailer.tools, mailer.body, ["a"], "a")
    mailer.answer = Happened()
    run(world.runner(Scripted(mailer.body)), ["a"], world.out)
    assert mailer.asked == [("a", "tests.test_effects:Mailer.send", 1, mailer.keys[0])]


def test_what_did_not_happen_is_done_now(world: World, mailer: Mailer) -> None:
    crash_in_call(world, mailer.tools, mailer.body, ["a"], "a")
    mailer.answer = DidNotHappen()
    run(world.runner(Scripted(mailer.body)), ["a"], world.out)
    assert mailer.tools.made == ["a", "a"]
    assert len(set(mailer.keys)) == 1
    assert world.outputs() == ["done a"]


def test_a_crash_after_did_not_happen_asks_again(world: World, mailer: Mailer) -> None:
    crash_in_call(world, mailer.tools, mailer.body, ["a"], "a")
    mailer.answer = DidNotHappen()
    mailer.tools.hanging.clear()
    crash_in_call(world, mailer.tools, mailer.body, ["a"], "a")
    mailer.answer = Happened("found")
    run(world.runner(Scripted(mailer.body)), ["a"], world.out)
    assert mailer.tools.made == ["a", "a"]
    assert [attempt for _, _, attempt, _ in mailer.asked] == [1, 2]
    assert world.outputs() == ["found"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Unknown(), "its reconcile cannot tell"),
        (Unknown("the mail server keeps no log"), "cannot tell: the mail server keeps no log"),
        (OSError("no route \ud800"), "it raised OSError: no route"),
        (SystemExit(3), "it raised SystemExit: 3"),
        (GeneratorExit("stray"), "it raised GeneratorExit: stray"),
        (asyncio.CancelledError("stray"), "it raised CancelledError: stray"),
        (None, "returned None, which is not Happened"),
        (True, "returned True, which is not Happened"),
        ("sent", "returned 'sent', which is not Happened"),
        (Happened, "which is not Happened"),
        (Happened(object()), "what its reconcile returned cannot be recorded"),
    ],
)
def test_what_is_no_answer_parks_the_message(world: World, mailer: Mailer, answer: Any, reason: str) -> None:
    crash_in_call(world, mailer.tools, mailer.body, ["a"], "a")
    mailer.answer = answer
    (parked,) = run(world.runner(Scripted(mailer.body)), ["a"], world.out).parked
    assert reason in parked.reason
    assert mailer.tools.made == ["a"]
    mailer.answer = Happened("asked again")
    report = run(world.runner(Scripted(mailer.body)), ["a"], world.out)
    assert report.parked == []
    assert world.outputs() == ["asked again"]
    assert mailer.tools.made == ["a"]


def test_a_reconcile_may_be_sync_or_return_a_coroutine(world: World, mailer: Mailer) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        reconcile = mailer.find_in_thread if value == "a" else mailer.find_by_coroutine
        return await ctx.durable_execute(mailer.send, value, reconcile=reconcile)

    source = ["a", "b"]
    mailer.tools.hang_on = {"a", "b"}
    crashed(
        world.runner(Scripted(body)),
        source,
        world.out,
        key=lambda value: value,
        when=lambda: len(mailer.tools.hanging) == 2,
    )
    mailer.answer = Happened("found")
    run(world.runner(Scripted(body)), source, world.out, key=lambda value: value)
    assert world.outputs() == ["found", "found"]


def test_a_crash_while_reconcile_is_asked_asks_again(world: World, mailer: Mailer) -> None:
    asked: list[int] = []

    async def find(what: Any) -> Any:
        asked.append(1)
        return await mailer.tools.call("look") and Happened("found")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(mailer.send, value, reconcile=find)

    crash_in_call(world, mailer.tools, body, ["a"], "a")
    crash_in_call(world, mailer.tools, body, ["a"], "look")
    run(world.runner(Scripted(body)), ["a"], world.out)
    assert asked == [1, 1]
    assert world.outputs() == ["found"]


def test_the_call_that_was_made_decides_its_effect_when_the_code_became_bolder(world: World, tools: Tools) -> None:
    """What was requested with effect once is not repeated because the code now says read."""
    effects: list[Any] = ["once"]

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value, effect=effects[0])

    crash_in_call(world, tools, body, ["a"], "a")
    effects[0] = "read"
    assert len(run(world.runner(Scripted(body)), ["a"], world.out).parked) == 1
    assert tools.made == ["a"]


def test_code_that_became_more_careful_is_heeded(world: World, tools: Tools) -> None:
    effects: list[Any] = ["idempotent"]

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value, effect=effects[0])

    crash_in_call(world, tools, body, ["a"], "a")
    effects[0] = "once"
    assert len(run(world.runner(Scripted(body)), ["a"], world.out).parked) == 1
    assert tools.made == ["a"]


@pytest.mark.parametrize("effect", ["Once", "", None, "write", "READ"])
def test_an_unknown_effect_is_refused(world: World, tools: Tools, effect: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value, effect=effect)

    with pytest.raises(ActionError, match="is not one of 'read', 'idempotent', 'once'"):
        run(world.runner(Scripted(body)), ["a"])
    assert tools.made == []


def test_a_reconcile_that_would_never_be_asked_is_refused(world: World, mailer: Mailer) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(mailer.send, value, effect="read", reconcile=mailer.find)

    with pytest.raises(ActionError, match=r"reconcile= is only asked about a call with effect='once'") as caught:
        run(world.runner(Scripted(body)), ["a"])
    assert isinstance(caught.value.__cause__, DefinitionError)


def test_outside_a_durable_call_there_is_no_current_call(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        with pytest.raises(LookupError, match="only known inside a function that runs in"):
            current_call()

    run(world.runner(Scripted(body)), [1])
    with pytest.raises(LookupError):
        current_call()


def test_a_call_in_a_thread_knows_itself(world: World) -> None:
    seen: list[tuple[str, str, int]] = []

    def callee() -> None:
        call = current_call()
        seen.append((call.job, call.name, call.attempt))

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(callee, name="callee")

    run(world.runner(Scripted(body)), [1])
    assert seen == [("job", "callee", 1)]


# --- parked messages ------------------------------------------------------------------------------------------------

MAIL = [
    {"k": "a", "do": "a1"},
    {"k": "b", "do": "b1"},
    {"k": "a", "do": "a2"},
    {"k": "b", "do": "b2"},
    {"k": "a", "do": "a3"},
]


def with_a1_in_doubt(world: World, mailer: Mailer) -> None:
    mailer.tools.hang_on.add("a1")
    crashed(
        world.runner(Scripted(mailer.body)),
        MAIL,
        world.out,
        key="k",
        when=lambda: "a1" in mailer.tools.hanging and len(world.outputs()) == 2,
    )
    mailer.tools.hang_on.clear()
    mailer.answer = Unknown()


def again(world: World, mailer: Mailer, source: Any = MAIL, **options: Any) -> tuple[LocalRunner, RunReport]:
    runner = world.runner(Scripted(mailer.body), **options)
    return runner, run(runner, source, world.out, key="k")


def test_other_keys_go_on_and_the_keys_later_messages_wait(world: World, mailer: Mailer) -> None:
    with_a1_in_doubt(world, mailer)
    _, report = again(world, mailer)
    assert [(parked.key, parked.message_id) for parked in report.parked] == [("a", "0")]
    assert report.waiting == 2
    assert world.outputs() == ["done b1", "done b2"]
    assert mailer.tools.count("a2") == mailer.tools.count("a3") == 0


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_what_waits_is_not_lost_and_goes_on_in_order_when_the_doubt_is_settled(
    world: World, mailer: Mailer, runs: int
) -> None:
    with_a1_in_doubt(world, mailer)
    for _ in range(runs):
        again(world, mailer)
    assert len(mailer.asked) == runs
    mailer.answer = Happened("found a1")
    _, report = again(world, mailer)
    assert (report.parked, report.waiting) == ([], 0)
    assert world.outputs() == ["done b1", "done b2", "found a1", "done a2", "done a3"]
    assert sorted(mailer.tools.made) == ["a1", "a2", "a3", "b1", "b2"]
    assert asyncio.run(world.recorded_async()) == {}


def test_a_message_that_comes_later_for_a_parked_key_waits_too(world: World, mailer: Mailer) -> None:
    with_a1_in_doubt(world, mailer)
    again(world, mailer)
    more = [*MAIL, {"k": "a", "do": "a4"}, {"k": "c", "do": "c1"}]
    _, report = again(world, mailer, more)
    assert report.waiting == 3
    assert world.outputs() == ["done b1", "done b2", "done c1"]
    mailer.answer = DidNotHappen()
    again(world, mailer, more)
    assert world.outputs()[3:] == ["done a1", "done a2", "done a3", "done a4"]


def test_a_parked_message_does_not_block_checkpoints_and_its_record_stays(world: World, mailer: Mailer) -> None:
    with_a1_in_doubt(world, mailer)
    _, report = again(world, mailer, checkpoint_interval=0.01)
    assert report.checkpoints >= 1
    recorded = asyncio.run(world.recorded_async())
    assert list(recorded) == [b'"a"']
    (state,) = recorded[b'"a"']
    assert state.message == "0"
    assert state.parked is not None


def test_a_doubt_that_arises_beside_other_calls_lets_them_end_first(world: World, mailer: Mailer) -> None:
    """No call of the same action is cut off, and so in doubt too, because one is parked."""
    tools = mailer.tools

    async def body(value: Any, ctx: RunnerContext) -> Any:
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(ctx.durable_execute(tools.call, "slow", effect="idempotent"))
            group.create_task(ctx.durable_execute(mailer.send, "a", reconcile=mailer.find))
            group.create_task(ctx.durable_execute(mailer.send, "b", reconcile=mailer.find))
        return slow.result()

    tools.hang_on = {"slow", "a", "b"}
    crashed(world.runner(Scripted(body)), [1], world.out, when=lambda: len(tools.hanging) == 3)
    tools.hang_on.clear()
    tools.delays["slow"] = 0.05
    mailer.answer = Unknown()
    assert len(run(world.runner(Scripted(body)), [1], world.out).parked) == 1
    mailer.answer = Happened()
    run(world.runner(Scripted(body)), [1], world.out)
    assert tools.count("slow") == 2
    assert world.outputs() == ["done slow"]


async def inner(ctx: RunnerContext) -> int:
    return await ctx.durable_execute(answer, effect="read")


async def answer() -> int:
    return 42


class Leaves(Agent):
    """Does on its one message what *how* says, and leaves with *exit*."""

    def __init__(self, how: str, exit: BaseException) -> None:
        self.how = how
        self.exit = exit

    async def leave(self) -> None:
        raise self.exit

    def leave_from_a_thread(self) -> None:
        raise self.exit

    @action(InputEvent)
    async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
        async def nested() -> int:
            return await inner(ctx)

        if self.how == "nested":
            await ctx.durable_execute(nested, effect="read", name="nested")
        elif self.how == "action":
            raise self.exit
        elif self.how == "task":
            await asyncio.gather(
                ctx.durable_execute(self.leave, effect="read"), ctx.durable_execute(answer, effect="read")
            )
        else:
            leave = self.leave if self.how == "async" else self.leave_from_a_thread
            await ctx.durable_execute(leave, effect="read")


@pytest.mark.parametrize("how", ["action", "async", "thread", "task"])
@pytest.mark.parametrize("exit", [SystemExit(0), SystemExit("bye"), GeneratorExit("bye")])
def test_an_exit_of_the_users_code_fails_the_action_and_does_not_end_the_process(how: str, exit: BaseException) -> None:
    runner = LocalRunner(Leaves(how, exit), job="job", store="memory://")
    for _ in range(2):
        with pytest.raises(ActionError, match=type(exit).__name__):
            runner.run([1])


def test_a_durable_call_inside_the_function_of_another_one_is_refused() -> None:
    runner = LocalRunner(Leaves("nested", SystemExit()), job="job", store="memory://")
    with pytest.raises(ActionError, match="inside the function of another one"):
        runner.run([1])
