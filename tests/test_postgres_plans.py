"""Every access of the PostgreSQL store has an index, and pruning leaves room that is used again."""

from __future__ import annotations

from typing import Any

import psycopg

from dalsegno.stores.base import Covered
from dalsegno.stores.postgres import PostgresStore
from dalsegno.stores.postgres import job as statements
from dalsegno.stores.postgres.schema import place
from dalsegno.stores.postgres.settings import parse_url
from dalsegno.testing.stores import decision, in_loop, step

OPEN_KEYS = 20_000


def filled(url: str) -> None:
    """A job with many open keys, and another one."""

    @in_loop
    async def fill() -> None:
        for name in ("job", "other"):
            store = PostgresStore(url)
            await store.open(name, "owner")
            await store.put([step(b"%d" % number, f"m{number}") for number in range(OPEN_KEYS)])
            await store.close()
        with PostgresStore(url).inspect() as outside:
            for number in range(50):
                assert outside.decide("job", decision(b"%d" % number, f"m{number}"))

    fill()
    with psycopg.connect(url, autocommit=True) as connection:
        for table in ("jobs", "workers", "records", "decisions"):
            connection.execute(f"VACUUM ANALYZE dalsegno.{table}".encode())


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for part in plan.get("Plans", ()) for node in nodes(part))]


def scans(url: str, statement: str, values: Any) -> dict[str, set[tuple[str, str | None]]]:
    """How each table is read by *statement*, by name."""
    with psycopg.connect(url) as connection:
        query = parse_url(url).statement(f"EXPLAIN (FORMAT JSON) {statement}")
        row = connection.execute(query, values).fetchone()
        connection.rollback()
    assert row is not None
    found: dict[str, set[tuple[str, str | None]]] = {}
    for node in nodes(row[0][0]["Plan"]):
        if "Relation Name" in node and node["Node Type"] != "ModifyTable":
            index = node.get("Index Name") or next(
                (part["Index Name"] for part in node.get("Plans", ()) if "Index Name" in part), None
            )
            found.setdefault(node["Relation Name"], set()).add((node["Node Type"], index))
    return found


def test_each_access_goes_through_its_index(postgres_url: str) -> None:
    filled(postgres_url)
    key, message = b"77", b"m77"
    by_message = {("Index Scan", "records_of_message"), ("Bitmap Heap Scan", "records_of_message")}
    claim = scans(postgres_url, statements._READ, (1, place(key), key))
    assert claim["records"] <= by_message
    assert claim["records"]
    listed = scans(
        postgres_url,
        "SELECT key, message, target, body FROM {decisions} WHERE n > %b AND job = %b ORDER BY n",
        (40, 1),
    )
    assert listed["decisions"] <= {("Index Scan", "decisions_pkey"), ("Seq Scan", None)}  # one page
    streamed = scans(postgres_url, "SELECT key, body FROM {records} WHERE job = %b ORDER BY n LIMIT 100", (1,))
    assert streamed["records"] == {("Index Scan", "records_pkey")}
    for many in (1, 100):
        numbers = range(many)
        keys, messages = [b"%d" % number for number in numbers], [b"m%d" % number for number in numbers]
        covered = [[place(each) for each in keys], [place(each) for each in messages], keys, messages]
        values = (1, 0, 1, 99, *covered, 1, 1, 5, 1, 5, 99, 1, 0, 1)
        pruned = scans(postgres_url, statements._PRUNE, values)
        assert pruned["records"] <= by_message
        assert pruned["records"]
    assert message


def test_there_is_no_index_that_no_access_uses(postgres_url: str) -> None:
    filled(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT indexname FROM pg_indexes WHERE schemaname = 'dalsegno'").fetchall()
    assert sorted(name for (name,) in found) == [
        "decisions_job_key_hash_message_hash_target_digest_key",
        "decisions_pkey",
        "jobs_name_digest_key",
        "jobs_pkey",
        "migrations_pkey",
        "records_of_message",
        "records_pkey",
        "workers_pkey",
    ]


CHECKPOINTS, MESSAGES = 50, 400


def test_fifty_checkpoints_leave_a_table_of_few(postgres_url: str) -> None:
    """VACUUM stands for autovacuum, whose turn no test can wait for; that it takes one is the next test."""
    sizes: list[int] = []

    @in_loop
    async def run() -> None:
        store = PostgresStore(postgres_url)
        await store.open("job", "owner")
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as vacuum:
            for checkpoint in range(1, CHECKPOINTS + 1):
                names = [(b"%d" % (n % 20), f"{checkpoint}-{n}") for n in range(MESSAGES)]
                await store.put([step(key, name, part, result="x" * 3000) for key, name in names for part in range(2)])
                await store.prune(Covered(checkpoint, names))
                await vacuum.execute("VACUUM dalsegno.records")
                size = await vacuum.execute("SELECT pg_total_relation_size('dalsegno.records')")
                sizes.extend(row[0] for row in await size.fetchall())
        await store.close()

    run()
    assert len(sizes) == CHECKPOINTS
    assert max(sizes[5:]) <= 3 * max(sizes[:5]), f"it grows: {sizes}"


def test_what_one_checkpoint_prunes_is_enough_for_autovacuum(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        @in_loop
        async def run() -> None:
            store = PostgresStore(postgres_url)
            await store.open("job", "owner")
            await store.close()

        run()
        ((options, toast),) = connection.execute(
            "SELECT c.reloptions, t.reloptions FROM pg_class AS c JOIN pg_class AS t ON t.oid = c.reltoastrelid"
            " WHERE c.oid = 'dalsegno.records'::regclass"
        ).fetchall()
    for found in (options, toast):
        settings = dict(option.split("=") for option in found)
        # A checkpoint is due after a thousand messages, and each of them has a record at least.
        assert float(settings["autovacuum_vacuum_threshold"]) <= 1000
        assert float(settings["autovacuum_vacuum_scale_factor"]) <= 0.02
