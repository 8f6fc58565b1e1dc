"""``python -m tests.services``: one PostgreSQL and one Kafka for development, until Ctrl-C."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack

from tests.services.kafka import Kafka
from tests.services.postgres import Postgres
from tests.services.programs import java, kafka_jars, postgres_bin
from tests.services.server import ServerFailed


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if arguments == ["fetch"]:
            print(f"PostgreSQL: {postgres_bin()}\nJava: {java()}\nKafka: {len(kafka_jars())} archives")
        else:
            serve()
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
    except ServerFailed as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


def serve() -> None:
    """Runs both, prints how to reach them, and stops both when interrupted."""
    with ExitStack() as servers:
        postgres = servers.enter_context(Postgres().launch())
        kafka = servers.enter_context(Kafka().launch())
        print(f"export DALSEGNO_TEST_POSTGRES={postgres.url}\nexport DALSEGNO_TEST_KAFKA={kafka.url}", flush=True)
        print("Ctrl-C stops both and removes their data.", file=sys.stderr, flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
