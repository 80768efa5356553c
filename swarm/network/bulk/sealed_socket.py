"""A plain TCP connection that only its two ends can read: records under AES-256-GCM.

    record:  u32 length of what follows | ciphertext, at most 544 KiB | tag, 16 bytes

Each direction has a key of its own and numbers its records from 0; the number is the nonce. A record that was changed,
dropped, repeated or moved does not open, and ends the stream. The end of a stream needs no mark: calls say their
lengths first. Encryption is the processor's own (0.1 CPU seconds a GB each way), into buffers that are used again.
"""

import contextlib
import math
import socket
import struct
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarm.network.bulk.downlink import DOWNLINK, Came, came_of, set_window
from swarm.network.bulk.uplink import LEAST_BYTES, UPLINK, Tcp, set_pace, tcp_of

SECRET_BYTES = 32
NONCE_BYTES = 32
RECORD_BYTES = 544 << 10
"""Two hold a part of 2^20 values in int8, and both ends' buffers fit into a core's own cache."""
_JOINED_BYTES = 16 << 10
"""Small buffers travel in one record, a head with a small body say; large ones begin a record of their own, and are
opened where they belong."""
_HEAD = struct.Struct(">I")
_TAG_BYTES = 16
_MOST_RECORDS = 1 << 32
_KEPT_BUFFERS = 16
_free_buffers: list[bytearray] = []
"""Only streams in the middle of a record hold one. For the one event loop that uses sealed sockets."""


