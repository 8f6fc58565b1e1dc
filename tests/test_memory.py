"""Memory: values are copied in and out, changes are recorded faithfully, and a replay gives the very same tree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno import ActionError, Agent, Event, InputEvent, MemoryObject, MemoryPathError, RunnerContext, action
from dalsegno.core import codec
from dalsegno.errors import CodecError
from dalsegno.memory import EMPTY, MemoryTransaction, Node, from_json, parse_path, to_json
from tests.helpers import Scripted, Tools, World, crashed, run


def transaction(root: Node = EMPTY) -> MemoryTransaction:
    return MemoryTransaction(root, codec, "short_term_memory")


def stored(tree: Any) -> Any:
    """What comes back of *tree* from a store."""
    return codec.loads(codec.dumps(tree))


@pytest.fixture
def changes() -> MemoryTransaction:
    return transaction()


@pytest.fixture
def memory(changes: MemoryTransaction) -> MemoryObject:
    return MemoryObject(lambda: changes)


def test_what_was_set_is_there(memory: MemoryObject) -> None:
    memory.set("user.name", "Ada")
    assert memory.get("user.name") == "Ada"
    assert memory.get(("user", "name")) == "Ada"
    assert memory.exists("user.name")
    assert "user" in memory


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, (), 0.0])
def test_an_empty_value_is_a_value(memory: MemoryObject, value: Any) -> None:
    memory.set("a", value)
    found = memory.get("a", "default")
    assert found == value
    assert type(found) is type(value)
    assert "a" in memory


def test_what_is_not_there_is_the_default(memory: MemoryObject) -> None:
    assert memory.get("a") is None
    assert memory.get("a.b.c", 7) == 7
    assert "a.b" not in memory


def test_a_value_is_copied_in_and_out(memory: MemoryObject) -> None:
    given = {"names": ["Ada"]}
    memory.set("user", given)
    given["names"].append("Eve")
    memory.get("user")["names"].append("Mallory")
    assert memory.get("user") == {"names": ["Ada"]}


def test_a_name_may_hold_dots_when_the_path_is_a_tuple(memory: MemoryObject) -> None:
    memory.set(("host.example", "ok"), True)
    assert memory.get(("host.example", "ok")) is True
    assert memory.get("host.example.ok") is None
    assert memory.fields() == ["host.example"]


@pytest.mark.parametrize("name", ["$", "o", "v", " ", "\0", "\ud800", "ключ", "😀", "a" * 5000, "1", "__class__"])
def test_any_other_name_is_legal(memory: MemoryObject, changes: MemoryTransaction, name: str) -> None:
    memory.set((name, name), name)
    memory.create_object((f"{name}x",))
    again = from_json(stored(to_json(changes.root)))
    replayed = transaction().replay(stored(changes.updates))
    for tree in (again, replayed):
        view = MemoryObject(lambda tree=tree: transaction(tree))  # type: ignore[misc]
        assert view.get((name, name)) == name
        assert view.fields() == [name, f"{name}x"]


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", (), ("a", ""), ("a", 1), ("a", None)])
def test_a_path_with_an_empty_name_or_none_is_refused(memory: MemoryObject, path: Any) -> None:
    for use in (memory.get, memory.exists, memory.delete, memory.create_object, lambda p: memory.set(p, 1)):
        with pytest.raises(MemoryPathError):
            use(path)


@pytest.mark.parametrize("path", [1, None, {"a"}, b"a"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(MemoryPathError, match="a memory path is a string or a tuple of names"):
        parse_path(path)


def test_a_path_does_not_lead_into_a_value(memory: MemoryObject) -> None:
    memory.set("user", {"name": "Ada"})
    with pytest.raises(MemoryPathError, match="holds a value, not an object"):
        memory.get("user.name")
    with pytest.raises(MemoryPathError, match="holds a value, not an object"):
        memory.set("user.name", "Eve")
    with pytest.raises(MemoryPathError, match=r"holds a value; delete\(\) it before create_object"):
        memory.create_object("user")
    assert memory.get("user") == {"name": "Ada"}


def test_an_object_is_not_overwritten_by_a_value(memory: MemoryObject) -> None:
    memory.set("user.name", "Ada")
    with pytest.raises(MemoryPathError, match=r"delete\(\) it before set"):
        memory.set("user", 1)
    memory.delete("user")
    memory.set("user", 1)
    assert memory.get("user") == 1


def test_an_object_is_a_view_of_its_part_of_the_tree(memory: MemoryObject) -> None:
    user = memory.create_object("user")
    user.set("name", "Ada")
    user.set("age", 36)
    assert memory.get("user.name") == "Ada"
    found = memory.get("user")
    assert isinstance(found, MemoryObject)
    assert found.fields() == list(found) == ["name", "age"]
    memory.delete("user")
    assert user.fields() == []
    assert user.get("name") is None


def test_creating_an_object_twice_changes_nothing(memory: MemoryObject, changes: MemoryTransaction) -> None:
    memory.create_object("user").set("name", "Ada")
    before = len(changes.updates)
    memory.create_object("user")
    assert memory.get("user.name") == "Ada"
    assert len(changes.updates) == before


def test_deleting_what_is_not_there_is_nothing(memory: MemoryObject, changes: MemoryTransaction) -> None:
    memory.delete("a.b")
    assert changes.updates == []
    assert memory.fields() == []


def test_a_value_that_cannot_be_recorded_names_its_path_and_changes_nothing(memory: MemoryObject) -> None:
    with pytest.raises(CodecError, match=r"short_term_memory\['user.lock'\]\[1\]"):
        memory.set("user.lock", [1, object()])
    assert memory.fields() == []


def test_a_transaction_leaves_the_tree_that_it_began_with_alone() -> None:
    first = transaction()
    MemoryObject(lambda: first).set("user.name", "Ada")
    before = to_json(first.root)
    second = transaction(first.root)
    view = MemoryObject(lambda: second)
    view.set("user.name", "Eve")
    view.set("user.age", 1)
    view.create_object("other")
    assert to_json(first.root) == before
    view.delete("user")
    assert to_json(first.root) == before
    assert to_json(EMPTY) == {"o": {}}


def test_create_set_and_delete_are_recorded_as_what_they_are(memory: MemoryObject, changes: MemoryTransaction) -> None:
    memory.create_object("a")
    memory.set("b", None)
    memory.delete("b")
    assert [update["op"] for update in changes.updates] == ["create", "set", "delete"]


_NAMES = st.sampled_from(["a", "b", "c"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map(tuple)
_STEPS: st.SearchStrategy[list[Any]] = st.lists(
    st.tuples(st.sampled_from(["set", "delete", "create"]), _PATHS, st.none() | st.integers() | st.just({})),
    max_size=20,
)


def apply(changes: MemoryTransaction, steps: list[Any]) -> None:
    view = MemoryObject(lambda: changes)
    for op, path, value in steps:
        try:
            if op == "set":
                view.set(path, value)
            elif op == "delete":
                view.delete(path)
            else:
                view.create_object(path)
        except MemoryPathError:
            pass


@given(_STEPS, _STEPS)
def test_replayed_updates_give_the_same_tree_over_any_tree(before: list[Any], steps: list[Any]) -> None:
    base = transaction()
    apply(base, before)
    live = transaction(base.root)
    apply(live, steps)
    restored = from_json(stored(to_json(base.root)))
    replayed = transaction(restored).replay(stored(live.updates))
    assert to_json(replayed) == to_json(live.root)


# --- memory in a running job ----------------------------------------------------------------------------------------


class Second(Event):
    pass


def test_memory_is_the_keys_own_and_stays_between_runs(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> int:
        n: int = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        return n

    records = [{"k": "a"}, {"k": "b"}, {"k": "a"}]
    run(world.runner(Scripted(body)), records, world.out, key="k")
    runner = world.runner(Scripted(body))
    run(runner, [*records, {"k": "a"}], world.out, key="k")
    assert dict(runner.memories()) == {"a": {"n": 3}, "b": {"n": 1}}
    assert sorted(world.outputs()) == [1, 1, 2, 3]


def test_writes_of_an_action_are_seen_by_later_actions_and_sensory_memory_ends_with_the_message(world: World) -> None:
    seen: list[Any] = []

    class Two(Agent):
        @action(InputEvent)
        async def one(self, event: InputEvent, ctx: RunnerContext) -> None:
            seen.append(ctx.sensory_memory.get("scratch"))
            ctx.sensory_memory.set("scratch", event.input)
            ctx.short_term_memory.set("kept", event.input)
            ctx.send_event(Second())

        @action(Second)
        async def two(self, event: Second, ctx: RunnerContext) -> None:
            seen.append((ctx.sensory_memory.get("scratch"), ctx.short_term_memory.get("kept")))

    runner = world.runner(Two())
    run(runner, [1, 2])
    assert seen == [None, (1, 1), None, (2, 2)]
    assert dict(runner.memories()) == {None: {"kept": 2}}


def test_a_replayed_action_sees_the_memory_that_it_saw_first(world: World, tools: Tools) -> None:
    """Memory of a half-done message is neither in the checkpoint nor applied twice."""
    seen: list[Any] = []

    class Two(Agent):
        @action(InputEvent)
        async def one(self, event: InputEvent, ctx: RunnerContext) -> None:
            n = ctx.short_term_memory.get("n", 0)
            ctx.short_term_memory.set("n", n + 1)
            ctx.sensory_memory.set("s", n)
            ctx.send_event(Second())

        @action(Second)
        async def two(self, event: Second, ctx: RunnerContext) -> None:
            n = ctx.short_term_memory.get("n")
            seen.append((n, ctx.sensory_memory.get("s")))
            ctx.short_term_memory.set("n", n + 10)
            await ctx.durable_execute(tools.call, n, effect="idempotent")

    tools.hang_on.add(12)
    store = world.store()
    crashed(
        world.runner(Two(), store=store, checkpoint_interval=0.01),
        [1, 2],
        when=lambda: 12 in tools.hanging and bool(store.pruned),
    )
    tools.hang_on.clear()
    runner = world.runner(Two())
    run(runner, [1, 2])
    assert seen == [(1, 0), (12, 11), (12, 11)]
    assert dict(runner.memories()) == {None: {"n": 22}}
    assert tools.made == [1, 12, 12]


def test_memory_of_a_failed_action_does_not_happen(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 1)
        await ctx.durable_execute(tools.call, value)

    tools.fail_on[1] = ValueError("no")
    runner = world.runner(Scripted(body))
    with pytest.raises(ActionError):
        run(runner, [1])
    assert dict(runner.memories()) == {}
    tools.fail_on.clear()
    runner = world.runner(Scripted(body))
    run(runner, [1])
    assert dict(runner.memories()) == {None: {"n": 1}}


def test_creates_and_deletes_replay_over_memory_from_a_checkpoint(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        memory = ctx.short_term_memory
        if value == 0:
            memory.set("old.a", 1)
            memory.set("stays", {"$": "odd", "x": (1, 2)})
        elif value == 1:
            memory.delete("old")
            memory.create_object("empty")
            memory.create_object("gone").set("a", 1)
            memory.delete("gone")
        else:
            assert memory.get("empty").fields() == []
            assert "old" not in memory
            await ctx.durable_execute(tools.call, value, effect="idempotent")

    run(world.runner(Scripted(body)), [0])
    tools.hang_on.add(2)
    crashed(world.runner(Scripted(body)), [0, 1, 2], when=lambda: 2 in tools.hanging)
    tools.hang_on.clear()
    runner = world.runner(Scripted(body))
    run(runner, [0, 1, 2])
    assert dict(runner.memories()) == {None: {"stays": {"$": "odd", "x": (1, 2)}, "empty": {}}}
