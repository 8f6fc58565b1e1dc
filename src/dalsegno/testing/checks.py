"""What is checked when a history is over: that it came to the end that its record demands, and left nothing behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dalsegno.core import codec
from dalsegno.errors import DivergenceError
from dalsegno.testing.lives import Ended, Lives
from dalsegno.testing.oracle import replayed
from dalsegno.testing.world import World


def check(lives: Lives, ended: Ended, folder: Path) -> None:
    """Blame what is wrong with a history whose last life has *ended*, on its world."""
    world = lives.world
    if ended.error is not None:
        _blame_error(world, ended.error, "the last run" if len(world.lives) > 1 else "the run")
        return
    calm, reference = replayed(lives.job, world, folder)
    if calm.error is not None:
        _blame_error(world, calm.error, "a replay of all recorded answers, without a crash")
        return
    _check_outputs(world, reference)
    _check_memories(world, ended, calm)
    _check_parked(world, ended, calm)
    _check_left(lives, ended)


def _blame_error(world: World, error: BaseException, run: str) -> None:
    if isinstance(error, DivergenceError):
        world.blame(
            "P7",
            f"{run} found that the code no longer fits the record: {error}\n  If nothing else is wrong, the calls of "
            "the action depend on what is not recorded: time, random numbers, the order of a set, the environment",
        )
    else:
        world.blame("P3", f"{run} failed: {_said(error)}")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _check_outputs(world: World, reference: World) -> None:
    seen, expected = Counter(name for name, _ in world.outputs), Counter(name for name, _ in reference.outputs)
    values = dict(reference.outputs)
    for name, times in seen.items():
        if times > 1:
            world.blame("outputs", f"the output {name!r} left {times} times")
    for name in expected - seen:
        world.blame("outputs", f"the output {name!r} is lost: {values[name]!r}")
    for name in seen - expected:
        if name not in expected:
            world.blame("outputs", f"there is an output {name!r} that the record does not yield")
    for name, value in world.outputs:
        if name in values and not _equal(value, values[name]):
            world.blame("P3", f"the output {name!r} is {value!r}; by the recorded answers it is {values[name]!r}")
    if not world.problems and _by_key(world) != _by_key(reference):
        world.blame("outputs", "the outputs of a key left in another order than that of its messages")


def _by_key(world: World) -> dict[bytes | None, list[str]]:
    """The outputs of each key, in their order; the id of an output begins with that of its action task."""
    keys = {task: key for key, _, task in world.log}
    found: dict[bytes | None, list[str]] = {}
    for name, _ in world.outputs:
        found.setdefault(keys.get(name.rpartition("-")[0]), []).append(name)
    return found


def _check_memories(world: World, ended: Ended, calm: Ended) -> None:
    for key in ended.memories.keys() | calm.memories.keys():
        is_now, expected = ended.memories.get(key), calm.memories.get(key)
        if not _equal(is_now, expected):
            world.blame(
                "P4",
                f"the short-term memory of key {codec.decode(key)!r} is {is_now!r}; by the recorded answers it is "
                f"{expected!r}",
            )


def _check_parked(world: World, ended: Ended, calm: Ended) -> None:
    assert ended.report is not None
    assert calm.report is not None
    parked = {(codec.encode(one.key), one.message_id): one for one in ended.report.parked}
    expected = {(codec.encode(one.key), one.message_id) for one in calm.report.parked}
    for which in parked.keys() - expected:
        world.blame("P6", f"a message is parked although all of its calls are on record: {parked[which].reason}")
    for key, message in expected - parked.keys():
        world.blame(
            "P5", f"message {message!r} of key {codec.decode(key)!r} is finished although a call of it is not recorded"
        )
    for (key, message), one in parked.items():
        doubts = [
            execution
            for place, executions in world.executions.items()
            for execution in executions
            if place[:2] == (key, message)
        ]
        if one.why == "in_doubt" and not any(was.effect == "once" for was in doubts) and not _requested(world, message):
            world.blame("P6", f"a message is parked as in doubt, and no call with effect 'once' is: {one.reason}")


def _requested(world: World, message: str) -> bool:
    return any(record.message == message and b'"requested"' in record.body for record in world.order)


def _check_left(lives: Lives, ended: Ended) -> None:
    """After the last checkpoint nothing is left but what is parked and what waits behind it."""
    assert ended.report is not None
    parked = {codec.encode(one.key) for one in ended.report.parked}
    with lives.store().inspect() as inspector:
        for key, message in inspector.messages(lives.world.job):
            if key not in parked:
                lives.world.blame(
                    "P9", f"records of message {message!r} of key {codec.decode(key)!r} are left after the last prune"
                )


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or codec.encode(one) == codec.encode(other)
