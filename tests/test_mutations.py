"""The tests test: with a mechanism switched off, the tests about it fail, and fail by what they assert."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import Change, Mutation, assert_failed, assert_passed, copied, outcomes

pytestmark = pytest.mark.slow


def on_both(test: str, words: str) -> dict[str, str]:
    """*test* with each store; its name ends with what else it is given, as in ``test[memory-a]``."""
    name, _, given = test.rstrip("]").partition("[")
    return {f"tests/{name}[{store}{'-' if given else ''}{given}]": words for store in ("memory", "sqlite")}


FENCED = "DID NOT RAISE .*FencedError"

MUTATIONS = [
    Mutation(
        "a barrier before a call that the outside world can tell",
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
        on_both(
            "test_executor.py::test_a_store_that_never_answers_keeps_every_effect_back",
            r"^AssertionError: assert \['a'\] == \[\]",
        ),
    ),
    Mutation(
        "recorded results are played back",
        [
            Change(
                "core/task.py",
                """
                    return await self._attempts.play_back(call)
                return await self._attempts.make(call, function, callee, options)
                """,
                """
                    pass
                return await self._attempts.make(call, function, callee, options)
                """,
            )
        ],
        on_both(
            "test_faults.py::test_empty_results_replay_and_none_runs_again",
            r"^AssertionError: assert \[2, 2, 2, .*\] == \[1, 1, 1, .*\]",
        ),
    ),
    Mutation(
        "outcomes of calls in flight together come in the recorded order",
        [Change("core/delivery.py", "if order not in self._calls or self._closed:", "if True:")],
        on_both(
            "test_races.py::test_a_sleep_that_is_over_after_the_restart_does_not_overtake_what_is_on_record",
            r"^AssertionError: assert \[\['done a', \[True, True\]\]\] == \[\['done a', \[False, True\]\]\]",
        ),
    ),
    Mutation(
        "a call that the action abandoned is not made again",
        [Change("core/journal.py", "self._cancelled.add(call.state.number)", "return")],
        on_both(
            "test_executor.py::test_a_call_that_the_action_cancelled_is_neither_made_again_nor_in_doubt[once]",
            r"^AssertionError: assert \[\] == \['b'\]",
        ),
    ),
    Mutation(
        "the action gets the decoded record of a result",
        [
            Change(
                "core/attempts.py",
                "return self.completed(call, tree)",
                """
                self.completed(call, tree)
                return result
                """,
            )
        ],
        on_both(
            "test_executor.py::test_what_a_call_returns_is_the_decoded_record_in_the_first_run_too",
            r"^AssertionError: .*'right': \[1\]",
        ),
    ),
    Mutation(
        "the action gets the decoded record of a failure",
        [Change("core/attempts.py", "return decoded.with_traceback(error.__traceback__)", "return error")],
        on_both(
            "test_faults.py::test_an_exception_with_required_keyword_arguments_is_the_same_in_the_replay",
            r"^AssertionError: .*object object at",
        ),
    ),
    Mutation(
        "an outcome that cannot be loaded is no failure of the call",
        [
            Change(
                "core/attempts.py",
                "await self._flight.stop_with(self._unrecordable(call, error, why).reason)",
                "raise",
            )
        ],
        on_both(
            "test_unloadable_outcomes.py::test_nor_does_one_that_makes_calls_side_by_side[gathered]",
            "DID NOT RAISE .*ActionError",
        ),
    ),
    Mutation(
        "nothing goes on past a failed write",
        [
            Change(
                "core/commit.py",
                "await self._put(batch)",
                """
                try:
                    await self._put(batch)
                except Exception:
                    pass
                """,
            )
        ],
        {
            **on_both(
                "test_faults.py::test_after_the_store_is_back_what_was_recorded_is_not_executed_again",
                "DID NOT RAISE .*StoreError",
            ),
            **on_both(
                "test_executor.py::test_a_read_does_not_start_after_a_failed_write", "DID NOT RAISE .*StoreError"
            ),
        },
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
        {
            **on_both(
                "test_faults.py::test_an_error_that_leaves_the_action_is_tried_again_and_a_caught_one_replays",
                "^ActionError: .*down too",
            ),
            "tests/test_journal.py::test_a_failure_that_leaves_the_action_is_not_final[read-kinds0]": (
                r"^AssertionError: assert \['called'\] == \[\]"
            ),
        },
    ),
    Mutation(
        "a failure that leaves the action is taken back, whatever the action did meanwhile",
        [
            Change(
                "core/journal.py",
                """
                recorded = [each for each in self._raised if each[0].status is _COMPLETED and id(each[1]) in left]
                """,
                """
                recorded = [each for each in self._raised if each[0].unsure and id(each[1]) in left]
                """,
            )
        ],
        on_both(
            "test_failures_on_their_way_out.py::test_it_is_so_when_the_message_is_parked_and_retried", "^AssertionError"
        ),
    ),
    Mutation(
        "a cancellation is never an outcome",
        [
            Change(
                "core/attempts.py",
                "except (SystemExit, GeneratorExit) as error:",
                """
                except asyncio.CancelledError:
                    failure = self.failed(call, RuntimeError("cancelled"))
                except (SystemExit, GeneratorExit) as error:
                """,
            )
        ],
        on_both(
            "test_executor.py::test_a_call_that_the_action_cancelled_is_neither_made_again_nor_in_doubt[once]",
            "^AssertionError: the run ended before the crash: .*RuntimeError: cancelled",
        ),
    ),
    Mutation(
        "what no longer fits the record is a divergence",
        [Change("core/journal.py", "if concurrent and len(self._groups) == 1 and not self._later:", "if True:")],
        on_both(
            "test_faults.py::test_changed_code_stops_with_expected_and_found_before_anything_executes",
            "DID NOT RAISE .*DivergenceError",
        ),
    ),
    Mutation(
        "a call is told apart by its arguments",
        [
            Change(
                "core/journal.py", "if state.name == name and state.arguments == arguments:", "if state.name == name:"
            )
        ],
        on_both(
            "test_faults.py::test_an_argument_that_changes_by_itself_is_reported_and_not_charged_twice",
            "DID NOT RAISE .*DivergenceError",
        ),
    ),
    Mutation(
        "the fingerprint is taken before the call",
        [
            Change(
                "core/invoke.py",
                "return await function(*args, **kwargs)",
                """
                result = await function(*args, **kwargs)
                state.args = codec.to_tree(list(args), root="args")
                from dalsegno.core.identity import fingerprint
                state.arguments = fingerprint(state.args)
                return result
                """,
            )
        ],
        on_both(
            "test_faults.py::test_the_fingerprint_is_taken_before_the_call_that_changes_its_arguments",
            r"^DivergenceError: .*Expected the recorded call sort\(\[1, 2, 3\]\)",
        ),
    ),
    Mutation(
        "calls that were in flight together match in any order",
        [Change("core/journal.py", "if state.alone or not groups:", "if True:")],
        {
            f"tests/test_journal.py::test_calls_that_were_in_flight_together_match_in_any_order[{order}]": (
                r"^DivergenceError: .*Expected the recorded call call\('a'\)"
            )
            for order in ("bac", "cba")
        },
    ),
    Mutation(
        "a call in doubt is not made again",
        [
            Change(
                "core/attempts.py",
                'if effect == "once" and may_have_happened(call.state.status, options):',
                "if False:",
            )
        ],
        on_both(
            "test_effects.py::test_a_call_in_doubt_that_nobody_can_tell_is_parked_and_not_made",
            r"^AssertionError: assert \['a', 'a'\] == \['a'\]",
        ),
    ),
    Mutation(
        "an action that is done is not run again",
        [Change("core/executor.py", "if recorded.done:", "if False:")],
        on_both(
            "test_conformance.py::test_no_action_that_is_done_is_run_again_whatever_came_since_the_checkpoint[1]",
            "^AssertionError: .*2 == 1",
        ),
    ),
    Mutation(
        "nothing is pruned before its checkpoint is complete",
        [
            Change(
                "runners/checkpointer.py",
                "covered, self._covered = self._covered, []",
                """
                covered, self._covered = self._covered, []
                await self._pruner.completed(checkpoint.number, covered, self.due.is_set)
                """,
            )
        ],
        on_both(
            "test_faults.py::test_nothing_is_pruned_before_the_checkpoint_is_complete",
            r"^AssertionError: assert \[1, .*\] == \[\]",
        ),
    ),
    Mutation(
        "the records of unfinished messages are not pruned",
        [
            Change(
                "runners/checkpointer.py",
                "covered, self._covered = self._covered, []",
                """
                covered, self._covered = self._covered, []
                covered += [(entry.message.key_bytes, entry.message.id) for entry in entries]
                """,
            )
        ],
        on_both(
            "test_effects.py::test_a_parked_message_does_not_block_checkpoints_and_its_record_stays",
            r"^AssertionError: assert \[\] == ",
        ),
    ),
    Mutation(
        "the output file is cut back to the checkpoint",
        [
            Change(
                "runners/sinks.py",
                """
                os.ftruncate(fd, end)
                os.lseek(fd, end, os.SEEK_SET)
                """,
                "os.lseek(fd, 0, os.SEEK_END)",
            )
        ],
        on_both(
            "test_faults.py::test_outputs_of_replayed_messages_are_in_the_file_once",
            r"^AssertionError: assert \[0, 1, 2, 0, 1, 2, ",
        ),
    ),
    Mutation(
        "a job has one owner, in memory",
        [Change("stores/memory.py", "if not self._owns(job):", "if False:")],
        {
            "tests/test_store_conformance.py::TestMemoryStore::test_a_former_owner_can_do_nothing": FENCED,
            "tests/test_faults.py::test_the_loser_stops_with_a_clear_error": "DID NOT RAISE .*FencedError",
        },
    ),
    Mutation(
        "a job has one owner, in a file",
        [
            Change(
                "stores/sqlite_file.py",
                'lock.execute("BEGIN EXCLUSIVE")  # not only RESERVED, so that `is_running` sees it',
                "pass",
            ),
            Change(
                "stores/sqlite_file.py",
                'self._fence = f"(SELECT epoch FROM jobs WHERE id = {self._id}) = {self._epoch}"',
                'self._fence = "1"',
            ),
        ],
        {
            "tests/test_store_conformance.py::TestSqliteStore::test_a_job_has_one_owner": "DID NOT RAISE .*Ownership",
            "tests/test_store_conformance.py::TestSqliteStore::test_a_former_owner_can_do_nothing": FENCED,
        },
    ),
    Mutation(
        "a message is finished only when it is durable",
        [
            Change(
                "runners/pipeline.py",
                "self._log.when_durable(functools.partial(self._finish_if, state, entry, result))",
                "self._finish_if(state, entry, result, None)",
            )
        ],
        on_both(
            "test_conformance.py::test_a_message_is_finished_only_when_its_record_is_durable",
            r"^AssertionError: assert \[\(\['a'\], .*\)\] == \[\(\[\], \{\}\)\]",  # perhaps in a checkpoint, too
        ),
    ),
    Mutation(
        "what comes again is the same message",
        [Change("runners/intake.py", "if self._is_known(message, content):", "if False:")],
        on_both("test_message_identity.py::test_a_message_that_comes_again_is_done_once", "^AssertionError: .*6, 0, 6"),
    ),
    Mutation(
        "what the last checkpoint lists as covered is not played back",
        [
            Change(
                "runners/identities.py",
                "return (key, message) in self._listed or self._checkpoints.find_finished(key, message) is not None",
                "return False",
            )
        ],
        on_both(
            "test_message_identity.py::test_a_crash_before_the_prune_leaves_nothing_and_the_id_is_still_known",
            "^RestoreError: .*'a', which is recorded, did not come again",
        ),
    ),
    Mutation(
        "messages wait for those that were recorded before them",
        [
            Change(
                "runners/recovery.py",
                """
                if claims is None:
                    self._release(entry)
                """,
                """
                if True:
                    self._release(entry)
                """,
            )
        ],
        on_both(
            "test_message_identity.py::test_messages_wait_for_those_that_were_recorded_before_them",
            r"^AssertionError: .*\['e', 1\]",
        ),
    ),
    Mutation(
        "a recorded message is claimed by its content",
        [
            Change(
                "runners/intake.py",
                "return str(self._next_id()) if claimed is None else claimed",
                "return str(self._next_id())",
            )
        ],
        on_both(
            "test_message_identity.py::test_without_ids_messages_are_known_by_their_content",
            "^RestoreError: .*did not come again",
        ),
    ),
    Mutation(
        "memory is committed with the finished message",
        [
            Change(
                "core/executor.py",
                "run.memory, run.sensory = task.commit(last=last, order=left.order if last else None)",
                """
                run.memory, run.sensory = task.commit(last=last, order=left.order if last else None)
                leaks[run.message.id](run.memory)
                """,
            ),
            Change("core/executor.py", "_STEPS_A_TURN = 16", "leaks = {}\n_STEPS_A_TURN = 16"),
            Change(
                "runners/pipeline.py",
                "history = state.history.get(entry.message.id, ())",
                """
                history = state.history.get(entry.message.id, ())
                from dalsegno.core.executor import leaks

                def leak(memory):
                    state.memory = memory
                    self._checkpointer.changed_memory(state)

                leaks[entry.message.id] = leak
                """,
            ),
        ],
        on_both(
            "test_conformance.py::test_a_checkpoint_does_not_hold_the_memory_of_a_message_that_is_in_flight",
            r"^AssertionError: .*'a': \{'n': 1\}",
        ),
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mechanism)
def test_with_a_mechanism_switched_off_the_tests_about_it_fail(tmp_path: Path, mutation: Mutation) -> None:
    assert_failed(outcomes(copied(tmp_path, mutation.changes), [*mutation.tests]), mutation.tests)


def test_with_all_mechanisms_on_the_same_tests_pass(tmp_path: Path) -> None:
    tests = [*{test: None for mutation in MUTATIONS for test in mutation.tests}]
    assert_passed(outcomes(copied(tmp_path), tests), tests)


SOME_TEST = "tests/test_store_conformance.py::TestMemoryStore::test_a_new_job_has_nothing"


@pytest.mark.parametrize(
    ("file", "line", "instead", "words"),
    [
        ("core/journal.py", "from __future__ import annotations", "assert False", "did not run the tests"),
        ("testing/stores.py", "from __future__ import annotations", "assert False", "when='collect'"),
        ("core/journal.py", "from __future__ import annotations", "# nothing", "passes although the mechanism is off"),
        ("stores/memory.py", "return list(self._opened().records)", "raise KeyError", "for another reason: KeyError"),
        ("stores/memory.py", "no such line", "", "bring this change up to date, stores/memory.py has it 0 times"),
        (
            "stores/memory.py",
            "job = self._owned()",
            "",
            "bring this change up to date, stores/memory.py has it 2 times",
        ),
    ],
)
def test_this_check_cannot_succeed_for_a_wrong_reason(
    tmp_path: Path, file: str, line: str, instead: str, words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_failed(
            outcomes(copied(tmp_path, [Change(file, line, instead)]), [SOME_TEST]), {SOME_TEST: "^AssertionError: "}
        )
