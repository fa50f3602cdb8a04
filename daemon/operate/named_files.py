"""Reads the files that settings name: tenants' keys, the certificate, headers for a trace collector, keys for other servers.

The start, the check of the settings and each reload read the files through this module, and a change of one of them makes the node
reload.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from config import credentials
from config.schema import NodeConfig
from daemon.access import keys
from daemon.access.keys import Keys
from daemon.http import tls
from daemon.http.tls import Tls
from daemon.record import audit_log
from daemon.traces import headers
from daemon.upstreams import keys as upstream_keys


@dataclass(slots=True, frozen=True)
class NamedFiles:
    """The contents of the files that the settings name. keys: tenants and their API keys; None if no keys are required. tls: the
    certificate; None without TLS. trace_headers: the headers for the trace collector, by name. upstream_keys: keys for other
    servers, by the model's name on this node."""

    keys: Keys | None
    tls: Tls | None
    trace_headers: Mapping[str, str]
    upstream_keys: Mapping[str, str]


def read(config: NodeConfig, path: str | None, flags: Container[str]) -> NamedFiles:
    """Returns the contents of the files that the settings name, and checks that the audit log's folder exists. path: the settings
    file, for errors; None: there is none. flags: the names of the settings that were given on the command line, for errors. Raises
    ConfigError if a file cannot be read or is wrong, or the folder is missing."""
    known = keys.load(config.keys_file) if config.keys_file else None
    keys_there = upstream_keys.load(config, path or "flags")
    audit_log.check(config.audit_log, _source_of("audit_log", path, flags))
    return NamedFiles(known, read_tls(config, path, flags), headers.load(config.traces), keys_there)


def read_tls(config: NodeConfig, path: str | None, flags: Container[str]) -> Tls | None:
    """Returns the TLS certificate and its key, or None without TLS. path: the settings file, for errors; None: there is none.
    flags: the names of the settings that were given on the command line, for errors. Raises ConfigError if the files cannot be read
    or the certificate and the key do not belong together."""
    return tls.load(config, _source_of("tls_certificate", path, flags))


def paths(config: NodeConfig) -> list[str]:
    """Returns the paths of the files that the settings name: API keys, trace headers, the certificate and its key, and keys for
    other servers. A change of one of them makes the node reload. Raises ConfigError for a `credential:NAME` that cannot be
    resolved."""
    traces = config.traces
    keys_file = [credentials.path_of(config.keys_file, "keys_file")] if config.keys_file else []
    headers_file = [credentials.path_of(traces.headers_file, "traces.headers_file")] if traces.headers_file else []
    return [*keys_file, *headers_file, *tls.files(config), *upstream_keys.paths(config)]


def _source_of(key: str, path: str | None, flags: Container[str]) -> str:
    return "flags" if key in flags or not path else path
