"""What tools and frameworks of agents say by other means than a result: error flags, and exceptions that steer.

With the real libraries: a server of the Model Context Protocol in a process of its own, and pydantic-ai.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from dalsegno import RetryPolicy, RunnerContext
from tests.helpers import Scripted, Tools, World, crashed, run

SERVER = Path(__file__).parent / "children" / "mcp_tools.py"


class ToolFailure(Exception):
    """The tool answered with its error flag set."""


def live_and_replayed(world: World, tools: Tools, body: Any) -> None:
    """Run *body* up to its call ``end``, crash there, and run it again."""
    tools.hang_on.add("end")
    crashed(world.runner(Scripted(body)), [1], when=lambda: "end" in tools.hanging)
    tools.hang_on.clear()
    run(world.runner(Scripted(body)), [1])


@pytest.mark.parametrize("effect", ["read", "once"])
def test_an_error_flag_inside_an_answer_is_a_failure_with_its_text_live_and_replayed(
    world: World, tools: Tools, tmp_path: Path, effect: Any
) -> None:
    mcp = importlib.import_module("mcp")
    executions = tmp_path / "executions"
    seen: list[tuple[type[Exception], str]] = []

    async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
        server = mcp.StdioServerParameters(command=sys.executable, args=[str(SERVER), str(executions)])
        async with mcp.Client(server) as client:
            answer = await client.call_tool(name, arguments)
        text = "".join(part.text for part in answer.content)
        if answer.is_error:
            raise ToolFailure(text)
        return text

    async def body(value: Any, ctx: RunnerContext) -> None:
        try:
            await ctx.durable_execute(call_tool, "refund", {"order": "A7"}, effect=effect, name="call_tool")
        except ToolFailure as failure:
            seen.append((type(failure), str(failure)))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    live_and_replayed(world, tools, body)
    live, replayed = seen
    assert live == replayed
    assert live[0] is ToolFailure
    assert "order A7 is too old" in live[1]
    assert executions.read_text() == "A7\n"


def signals() -> list[tuple[Exception, dict[str, Any]]]:
    steering = importlib.import_module("pydantic_ai.exceptions")
    return [
        (steering.ModelRetry("give the order's number"), {"message": "give the order's number"}),
        (steering.ApprovalRequired({"amount": 40}), {"metadata": {"amount": 40}}),
        (steering.CallDeferred({"job": "j-1"}), {"metadata": {"job": "j-1"}}),
    ]


@pytest.mark.parametrize("effect", ["read", "once"])
@pytest.mark.parametrize("number", range(3))
def test_an_exception_that_steers_a_framework_is_not_retried_and_replays_as_itself_with_its_tool_run_once(
    world: World, tools: Tools, number: int, effect: Any
) -> None:
    signal, fields = signals()[number]
    policy = RetryPolicy(attempts=3, backoff=0, retry_on=lambda error: not isinstance(error, type(signal)))
    seen: list[Any] = []

    async def tool() -> None:
        tools.made.append("tool")
        raise signal

    async def body(value: Any, ctx: RunnerContext) -> None:
        try:
            await ctx.durable_execute(tool, name="tool", effect=effect, retry=policy)
        except type(signal) as caught:
            seen.append((type(caught), str(caught), {name: getattr(caught, name) for name in fields}))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    live_and_replayed(world, tools, body)
    live, replayed = seen
    assert live == replayed == (type(signal), str(signal), fields)
    assert tools.count("tool") == 1
