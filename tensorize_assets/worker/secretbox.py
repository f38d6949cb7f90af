"""libsodium's secretbox (XSalsa20-Poly1305) over large chunks, from several threads at once."""

from __future__ import annotations

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


def following(nonce: bytes, count: int) -> bytes:
    """Return the nonce of the chunk `count` after the one that has `nonce`.

    tensorizer stores the first and counts on, as libsodium's `sodium_increment` does.
    """
    number = int.from_bytes(nonce, "little") + count
    return (number % (1 << 8 * NONCE_BYTES)).to_bytes(NONCE_BYTES, "little")
