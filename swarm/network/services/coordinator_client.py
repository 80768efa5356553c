"""An invite's holder calls the host's service: over TLS, to the one certificate that the invite names."""

import contextlib
import ssl
from collections.abc import Iterator
from typing import Any

import grpc

from swarm.core.canonical import Value, unpack
from swarm.core.errors import LocalError, RemoteError, TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.identity.key import is_peer_id
from swarm.invite import Invite
from swarm.log_format import printable
from swarm.manifest.signed_run import MAX_SIGNED_RUN_BYTES, SignedRun
from swarm.network.services.certificate import SERVER_NAME, fingerprint_of
from swarm.proto import coordinator_pb2 as pb
from swarm.proto import coordinator_pb2_grpc as rpc

CONNECT_S = 10.0
CALL_S = 15.0
DOWNLOAD_S = 3600.0
MAX_REPLY_BYTES = 8 << 20


class CoordinatorClient:
    """The service's calls. Each raises TransientError when it is gone or busy, RemoteError when it refuses."""

    def __init__(self, channel: grpc.Channel, invite: Invite) -> None:
        self._stub: Any = rpc.CoordinatorStub(channel)
        self.invite = invite

    def run(self) -> tuple[SignedRun, pb.Run]:
        """The run that the invite is to. Raises RemoteError if this is another, or under another run key."""
        with _errors(self.invite):
            answer = self._stub.GetRun(pb.RunRequest(), timeout=CALL_S)
        signed = SignedRun.from_value(_canonical(answer.signed_run, MAX_SIGNED_RUN_BYTES))
        self.invite.check_run(signed)
        return signed, answer

    def peers(self, stage: int) -> pb.Peers:
        with _errors(self.invite):
            answer: pb.Peers = self._stub.ListPeers(pb.PeersRequest(stage=stage), timeout=CALL_S)
        for peer in answer.peers:
            if not is_peer_id(PeerId(peer.peer_id)):
                raise RemoteError("malformed", f"the host at {self.invite.target} names a peer {peer.peer_id[:60]!r}")
        return answer

    def checkpoints(self) -> list[Value]:
        """Records as they were sent, newest first."""
        with _errors(self.invite):
            answer = self._stub.ListCheckpoints(pb.CheckpointsRequest(), timeout=CALL_S)
        return [_canonical(record, MAX_REPLY_BYTES) for record in reversed(answer.records)]

    def download(self, version: int, name: str, offset: int = 0) -> Iterator[bytes]:
        """The file from `offset` on."""
        request = pb.DownloadRequest(version=version, name=name, offset=offset)
        with _errors(self.invite):
            for piece in self._stub.Download(request, timeout=DOWNLOAD_S):
                yield piece.data

    def status(self) -> pb.Status:
        with _errors(self.invite):
            answer: pb.Status = self._stub.GetStatus(pb.StatusRequest(), timeout=CALL_S)
        if (answer.run_id, answer.name) != (self.invite.run_id, self.invite.name):
            raise RemoteError("run_id", f"the host at {self.invite.target} tells of another run than the invite's")
        return answer


@contextlib.contextmanager
def coordinator_client(invite: Invite) -> Iterator[CoordinatorClient]:
    """A client of the invite's host. Raises RemoteError if somebody else answers there.

    The certificate is fetched first and compared with the invite's; the channel then trusts that one alone.
    """
    try:
        pem = ssl.get_server_certificate((invite.host.strip("[]"), invite.port), timeout=CONNECT_S).encode()
    except OSError as error:
        raise UnreachableError(f"the host at {invite.target} cannot be reached: {error}") from error
    try:
        found = fingerprint_of(pem)
    except ValueError as error:
        raise RemoteError("certificate", f"{invite.target} shows no certificate: {error}") from error
    if found != invite.certificate:
        raise RemoteError(
            "certificate",
            f"{invite.target} shows the certificate {found.hex()[:16]}, the invite names "
            f"{invite.certificate.hex()[:16]}: somebody else answers there, or the host made a new one; ask it for a "
            "new invite",
        )
    options = [
        ("grpc.ssl_target_name_override", SERVER_NAME),
        ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ("grpc.enable_http_proxy", 0),
    ]
    with grpc.secure_channel(invite.target, grpc.ssl_channel_credentials(pem), options) as channel:
        yield CoordinatorClient(channel, invite)


_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@contextlib.contextmanager
def _errors(invite: Invite) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), printable(str(error.details())[:400])
        if code in _TRANSIENT:
            raise TransientError(f"the host at {invite.target}: {details}") from error
        if code is grpc.StatusCode.CANCELLED:
            raise LocalError("the call was cancelled") from error
        raise RemoteError(code.name.lower(), f"the host at {invite.target} refuses: {details}") from error


def _canonical(data: bytes, max_bytes: int) -> Value:
    return unpack(data, max_bytes=max_bytes)
