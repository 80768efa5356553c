"""An identity sealed under a passphrase, to be kept elsewhere or moved to another machine.

A JSON object: scrypt's cost, salt and nonce, and the key file under ChaCha20-Poly1305, bound to the peer id in clear.
"""

import json
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from swarm.core.errors import SettingsError
from swarm.identity.key import Identity

FORMAT = "homeswarm identity, sealed"
LOG2_N, R, P = 17, 8, 1
"""scrypt's cost: 128 MiB and some 0.4 s for each guess."""
MOST_LOG2_N = 20
SHORTEST_PASSPHRASE = 8
MAX_BACKUP_BYTES = 4096


def seal_identity(identity: Identity, passphrase: str) -> str:
    """The identity's backup. Raises SettingsError for a passphrase that is too short."""
    if len(passphrase) < SHORTEST_PASSPHRASE:
        raise SettingsError(
            f"the passphrase has {len(passphrase)} characters; give {SHORTEST_PASSPHRASE} or more: it guards the file"
        )
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    box = ChaCha20Poly1305(_key(passphrase, salt, LOG2_N)).encrypt(
        nonce, identity.to_key_file_bytes(), identity.peer_id.encode()
    )
    value = {"format": FORMAT, "peer_id": identity.peer_id, "log2_n": LOG2_N, "salt": salt.hex(), "nonce": nonce.hex()}
    return json.dumps({**value, "box": box.hex()}, indent=1) + "\n"


def open_identity(text: str, passphrase: str) -> Identity:
    """The identity of a backup. Raises SettingsError for a wrong passphrase or a file of another form."""
    try:
        value = json.loads(text) if len(text) <= MAX_BACKUP_BYTES else None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError("it is no backup of an identity")
        log2_n = int(value["log2_n"])
        if not 10 <= log2_n <= MOST_LOG2_N:
            raise ValueError(f"log2_n = {log2_n} is not within 10 and {MOST_LOG2_N}")
        salt, nonce, box = (bytes.fromhex(value[name]) for name in ("salt", "nonce", "box"))
        peer_id = str(value["peer_id"])
        data = ChaCha20Poly1305(_key(passphrase, salt, log2_n)).decrypt(nonce, box, peer_id.encode())
    except InvalidTag as error:
        raise SettingsError("wrong passphrase, or the backup was changed; try again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"the backup cannot be read: {error}; `swarm identity export` writes one") from error
    return Identity.from_key_file_bytes(data)


def _key(passphrase: str, salt: bytes, log2_n: int) -> bytes:
    return Scrypt(salt=salt, length=32, n=1 << log2_n, r=R, p=P).derive(passphrase.encode())
