"""Ciphers: what is sealed opens in its place and nowhere else; each way to get a key wrong is an error that helps."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno import AesGcmCipher, DefinitionError, PayloadCipher, RecordError, StoreError
from dalsegno.cipher import SEALED, is_sealed, parse_keys, place, seal, unseal

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
PLACE = place("job", b"1")


def base64_of(key: bytes) -> str:
    return base64.b64encode(key).decode()


@pytest.fixture
def cipher() -> AesGcmCipher:
    return AesGcmCipher(KEY)


# --- sealing and opening --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 24, 32])
@pytest.mark.parametrize("plain", [b"", b"\0", b"{}", SEALED, os.urandom(70_000), b"x" * 20_000_000], ids=len)
def test_what_was_sealed_opens(length: int, plain: bytes) -> None:
    cipher = AesGcmCipher(os.urandom(length))
    assert unseal(cipher, seal(cipher, plain, PLACE), PLACE, "it") == plain


def test_a_sealed_payload_is_recognised_and_shows_nothing(cipher: AesGcmCipher) -> None:
    sealed = seal(cipher, b"the text", PLACE)
    assert is_sealed(sealed)
    assert b"text" not in sealed
    assert not any(map(is_sealed, (b"", b"{}", b'"\x89DSE"', "\x89DSE", None, 1)))
    with pytest.raises(UnicodeDecodeError):
        sealed[:1].decode()


def test_each_payload_has_a_nonce_of_its_own(cipher: AesGcmCipher) -> None:
    header = len(SEALED) + 1 + 2
    nonces = {seal(cipher, b"same", PLACE)[header : header + 12] for _ in range(2000)}
    assert len(nonces) == 2000


def test_it_is_aes_gcm_as_published() -> None:
    """Whoever has the key can open a payload with any other implementation of AES-GCM."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    sealed = AesGcmCipher({"2026": KEY}).encrypt(b"the text", b"place")
    assert sealed[:5] == b"\x042026"
    nonce, text, tag = sealed[5:17], sealed[17:-16], sealed[-16:]
    decryptor = Cipher(algorithms.AES(KEY), modes.GCM(nonce, tag)).decryptor()
    decryptor.authenticate_additional_data(b"place")
    assert decryptor.update(text) + decryptor.finalize() == b"the text"


def test_any_changed_byte_and_any_cut_is_refused(cipher: AesGcmCipher) -> None:
    sealed = seal(cipher, b"text", PLACE)
    for n in range(len(sealed)):
        changed = sealed[:n] + bytes([sealed[n] ^ 1]) + sealed[n + 1 :]
        with pytest.raises(RecordError, match=r"^the record"):
            unseal(cipher, changed, PLACE, "the record")
        with pytest.raises(RecordError, match=r"^the record"):
            unseal(cipher, sealed[:n], PLACE, "the record")
    for longer in (sealed + b"\0", sealed + sealed):
        with pytest.raises(RecordError, match="the record cannot be decrypted"):
            unseal(cipher, longer, PLACE, "the record")


def test_another_place_is_refused(cipher: AesGcmCipher) -> None:
    sealed = seal(cipher, b"text", place("job", b"1", "m"))
    for other in (place("job", b"1", "n"), place("job", b"1m", ""), place("job", b"1", "m", ""), b""):
        with pytest.raises(RecordError, match=r"the key '1' does not fit.*moved here"):
            unseal(cipher, sealed, other, "it")


_parts = st.lists(st.binary(max_size=3) | st.text("a\0\ud800é", max_size=3), max_size=4)


def _bytes(part: str | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.encode(errors="surrogatepass")


@given(_parts, _parts)
def test_places_of_different_parts_differ(one: list[str | bytes], other: list[str | bytes]) -> None:
    assert (place(*one) == place(*other)) is ([*map(_bytes, one)] == [*map(_bytes, other)])


@pytest.mark.parametrize("payload", [b"", b'{"v":1}', "text", None, 3, SEALED[:-1]])
def test_a_plain_payload_is_refused(cipher: AesGcmCipher, payload: Any) -> None:
    with pytest.raises(RecordError, match="it is not encrypted, but this job is run with a cipher"):
        unseal(cipher, payload, PLACE, "it")


def test_a_newer_format_is_refused(cipher: AesGcmCipher) -> None:
    with pytest.raises(RecordError, match=r"encrypted in format 2.*install"):
        unseal(cipher, SEALED + b"\x02abc", PLACE, "it")


class Broken(PayloadCipher):
    def encrypt(self, plain: bytes, bound_to: bytes) -> bytes:
        raise ConnectionError("the key service is down")

    def decrypt(self, sealed: bytes, bound_to: bytes) -> bytes:
        raise KeyError


def test_what_a_cipher_raises_becomes_an_error_that_says_where() -> None:
    with pytest.raises(StoreError, match=r"4 bytes cannot be encrypted.*the key service is down"):
        seal(Broken(), b"text", PLACE)
    with pytest.raises(RecordError, match="the record cannot be decrypted: the cipher raised KeyError"):
        unseal(Broken(), SEALED + b"\x01", PLACE, "the record")


# --- keys and their rotation ----------------------------------------------------------------------------------------


def test_the_last_key_encrypts_and_all_decrypt() -> None:
    old, both = AesGcmCipher(KEY), AesGcmCipher({"1": KEY, "2": OTHER_KEY})
    assert both.decrypt(old.encrypt(b"a", PLACE), PLACE) == b"a"
    newer = both.encrypt(b"b", PLACE)
    assert newer[:2] == b"\x012"
    assert AesGcmCipher({"2": OTHER_KEY}).decrypt(newer, PLACE) == b"b"
    with pytest.raises(ValueError, match="encrypted with the key '2', and the cipher has '1'"):
        old.decrypt(newer, PLACE)


def test_another_key_under_the_same_id_is_refused(cipher: AesGcmCipher) -> None:
    with pytest.raises(ValueError, match="the key '1' does not fit"):
        AesGcmCipher(OTHER_KEY).decrypt(cipher.encrypt(b"a", PLACE), PLACE)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (b"", "the key '1' has 0 bytes; AES takes 16, 24 or 32"),
        (b"x" * 31, "has 31 bytes"),
        ("x" * 32, "type str: a key is bytes"),
        (None, "type NoneType"),
        ({}, "at least one key"),
        ({"": KEY}, "the id of a key"),
        ({"x" * 256: KEY}, "the id of a key"),
        ({"\ud800": KEY}, "the id of a key"),
        ({"a\nb": KEY}, "the id of a key"),
        ({KEY: "1"}, "the id of a key"),
        ({"a": KEY, "b": b"x"}, "the key 'b' has 1 bytes"),
    ],
)
def test_a_wrong_key_is_refused_and_not_shown(keys: Any, match: str) -> None:
    with pytest.raises(DefinitionError, match=match) as refused:
        AesGcmCipher(keys)
    assert "xxx" not in str(refused.value)
    assert repr(KEY)[2:-1] not in str(refused.value)


