"""Authenticated messages between the tests' run and their judge: each carries a number and a keyed digest (BLAKE2b).

The tests' run shares its interpreter with the program, which may have replaced any function of Python's: only functions that were
taken hold of before the program was loaded, and that are written in C, are called here. Standard library only.
"""

from __future__ import annotations

import socket
import struct
from hashlib import blake2b
from json import decoder, encoder
from typing import Any

from covey.rewards.sandbox.wire import LARGEST, Broken

_DIGEST = 16
_size = struct.Struct("!Q")


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value)} is no message")


_text = encoder.c_make_encoder(  # type: ignore[attr-defined]  # json.dumps looks its parts up each time
    None, _refuse, encoder.encode_basestring_ascii, None, ":", ",", False, False, True
)
_value = decoder.JSONDecoder().scan_once  # type: ignore[attr-defined]


class Channel:
    """One end of a connection. `key` is known to both ends before a program is loaded."""

    def __init__(self, connection: socket.socket, key: bytes, name: bytes, other: bytes) -> None:
        self._receive, self._send = connection.recv, connection.sendall
        self._key, self._names, self._counts = key, (name, other), [0, 0]

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Raises Broken when the other end is closed, or the message is too long."""
        body = "".join(_text(message, 0)).encode()
        if len(body) > LARGEST:
            raise Broken(f"a message of {len(body)} bytes")
        digest = self._digest(0, body)
        try:
            self._send(_size.pack(len(body)) + digest + body)
        except OSError as error:
            raise Broken("nobody listens") from error

    def receive(self) -> dict[str, Any]:
        """Receive the next message. Raises Broken at the end of the stream, and for a forged message."""
        size = _size.unpack(self._read(_size.size))[0]
        if size > LARGEST:
            raise Broken(f"a message of {size} bytes")
        digest, body = self._read(_DIGEST), self._read(size)
        if digest != self._digest(1, body):
            raise Broken("a message that the other end did not write")
        return _value(body.decode(), 0)[0]

    def _digest(self, side: int, body: bytes) -> bytes:
        number = self._counts[side]
        self._counts[side] += 1
        return blake2b(_size.pack(number) + body, key=self._key, digest_size=_DIGEST, person=self._names[side]).digest()

    def _read(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            try:
                part = self._receive(min(size - len(parts), 2**20))
            except OSError as error:
                raise Broken("the connection is closed") from error
            if not part:
                raise Broken("it closed the connection")
            parts += part
        return parts


def ends(connection: socket.socket, key: bytes, *, judge: bool) -> Channel:
    """This process's end: the judge's, or that of the tests' run."""
    names = (b"judge", b"run") if judge else (b"run", b"judge")
    return Channel(connection, key, *names)
