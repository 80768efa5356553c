"""Identities held against RFC 8032, hivemind, p2pd's and py-libp2p's idea of the same key."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarm.core.errors import SettingsError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity, is_peer_id, peer_id_bytes, peer_id_from_bytes, verify
from swarm.network.identity_file import load_or_create_identity

SEED = bytes(range(32))
PEER_ID = PeerId("12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB")

# RFC 8032, section 7.1, test 2.
RFC_SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
RFC_SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_peer_id_is_golden_and_the_seeds_alone() -> None:
    assert Identity.from_seed(SEED).peer_id == PEER_ID
    assert len({Identity.generate().peer_id for _ in range(20)}) == 20


def test_sign_gives_rfc_8032_bytes() -> None:
    identity = Identity.from_seed(RFC_SEED)
    assert identity.sign(b"\x72") == RFC_SIGNATURE
    assert verify(identity.peer_id, b"\x72", RFC_SIGNATURE)


def test_verify_refuses_other_data_signers_and_signatures() -> None:
    identity = Identity.from_seed(SEED)
    signature = identity.sign(b"data")
    assert verify(PEER_ID, b"data", signature)
    assert not verify(PEER_ID, b"dato", signature)
    assert not verify(Identity.generate().peer_id, b"data", signature)
    for position in range(64):
        wrong = bytearray(signature)
        wrong[position] ^= 1
        assert not verify(PEER_ID, b"data", bytes(wrong))
    for length in (0, 63, 65):
        assert not verify(PEER_ID, b"data", (signature * 2)[:length])


@pytest.mark.parametrize(
    "text",
    [
        "",
        PEER_ID[:-1],
        PEER_ID + "1",
        "1" + PEER_ID[:-1],
        PEER_ID.replace("K", "0"),
        PEER_ID.replace("K", "é"),
        "z" * 52,
        "1" * 52,
        "Qm" + "a" * 44,
        "1" * 1_000_000,
    ],
)
def test_malformed_peer_ids_are_nobody(text: str) -> None:
    signature = Identity.from_seed(SEED).sign(b"data")
    assert not is_peer_id(text)
    assert not verify(PeerId(text), b"data", signature)
    with pytest.raises(ValueError, match="not an Ed25519 peer id"):
        peer_id_bytes(PeerId(text))


def test_peer_id_bytes_go_there_and_back() -> None:
    assert peer_id_from_bytes(peer_id_bytes(PEER_ID)) == PEER_ID
    with pytest.raises(ValueError, match="not an Ed25519 peer id"):
        peer_id_from_bytes(bytes(34))


def test_key_file_bytes_go_there_and_back() -> None:
    data = Identity.from_seed(SEED).to_key_file_bytes()
    assert data[:36] == bytes.fromhex("08011240") + SEED
    assert len(data) == 68
    assert Identity.from_key_file_bytes(data).peer_id == PEER_ID


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"-----BEGIN PRIVATE KEY-----\n", "PEM"),
        (bytes.fromhex("08011220") + SEED, "py-libp2p"),
        (b"\x08\x00\x12\x90\x09" + bytes(100), "RSA"),
        (b"\x08\x02\x12\x20" + SEED, "secp256k1"),
        (b"", "0 bytes"),
        (bytes.fromhex("08011240") + SEED + bytes(32), "does not belong"),
    ],
)
def test_key_file_of_another_format_is_named_in_the_error(data: bytes, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Identity.from_key_file_bytes(data)


def test_identity_repr_does_not_show_the_key() -> None:
    assert SEED.hex() not in repr(Identity.from_seed(SEED))


def test_hivemind_agrees_on_the_peer_id() -> None:
    from hivemind.p2p import PeerID

    assert PeerID(peer_id_bytes(PEER_ID)).to_base58() == PEER_ID
    assert PeerID.from_base58(PEER_ID).to_bytes() == peer_id_bytes(PEER_ID)


def test_py_libp2p_agrees_on_the_peer_id_and_the_signature() -> None:
    script = """
import sys
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
pair = create_new_key_pair(bytes.fromhex(sys.argv[1]))
print(ID.from_pubkey(pair.public_key).to_base58(), pair.private_key.sign(b"data").hex())
"""
    # A process of its own: libp2p cannot share one with hivemind.
    output = subprocess.run(
        [sys.executable, "-c", script, SEED.hex()], capture_output=True, text=True, timeout=200, check=True
    ).stdout.split()
    assert output == [PEER_ID, Identity.from_seed(SEED).sign(b"data").hex()]


def test_identity_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "identity.key"
    with ThreadPoolExecutor(8) as pool:
        identities = list(pool.map(load_or_create_identity, [path] * 8))
    assert len({identity.peer_id for identity in identities}) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    assert Identity.from_key_file_bytes(path.read_bytes()).peer_id == identities[0].peer_id


def test_identity_file_of_another_format_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(SettingsError, match=r"identity = .*identity\.key.*PEM"):
        load_or_create_identity(path)
    assert path.read_bytes() == b"-----BEGIN PRIVATE KEY-----\n"


def test_identity_file_in_an_impossible_place_is_a_settings_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingsError, match="identity = "):
        load_or_create_identity(tmp_path / "file" / "identity.key")
    with pytest.raises(SettingsError, match="identity = "):
        load_or_create_identity(tmp_path)