def test_a_long_id_is_kept() -> None:
    cipher = AesGcmCipher({"é" * 127: KEY})
    assert cipher.decrypt(cipher.encrypt(b"a", PLACE), PLACE) == b"a"


def test_a_cipher_does_not_show_its_keys() -> None:
    cipher = AesGcmCipher({"2025": KEY, "2026": OTHER_KEY})
    assert repr(cipher) == "<AesGcmCipher with the keys '2025', '2026'>"
    assert KEY not in vars(cipher).values()


def test_keys_are_read_from_text() -> None:
    urlsafe = base64.urlsafe_b64encode(b"\xff" * 32).decode()
    one, two = base64_of(KEY), base64_of(OTHER_KEY)
    assert parse_keys(one, "x") == {"1": KEY}
    assert parse_keys(f" \n{one}\n\n", "x") == {"1": KEY}
    assert parse_keys(f"old:{one},new: {two}", "x") == {"old": KEY, "new": OTHER_KEY}
    assert list(parse_keys(f"# yearly\r\n2025:{one}\r\n2026:{two}\r\n# a, b\r\n", "x")) == ["2025", "2026"]
    assert parse_keys(f"a:b:{urlsafe}", "x") == {"a:b": b"\xff" * 32}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "the place is empty; .*openssl rand"),
        ("# only a comment", "the place is empty"),
        ("my secret key", "the place, key 1 is not base64"),
        ("c2hvcnQ", "is not base64"),
        ("c2hvcnQ=", "is a key of 5 bytes; AES takes 16, 24 or 32"),
        (KEY.hex(), "is a key of 48 bytes"),
        (f"{base64_of(KEY)},{base64_of(OTHER_KEY)}", "two keys with the id '1'"),
        (f"a:{base64_of(KEY)},b:x", "the place, key 2 is not base64"),
        ("schlüssel", "is not base64"),
    ],
)
def test_wrong_text_is_refused_and_not_shown(text: str, match: str) -> None:
    with pytest.raises(DefinitionError, match=match) as refused:
        parse_keys(text, "the place")
    assert not text or text not in str(refused.value)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, cipher: AesGcmCipher) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(DefinitionError, match=r"variable 'SOME_KEY' is not set.*base64"):
        AesGcmCipher.from_environment("SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "short")
    with pytest.raises(DefinitionError, match="the environment variable 'SOME_KEY', key 1"):
        AesGcmCipher.from_environment("SOME_KEY")
    monkeypatch.setenv("SOME_KEY", base64_of(KEY))
    assert AesGcmCipher.from_environment("SOME_KEY").decrypt(cipher.encrypt(b"a", b""), b"") == b"a"


def test_keys_come_from_a_file(tmp_path: Path, cipher: AesGcmCipher) -> None:
    path = tmp_path / "keys"
    for wrong, match in ((None, "cannot be read"), (b"\xff\xfe", "not text in UTF-8"), (b"short", "keys', key 1")):
        if wrong is not None:
            path.write_bytes(wrong)
        with pytest.raises(DefinitionError, match=match):
            AesGcmCipher.from_file(path)
    with pytest.raises(DefinitionError, match="cannot be read"):
        AesGcmCipher.from_file(tmp_path)
    path.write_text(f"{base64_of(KEY)}\n")
    assert AesGcmCipher.from_file(str(path)).decrypt(cipher.encrypt(b"a", b""), b"") == b"a"


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(DefinitionError, match=r"pip install 'dalsegno\[cipher\]'"):
        AesGcmCipher(KEY)


def test_nothing_of_the_package_is_imported_before_it_is_needed() -> None:
    code = "import dalsegno, sys; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_order_of_keys_is_that_in_which_they_were_given() -> None:
    for first, last in pairwise(("b", "a", "c")):
        assert AesGcmCipher({first: KEY, last: OTHER_KEY}).encrypt(b"", b"")[1:2] == last.encode()
