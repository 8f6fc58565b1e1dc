"""The executor: runs the actions of one message, or plays them back.

The actions of a message run one after the other: those of the input event first, then those of each event in the order
in which it was sent. A recorded action is not run: its memory updates are applied and its events are sent again.

A message yields `Finished` when all of its actions are done, or `Parked` when it cannot go on until somebody decides or
its time has come; everything else is an exception. Nothing leaves here: outputs and memory go to the runner, which
waits until the record is durable.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from dalsegno.agent import ActionSpec, Agent
from dalsegno.core import codec, divergence
from dalsegno.core.decisions import resolve_target, retry_target, signal_target, wait_limit
from dalsegno.core.environment import Environment
from dalsegno.core.flight import SetAside
from dalsegno.core.identity import fingerprint, key_bytes, task_id
from dalsegno.core.recorded_tasks import Due, RecordedTasks
from dalsegno.core.records import CallState, Park, TaskActionState
from dalsegno.core.task import ActionTask, record_park
from dalsegno.errors import ActionError, DalSegnoError, DivergenceError, InDoubtError
from dalsegno.events import Event, InputEvent, OutputEvent
from dalsegno.memory import EMPTY, MemoryTransaction, Node


class Message(NamedTuple):
    """One input record of one message key. *tree* is the record's content as the codec writes it."""

    key: Any
    key_bytes: bytes
    id: str
    tree: Any

    @classmethod
    def of(cls, key: Any, message_id: str, value: object) -> Message:
        return cls(key, key_bytes(key), message_id, codec.to_tree(value, root="input"))


class Output(NamedTuple):
    """One output of a message. *id* is the same in every replay."""

    id: str
    value: Any


class Finished(NamedTuple):
    """All actions of the message are done; *memory* is the key's memory from now on."""

    memory: Node
    outputs: list[Output]


@dataclass(frozen=True, slots=True)
class Parked:
    """The message is set aside, until *until* at most."""

    park: Park
    until: datetime | None = None


@dataclass(slots=True)
class _Step:
    """One action task that is due."""

    spec: ActionSpec
    event: Event
    sender: str
    index: int


@dataclass(slots=True)
class _Run:
    """The state of one message while its actions run."""

    message: Message
    memory: Node
    sensory: Node = EMPTY
    outputs: list[Output] = field(default_factory=list)
    due: deque[_Step] = field(default_factory=deque)
    park: Park | None = None
    """Why the message is set aside, where that is no matter of the action task that ran last."""
    diverged: bool = False


_logger = logging.getLogger("dalsegno")

_STEPS_A_TURN = 16
"""Action tasks of a message that may run in a row, if none of them waits, before others get their turn."""


