"""An agent survives a crash at each of its steps with its records in Kafka topics, on a real broker."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

from dalsegno import Agent, DidNotHappen, Happened, InputEvent, OutputEvent, RunnerContext, action
from dalsegno.stores.kafka import KafkaStore
from dalsegno.testing import Outside, crash_everywhere
from tests.kafka_helpers import delete_topics
from tests.services.kafka import Kafka

outside = Outside()


async def decide(order: str) -> str:
    return random.choice(["refund", "repair", "nothing"])


def refund(order: str) -> str:
    outside.did("refund", order)
    return f"receipt of {order}"


def was_refunded(order: str) -> Happened | DidNotHappen:
    return Happened(f"receipt of {order}") if outside.has("refund", order) else DidNotHappen()


class Complaints(Agent):
    @action(InputEvent)
    async def settle(self, event: InputEvent, ctx: RunnerContext) -> None:
        order = event.input["order"]
        decision = await ctx.durable_execute(decide, order, effect="read")
        receipt = await ctx.durable_execute(refund, order, reconcile=was_refunded)
        ctx.short_term_memory.set("settled", [*ctx.short_term_memory.get("settled", []), order])
        ctx.send_event(OutputEvent(output={"order": order, "decision": decision, "receipt": receipt}))


def test_an_agent_survives_a_crash_at_each_of_its_steps(kafka_server: Kafka) -> None:
    prefix = f"test-{secrets.token_hex(8)}"
    places: dict[Path, str] = {}

    def make(folder: Path) -> KafkaStore:
        if folder not in places and places:
            delete_topics(kafka_server, prefix)  # of the history before
        place = places.setdefault(folder, f"{prefix}-{len(places)}")
        return KafkaStore(f"kafka://{kafka_server.url}/{place}?partitions=2")

    orders = [{"customer": f"c{n % 2}", "order": f"o{n}"} for n in range(3)]
    report = crash_everywhere(
        Complaints, orders, key="customer", store=make, outside=outside, pairs=5, checkpoint_after=2
    )
    delete_topics(kafka_server, prefix)
    assert report.passed
    assert len(places) > 50