class SealedSocket:
    """What `swarm.network.bulk.sockets` needs of a non-blocking stream socket, sealed. Owns the connection."""

    def __init__(self, connection: socket.socket, *, send_key: bytes, receive_key: bytes) -> None:
        self._connection = connection
        self._sealing, self._opening = AESGCM(send_key), AESGCM(receive_key)
        self._num_sealed = self._num_opened = 0
        self._outgoing: bytearray | None = None
        self._unsent = memoryview(b"")
        self._unsent_plain = 0
        self._pace = math.inf
        self._incoming: bytearray | None = None
        self._received = 0
        self._low_water = 1
        self._head = bytearray(_HEAD.size)
        self._opened = memoryview(b"")
        """Of the last record, what was not asked for yet."""
        self._window = math.inf
        DOWNLINK.opened(self)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def held_bytes(self) -> int:
        """That came of a record which is not all here, or is not asked for yet."""
        return self._received + len(self._opened)

    @property
    def unsent_bytes(self) -> int:
        """Of records that `sendmsg` has counted: less than none while the kernel has some of the present one."""
        return len(self._unsent) - self._unsent_plain if self._unsent else 0

    @property
    def tcp(self) -> Tcp:
        """As in `PacedStream`."""
        return tcp_of(self._connection)

    def pace(self, bytes_per_s: float) -> None:
        """As in `PacedStream`."""
        if bytes_per_s != self._pace:
            self._pace = bytes_per_s
            set_pace(self._connection, bytes_per_s)

    @property
    def came(self) -> Came:
        """As in `SharingStream`."""
        return came_of(self._connection)

    def limit(self, window_bytes: float) -> None:
        """As in `SharingStream`."""
        if window_bytes != self._window:
            self._window = window_bytes
            set_window(self._connection, window_bytes)
            if math.isfinite(window_bytes):
                self._wake_after(1)

    def close(self) -> None:
        UPLINK.left(self)
        DOWNLINK.left(self)
        self._connection.close()
        for buffer in (self._outgoing, self._incoming):
            _give_back(buffer)
        self._outgoing = self._incoming = None

    def break_off(self) -> None:
        """To both ends it is over; whoever holds it still closes it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        """As they are on the wire: to learn whether anything came, or the end."""
        return self._connection.recv(num_bytes, flags)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send one record of what `buffers` begin with; returns how much of them that was, once the kernel has it all.

        After a BlockingIOError the next call must bring the same buffers: their record is sealed already.
        """
        if not self._unsent:
            self._seal(buffers)
        if self._unsent_plain >= LEAST_BYTES:
            UPLINK.sends(self)
        while self._unsent:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        _give_back(self._outgoing)
        self._outgoing = None
        return self._unsent_plain

    def recv_into(self, view: memoryview) -> int:
        """Bytes into `view`, of one record; 0 when the other end has closed. Raises OSError for a false record."""
        if not self._opened:
            try:
                if not self._receive_record():
                    return 0
            except BlockingIOError:
                self._wake_after(self._awaited(len(view)))
                raise
            DOWNLINK.received()
            self._wake_after(1)
            length = self._received - _HEAD.size - _TAG_BYTES
            assert self._incoming is not None
            sealed = memoryview(self._incoming)[: length + _TAG_BYTES]
            whole = len(view) >= length
            plain = view[:length] if whole else memoryview(bytearray(length))
            self._open(sealed, plain)
            self._received = 0
            _give_back(self._incoming)
            self._incoming = None
            if whole:
                return length
            self._opened = plain
        num_bytes = min(len(view), len(self._opened))
        view[:num_bytes] = self._opened[:num_bytes]
        self._opened = self._opened[num_bytes:]
        return num_bytes

    def _seal(self, buffers: Sequence[memoryview]) -> None:
        plain = buffers[0][:RECORD_BYTES]
        together = len(plain)
        joined = [plain]
        for buffer in buffers[1:]:
            together += len(buffer)
            if together > _JOINED_BYTES:
                break
            joined.append(buffer)
        data = plain if len(joined) == 1 else b"".join(joined)
        self._outgoing = _free_buffers.pop() if _free_buffers else bytearray(_HEAD.size + RECORD_BYTES + _TAG_BYTES)
        length = len(data) + _TAG_BYTES
        _HEAD.pack_into(self._outgoing, 0, length)
        record = memoryview(self._outgoing)[: _HEAD.size + length]
        self._sealing.encrypt_into(_nonce(self._num_sealed), data, None, record[_HEAD.size :])
        self._num_sealed += 1
        self._unsent, self._unsent_plain = record, len(data)

    def _receive_record(self) -> bool:
        """All of the next record, as far as it has come; False at the end of the stream."""
        while self._received < _HEAD.size:
            num_bytes = self._connection.recv_into(memoryview(self._head)[self._received :])
            if num_bytes == 0:
                if self._received:
                    raise ConnectionResetError("the stream ended inside a record")
                return False
            self._received += num_bytes
        (length,) = _HEAD.unpack(self._head)
        if not _TAG_BYTES < length <= RECORD_BYTES + _TAG_BYTES:
            raise ConnectionAbortedError(f"a record of {length} bytes")
        if self._incoming is None:
            self._incoming = _free_buffers.pop() if _free_buffers else bytearray(_HEAD.size + RECORD_BYTES + _TAG_BYTES)
        into = memoryview(self._incoming)
        while self._received < _HEAD.size + length:
            num_bytes = self._connection.recv_into(into[self._received - _HEAD.size : length])
            if num_bytes == 0:
                raise ConnectionResetError("the stream ended inside a record")
            self._received += num_bytes
        return True

    def _awaited(self, num_plain: int) -> int:
        """Bytes of the connection that must come before the next record can be opened; or, if nothing of it is here,
        that the other end must still send for so many bytes."""
        if self._received < _HEAD.size:
            length = min(num_plain, RECORD_BYTES) + _TAG_BYTES
        else:
            (length,) = _HEAD.unpack(self._head)
        return int(_HEAD.size + length - self._received)

    def _wake_after(self, num_bytes: int) -> None:
        """Let the event loop be woken when so much has come, or the end; the kernel keeps that within its buffer. What
        comes through a small window is read at once: its sender waits for the room."""
        if math.isfinite(self._window):
            num_bytes = 1
        if num_bytes != self._low_water:
            with contextlib.suppress(OSError):  # it is woken more often
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._low_water = num_bytes

    def _open(self, sealed: memoryview, plain: memoryview) -> None:
        try:
            self._opening.decrypt_into(_nonce(self._num_opened), sealed, None, plain)
        except InvalidTag as error:
            raise ConnectionAbortedError(
                "a record that was not sealed by the other end, or not as the next one"
            ) from error
        self._num_opened += 1


def stream_keys(secret: bytes, binding: bytes, caller_nonce: bytes, callee_nonce: bytes) -> tuple[bytes, bytes]:
    """(key of what the caller sends, key of what the callee sends), 32 bytes each, of one stream alone.

    `binding` says whose stream it is, and of which session: both ends must mean the same (RFC 5869, section 3.2).
    """
    derived = HKDF(
        algorithm=hashes.SHA256(),
        length=64,
        salt=caller_nonce + callee_nonce,
        info=b"homeswarm direct stream" + binding,
    ).derive(secret)
    return derived[:32], derived[32:]


def _nonce(number: int) -> bytes:
    if number >= _MOST_RECORDS:
        raise ConnectionAbortedError("the stream has carried all records that one key may")
    return number.to_bytes(12, "big")


def _give_back(buffer: bytearray | None) -> None:
    if buffer is not None and len(_free_buffers) < _KEPT_BUFFERS:
        _free_buffers.append(buffer)
