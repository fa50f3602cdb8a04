"""Certificates for tests, made by the `openssl` command in a folder of the test's."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the `openssl` command is not here")


class Authority:
    """Issues certificates for 127.0.0.1 and localhost. ca: the path of its own, which clients trust."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = self._key("ca").with_suffix(".pem")
        self._openssl("req", "-x509", "-new", "-key", "ca.key", "-days", "3650", "-subj", "/CN=test authority", "-out", "ca.pem")
        (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")

    def issue(self, name: str, days: int = 3650) -> tuple[Path, Path]:
        """Returns the paths of a new certificate, with the authority's behind it, and of its key. days: below 0 if it shall have
        expired."""
        key = self._key(name)
        self._openssl("req", "-new", "-key", key.name, "-subj", f"/O=Example/CN={name}", "-out", f"{name}.csr")
        options = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days), "-extfile", "names"]
        self._openssl("x509", "-req", "-in", f"{name}.csr", *options, "-out", f"{name}.pem")
        certificate = self._folder / f"{name}.pem"
        certificate.write_bytes(certificate.read_bytes() + self.ca.read_bytes())
        return certificate, key

    def rsa_key(self) -> Path:
        self._openssl("genrsa", "-out", "rsa.key", "2048")
        return self._folder / "rsa.key"

    def encrypted(self, key: Path) -> Path:
        self._openssl("pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", "encrypted.key")
        return self._folder / "encrypted.key"

    def trusting(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Returns the settings of a client that trusts the authority. certificate: what it shows of itself."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context

    def _key(self, name: str) -> Path:
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")
        return self._folder / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self._folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def subject_of(context: ssl.SSLContext, address: tuple[str, int]) -> str:
    """Returns the common name of the certificate that a new connection is shown."""
    with socket.create_connection(address, timeout=60) as plain, context.wrap_socket(plain, server_hostname="localhost") as secured:
        found = secured.getpeercert() or {}
    return next(value for part in found["subject"] for name, value in part if name == "commonName")
