"""Writes transactions, and knows of each what became of it. Everything here blocks, for a bounded time.

A transactional id belongs to one worker of one job. Whoever initialises it is its owner from then on: the broker aborts
what a former owner has open and refuses whatever that one still sends, in every partition.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from confluent_kafka import KafkaError, Message, Producer

from dalsegno.errors import FencedError, StoreError
from dalsegno.stores.kafka.cluster import ERRORS, Cluster, client_logger, errors, explained, reason_of
from dalsegno.stores.kafka.settings import Settings

OVERHEAD = 1024
"""Bytes that a batch has at most beside the value of its only message, with room to spare."""

Frame = tuple[int, bytes]
"""Partition and value of a message."""


class Unknown(Exception):
    """The commit was asked for and no answer came. *offsets* are where the frames are, if it was done."""

    def __init__(self, offsets: list[int], error: StoreError) -> None:
        super().__init__(str(error))
        self.offsets, self.error = offsets, error


class _Aborted(Exception):
    """The transaction did not take place, and another one may."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(str(error))
        self.error = error


class Writer:
    """A transactional producer. One thread at a time may use it."""

    def __init__(self, settings: Settings, cluster: Cluster, transactional_id: str, largest: int) -> None:
        self.settings, self._cluster = settings, cluster
        self._broken: StoreError | None = None
        with errors(settings, "make a producer with these settings"):
            self._producer = Producer(
                {
                    **settings.producer(largest),
                    "transactional.id": transactional_id,
                    "transaction.timeout.ms": int(settings.transaction_timeout * 1000),
                    "error_cb": cluster.trouble,
                    "log_level": 4,
                },
                logger=client_logger,
            )

    def own(self) -> None:
        """Become the owner of the transactional id."""
        deadline = time.monotonic() + self.settings.timeout
        while True:
            try:
                self._producer.init_transactions(max(deadline - time.monotonic(), 0.1))
                return
            except ERRORS as error:
                self._cluster.check("take over the job")
                reason = reason_of(error)
                if not reason.retriable() or time.monotonic() > deadline:
                    raise explained(self.settings, "take over the job", reason) from error

    def write(self, topic: str, frames: Sequence[Frame]) -> list[int]:
        """Write *frames* in one transaction; their offsets.

        It is tried again while it is sure that nothing of it was written, until the timeout. Raises `FencedError` if
        somebody else owns the transactional id, `Unknown` if nobody can tell what became of it, and `StoreError` if it
        failed; then nothing of it is written.
        """
        if self._broken is not None:
            raise self._broken
        deadline = time.monotonic() + self.settings.timeout
        pause = 0.05
        while True:
            try:
                return self._attempt(topic, frames)
            except _Aborted as aborted:
                if time.monotonic() + pause > deadline:
                    raise aborted.error from aborted.error.__cause__
                client_logger.info("%s: once more after: %s", self.settings, aborted)
            except (StoreError, Unknown) as error:
                self._broken = error.error if isinstance(error, Unknown) else error
                raise
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _attempt(self, topic: str, frames: Sequence[Frame]) -> list[int]:
        with errors(self.settings, "begin a transaction"):
            self._producer.begin_transaction()
        reports: list[Message | None] = [None] * len(frames)
        failed: list[KafkaError] = []
        try:
            for number, (partition, value) in enumerate(frames):
                self._produce(topic, partition, value, functools.partial(_report, reports, failed, number))
            self._producer.flush(self.settings.transaction_timeout)
        except ERRORS as error:
            self._abort(reason_of(error))
        if failed:
            self._abort(failed[0])
        offsets = [report.offset() for report in reports if report is not None]
        if len(offsets) < len(frames):
            self._abort(KafkaError(KafkaError._MSG_TIMED_OUT))
        found = [offset for offset in offsets if offset is not None]
        self._commit(found)
        return found

    def _produce(self, topic: str, partition: int, value: bytes, report: functools.partial[None]) -> None:
        while True:
            try:
                self._producer.produce(topic, value, partition=partition, on_delivery=report)
                self._producer.poll(0)
                return
            except BufferError:
                self._producer.poll(0.1)

    def _commit(self, offsets: list[int]) -> None:
        deadline = time.monotonic() + self.settings.timeout
        while True:
            try:
                self._producer.commit_transaction(max(deadline - time.monotonic(), 0.1))
                return
            except ERRORS as caught:
                error = reason_of(caught)
                if error.txn_requires_abort():
                    self._abort(error)
                failure = explained(self.settings, "commit what was recorded", error)
                if isinstance(failure, FencedError):
                    raise failure from caught
                if not error.retriable() or time.monotonic() > deadline:
                    raise Unknown(offsets, failure) from caught
                self._cluster.check("commit what was recorded")

    def _abort(self, error: KafkaError) -> NoReturn:
        """Abort the transaction that failed because of *error*."""
        failure = explained(self.settings, "record a step", error)
        if isinstance(failure, FencedError):
            raise failure
        try:
            self._producer.abort_transaction(self.settings.timeout)
        except ERRORS as worse:
            found = explained(self.settings, "abort what could not be recorded", reason_of(worse))
            raise (found if isinstance(found, FencedError) else failure) from worse
        if error.code() in _OF_NO_USE:
            raise failure
        raise _Aborted(failure)

    def give_up(self, error: StoreError) -> None:
        """Write nothing more; every `write` from now on raises *error*."""
        self._broken = error

    def close(self) -> None:
        # What is left in its queues belongs to no transaction that will ever be committed.
        with suppress(*ERRORS):
            self._producer.purge()
            self._producer.flush(0.1)


def _report(
    reports: list[Message | None], failed: list[KafkaError], number: int, error: KafkaError | None, message: Message
) -> None:
    if error is not None:
        failed.append(error)
    else:
        reports[number] = message


_OF_NO_USE = (
    *(KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.INVALID_MSG),
    *(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED),
    *(KafkaError.UNSUPPORTED_COMPRESSION_TYPE, KafkaError.INVALID_RECORD),
)
