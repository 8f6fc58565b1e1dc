"""Encryption of payloads: what a cipher is, and how a sealed payload looks.

A *payload* is what a job keeps of values: the body of a record, and in the checkpoint file memory, messages, positions
and reasons. With a `PayloadCipher` each one lies in the files as ::

    89 44 53 45   01        …
    magic         version   what the cipher made

which is neither JSON nor text, so a sealed payload is never taken for a plain one, nor the other way round. Each is
*bound to* its place (job, store, key, message, action task; or table, column and row) as associated data: copied to
another place it cannot be opened. Nothing here knows an algorithm but `AesGcmCipher`, which calls the `cryptography`
package.
"""

from __future__ import annotations

import base64
import binascii
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DefinitionError, RecordError, StoreError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SEALED = b"\x89DSE"
"""How every sealed payload begins. The first byte begins neither JSON nor UTF-8."""
SEAL_VERSION = 1
_PREFIX = SEALED + bytes([SEAL_VERSION])

SINGLE_KEY_ID = "1"
_NONCE_BYTES = 12
_TAG_BYTES = 16
_KEY_BYTES = (16, 24, 32)
_LONGEST_KEY_ID = 255


class PayloadCipher(ABC):
    """Encrypts payloads with authentication (AEAD). Its methods are called from several threads at the same time."""

    @abstractmethod
    def encrypt(self, plain: bytes, bound_to: bytes) -> bytes:
        """*plain*, of any length, as bytes that `decrypt` opens for the same *bound_to* and for no other.

        Twice the same payload must not give the same bytes. Whatever it raises, nothing of the payload is written, and
        the run ends with a `StoreError`.
        """

    @abstractmethod
    def decrypt(self, sealed: bytes, bound_to: bytes) -> bytes:
        """What `encrypt` was given for *bound_to*.

        Raises an exception that says why and what to do if *sealed* was made with another key or for another place, or
        is not exactly what `encrypt` gave. Callers make it a `RecordError` that says where.
        """


