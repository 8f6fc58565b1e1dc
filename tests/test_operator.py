"""`Operator`: what waits in a job is seen and decided from Python, while the job runs or not."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dalsegno import (
    AlreadyDecidedError,
    CodecError,
    DefinitionError,
    DidNotHappen,
    Happened,
    InspectError,
    LocalRunner,
    Operator,
    PayloadCipher,
    RecordError,
    RunnerContext,
    StoreError,
    Unknown,
    register,
)
from dalsegno.operate.operator import OpenQuestion
from dalsegno.runners import parking
from dalsegno.stores.encrypting import EncryptingStore
from tests.helpers import PATIENCE, Scripted, Tools, World, crashed, run, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_LISTEN_SECONDS", 0.01)


@register
@dataclass(frozen=True)
class Approval:
    by: str
    cents: int


class Reversed(PayloadCipher):
    def encrypt(self, plain: bytes, bound_to: bytes) -> bytes:
        return plain[::-1]

    def decrypt(self, sealed: bytes, bound_to: bytes) -> bytes:
        return sealed[::-1]


def operator(world: World, **options: Any) -> Operator:
    return Operator(job="job", store=world.store(), **options)


def waits(*names: str) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return [await ctx.wait_for(name) for name in names]

    return Scripted(body)


def calls(tools: Tools) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value)

    return Scripted(body)


def itself(value: Any) -> Any:
    return value


def in_doubt(world: World, tools: Tools) -> str:
    """A job whose message of key "a" is in doubt; gives the id of the call."""
    tools.hang_on = {"a"}
    crashed(world.runner(calls(tools)), ["a"], world.out, key=itself, when=lambda: bool(tools.hanging))
    tools.hang_on = set()
    run(world.runner(calls(tools)), ["a"], world.out, key=itself)
    (parked,) = operator(world).parked()
    (question,) = parked.questions
    assert question.call is not None
    return question.call


def failed(world: World, tools: Tools, *values: Any) -> None:
    tools.fail_on = {value: ValueError("card refused") for value in values}
    run(world.runner(calls(tools), on_failure="park"), values, world.out, key=itself)


# --- signal ---------------------------------------------------------------------------------------------------------


def test_what_waits_is_listed_and_answered_and_the_next_run_goes_on(world: World) -> None:
    run(world.runner(waits("approve")), ["a"], world.out, key=itself)
    (parked,) = operator(world).parked()
    assert (parked.key, parked.message_id, parked.why) == ("a", "0", "waiting")
    assert parked.reason is not None
    assert "waits for the signal 'approve'" in parked.reason
    (question,) = parked.questions
    assert question == OpenQuestion("signal", "approve", question.call, answered=False)
    operator(world).signal("a", "approve", {"by": "Ann"})
    ((question,),) = (each.questions for each in operator(world).parked())
    assert question.answered
    assert run(world.runner(waits("approve")), ["a"], world.out, key=itself).parked == []
    assert world.outputs() == [[{"by": "Ann"}]]
    assert operator(world).parked() == []


@pytest.mark.parametrize("value", [Approval("Ann", 250), ("x", {1: 2.5}, b"\0"), None, False])
def test_the_action_gets_the_very_value(world: World, value: Any) -> None:
    got: list[Any] = []

    async def body(_: Any, ctx: RunnerContext) -> None:
        got.append(await ctx.wait_for("it"))

    run(world.runner(Scripted(body)), [1])
    operator(world).signal(None, "it", value)
    run(world.runner(Scripted(body)), [1])
    assert got == [value]
    assert type(got[0]) is type(value)


@pytest.mark.parametrize("key", [1, "1", True, 1.0, ("a", None), "", "*", "\0", b"x", Approval("Ann", 1)])
def test_a_key_is_the_value_itself_and_no_other_that_looks_like_it(world: World, key: Any) -> None:
    keys = [1, "1", True, 1.0, ("a", None), "", "*", "\0", b"x", Approval("Ann", 1)]
    run(world.runner(waits("it")), range(len(keys)), world.out, key=lambda n: keys[n])
    operator(world).signal(key, "it", "yes")
    answered = [each.key for each in operator(world).parked() if each.questions[0].answered]
    assert [(type(found), found) for found in answered] == [(type(key), key)]


@pytest.mark.parametrize("again", ["yes", "no"])
def test_a_second_signal_is_refused_before_and_after_the_first_is_taken_up(world: World, again: str) -> None:
    run(world.runner(waits("approve", "ship")), ["a"], world.out, key=itself)
    operator(world).signal("a", "approve", "yes")
    with pytest.raises(AlreadyDecidedError, match=r"key \"a\", message '0', call .* already decided") as caught:
        operator(world).signal("a", "approve", again)
    assert repr(again) not in str(caught.value)
    run(world.runner(waits("approve", "ship")), ["a"], world.out, key=itself)
    with pytest.raises(AlreadyDecidedError, match="already decided"):
        operator(world).signal("a", "approve", again)
    with pytest.raises(InspectError, match="waited for are ship") as nobody:
        operator(world).signal("a", "refund", again)
    assert not isinstance(nobody.value, AlreadyDecidedError)
    operator(world).signal("a", "ship", again)
    run(world.runner(waits("approve", "ship")), ["a"], world.out, key=itself)
    assert world.outputs() == [["yes", again]]


def test_a_second_answer_is_refused_as_such_after_the_first_was_taken_up(world: World) -> None:
    """As long as the message is on record."""
    agent = waits("approve", "ship", "ship")
    run(world.runner(agent), ["a"], world.out, key=itself)
    for name, value, then in (("approve", 1, ("approve", 2)), ("ship", 3, ("approve", 2))):
        operator(world).signal("a", name, value)
        run(world.runner(agent), ["a"], world.out, key=itself)
        with pytest.raises(AlreadyDecidedError, match=f"{then[0]}.* already decided"):
            operator(world).signal("a", *then)
    operator(world).signal("a", "ship", 4)  # the second of that name
    run(world.runner(agent), ["a"], world.out, key=itself)
    assert world.outputs() == [[1, 3, 4]]
    with pytest.raises(InspectError, match="waits for a signal") as done:
        operator(world).signal("a", "approve", 2)
    assert not isinstance(done.value, AlreadyDecidedError)


def test_of_those_who_answer_at_the_same_time_one_is_heard(world: World) -> None:
    run(world.runner(waits("approve")), ["a"], world.out, key=itself)
    start = threading.Barrier(8)
    heard: list[int] = []
    refused: list[Exception] = []

    def answer(who: int) -> None:
        start.wait(PATIENCE)
        try:
            operator(world).signal("a", "approve", who)
            heard.append(who)
        except AlreadyDecidedError as error:
            refused.append(error)

    threads = [threading.Thread(target=answer, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert (len(heard), len(refused)) == (1, 7)
    run(world.runner(waits("approve")), ["a"], world.out, key=itself)
    assert world.outputs() == [heard]


def test_what_nobody_waits_for_is_refused_with_what_is_waited_for(world: World) -> None:
    run(world.runner(waits("approve")), ["a"], world.out, key=itself)
    for key, name in (("a", "reject"), ("b", "approve"), (b"a", "approve")):
        with pytest.raises(InspectError, match=f"waits for a signal '{name}'; waited for are approve"):
            operator(world).signal(key, name, 1)
    with pytest.raises(CodecError, match="the value of the signal"):
        operator(world).signal("a", "approve", object())
    ((question,),) = (each.questions for each in operator(world).parked())
    assert not question.answered


# --- resolve --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [Happened(Approval("bank", 7)), DidNotHappen()])
def test_a_call_in_doubt_is_resolved_as_a_reconcile_would(world: World, tools: Tools, answer: Any) -> None:
    call = in_doubt(world, tools)
    got: list[Any] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        got.append(await ctx.durable_execute(tools.call, value))

    operator(world).resolve(call[:12], answer)
    operator(world).resolve(call, answer)  # the same once more
    other = DidNotHappen() if answer == Happened(Approval("bank", 7)) else Happened(None)
    with pytest.raises(AlreadyDecidedError, match=r"helpers:Tools\.call"):
        operator(world).resolve(call, other)
    run(world.runner(Scripted(body)), ["a"], key=itself)
    assert got == [answer.result if isinstance(answer, Happened) else "done a"]
    assert tools.count("a") == (1 if isinstance(answer, Happened) else 2)
    with pytest.raises(InspectError, match="no call"):
        operator(world).resolve(call, answer)


@pytest.mark.parametrize("answer", [Unknown(), Happened, True, None, "yes"])
def test_what_is_no_answer_decides_nothing(world: World, tools: Tools, answer: Any) -> None:
    call = in_doubt(world, tools)
    with pytest.raises(DefinitionError, match=r"takes Happened\(result\) or DidNotHappen\(\)"):
        operator(world).resolve(call, answer)
    with pytest.raises(CodecError, match="result"):
        operator(world).resolve(call, Happened(object()))
    assert not operator(world).parked()[0].questions[0].answered


# --- retry ----------------------------------------------------------------------------------------------------------


def test_a_failed_message_runs_again_once_per_failure(world: World, tools: Tools) -> None:
    failed(world, tools, "a", "b")
    assert [(each.key, each.why, each.questions[0].kind) for each in operator(world).parked()] == [
        ("a", "failed", "retry"),
        ("b", "failed", "retry"),
    ]
    operator(world).retry("a")
    operator(world).retry("a", "0")  # the same once more
    run(world.runner(calls(tools), on_failure="park"), ["a", "b"], world.out, key=itself)
    assert (tools.count("a"), tools.count("b")) == (2, 1)
    tools.fail_on = {}
    operator(world).retry("a")
    run(world.runner(calls(tools), on_failure="park"), ["a", "b"], world.out, key=itself)
    assert world.outputs() == ["done a"]
    with pytest.raises(InspectError, match=r'no message of key "a" is set aside as failed.*failed are 1'):
        operator(world).retry("a")
    with pytest.raises(InspectError, match="has no message '0' of key \"b\" on record"):
        operator(world).retry("b", "0")


# --- where and when -------------------------------------------------------------------------------------------------


def test_a_running_job_is_answered_from_its_own_process(world: World, tools: Tools) -> None:
    """The store of the runner itself, also one in memory, from the loop that the job runs in."""
    tools.fail_on["b"] = ValueError("not yet")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value == "a":
            return await ctx.wait_for("approve")
        return await ctx.durable_execute(tools.call, value, effect="read")

    async def main() -> None:
        runner = world.runner(Scripted(body), on_failure="park")
        by = runner.operator()
        async with asyncio.timeout(PATIENCE):
            job = asyncio.ensure_future(runner.run_async(["a", "b"], world.out, key=itself, wait=True))
            await until(lambda: runner._pipeline is not None and len(runner._pipeline.parked()) == 2)
            assert {each.key for each in await by.parked_async()} == {"a", "b"}
            tools.fail_on.clear()
            await by.retry_async("b")
            await until(world.outputs)
            await by.signal_async("a", "approve", "yes")
            assert (await job).parked == []

    asyncio.run(main())
    assert world.outputs() == ["done b", "yes"]


def test_a_job_in_memory_is_answered_through_its_runner() -> None:
    runner = LocalRunner(waits("approve"), job="job", store="memory://")
    outputs: list[Any] = []
    run(runner, ["a"], outputs.append, key=itself)
    runner.operator().signal("a", "approve", 1)
    run(runner, ["a"], outputs.append, key=itself)
    assert outputs == [[1]]
    with pytest.raises(DefinitionError, match=r"memory of the process that runs the job.*LocalRunner\.operator\(\)"):
        Operator(job="job", store="memory://")


def test_an_encrypted_job_is_answered_with_its_cipher_only(world: World, tools: Tools) -> None:
    run(world.runner(waits("approve"), cipher=Reversed()), ["a"], world.out, key=itself)
    for decide in (Operator.parked, lambda by: by.signal("a", "approve", 1)):
        with pytest.raises(RecordError, match="is encrypted"):
            decide(operator(world))
    assert [each.key for each in operator(world, cipher=Reversed()).parked()] == ["a"]
    world.runner(waits("approve"), cipher=Reversed()).operator().signal("a", "approve", Approval("Ann", 3))
    with world.store().inspect() as inspector:
        (decision,) = inspector.decisions("job")
    assert b"Ann" not in decision.body
    got: list[Any] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        got.append(await ctx.wait_for("approve"))

    run(world.runner(Scripted(body), cipher=Reversed()), ["a"], key=itself)
    assert got == [Approval("Ann", 3)]
    with pytest.raises(DefinitionError, match="leave cipher= out"):
        Operator(job="job", store=EncryptingStore(world.store(), Reversed()), cipher=Reversed())


def test_a_job_that_never_ran_has_nothing_to_decide(world: World, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="job"):
        operator(world).parked()
    with pytest.raises(StoreError, match=r"there is no file '\.dalsegno/shop\.db'.*store="):
        Operator(job="shop").signal("a", "approve", 1)
    assert list(tmp_path.iterdir()) == []
    run(LocalRunner(waits("approve"), job="shop"), ["a"], key=itself)
    Operator(job="shop").signal("a", "approve", 1)
    with pytest.raises(StoreError, match="has no job 'other'; its jobs are 'shop'"):
        Operator(job="other", store="sqlite:///.dalsegno/shop.db").parked()
