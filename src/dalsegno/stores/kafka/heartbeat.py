"""Shows outsiders that the owner of a job is alive.

It commits an offset for a consumer group that nobody is a member of: that is a small value that the brokers keep by a
name, replace, and forget by themselves, and no log grows. Nothing rests on it: who may write is for the brokers alone
to say.
"""

from __future__ import annotations

import threading
import time

from dalsegno.stores.kafka.cluster import Cluster

BEAT_SECONDS = 5.0
ALIVE_SECONDS = 3 * BEAT_SECONDS
"""Clocks of two hosts may differ by less than that."""


class Heartbeat:
    """A thread that says from time to time that the owner of *epoch* is alive."""

    def __init__(self, cluster: Cluster, topic: str, epoch: int) -> None:
        self._cluster, self._topic, self._group = cluster, topic, group_of(topic, epoch)
        self._stopping = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="dalsegno-kafka-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        self._cluster.note(self._group, self._topic, f"{time.time():.0f}")

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._cluster.forget(self._group)


def group_of(topic: str, epoch: int) -> str:
    return f"{topic}.{epoch}"


def is_alive(cluster: Cluster, topic: str, epoch: int) -> bool:
    """Whether the owner of *epoch* said within the last seconds that it is alive."""
    noted = cluster.noted(group_of(topic, epoch), topic)
    return bool(noted) and time.time() - float(noted or 0) < ALIVE_SECONDS
