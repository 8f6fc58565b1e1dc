"""The SQLite store does what the memory store does, whatever is done with it in whatever order."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from dalsegno.core.records import Record
from dalsegno.errors import DalSegnoError
from dalsegno.stores.base import Covered, Decision, TaskActionStore
from dalsegno.stores.memory import MemoryStore
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.testing.stores import ODD_KEYS, ODD_TEXTS, step

pytestmark = pytest.mark.slow

JOBS = ("a", "b", "a\0", "é")
# A few that come again and again, or anything.
KEYS = st.sampled_from(ODD_KEYS) | st.binary(max_size=6)
TEXTS = st.sampled_from(ODD_TEXTS) | st.text(st.characters(), max_size=4)
FEW_KEYS = st.sampled_from(ODD_KEYS[:4])
FEW_TEXTS = st.sampled_from(ODD_TEXTS[:4])
MESSAGES = st.tuples(FEW_KEYS, FEW_TEXTS) | st.tuples(KEYS, TEXTS)


async def outcome(operation: Awaitable[object]) -> object:
    """What *operation* returns, or what kind of error it raises."""
    try:
        return await operation
    except DalSegnoError as error:
        return type(error)


def decided(store: TaskActionStore, job: str, decision: Decision) -> object:
    with store.inspect() as outside:
        try:
            return outside.decide(job, decision)
        except DalSegnoError as error:
            return type(error)


def seen(store: TaskActionStore) -> object:
    """All that an outsider sees of all jobs, but for what is different in every store."""
    with store.inspect() as outside:
        return [
            (
                (info.name, info.epoch, info.owner, info.pid, info.host, info.pruned_through, info.running),
                (info.messages, list(outside.messages(info.name))),
                (list(outside.records(info.name)), outside.decisions(info.name)),
                [list(outside.records(info.name, *which)) for which in list(outside.messages(info.name))[:3]],
            )
            for info in outside.jobs()
        ]


class SqliteAgainstTheModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loop = asyncio.Runner()
        self.jobs: dict[str, Any] = {}
        self.number = 0
        self.keys: dict[bytes, None] = {}
        self.model, self.store = MemoryStore(self.jobs), SqliteStore(self.folder / "agent.db")

    def run(self, work: Coroutine[Any, Any, object]) -> object:
        return self.loop.run(work)

    def both(self, operation: str, *args: object) -> None:
        expected, found = (self.run(outcome(getattr(store, operation)(*args))) for store in (self.model, self.store))
        assert found == expected

    @initialize(job=st.sampled_from(JOBS))
    def open(self, job: str) -> None:
        self.both("open", job, "owner")

    @rule(job=st.sampled_from(JOBS), anew=st.booleans())
    def reopen(self, job: str, anew: bool) -> None:
        self.compare()
        self.both("close")
        if anew:
            self.model, self.store = MemoryStore(self.jobs), SqliteStore(self.folder / "agent.db")
        self.both("open", job, "owner")

    @rule(messages=st.lists(st.tuples(MESSAGES, FEW_TEXTS), max_size=8), copies=st.sampled_from((1, 1, 1, 70)))
    def put(self, messages: list[tuple[tuple[bytes, str], str]], copies: int) -> None:
        records = []
        for _ in range(copies):
            for (key, message), task in messages:
                self.number += 1
                self.keys[key] = None
                records.append(step(key, message, self.number, task=task, result=self.number))
        self.both("put", records)

    @rule(message=MESSAGES, body=st.binary(max_size=8))
    def put_damaged(self, message: tuple[bytes, str], body: bytes) -> None:
        self.keys[message[0]] = None
        self.both("put", [Record(*message, "task", body)])

    @rule(key=FEW_KEYS | KEYS)
    def claim(self, key: bytes) -> None:
        self.both("claim", key)

    @rule(key=FEW_KEYS | KEYS, task=FEW_TEXTS)
    def get(self, key: bytes, task: str) -> None:
        self.both("get", key, task)

    @rule(checkpoint=st.integers(0, 2**63 - 1), messages=st.lists(MESSAGES, max_size=20))
    def prune(self, checkpoint: int, messages: list[tuple[bytes, str]]) -> None:
        self.both("prune", Covered(checkpoint, messages))

    @rule(job=st.sampled_from(JOBS), message=MESSAGES, what=FEW_TEXTS)
    def decide(self, job: str, message: tuple[bytes, str], what: str) -> None:
        """From outside, of any job, whether it runs or not."""
        self.number += 1
        made = Decision(*message, what, b"%d" % self.number)
        assert decided(self.store, job, made) == decided(self.model, job, made)

    @rule(after=st.integers(0, 20))
    def poll(self, after: int) -> None:
        """Numbers are a store's own business, their order is not."""
        self.compare_polled(0)
        polled = self.run(self.store.decisions(0))
        assert isinstance(polled, list)
        if polled:
            self.compare_polled(min(after, len(polled) - 1))

    def compare_polled(self, place: int) -> None:
        async def after(store: TaskActionStore) -> object:
            everything = await store.decisions(0)
            number = everything[place][0] if everything else 0
            return [made for _, made in everything], [made for _, made in await store.decisions(number)]

        assert self.run(after(self.store)) == self.run(after(self.model))

    @rule()
    def look_in(self) -> None:
        assert seen(self.store) == seen(self.model)

    @rule()
    def compare(self) -> None:
        async def history(store: TaskActionStore) -> object:
            listed = [await outcome(store.list(key)) for key in self.keys]
            return listed, sorted(await store.keys()), store.pruned_through

        assert self.run(history(self.store)) == self.run(history(self.model))

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.close()
        shutil.rmtree(self.folder)


TestSqliteAgainstTheModel = SqliteAgainstTheModel.TestCase
TestSqliteAgainstTheModel.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
