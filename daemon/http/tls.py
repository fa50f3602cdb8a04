"""Sets up TLS for the listeners: reads the certificate and its key, and tests them before they are used.

A pair that does not work is refused as a whole. OpenSSL's own errors name no file, so each file is checked by itself first; then a
handshake in memory shows that the pair works, and yields the certificate's fields.
"""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from config import credentials
from config.load import ConfigError, located_setting
from config.schema import NodeConfig
from loader.files.regular_file import read_regular

log = logging.getLogger("hearthd")
MOST_BYTES = 1 << 20  # the limit for each file
SOON_DAYS = 14
DAY_S = 86400.0
LOOK_EVERY_S = 3600.0
MOST_ROUNDS = 16  # the limit of a handshake; TLS 1.2 takes three
ALPN = ["http/1.1"]
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL's x509_vfy.h, which Python has no name for
_OTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")  # the last: another kind of key (RSA, EC)
_SHORT = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "countryName": "C",
}


@dataclass(slots=True, frozen=True)
class Certificate:
    """The fields of a certificate. subject: in the form `CN=gpu1.example.org, O=Example`, "" if it has none. names: the host names
    and addresses for which it was issued. from_unix_s, until_unix_s: Unix seconds between which it is valid."""

    subject: str
    names: tuple[str, ...]
    from_unix_s: float
    until_unix_s: float

    @property
    def shown(self) -> str:
        return self.subject or ", ".join(self.names) or "without a name"

    def days_left(self, unix_s: float) -> int:
        """Returns the whole days from unix_s until the certificate expires, below 0 if it has expired."""
        return int((self.until_unix_s - unix_s) // DAY_S)

    def warning(self, unix_s: float) -> str:
        """Returns a sentence if the certificate has expired, expires within SOON_DAYS or is not valid yet; else "". unix_s: the
        time now."""
        if unix_s >= self.until_unix_s:
            return f"the TLS certificate {self.shown} has expired at {_utc(self.until_unix_s)}; clients refuse it"
        if unix_s < self.from_unix_s:
            return f"the TLS certificate {self.shown} is valid only from {_utc(self.from_unix_s)} on; until then clients refuse it"
        days = self.days_left(unix_s)
        if days >= SOON_DAYS:
            return ""
        return f"the TLS certificate {self.shown} expires in {days} days, at {_utc(self.until_unix_s)}"


@dataclass(slots=True, frozen=True)
class Tls:
    """The TLS settings from one reading of the certificate's and the key's files. context: for new connections. digest: SHA-256 of
    the files' contents and min_version, to notice changes. min_version: "1.2" or "1.3". asks_clients: whether clients must show a
    certificate."""

    context: ssl.SSLContext
    certificate: Certificate
    digest: bytes
    min_version: str
    asks_clients: bool

    def row(self) -> dict[str, Any]:
        """Returns the certificate's fields for `hearth status`, with the days until it expires and a warning, which is "" if there
        is nothing to warn of."""
        now, certificate = time.time(), self.certificate
        return {
            "subject": certificate.shown,
            "names": list(certificate.names),
            "expires": certificate.until_unix_s,
            "days_left": certificate.days_left(now),
            "warning": certificate.warning(now),
            "min_version": self.min_version,
            "client_certificates": self.asks_clients,
        }


def files(config: NodeConfig) -> list[str]:
    """Returns the paths of the files that `load` reads. Raises ConfigError for a `credential:NAME` that cannot be resolved."""
    values = {key: str(getattr(config, key)) for key in ("tls_certificate", "tls_key", "tls_client_ca")}
    return [credentials.path_of(value, key) for key, value in values.items() if value]


def load(config: NodeConfig, source: str) -> Tls | None:
    """Returns the tested certificate and key that the settings name, or None if they name none. source: the settings file, for
    errors. Raises ConfigError, which names the setting, the file and the problem. An expired certificate is no error."""
    if not config.tls_certificate:
        return None
    try:
        return _load(config, source)
    except ConfigError as error:
        raise located_setting(error) from None


def _load(config: NodeConfig, source: str) -> Tls:
    certificate_path, chain = _read(source, "tls_certificate", config.tls_certificate)
    key_path, key = _read(source, "tls_key", config.tls_key)
    _check_certificates(source, "tls_certificate", certificate_path, chain)
    if b"PRIVATE KEY-----" not in key:
        raise ConfigError(source, "tls_key", f"{key_path} holds no private key in PEM form (-----BEGIN … PRIVATE KEY-----)")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[config.tls_min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(ALPN)
    try:
        context.load_cert_chain(certificate_path, key_path, password=_no_passphrase)
    except _EncryptedError:
        message = f"{key_path} is encrypted, and nobody is there to enter its passphrase; `openssl pkey -in FILE` writes it without"
        raise ConfigError(source, "tls_key", message) from None
    except OSError as error:  # ssl.SSLError is an OSError
        if _reason(error) in _OTHER_KEY:
            message = f"{key_path} is not the key of the first certificate in {certificate_path}"
        else:
            message = f"{key_path} cannot be used with the certificate in {certificate_path}: {_say(error)}"
        raise ConfigError(source, "tls_key", message) from None
    try:
        told = _tried(context, chain)
    except OSError as error:
        message = f"{certificate_path} cannot be used: a client that trusts it ends the handshake: {_say(error)}"
        raise ConfigError(source, "tls_certificate", message) from None
    parts = [config.tls_min_version.encode(), chain, key]
    if config.tls_client_ca:
        ca_path, ca = _read(source, "tls_client_ca", config.tls_client_ca)
        _check_certificates(source, "tls_client_ca", ca_path, ca)
        context.load_verify_locations(cadata=_ascii(ca))
        context.verify_mode = ssl.CERT_REQUIRED
        parts.append(ca)
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
    return Tls(context, _certificate(told), digest, config.tls_min_version, bool(config.tls_client_ca))


def _read(source: str, key: str, value: str) -> tuple[str, bytes]:
    path = credentials.path_of(value, key)
    try:
        return path, read_regular(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(source, key, f"{path} cannot be read: {error.strerror}") from None


def _check_certificates(source: str, key: str, path: str, data: bytes) -> None:
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise ConfigError(source, key, f"{path} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_ascii(data))
    except ssl.SSLError as error:
        raise ConfigError(source, key, f"{path} holds what is no certificate: {_say(error)}") from None


def _ascii(data: bytes) -> str:
    """Returns a PEM file's content as text, without bytes that are not ASCII, which may occur in comments between its blocks."""
    return data.decode("ascii", "ignore")


class _EncryptedError(Exception):
    pass


def _no_passphrase() -> str:
    raise _EncryptedError  # without a callback OpenSSL would ask for the passphrase on the terminal and wait


def _tried(context: ssl.SSLContext, chain: bytes) -> Mapping[str, Any]:
    """Does a TLS handshake in memory with a client that trusts the certificate, and returns the certificate's fields in the form of
    SSLSocket.getpeercert. context: the server's context. chain: its certificates in PEM. Raises ssl.SSLError if the handshake
    fails."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.load_verify_locations(cadata=_ascii(chain))
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    sides = [client, context.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(MOST_ROUNDS):
        sides = [side for side in sides if not _has_shaken(side)]
        if not sides:
            return client.getpeercert() or {}
    raise ssl.SSLError("the handshake does not come to an end")


def _has_shaken(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _certificate(told: Mapping[str, Any]) -> Certificate:
    subject = ", ".join(f"{_SHORT.get(name, name)}={value}" for part in reversed(told["subject"]) for name, value in part)
    names = tuple(value for kind, value in told.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))
    valid = (ssl.cert_time_to_seconds(told["notBefore"]), ssl.cert_time_to_seconds(told["notAfter"]))
    return Certificate(subject, names, *map(float, valid))


def _reason(error: OSError) -> str:
    return (error.reason or "") if isinstance(error, ssl.SSLError) else ""


def _say(error: OSError) -> str:
    """Returns the words of an OpenSSL error for people, without the position in OpenSSL's source code."""
    verified = getattr(error, "verify_message", "")
    found = verified or _reason(error).replace("_", " ").lower() or re.sub(r" ?(\[\w+\] |\(_ssl\.c:\d+\))", "", str(error.args[-1]))
    return "its PEM cannot be decoded" if found == "PEM lib" else found


def _utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


class CertificateLog:
    """Logs warnings about the certificate in use, each at most once a day."""

    def __init__(self) -> None:
        self._told = ""

    def tell(self, tls: Tls | None, unix_s: float) -> None:
        text = tls.certificate.warning(unix_s) if tls is not None else ""
        if text and text != self._told:  # the text contains the days left, so it changes once a day
            log.warning("%s", text)
        self._told = text
