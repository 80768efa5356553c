"""A host's TLS certificate: signed by itself, and known by its fingerprint."""

import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.core.errors import SettingsError

SERVER_NAME = "homeswarm"
"""The name in every host's certificate: whom it is for is said by the fingerprint, not by a name."""
VALID_FROM, VALID_UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2070, 1, 1, tzinfo=UTC)
"""For as long as any run: a certificate that ran out would shut everybody's invite."""


@dataclass(frozen=True)
class Certificate:
    """PEM of the private key and of the certificate."""

    key: bytes
    chain: bytes

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate, as invites bear it."""
        return fingerprint_of(self.chain)


def fingerprint_of(pem: bytes) -> bytes:
    """SHA-256 of a PEM certificate's DER form. Raises ValueError for anything else."""
    certificate = x509.load_pem_x509_certificate(pem)
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def load_or_create_certificate(path: Path) -> Certificate:
    """Key and certificate in one file of mode 0600, made on first use. Raises SettingsError."""
    try:
        if not path.exists():
            _create(path)
        pem = path.read_bytes()
        key, mark, chain = pem.partition(b"-----BEGIN CERTIFICATE-----")
        made = Certificate(key, mark + chain)
        fingerprint_of(made.chain)
        return made
    except (OSError, ValueError) as error:
        raise SettingsError(f"certificate {path}: {error}; restore it, or remove it and send new invites") from error


def _create(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
