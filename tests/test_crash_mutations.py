"""The crash tests test: with a mechanism of the library switched off, `crash_everywhere` fails within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import Change, Mutation, assert_failed, copied, outcomes

pytestmark = pytest.mark.slow

SURVIVES = "tests/test_crash_everywhere.py::test_a_right_agent_survives"

MUTATIONS = [
    Mutation(
        "the barrier before a call with effect once",
        [
            Change(
                "core/attempts.py",
                """
                self._journal.request(call, effect, answer)
                await self._environment.log.barrier()
                """,
                "self._journal.request(call, effect, answer)",
            )
        ],
        {f"{SURVIVES}[Reviewer-memory://]": r"\[P6\] the call .*charge.* before its request was durable"},
    ),
    Mutation(
        "the check that the one who writes owns the job",
        [Change("stores/memory.py", "if not self._owns(job):", "if False:")],
        {f"{SURVIVES}[Reviewer-memory://]": r"case 'zombie .*\[P8\] a process that had lost its job could still write"},
    ),
    Mutation(
        "pruning at the checkpoint, not at the end of the message",
        [
            Change(
                "runners/pipeline.py",
                "self._checkpointer.cover(state.key, entry.message.id)",
                """
                self._checkpointer.cover(state.key, entry.message.id)
                from dalsegno.stores.base import Covered
                pruned = self._store.prune(Covered(self._checkpointer.number, [(state.key, entry.message.id)]))
                asyncio.ensure_future(pruned)
                """,
            )
        ],
        {f"{SURVIVES}[Reviewer-memory://]": r"\[P1\] the call .* was executed again although its outcome is recorded"},
    ),
    Mutation(
        "the fingerprint is taken before the call",
        [
            Change(
                "core/invoke.py",
                "return await function(*args, **kwargs)",
                """
                result = await function(*args, **kwargs)
                from dalsegno.core.callee import encode_arguments
                state.args, state.kwargs, state.arguments = encode_arguments(state.name, tuple(args), kwargs)
                return result
                """,
            )
        ],
        {f"{SURVIVES}[Failing-memory://]": r"\[P7\] .*no longer fits the record"},
    ),
    Mutation(
        "a failure becomes history only when the action goes on",
        [
            Change(
                "core/journal.py",
                """
                call.state.error = error
                self._pending_failures[call.state.number] = call
                """,
                """
                call.state.error = error
                self._pending_failures[call.state.number] = call
                self._record_failures(call.strand)
                """,
            ),
            Change(
                "core/journal.py",
                """
                recorded = [each for each in self._raised if each[0].status is _COMPLETED and id(each[1]) in left]
                """,
                """
                recorded = []
                """,
            ),
        ],
        {f"{SURVIVES}[Failing-memory://]": r"\[P3\] .* failed: .*the provider is down"},
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mechanism)
def test_without(mutation: Mutation, tmp_path: Path) -> None:
    copy = copied(tmp_path, mutation.changes)
    assert_failed(outcomes(copy, [*mutation.tests]), mutation.tests)
