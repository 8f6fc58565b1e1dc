"""Real PostgreSQL and Kafka servers for tests and for developers, on loopback, with their data in temporary folders.

By hand, ``make services`` (``python -m tests.services``) runs one of each until Ctrl-C and prints how to reach them.
In tests, the fixtures of `tests.services.fixtures` start what a test asks for: one PostgreSQL and one Kafka are shared
by all tests and workers of a run, `private_postgres` and `private_kafka` belong to one test, which may stop, kill and
restart them. What ``DALSEGNO_TEST_POSTGRES`` and ``DALSEGNO_TEST_KAFKA`` name is used instead of starting a shared one.

A server ends with the process that owns it, also when that is killed, and its data goes with it (see `guard`).
"""

from tests.services.kafka import Kafka
from tests.services.postgres import Postgres
from tests.services.server import NotOurs, Server, ServerFailed

__all__ = ["Kafka", "NotOurs", "Postgres", "Server", "ServerFailed"]