def place(*parts: str | bytes) -> bytes:
    """What a payload is bound to, as bytes: two lists of parts of the same length that differ give different bytes."""
    encoded = [part if isinstance(part, bytes) else part.encode(errors="surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(8) + part for part in encoded)


def is_sealed(payload: object) -> bool:
    """Whether *payload* begins as a sealed one does."""
    return isinstance(payload, bytes) and payload.startswith(SEALED)


def seal(cipher: PayloadCipher, plain: bytes, bound_to: bytes) -> bytes:
    """The sealed payload of *plain*; raises `StoreError` if the cipher cannot make it."""
    try:
        return _PREFIX + cipher.encrypt(plain, bound_to)
    except Exception as error:
        raise StoreError(
            f"a payload of {len(plain):,} bytes cannot be encrypted, so it was not written ({type(error).__name__}: "
            f"{error}); see to the cipher {cipher!r} and start again"
        ) from error


def unseal(cipher: PayloadCipher, payload: object, bound_to: bytes, where: str) -> bytes:
    """The plain payload; *where* names it in the `RecordError` for one that cannot be opened."""
    if not (isinstance(payload, bytes) and payload.startswith(SEALED)):
        raise RecordError(
            f"{where} is not encrypted, but this job is run with a cipher: it was written without one, or did not come "
            "from this job. Run the job as it was begun, without the cipher, or give a job with the cipher a new name"
        )
    version = payload[len(SEALED)] if len(payload) > len(SEALED) else 0
    if version > SEAL_VERSION:
        raise RecordError(
            f"{where} is encrypted in format {version}; this version of dalsegno reads up to {SEAL_VERSION}: install "
            "the version that wrote it, or a newer one"
        )
    if version < 1:
        raise RecordError(f"{where} is damaged: it is cut, or in a format that no release has written; put a copy back")
    try:
        return cipher.decrypt(payload[len(_PREFIX) :], bound_to)
    except Exception as error:
        reason = str(error) or f"the cipher raised {type(error).__name__}"
        raise RecordError(f"{where} cannot be decrypted: {reason}") from error


def needs_cipher(where: str) -> RecordError:
    """The error for a sealed payload that is met without a cipher."""
    return RecordError(
        f"{where} is encrypted, but this job is run without a cipher: give the one that it was begun with, with "
        "cipher= in Python or --cipher on the command line"
    )


class AesGcmCipher(PayloadCipher):
    """AES in Galois/Counter Mode (NIST SP 800-38D), with a fresh random nonce of 96 bits for each payload.

    *keys* is one key of 16, 24 or 32 bytes, or several by their ids: the last one encrypts, all of them decrypt. Each
    payload names the id of its key in clear. A single key has the id ``"1"``. One key may encrypt up to 2**32 payloads
    (section 8.3 there); add a new one before that.

    Needs the package `cryptography`: ``pip install 'dalsegno[cipher]'``. Raises `DefinitionError` for a wrong key.
    """

    def __init__(self, keys: bytes | Mapping[str, bytes]) -> None:
        by_id = keys if isinstance(keys, Mapping) else {SINGLE_KEY_ID: keys}
        if not by_id:
            raise DefinitionError("AesGcmCipher needs at least one key")
        make = _aes_gcm()
        self._keys = {_checked_id(key_id): make(_checked_key(key_id, key)) for key_id, key in by_id.items()}
        self._newest = list(self._keys)[-1]
        encoded = self._newest.encode()
        self._header = bytes([len(encoded)]) + encoded

    @classmethod
    def from_environment(cls, variable: str) -> AesGcmCipher:
        """With the keys in the environment variable *variable*, as `parse_keys` reads them."""
        text = os.environ.get(variable)
        if text is None:
            raise DefinitionError(f"the environment variable {variable!r} is not set; {_FORM}")
        return cls(parse_keys(text, f"the environment variable {variable!r}"))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> AesGcmCipher:
        """With the keys in the file *path*, as `parse_keys` reads them."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise DefinitionError(f"the key file {os.fspath(path)!r} cannot be read ({reason}); {_FORM}") from None
        return cls(parse_keys(text, f"the key file {os.fspath(path)!r}"))

    def encrypt(self, plain: bytes, bound_to: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return self._header + nonce + self._keys[self._newest].encrypt(nonce, plain, bound_to)

    def decrypt(self, sealed: bytes, bound_to: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        start = 1 + (sealed[0] if sealed else 0)
        if len(sealed) < start + _NONCE_BYTES + _TAG_BYTES:
            raise ValueError("it is too short for what AesGcmCipher makes: it was cut, or made by another cipher")
        key_id = sealed[1:start].decode(errors="replace")
        if key_id not in self._keys:
            raise ValueError(
                f"it was encrypted with the key {key_id!r}, and the cipher has {self._ids()}: give it that key too"
            )
        nonce, rest = sealed[start : start + _NONCE_BYTES], sealed[start + _NONCE_BYTES :]
        try:
            return self._keys[key_id].decrypt(nonce, rest, bound_to)
        except InvalidTag:
            raise ValueError(
                f"the key {key_id!r} does not fit. Either it is not the key that this job was begun with under that "
                "id: give the right one; or the payload was changed, or moved here from another place: put a copy back"
            ) from None

    def __repr__(self) -> str:
        return f"<AesGcmCipher with the keys {self._ids()}>"

    def _ids(self) -> str:
        return ", ".join(map(repr, self._keys))


_FORM = "it holds a key of 16, 24 or 32 bytes in base64, as `openssl rand -base64 32` makes one"


def parse_keys(text: str, where: str) -> dict[str, bytes]:
    """Keys by id, oldest first, from *text*: ``BASE64`` for a single one, else ``ID:BASE64``, by line or comma.

    Blank lines and lines that start with ``#`` are left out. Raises `DefinitionError` that names *where*, and never
    shows a key.
    """
    lines = [line.strip() for line in text.splitlines()]
    entries = [part.strip() for line in lines if not line.startswith("#") for part in line.split(",")]
    keys: dict[str, bytes] = {}
    for number, entry in enumerate(filter(None, entries), 1):
        key_id, colon, encoded = entry.rpartition(":")
        key_id = key_id.strip() if colon else SINGLE_KEY_ID
        key = _decoded(encoded.strip(), f"{where}, key {number}")
        if key_id in keys:
            raise DefinitionError(
                f"{where} has two keys with the id {key_id!r}: write ID:KEY, each with an id of its own"
            )
        keys[key_id] = key
    if not keys:
        raise DefinitionError(f"{where} is empty; {_FORM}")
    return keys


def _decoded(encoded: str, where: str) -> bytes:
    try:
        key = base64.b64decode(encoded.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        raise DefinitionError(f"{where} is not base64; {_FORM}") from None
    if len(key) not in _KEY_BYTES:
        raise DefinitionError(f"{where} is a key of {len(key)} bytes; AES takes 16, 24 or 32: {_FORM}")
    return key


def _checked_id(key_id: object) -> str:
    # Not shown: it may be the key itself, given in the wrong place.
    if not (isinstance(key_id, str) and key_id.isprintable() and 0 < len(key_id.encode()) <= _LONGEST_KEY_ID):
        raise DefinitionError(
            f"the id of a key is printable text of 1 to {_LONGEST_KEY_ID} bytes; AesGcmCipher got another"
        )
    return key_id


def _checked_key(key_id: str, key: object) -> bytes:
    if not isinstance(key, bytes):
        raise DefinitionError(
            f"the key {key_id!r} is of the type {type(key).__name__}: a key is bytes; decode it, or use "
            "AesGcmCipher.from_environment or from_file, which read base64"
        )
    if len(key) not in _KEY_BYTES:
        raise DefinitionError(f"the key {key_id!r} has {len(key)} bytes; AES takes 16, 24 or 32")
    return key


def _aes_gcm() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise DefinitionError(
            "AesGcmCipher needs the package 'cryptography': pip install 'dalsegno[cipher]'"
        ) from error
    return AESGCM
