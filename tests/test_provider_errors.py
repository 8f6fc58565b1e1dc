"""Errors of providers' clients, whose constructors cannot be called with what an exception keeps of itself.

They replay into the same ``except`` branch, with the same fields and the same words. The client that is used by most is
tried itself, against a server that is really too busy.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dalsegno import ActionError, RunnerContext
from tests.helpers import Scripted, Tools, World, crashed, run

EFFECTS: list[Any] = ["read", "idempotent", "once"]


class Response:
    """What cannot be recorded, as a response with an open connection cannot."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.request = object()
        self.lock = threading.Lock()


class APIError(Exception):
    def __init__(self, message: str, request: Any, *, body: object | None) -> None:
        super().__init__(message)
        self.request = request
        self.message = message
        self.body = body
        self.code = body.get("code") if isinstance(body, dict) else None


class APIStatusError(APIError):
    def __init__(self, message: str, *, response: Response, body: object | None) -> None:
        super().__init__(message, response.request, body=body)
        self.response = response
        self.status_code = response.status_code


class RateLimitError(APIStatusError):
    pass


class SeveralNeeded(Exception):
    def __init__(self, model: str, limit: int, *, unit: str) -> None:
        super().__init__(f"{model} takes {limit} {unit}")
        self.model, self.limit, self.unit = model, limit, unit


class WithoutArgs(Exception):
    def __init__(self, *, reason: str) -> None:
        self.reason = reason

    def __str__(self) -> str:
        return f"because {self.reason}"


async def rate_limited() -> str:
    raise RateLimitError("slow down", response=Response(429), body={"code": "busy", "wait": 3})


async def several_needed() -> str:
    raise SeveralNeeded("small", 8192, unit="tokens")


async def without_args() -> str:
    raise WithoutArgs(reason="of the weather")


FIELDS = ["message", "status_code", "code", "body", "model", "limit", "unit", "reason", "request_id", "param", "type"]


def as_seen(error: BaseException) -> tuple[Any, ...]:
    """The branch, the words and the fields."""
    return type(error), str(error), error.args, {name: getattr(error, name, "unset") for name in FIELDS}


RAISED: list[tuple[Callable[[], Awaitable[str]], type[Exception], str, dict[str, Any]]] = [
    (rate_limited, APIStatusError, "slow down", {"status_code": 429, "code": "busy", "message": "slow down"}),
    (several_needed, SeveralNeeded, "small takes 8192 tokens", {"model": "small", "limit": 8192, "unit": "tokens"}),
    (without_args, WithoutArgs, "because of the weather", {"reason": "of the weather"}),
]


@pytest.mark.parametrize("effect", EFFECTS)
def test_an_error_that_cannot_be_made_anew_replays_in_the_same_branch_with_its_fields(
    world: World, tools: Tools, effect: Any
) -> None:
    seen: list[list[Any]] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        seen.append([])
        for function, branch, _, _ in RAISED:
            try:
                await ctx.durable_execute(counted(tools, function), name=function.__name__, effect=effect)
            except branch as error:
                seen[-1].append(as_seen(error))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    live, replayed = caught_live_and_replayed(world, tools, body, seen)
    assert live == replayed
    assert [name.__name__ for name, *_ in live] == ["RateLimitError", "SeveralNeeded", "WithoutArgs"]
    for (_, words, _, fields), (_, _, expected_words, expected) in zip(live, RAISED, strict=True):
        assert words == expected_words
        assert fields == {
            **dict.fromkeys(FIELDS, "unset"),
            **({"body": {"code": "busy", "wait": 3}} if "code" in expected else {}),
            **expected,
        }
    assert [tools.count(function.__name__) for function, *_ in RAISED] == [1, 1, 1]


def counted(tools: Tools, function: Callable[[], Awaitable[str]]) -> Callable[[], Awaitable[str]]:
    async def call() -> str:
        tools.made.append(function.__name__)
        return await function()

    return call


def caught_live_and_replayed(world: World, tools: Tools, body: Any, seen: list[list[Any]]) -> tuple[Any, Any]:
    tools.hang_on.add("end")
    crashed(world.runner(Scripted(body)), [1], when=lambda: "end" in tools.hanging)
    tools.hang_on.clear()
    run(world.runner(Scripted(body)), [1])
    live, replayed = seen
    return live, replayed


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("number", range(len(RAISED)))
def test_such_an_error_that_leaves_the_action_is_its_cause_and_is_tried_again(
    world: World, tools: Tools, effect: Any, number: int
) -> None:
    function, branch, words, fields = RAISED[number]
    down = [True, True]

    async def flaky() -> str:
        tools.made.append("asked")
        return await function() if down.pop() else "up again"

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(flaky, name="flaky", effect=effect)

    for _ in range(2):
        with pytest.raises(ActionError, match=words) as caught:
            run(world.runner(Scripted(body)), [1], world.out)
        cause = caught.value.__cause__
        assert isinstance(cause, branch)
        assert {name: getattr(cause, name) for name in fields} == fields
    down.append(False)
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == ["up again"]
    assert tools.made == ["asked"] * 3


class _TooBusy(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        body = b'{"error": {"message": "slow down", "type": "requests", "param": null, "code": "rate_limit_exceeded"}}'
        self.send_response(429)
        for name, value in {
            "content-type": "application/json",
            "x-request-id": "r-7",
            "content-length": len(body),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def too_busy() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _TooBusy)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_rate_limit_of_the_openai_client_replays_as_it_was_caught(
    world: World, tools: Tools, too_busy: Any, effect: Any
) -> None:
    openai = importlib.import_module("openai")  # slow
    seen: list[list[Any]] = []

    async def ask(prompt: str) -> str:
        address = f"http://127.0.0.1:{too_busy.server_port}/v1"
        async with openai.AsyncOpenAI(api_key="none", base_url=address, max_retries=0) as client:
            messages = [{"role": "user", "content": prompt}]
            answer = await client.chat.completions.create(model="any", messages=messages)
        return str(answer.choices[0].message.content)

    async def body(value: Any, ctx: RunnerContext) -> None:
        seen.append([])
        try:
            await ctx.durable_execute(ask, "hello", name="ask", effect=effect)
        except openai.APIConnectionError:
            pytest.fail("another branch")
        except openai.RateLimitError as error:
            seen[-1].append(as_seen(error))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    live, replayed = caught_live_and_replayed(world, tools, body, seen)
    assert live == replayed
    ((branch, words, _, fields),) = live
    assert branch is openai.RateLimitError
    assert "slow down" in words
    assert (fields["status_code"], fields["code"], fields["request_id"]) == (429, "rate_limit_exceeded", "r-7")
    assert too_busy.asked == ["/v1/chat/completions"]