class Executor:
    """Runs messages of one agent in one environment; holds no state of any message."""

    def __init__(
        self, agent: Agent, environment: Environment, *, park_failures: bool = False, max_attempts: int | None = None
    ) -> None:
        self._agent = agent
        self._environment = environment
        self._park_failures = park_failures
        self._max_attempts = max_attempts

    async def run(
        self, message: Message, memory: Node, history: Sequence[TaskActionState], *, mark: bool = False
    ) -> Finished | Parked:
        """Run or play back *message* over the key's *memory* as it was before it.

        With *mark* it is recorded, before anything of it runs, that the message is begun once more, so that one that
        ends the process is known by that. With *max_attempts*, it is parked when it was begun as often as that, the
        first time, which nobody marked, included.

        Raises `ActionError` when an action fails, `DivergenceError` when code or input no longer fits *history*,
        `StoreError` when something could not be recorded, and `Stopped` when the environment is stopping.
        """
        run = _Run(message, memory)
        content = fingerprint(message.tree)
        if history:
            self._check_content(message, content, history)
            if any(state.last for state in history):
                return self._play_back(run, history)
            held = self._held(message, history)
            if held is not None:
                return held
        for spec in self._agent.handlers(InputEvent):
            run.due.append(_Step(spec, codec.restored(InputEvent, {"input": codec.from_tree(message.tree)}), "", 0))
        left = RecordedTasks(history, self._environment.rerun)
        task: ActionTask | None = None
        header = {"content": content}
        steps = 0
        try:
            while run.due:
                step = run.due.popleft()
                task = self._task(run, step, left, header)
                if task is not None:
                    if mark:
                        await self._mark(task, history)
                        mark = False
                    await task.run(step.event)
                    self._commit(run, task, left)
                header = {}
                steps += 1
                if steps % _STEPS_A_TURN == 0:
                    await self._environment.give_way()
            if left.left:
                self._settle_left(run, left)
        except (InDoubtError, SetAside, ActionError) as error:
            return self._parked(run, task, error)
        finally:
            if run.diverged or (task is not None and task.diverged):
                self._environment.counters.diverged += 1
        return Finished(run.memory, run.outputs)

    def _held(self, message: Message, history: Sequence[TaskActionState]) -> Parked | None:
        """Whether the message stays set aside as its record says, because nothing that it waits for has happened.

        One with a call in doubt is taken up at each start: its reconcile may be able to tell now.
        """
        decided = self._environment.decisions.get((message.key_bytes, message.id), {})
        for state in history:
            park = state.parked
            if park is None or park.why == "in_doubt":
                continue
            if park.why != "waiting":
                return None if retry_target(state.task, state.failures) in decided else Parked(park)
            until = wait_limit(state.calls[park.call]) if park.call in state.calls else None
            if until is not None and until <= self._environment.clock():
                return None
            return None if signal_target(state.task, park.call or 0) in decided else Parked(park, until)
        return None

    async def _mark(self, task: ActionTask, history: Sequence[TaskActionState]) -> None:
        # What ended in a park did not end the process.
        parked = any(state.parked is not None and state.parked.why == "in_doubt" for state in history)
        begun = max((state.begun for state in history), default=0) - parked
        failures = max((state.failures for state in history), default=0)
        # The first time is not marked; each time that it is parked and retried allows for one more.
        if self._max_attempts is not None and begun + 1 >= self._max_attempts + failures:
            reason = (
                f"{task}: the message was begun {begun + 1} times, and each time the process ended before the message "
                "did; see what it does to the process, then retry it"
            )
            task.set_aside(Park.because(reason, "attempts"))
            raise SetAside
        await task.begin(begun + 1)

    def _parked(self, run: _Run, task: ActionTask | None, error: Exception) -> Parked:
        """The message is set aside for *error*; raises it if the job is to stop."""
        if run.park is not None:
            return Parked(run.park)
        if task is None or (isinstance(error, ActionError) and not self._park_failures):
            raise error
        if isinstance(error, ActionError):
            task.set_aside(Park.because(str(error), "failed"))
        assert task.park is not None
        return Parked(task.park, task.until)

    def _check_content(self, message: Message, content: str, history: Sequence[TaskActionState]) -> None:
        recorded = next((state.content for state in history if state.content), None)
        if recorded not in (None, content):
            raise DivergenceError(
                f"{self._describe(message)}: its content is not what was recorded for it before the restart "
                f"(fingerprint {recorded}, now {content}): the input was edited or reordered. Put the input back as it "
                "was, or give the job a new name to start afresh"
            )

    def _task(self, run: _Run, step: _Step, left: RecordedTasks, header: dict[str, Any]) -> ActionTask | None:
        """The action task to run, None if it is done and was played back. *left* is what is recorded from it on."""
        identity = task_id(run.message.id, step.sender, step.index, step.spec.name)
        recorded = self._recorded(run, step, left, identity) if left.left else None
        if recorded is not None:
            identity = recorded.task
            if recorded.done:
                self._apply(run, recorded)
                return None
        header["action"] = step.spec.name
        header["event"] = _type_name(step.event)
        header["sender"] = step.sender
        header["index"] = step.index
        return ActionTask(
            self._environment, self._agent, step.spec, run.message, identity, header, recorded, run.memory, run.sensory
        )

    def _recorded(self, run: _Run, step: _Step, left: RecordedTasks, identity: str) -> TaskActionState | None:
        handlers = [spec.name for spec in self._agent.handlers(type(step.event))]
        place = divergence.defined_at(step.spec.function, ", ")
        event = _type_name(step.event)
        due = Due(identity, run.message.id, step.sender, step.index, step.spec.name, event, handlers, place)
        before = len(left.moved)
        found = left.take(due, self._describe(run.message))
        for what in left.moved[before:]:
            self._warn(run, f"{what} What is recorded of it is played back, the rest is run")
        return found

    def _commit(self, run: _Run, task: ActionTask, left: RecordedTasks) -> None:
        before = len(run.outputs)
        self._take(run, task.identity, task.sent)
        if self._environment.check_output is not None:
            self._check_outputs(self._environment.check_output, task, run.outputs[before:])
        run.diverged |= task.diverged
        last = not run.due
        if last and left.left:
            self._settle_left(run, left)
        run.memory, run.sensory = task.commit(last=last, order=left.order if last else None)

    def _check_outputs(self, check: Callable[[Any, str], None], task: ActionTask, outputs: Sequence[Output]) -> None:
        # Now, as nothing of the action is final yet: once it is done, the message could neither go on nor be parked.
        for output in outputs:
            try:
                check(output.value, output.id)
            except DalSegnoError as error:
                raise ActionError(f"{task}: an output cannot be written: {error}") from error

    def _settle_left(self, run: _Run, left: RecordedTasks) -> None:
        """Action tasks are recorded that the code no longer has. Calls of theirs that are in doubt stay so."""
        if not self._environment.rerun:
            raise divergence.untriggered_action(self._describe(run.message), left.left[0])
        decided = self._environment.decisions.get((run.message.key_bytes, run.message.id), {})
        for state in left.left:
            for call in () if state.done else state.calls.values():
                if divergence.in_doubt(call) and resolve_target(state.task, call.number, call.attempt) not in decided:
                    self._park_left(run, state, call)
        for state in left.left:
            what = divergence.untriggered_action(self._describe(run.message), state).what
            self._warn(run, f"{what} It is left out.{divergence.harm_of([*state.calls.values()])}")

    def _park_left(self, run: _Run, state: TaskActionState, call: CallState) -> NoReturn:
        where = f"{self._describe(run.message)}, action {state.action!r}"
        run.park = Park.because(f"{where}: {divergence.lost_in_doubt(call)}", "in_doubt", call.number)
        if run.park != state.parked:
            record_park(self._environment, run.message, state, run.park)
        raise SetAside

    def _warn(self, run: _Run, text: str) -> None:
        run.diverged = True
        _logger.warning("%s: the code no longer fits the record. %s", self._describe(run.message), text)

    def _apply(self, run: _Run, state: TaskActionState, *, route: bool = True) -> None:
        """Play back an action task that is done."""
        self._environment.counters.replayed += len(state.calls)
        run.memory = MemoryTransaction(run.memory, codec, "short_term_memory").replay(state.short_term)
        run.sensory = MemoryTransaction(run.sensory, codec, "sensory_memory").replay(state.sensory)
        self._take(run, state.task, state.events, route=route)

    def _take(self, run: _Run, sender: str, events: Sequence[Any], *, route: bool = True) -> None:
        """Send the recorded *events*: outputs leave with the message, others make their actions due if *route*."""
        for index, tree in enumerate(events):
            output = codec.decode_field(tree, OutputEvent, "output")
            if output is not codec.MISSING:
                run.outputs.append(Output(f"{sender}-{index}", output))
                continue
            event = codec.from_tree(tree)
            if isinstance(event, OutputEvent):
                run.outputs.append(Output(f"{sender}-{index}", event.output))
            elif route:
                self._route(run, event, tree, sender, index)

    def _route(self, run: _Run, event: Event, tree: Any, sender: str, index: int) -> None:
        """Each action gets a copy of its own, so that what one changes in it is not seen by the next."""
        specs = self._agent.handlers(type(event))
        if not specs:
            unhandled = divergence.unhandled_event(self._describe(run.message), _type_name(event))
            if not self._environment.rerun:
                raise unhandled
            self._warn(run, f"{unhandled.what} It is left out.")
        for number, spec in enumerate(specs):
            run.due.append(_Step(spec, codec.from_tree(tree) if number else event, sender, index))

    def _play_back(self, run: _Run, history: Sequence[TaskActionState]) -> Finished:
        """A message that is done needs no code at all: its record says everything."""
        order = next((state.order for state in history if state.order is not None), None)
        if order is not None:
            states = {state.task: state for state in history}
            history = [states[task] for task in order]
        for state in history:
            self._apply(run, state, route=False)
        return Finished(run.memory, run.outputs)

    def _describe(self, message: Message) -> str:
        return f"job {self._environment.job!r}, key {message.key!r}, message {message.id!r}"


def _type_name(event: Event) -> str:
    return type(event).__qualname__
