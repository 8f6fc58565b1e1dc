"""Claims: which recorded message a replayed one is, and when it is its turn, whatever the partitions' order."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from dalsegno.core.claims import Claims, Recorded


def claims(*recorded: str) -> Claims[str]:
    """Messages with the ids 0, 1, … and these contents."""
    return Claims(Recorded(str(number), content) for number, content in enumerate(recorded))


def test_a_message_is_the_earliest_unclaimed_one_of_its_content() -> None:
    found = claims("a", "b", "a")
    assert [found.claim(content) for content in ("a", "a", "a", "b", "c", "b")] == ["0", "2", None, "1", None, None]


def test_a_message_that_is_not_to_be_claimed_by_content_is_not() -> None:
    found: Claims[str] = Claims([Recorded("0", None), Recorded("1", "a")])
    assert found.claim("a") == "1"
    assert found.claim("a") is None


def test_twelve_equal_messages_are_claimed_in_recorded_order_and_not_in_that_of_text() -> None:
    for first in (0, 2**31 - 6, 2**63 - 6):
        found: Claims[str] = Claims(Recorded(str(first + n), "same") for n in range(12))
        assert [found.claim("same") for _ in range(12)] == [str(first + n) for n in range(12)]


def test_messages_go_on_in_recorded_order_and_new_ones_after_them() -> None:
    found = claims("a", "b", "c")
    assert found.arrive("new", "x") == []
    assert found.arrive("2", "c") == []
    assert found.arrive("0", "a") == ["a"]
    assert found.arrive("newer", "y") == []
    assert (found.waiting, found.settled) == (3, False)
    assert found.arrive("1", "b") == ["b", "c", "x", "y"]
    assert (found.waiting, found.settled) == (0, True)
    assert found.arrive("newest", "z") == ["z"]


def test_what_is_given_up_goes_on_at_once_if_it_comes_after_all() -> None:
    found = claims("a", "b", "c", "d", "e")
    assert found.arrive("3", "d") == []
    assert found.arrive("1", "b") == []
    assert found.arrive("new", "x") == []
    assert found.give_up() == (["0", "2"], ["b", "d"])
    assert (found.waiting, found.settled) == (1, False)  # the new one still waits for e
    assert found.claim("a") == "0"
    assert found.arrive("0", "a") == ["a"]
    assert found.give_up() == (["4"], ["x"])
    assert found.settled
    assert found.arrive("4", "e") == ["e"]


def test_giving_up_lets_what_comes_next_go_on_too() -> None:
    found = claims("a", "b", "c")
    assert found.arrive("1", "b") == []
    assert found.give_up() == (["0"], ["b"])
    assert found.arrive("2", "c") == ["c"]
    assert found.settled


def test_without_records_nothing_waits() -> None:
    found = claims()
    assert found.claim("a") is None
    assert found.arrive("0", "a") == ["a"]
    assert found.settled


# --- two partitions that are merged anew after each crash -----------------------------------------------------------


class Sent(NamedTuple):
    """A message of a partition. Several may have the same content."""

    partition: int
    place: int
    content: str


def merged(draw: st.DrawFn, parts: list[list[Sent]]) -> list[Sent]:
    """Any order of all messages that keeps the order of each part."""
    left = [list(part) for part in parts]
    order = []
    while any(left):
        part = draw(st.sampled_from([part for part in left if part]))
        order.append(part.pop(0))
    return order


class Life:
    """What a process does between two crashes: takes messages in until it is killed, and runs those whose turn it is.

    *recorded* is the store: ids with contents, in recorded order. It is filled by what runs.
    """

    def __init__(self, recorded: dict[str, str]) -> None:
        self.recorded = recorded
        self.found: Claims[tuple[str, Sent]] = Claims(Recorded(*each) for each in recorded.items())
        self.ids: dict[Sent, str] = {}
        self.next = 1 + max(map(int, recorded), default=-1)
        self.ran: list[tuple[str, Sent]] = []
        self.before = list(recorded)

    def take(self, sent: Sent) -> None:
        message = self.found.claim(sent.content)
        if message is None:
            message, self.next = str(self.next), self.next + 1
        self.ids[sent] = message
        for ready in self.found.arrive(message, (message, sent)):
            self.run(*ready)

    def run(self, message: str, sent: Sent) -> None:
        assert self.recorded.setdefault(message, sent.content) == sent.content, "a record went to another message"
        self.ran.append((message, sent))


@st.composite
def lives(draw: st.DrawFn, contents: st.SearchStrategy[str]) -> tuple[list[list[Sent]], list[list[Sent]]]:
    """Two partitions, and what each life takes in of them; the last one takes in all."""
    parts = [
        [Sent(number, place, content) for place, content in enumerate(draw(st.lists(contents, max_size=8)))]
        for number in range(2)
    ]
    crashes = draw(st.integers(0, 3))
    whole = [merged(draw, parts) for _ in range(crashes + 1)]
    taken = [order[: draw(st.integers(0, len(order)))] for order in whole[:-1]]
    return parts, [*taken, whole[-1]]


@given(lives(st.sampled_from("aabc")))
def test_no_record_goes_to_another_message_and_nothing_recorded_runs_again(
    drawn: tuple[list[list[Sent]], list[list[Sent]]],
) -> None:
    parts, orders = drawn
    recorded: dict[str, str] = {}
    life = Life(recorded)
    for order in orders:
        life = Life(recorded)
        for sent in order:
            life.take(sent)
        assert len(set(life.ids.values())) == len(life.ids), "two messages got one id"
        ran = [message for message, _ in life.ran]
        assert ran[: len(life.before)] == life.before[: len(ran)], "recorded messages did not run in recorded order"
    everything = Counter(sent.content for part in parts for sent in part)
    assert Counter(recorded.values()) == everything, "more is recorded than was sent, so something ran again"
    assert len(life.ran) == everything.total()


@given(lives(st.uuids().map(str)))
def test_messages_of_a_partition_stay_in_order_if_their_contents_differ(
    drawn: tuple[list[list[Sent]], list[list[Sent]]],
) -> None:
    _, orders = drawn
    recorded: dict[str, str] = {}
    for order in orders:
        life = Life(recorded)
        for sent in order:
            life.take(sent)
        for partition in range(2):
            places = [sent.place for _, sent in life.ran if sent.partition == partition]
            assert places == sorted(places)


@given(lives(st.sampled_from("aabc")), st.data())
def test_however_often_it_is_given_up_each_message_goes_on_once_and_with_its_own_record(
    drawn: tuple[list[list[Sent]], list[list[Sent]]], data: st.DataObject
) -> None:
    _, orders = drawn
    recorded: dict[str, str] = {}
    life = Life(recorded)
    for order in orders:
        life = Life(recorded)
        for sent in order:
            life.take(sent)
            if life.found.waiting and data.draw(st.booleans()):
                missing, ready = life.found.give_up()
                assert missing
                for message, of in ready:
                    life.run(message, of)
        assert len({message for message, _ in life.ran}) == len(life.ran)
    assert sorted(life.ran) == sorted((message, sent) for sent, message in life.ids.items())
