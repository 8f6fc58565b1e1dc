"""The Kafka store while brokers fail, answer late, or refuse: real brokers, and a proxy that loses requests."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from dalsegno.errors import StoreError
from dalsegno.stores.base import Covered
from dalsegno.stores.kafka import KafkaStore
from dalsegno.testing.stores import in_loop, states, step
from tests.kafka_helpers import Place
from tests.kafka_proxy import END_TRANSACTION, ProxiedKafka
from tests.services.kafka import Kafka

QUICK = "partitions=2&timeout=4&transaction_timeout=4"


@pytest.fixture(scope="module")
def proxied() -> Iterator[ProxiedKafka]:
    kafka = ProxiedKafka(settings={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"})
    try:
        yield kafka.launch()
    finally:
        kafka.proxy.close()
        kafka.close()


pytestmark = [pytest.mark.services, pytest.mark.slow]


def store_of(kafka: ProxiedKafka, prefix: str) -> KafkaStore:
    return KafkaStore(f"kafka://{kafka.proxy.url}/{prefix}?{QUICK}")


def lose(kafka: ProxiedKafka, what: str, times: int) -> None:
    """Lose the next *times* requests that end a transaction, or their answers."""
    left = [times]

    def loses(api: int) -> str:
        if api != END_TRANSACTION or left[0] == 0:
            return ""
        left[0] -= 1
        return what

    kafka.proxy.lost.clear()
    kafka.proxy.loses = loses


@pytest.mark.parametrize("what", ["request", "answer"])
def test_a_connection_that_is_lost_around_a_commit_changes_nothing(proxied: ProxiedKafka, what: str) -> None:
    put = [step(b"1", f"m{n}") for n in range(4)]

    @in_loop
    async def test() -> None:
        store = store_of(proxied, f"once-{what}")
        await store.open("job", "the test")
        await store.put(put[:1])
        for record in put[1:]:
            lose(proxied, what, 1)
            await store.put([record])
            assert proxied.proxy.lost == [what]
        await store.close()
        store = store_of(proxied, f"once-{what}")
        await store.open("job", "the test")
        assert await store.claim(b"1") == states(put, b"1")
        await store.close()

    test()


@pytest.mark.parametrize("what", ["request", "answer"])
def test_a_commit_that_gets_no_answer_for_good_is_found_out(proxied: ProxiedKafka, what: str) -> None:
    put = [step(b"1", "m"), step(b"1", "n")]

    @in_loop
    async def test() -> None:
        store = store_of(proxied, f"never-{what}")
        await store.open("job", "the test")
        await store.put(put[:1])
        lose(proxied, what, 10_000)
        try:
            if what == "answer":
                await store.put(put[1:])  # it took place, and that is found out
            else:
                with pytest.raises(StoreError, match="nothing of it was written"):
                    await store.put(put[1:])
            assert len(proxied.proxy.lost) >= 1
            # Its client is of no use any more, and says so.
            with pytest.raises(StoreError):
                await store.put([step(b"1", "later")])
        finally:
            proxied.proxy.loses = lambda api: ""
        await store.close()
        store = store_of(proxied, f"never-{what}")
        await store.open("job", "the test")
        assert await store.claim(b"1") == states(put if what == "answer" else put[:1], b"1")
        await store.close()

    test()


def test_a_slow_broker_is_waited_for(proxied: ProxiedKafka) -> None:
    @in_loop
    async def test() -> None:
        store = store_of(proxied, "slow")
        await store.open("job", "the test")
        await store.put([step(b"1", "m")])
        assert await store.keys() == [b"1"]
        assert (await store.prune(Covered(1, [(b"1", "m")]))).records == 1
        await store.close()

    proxied.proxy.delay = 0.15
    try:
        test()
    finally:
        proxied.proxy.delay = 0.0


def test_a_broker_that_is_killed_and_started_in_the_middle_loses_nothing(private_kafka: Callable[..., Kafka]) -> None:
    kafka = private_kafka()
    place = Place(kafka, "agents")

    @in_loop
    async def test() -> None:
        acknowledged = []
        async with place.opened(options="partitions=2&timeout=60") as store:
            await store.put([step(b"1", "first")])
            acknowledged.append("first")

            async def again() -> None:
                await asyncio.sleep(0.2)
                await asyncio.to_thread(kafka.kill)
                await asyncio.to_thread(kafka.start)

            restarting = asyncio.create_task(again())
            number = 0
            while not restarting.done():
                number += 1
                await store.put([step(b"%d" % key, f"m{number}", result="x" * 20_000) for key in (1, 2, 3)])
                acknowledged.append(f"m{number}")
            await restarting
            await store.put([step(b"1", "last")])
            acknowledged.append("last")
            assert await store.list(b"1") == await store.claim(b"1")
        async with place.opened(options="partitions=2&timeout=60") as store:
            assert [state.message for state in await store.claim(b"1")] == acknowledged

    test()


def test_a_broker_that_is_not_there_is_an_error_in_bounded_time() -> None:
    @in_loop
    async def test() -> None:
        begun = time.monotonic()
        with pytest.raises(StoreError, match="no broker can be reached"):
            await KafkaStore("kafka://127.0.0.1:9/agents?timeout=2").open("job", "the test")
        assert time.monotonic() - begun < 60
        with pytest.raises(StoreError, match="no broker can be reached"):
            KafkaStore("kafka://127.0.0.1:9/agents?timeout=2").inspect()

    test()


def test_scram_and_wrong_credentials(private_kafka: Callable[..., Kafka], tmp_path: Path) -> None:
    kafka = private_kafka(security="SASL_PLAINTEXT", scram_users={"ann": "right=?&"})
    settings = tmp_path / "client.properties"
    settings.write_text("sasl.password=right=?&\n")
    url = (
        f"kafka://{kafka.url}/agents?partitions=2&security.protocol=SASL_PLAINTEXT&sasl.mechanism=SCRAM-SHA-256"
        "&sasl.username=ann"
    )

    @in_loop
    async def test() -> None:
        store = KafkaStore(f"{url}&settings={settings}")
        await store.open("job", "the test")
        await store.put([step(b"1", "m")])
        with store.inspect() as outside:
            assert len(list(outside.records("job"))) == 1
        await store.close()
        for password in ("wrong-one", "right%3D%3F"):
            with pytest.raises(StoreError, match=r"Authentication failed.*check the security settings") as refused:
                await KafkaStore(f"{url}&sasl.password={password}&timeout=30").open("job", "the test")
            assert password not in str(refused.value)

    test()


def test_tls_and_a_certificate_that_is_not_trusted(private_kafka: Callable[..., Kafka], tmp_path: Path) -> None:
    certificate, key = _certificate()
    kafka = private_kafka(
        security="SSL",
        settings={"ssl.keystore.type": "PEM", "ssl.keystore.location": "{folder}/server.pem"},
        files={"server.pem": key + certificate},
        client={"ssl.ca.pem": certificate.decode()},
    )
    good, bad = tmp_path / "good.pem", tmp_path / "bad.pem"
    good.write_bytes(certificate)
    bad.write_bytes(_certificate()[0])
    url = f"kafka://{kafka.url}/agents?partitions=2&security.protocol=SSL"

    @in_loop
    async def test() -> None:
        store = KafkaStore(f"{url}&ssl.ca.location={good}")
        await store.open("job", "the test")
        await store.put([step(b"1", "m")])
        await store.close()
        with pytest.raises(StoreError, match="check the security settings"):
            await KafkaStore(f"{url}&ssl.ca.location={bad}").open("job", "the test")
        with pytest.raises(StoreError, match="make a client with these settings"):
            await KafkaStore(f"{url}&ssl.ca.location=/nowhere/at.all").open("job", "the test")

    test()


def _certificate() -> tuple[bytes, bytes]:
    """A certificate for loopback that signs itself, and its key, as PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
