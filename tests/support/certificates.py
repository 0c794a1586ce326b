"""Certificates for servers under test."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A certificate authority of one test, whose certificates and keys are in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {directory.name}")])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._write("ca", self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))

    def issue(self, file: str, name: str) -> None:
        """Write ``file.pem`` and ``file.key`` for a host or a role."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._write(
            file, subject, ec.generate_private_key(ec.SECP256R1()), x509.SubjectAlternativeName([x509.DNSName(name)])
        )

    def _write(
        self, file: str, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> None:
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        (self.directory / f"{file}.pem").write_bytes(certificate.public_bytes(pem))
        private = self.directory / f"{file}.key"
        private.touch(mode=0o600)
        private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
