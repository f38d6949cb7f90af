"""libsodium's secretbox (XSalsa20-Poly1305) over large chunks, from several threads at once."""

from __future__ import annotations

import hashlib

from nacl import bindings

# PyNaCl's own `crypto_secretbox_easy` clears and copies each chunk with the interpreter lock held:
# half the rate on one core, and no gain from a second. Importing `bindings` initialises libsodium,
# without which it would not pick the code of this processor.
from nacl._sodium import ffi, lib

KEY_BYTES: int = bindings.crypto_secretbox_KEYBYTES
NONCE_BYTES: int = bindings.crypto_secretbox_NONCEBYTES
MAC_BYTES: int = bindings.crypto_secretbox_MACBYTES

Bytes = bytes | bytearray | memoryview


def seal(message: Bytes, nonce: bytes, key: Bytes, room: bytearray) -> None:
    """Put the MAC of `message` and, after it, its ciphertext, which is as long, into `room`.

    Lets go of the interpreter lock. The lengths of `nonce` and `key` are the caller's to check.
    """
    with (
        ffi.from_buffer("unsigned char[]", room, require_writable=True) as out,
        ffi.from_buffer("unsigned char[]", message) as plain,
        ffi.from_buffer("unsigned char[]", key) as secret,
    ):
        # libsodium writes wherever it is told to.
        if len(room) < MAC_BYTES + len(plain):
            raise ValueError(f"{len(plain)} bytes do not fit, encrypted, into {len(room)}")
        if lib.crypto_secretbox_easy(out, plain, len(plain), nonce, secret):
            raise RuntimeError("libsodium did not encrypt")


def open_in_place(room: bytearray, size: int, nonce: bytes, key: Bytes) -> bool:
    """Decrypt the `size` bytes that follow their MAC in `room`; False when the MAC is not theirs.

    Then they stay as they are. Lets go of the interpreter lock, as `seal` does.
    """
    with (
        ffi.from_buffer("unsigned char[]", room, require_writable=True) as sealed,
        ffi.from_buffer("unsigned char[]", key) as secret,
    ):
        if len(room) < MAC_BYTES + size:
            raise ValueError(f"{size} bytes and their MAC are not in {len(room)}")
        plain = sealed + MAC_BYTES
        return lib.crypto_secretbox_open_easy(plain, sealed, MAC_BYTES + size, nonce, secret) == 0


def synthetic_nonce(content: bytes, key: Bytes) -> bytes:
    """Return the first nonce of a tensor: of its content's hash, and unknown without the key.

    One content under one key has one nonce, so that encrypting a build again gives the same bytes;
    two contents do not share one, of which both would be given away.
    """
    return hashlib.blake2b(
        content, digest_size=NONCE_BYTES, key=bytes(key), person=b"tensorizer nonce"
    ).digest()


def following(nonce: bytes, count: int) -> bytes:
    """Return the nonce of the chunk `count` after the one that has `nonce`.

    tensorizer stores the first and counts on, as libsodium's `sodium_increment` does.
    """
    number = int.from_bytes(nonce, "little") + count
    return (number % (1 << 8 * NONCE_BYTES)).to_bytes(NONCE_BYTES, "little")
