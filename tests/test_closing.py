"""The end of a run: everything is closed, whatever fails, and the first failure is the one that is raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dalsegno import ActionError, RunnerContext
from dalsegno.runners.sinks import CallableSink
from dalsegno.runners.sources import IterableSource, SourceItem
from tests.helpers import Scripted, SpyStore, Tools, World, for_ever, run, until

PARTS = ["source", "sink", "store"]


class Closings:
    """A source, a sink and a store, of which those in *failing* let go of everything and then raise."""

    def __init__(self, world: World, *failing: str) -> None:
        self.closed: list[str] = []
        closed = self.closed

        def close(part: str) -> None:
            closed.append(part)
            if part in failing:
                raise OSError(f"the {part} did not close")

        class Source(IterableSource):
            async def close(self) -> None:
                await super().close()
                close("source")

        class Sink(CallableSink):
            def close(self) -> None:
                super().close()
                close("sink")

        class Store(SpyStore):
            async def close(self) -> None:
                await super().close()
                close("store")

        self.outputs: list[Any] = []
        self.source = Source([1])
        self.sink = Sink(self.outputs.append)
        self.store = Store(world.store().inner)


def calling(tools: Tools) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, "a", effect="idempotent")

    return Scripted(body)


@pytest.mark.parametrize("failing", [*([part] for part in PARTS), PARTS], ids="+".join)
def test_all_is_closed_although_closing_fails_and_the_job_is_free(
    world: World, tools: Tools, failing: list[str]
) -> None:
    parts = Closings(world, *failing)
    with pytest.raises(OSError, match="did not close") as caught:
        run(world.runner(calling(tools), store=parts.store), parts.source, parts.sink)
    assert sorted(set(parts.closed)) == sorted(PARTS)
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert [part for part in PARTS if f"the {part} did not close" in "\n".join(told)] == sorted(
        failing, key=PARTS.index
    )
    run(world.runner(calling(tools)), [1])
    assert tools.made == ["a"]


@pytest.mark.parametrize("failing", [*([part] for part in PARTS), PARTS], ids="+".join)
def test_the_failure_of_the_run_is_raised_and_not_that_of_closing(
    world: World, tools: Tools, failing: list[str]
) -> None:
    tools.fail_on["a"] = ConnectionError("down")
    parts = Closings(world, *failing)
    with pytest.raises(ActionError, match="down") as caught:
        run(world.runner(calling(tools), store=parts.store), parts.source, parts.sink)
    assert sorted(set(parts.closed)) == sorted(PARTS)
    notes = "\n".join(caught.value.__notes__)
    assert [part for part in PARTS if f"the {part} did not close" in notes] == sorted(failing, key=PARTS.index)
    tools.fail_on.clear()
    run(world.runner(calling(tools)), [1], parts.outputs.append)
    assert parts.outputs == ["done a"]


def test_a_cancelled_run_is_cancelled_although_closing_fails(world: World, tools: Tools) -> None:
    parts = Closings(world, *PARTS)
    tools.hang_on.add("a")

    async def main() -> None:
        runner = world.runner(calling(tools), store=parts.store)
        running = asyncio.ensure_future(runner.run_async(parts.source, parts.sink))
        await until(lambda: tools.hanging)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(main())
    assert sorted(set(parts.closed)) == sorted(PARTS)
    tools.hang_on.clear()
    run(world.runner(calling(tools)), [1], parts.outputs.append)
    assert parts.outputs == ["done a"]


def test_what_could_not_be_opened_does_not_keep_the_rest_open(world: World, tools: Tools) -> None:
    parts = Closings(world)

    class Unreadable(IterableSource):
        async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
            raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        run(world.runner(calling(tools), store=parts.store), Unreadable([1]), parts.sink)
    assert sorted(set(parts.closed)) == ["sink", "store"]
    run(world.runner(calling(tools)), [1], parts.outputs.append)
    assert parts.outputs == ["done a"]


@pytest.mark.parametrize("where", ["call", "calls", "action"])
def test_a_task_that_is_thrown_away_says_nothing_of_what_it_was_in_and_waits_for_nothing(
    world: World, tools: Tools, where: str
) -> None:
    """As when its event loop is: its coroutine is closed, and must not await any more."""
    hanging: list[str] = []

    async def hang(what: str) -> None:
        hanging.append(what)
        await for_ever()

    async def body(value: Any, ctx: RunnerContext) -> None:
        if where == "action":
            await hang("action")
        if where == "call":
            await ctx.durable_execute(hang, "a", name="hang")
        await asyncio.gather(*(ctx.durable_execute(hang, what, name="hang") for what in "ab"))

    store = SpyStore(world.store())

    async def main() -> None:
        runner = world.runner(Scripted(body), store=store)
        running = asyncio.ensure_future(runner.run_async([1], world.out))
        await until(lambda: len(hanging) == (2 if where == "calls" else 1))
        assert runner._pipeline is not None
        (worker,) = runner._pipeline._workers
        coroutine: Any = worker.get_coro()
        coroutine.close()
        worker.cancel()
        await asyncio.wait([worker])
        assert "cannot reuse" in str(worker.exception())
        with pytest.raises(GeneratorExit):
            await running

    asyncio.run(main())
    assert "failed" not in store.kinds()
    assert "done" not in store.kinds()
