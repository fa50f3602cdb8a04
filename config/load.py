"""Builds a NodeConfig from TOML files and flags. Every error names the file, the key, the value and what is allowed."""

from __future__ import annotations

import contextlib
import math
import os
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from config import (
    adapters,
    hosts,
    locate,
    names,
    origins,
    otel_environment,
    parallel,
    paths,
    replicas,
    trace_endpoint,
    units,
    upstream,
    warm,
)
from config.chat_templates import is_template_text
from config.device_names import host_of, is_local
from config.nearest import nearest
from config.schema import HostConfig, ModelConfig, NodeConfig, ParallelConfig, SamplingDefaults, TracesConfig
from config.settings_files import present_files, settings_files

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "text", "json", "journal")
AUDIT_IN_LOG = ("log", "journal")  # values of audit_log that are not file names
CREDENTIAL = "credential:"  # prefix of a value that is not a path, but names a credential that systemd passes to the service
TLS_VERSIONS = ("1.2", "1.3")
RUNNERS = ("torch", "null")
QUANTIZATIONS = ("int8", "none")
RESIDENT_FORMS = ("plain", "packed")
KV_CACHE_DTYPES = ("auto", "fp8")
TOOL_PARSERS = (
    "command",
    "deepseek_v3",
    "deepseek_v31",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "harmony",
    "hermes",
    "kimi_k2",
    "llama3",
    "llama4_json",
    "llama4_pythonic",
    "mistral",
    "qwen3_coder",
    "seed_oss",
    "none",
)
REASONING_PARSERS = ("command", "gemma4", "harmony", "mistral", "seed_oss", "think", "none")
_PATHS = (
    *("models_dir", "control", "status_socket", "state_dir", "cache_dir", "keys_file"),
    *("tls_certificate", "tls_key", "tls_client_ca"),
)
_MODEL_PATHS = ("chat_template", "upstream_key_file")
# keys of a model whose values are tables -> the table's type, an example, and a text that is allowed instead ("": none)
_MODEL_TABLES: dict[str, tuple[type[msgspec.Struct], str, str]] = {
    "sampling": (SamplingDefaults, "{ temperature = 0.7 }", ""),
    "parallel": (ParallelConfig, "{ tensor = 2 }", parallel.AUTO),
}
SECRET = ("headers",)  # keys whose values are never shown
_NOT_QUOTED = (*SECRET, "endpoint")  # keys whose values are not shown in messages either, because they may contain a password
MIN_STALL_S = 10.0  # an idle engine reports that it is alive every 5 s
# Defaults of a node with a cuda device: the driver maps a few large pieces of memory faster than many small ones, and a GPU's steps
# are too short for small batches.
CUDA_DEFAULTS: dict[str, Any] = {"chunk_bytes": 16 << 20, "max_num_batched_tokens": 4096, "turn_budget_ms": 5.0}


class ConfigError(Exception):
    """Raised for a configuration file or a setting that cannot be used. key: its dotted path as in the file, e.g.
    `models."org/name".dtype`; "" if the error is about the whole file. source: the path of the file, or "flags". line: counts from
    1; 0 where it is unknown (for flags and for a file that cannot be read)."""

    def __init__(self, source: str, key: str, message: str, line: int = 0) -> None:
        where = f"{source}:{line}" if line else source
        super().__init__(f"{where}: {key}: {message}" if key else f"{where}: {message}")
        self.source, self.key, self.message, self.line = source, key, message, line


def located(error: ConfigError) -> ConfigError:
    """Returns a copy of the error with the number of the line that sets its key in the file error.source. Returns the error
    unchanged if it has a line already, names no key, or names no file."""
    if error.line or not error.key or not os.path.isfile(error.source):
        return error
    with open(error.source, encoding="utf-8") as file:
        line = locate.line_of(file.read(), error.key)
    return ConfigError(error.source, error.key, error.message, line)


def located_setting(error: ConfigError) -> ConfigError:
    """Returns a copy of the error with the file and the number of the line that set its key. error.source: the settings file named
    on the command line. If files in the folder conf.d beside it set the key too, the copy names the last of them, whose value is in
    use. The error is returned unchanged if it has a line already, names no key, or names no file."""
    if error.line or not error.key or not os.path.isfile(error.source):
        return error
    source, deepest = error.source, 0
    for path in present_files(error.source):
        depth = 0
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:  # the file may have just been replaced
            depth = locate.depth_of(file.read(), error.key)
        if depth and depth >= deepest:
            source, deepest = path, depth
    return located(ConfigError(source, error.key, error.message))


def load(path: str | None, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ) -> NodeConfig:
    """Returns the node's settings from the TOML file at `path` (None: no file), the files in the folder `conf.d` beside it, and
    `flags`. The files of conf.d override the first file key by key, in the order of their names; flags override all files. flags:
    maps a key to its value as on the command line, a text or a list of texts. environment: the environment variables; those that
    OpenTelemetry defines fill the keys of `[traces]` that the files leave out.

    In the result `chunk_bytes`, `max_body_bytes` and `stored_responses_bytes` are numbers of bytes, and the sockets and folders
    have their defaults filled in. Paths are absolute, because engines run in another folder: a path in a flag is relative to the
    current folder, one in a file to the folder of the file. Raises ConfigError for the first file, key or value that cannot be
    used."""
    try:
        return _load(path, flags, environment)
    except ConfigError as error:
        raise located_setting(error) from None


def _load(path: str | None, flags: Mapping[str, Any] | None, environment: Mapping[str, str]) -> NodeConfig:
    table: dict[str, Any] = {}
    for file in _files(path) if path is not None else ():
        _merge(table, _table_of(file))
    config = _node(path or "flags", table)
    traces = _traces(path or "flags", table.get("traces", {}), environment)
    config = msgspec.structs.replace(config, traces=traces, hosts=_hosts(path or "flags", table.get("hosts", {})))
    if flags:
        config = msgspec.structs.replace(config, **_from_flags(flags))
        config = msgspec.structs.replace(config, **_absolute(config, os.getcwd()))
    config = with_device_defaults(config, config.device, {*table, *(flags or {})})
    control = config.control or paths.daemon_control_path()
    config = msgspec.structs.replace(
        config,
        control=control,
        status_socket=config.status_socket or paths.daemon_status_path(control),
        state_dir=config.state_dir or paths.state_dir(),
        cache_dir=config.cache_dir or paths.cache_dir(),
        chunk_bytes=units.parse_bytes(config.chunk_bytes),
        max_body_bytes=units.parse_bytes(config.max_body_bytes),
        stored_responses_bytes=_bytes_or_zero(config.stored_responses_bytes),
    )
    _check_across(path or "flags", config)
    return config


def _files(path: str) -> list[str]:
    try:
        return settings_files(path)
    except OSError as error:
        raise ConfigError(str(error.filename), "", f"cannot be read: {error.strerror}") from None


def _table_of(path: str) -> dict[str, Any]:
    """Returns the content of one settings file as a table, with paths made absolute. Raises ConfigError if the file cannot be read,
    or is not valid by itself, without other settings files."""
    table = read_toml(path)
    try:
        config, traces = _node(path, table), _traces_values(path, table.get("traces", {}))
        lenders = _hosts_values(path, table.get("hosts", {}))
    except ConfigError as error:
        raise located(error) from None
    folder = os.path.dirname(os.path.abspath(path))
    table |= _absolute(config, folder)
    for name, model in config.models.items():
        for key in _MODEL_PATHS:
            value = getattr(model, key)
            is_text = key == "chat_template" and is_template_text(value or "")
            if value and not is_text and not value.startswith(CREDENTIAL):
                table["models"][name][key] = os.path.join(folder, value)
    headers_file = str(traces.get("headers_file", ""))
    if headers_file and not headers_file.startswith(CREDENTIAL):
        table["traces"]["headers_file"] = os.path.join(folder, headers_file)
    for name, values in lenders.items():
        if (value := values.get("key_file")) and not value.startswith(CREDENTIAL):
            table["hosts"][name]["key_file"] = os.path.join(folder, value)
    return table


def _merge(into: dict[str, Any], table: dict[str, Any]) -> None:
    """Changes `into` by setting each key of `table` in it. Tables in both are merged in the same way; all other values, lists
    included, are replaced."""
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def with_device_defaults(config: NodeConfig, devices: Iterable[str], given: Container[str]) -> NodeConfig:
    """Returns the settings with the defaults for GPUs (CUDA_DEFAULTS) if one of the devices is a cuda device of this machine;
    otherwise unchanged. devices: names such as `cuda:0`, with or without a budget. given: the keys that a file or a flag has set,
    whose values stay."""
    if not any(is_local(text.partition("=")[0].strip(), "cuda") for text in devices):
        return config
    return msgspec.structs.replace(config, **{key: value for key, value in CUDA_DEFAULTS.items() if key not in given})


def read_toml(path: str) -> dict[str, Any]:
    """Returns the file's content as a table. Raises ConfigError if the file cannot be read or is not valid TOML; the error names
    the file and, for a syntax error, the line."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", f"is not valid TOML: {error}", locate.line_of_syntax_error(str(error))) from None


def _node(source: str, table: dict[str, Any]) -> NodeConfig:
    plain = {key: value for key, value in table.items() if key not in ("models", "names", "traces", "hosts")}
    values = fields_of(source, "", NodeConfig, plain)
    values["names"] = _names(source, table.get("names", {}))
    models = table.get("models", {})
    if not isinstance(models, dict):
        raise ConfigError(source, "models", 'must be tables, as in [models."org/name"]')
    values["models"] = {}
    for name, entry in models.items():
        where = f'models."{name}"'
        if not isinstance(entry, dict):
            raise ConfigError(source, where, f'must be a table [{where}]; a name with "/" or "." goes in quotes')
        fields = dict(entry)
        tables = {key: fields.pop(key) for key in _MODEL_TABLES if key in fields}
        known = fields_of(source, where + ".", ModelConfig, fields)
        for key, table in tables.items():
            struct, example, word = _MODEL_TABLES[key]
            if isinstance(table, dict):
                known[key] = struct(**fields_of(source, f"{where}.{key}.", struct, table))
            elif word and table == word:
                known[key] = word
            else:
                instead = f'"{word}" or ' if word else ""
                raise ConfigError(source, f"{where}.{key}", f"{table!r} must be {instead}a table, as in {key} = {example}")
        values["models"][name] = ModelConfig(**known)
    return NodeConfig(**values)


def _traces(source: str, table: Any, environment: Mapping[str, str]) -> TracesConfig:
    """Returns the settings of traces from `table`, the content of `[traces]`. Environment variables of OpenTelemetry fill the keys
    that the table leaves out. Raises ConfigError for a wrong key or value, also in a variable."""
    values = _traces_values(source, table)
    try:
        given = {name: each for name, each in otel_environment.given(environment).items() if name not in values}
    except otel_environment.BadVariable as error:
        raise ConfigError("environment", error.variable, error.message) from None
    types = key_types(TracesConfig)
    for name, each in given.items():
        values[name] = _convert("environment", each.variable, types[name], each.value, name)
    return TracesConfig(**values)


def _traces_values(source: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(source, "traces", 'must be a table: [traces], and below it endpoint = "http://HOST:4318"')
    return fields_of(source, "traces.", TracesConfig, table)


def _hosts(source: str, table: Any) -> dict[str, HostConfig]:
    """Returns the settings of all hosts from `table`, the content of all tables `[hosts.NAME]`. Raises ConfigError for a wrong or
    missing setting."""
    found = {}
    for name, values in _hosts_values(source, table).items():
        for key in HostConfig.__struct_fields__:
            if key not in values:
                example = 'address = "10.0.0.2:7100" and key_file = "/etc/hearthd/b.key"'
                raise ConfigError(source, f"hosts.{name}", f"needs {key}; a host has {example}")
        found[name] = HostConfig(**values)
    return found


def _hosts_values(source: str, table: Any) -> dict[str, dict[str, Any]]:
    """Returns the settings that the tables `[hosts.NAME]` (`table`) give: the host's name -> setting -> value. Names and types are
    checked; defaults are not filled in. source: the file, for errors. Raises ConfigError for a wrong name, setting or type."""
    if not isinstance(table, dict):
        raise ConfigError(source, "hosts", "must be tables, one for each host, as in [hosts.b]")
    found = {}
    for name, entry in table.items():
        try:
            hosts.check_name(name)
        except ValueError as error:
            raise ConfigError(source, f'hosts."{name}"', f"{name!r} {error}") from None
        if not isinstance(entry, dict):
            raise ConfigError(source, f"hosts.{name}", f"{entry!r} must be a table [hosts.{name}]")
        found[name] = fields_of(source, f"hosts.{name}.", HostConfig, entry)
    return found


def _names(source: str, table: Any) -> dict[str, list[str]]:
    """Returns the content of the table `[names]`: name or pattern -> list of models that answer to it. An entry with a single model
    becomes a list of one. Raises ConfigError for an entry that cannot be used."""
    if not isinstance(table, dict):
        raise ConfigError(source, "names", 'must be a table: [names], and below it lines such as "gpt-4*" = "org/name"')
    for name, value in table.items():
        if wrong := names.problem(name, value):
            raise ConfigError(source, f'names."{name}"', wrong)
    return {name: [value] if isinstance(value, str) else value for name, value in table.items()}


def _absolute(config: NodeConfig, folder: str) -> dict[str, str]:
    paths_of = {key: str(getattr(config, key)) for key in _PATHS}
    if config.audit_log not in AUDIT_IN_LOG:
        paths_of["audit_log"] = config.audit_log
    return {key: os.path.join(folder, value) for key, value in paths_of.items() if value and not value.startswith(CREDENTIAL)}


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns key -> value of the flags, with the texts of the command line converted to the types of NodeConfig's fields. Raises
    ConfigError for a text that cannot be converted."""
    types = key_types(NodeConfig)
    values: dict[str, Any] = {}
    for key, text in flags.items():
        value = text
        kinds = _plain_kinds(types[key])
        if isinstance(text, str) and bool in kinds:
            value = {"true": True, "false": False}.get(text, text)
        elif isinstance(text, str) and str not in kinds:
            try:
                value = int(text) if int in kinds and float not in kinds else float(text)
            except ValueError:
                raise ConfigError("flags", flag_name(key), f"{text!r} must be {_say(types[key])}") from None
        values[key] = _convert("flags", flag_name(key), types[key], value, key)
    return values


def flag_name(key: str) -> str:
    return "--models" if key == "models_dir" else "--" + key.replace("_", "-")


def key_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Returns field name -> type of a struct's fields. The documentation that annotates the fields is left out."""
    hints = get_type_hints(struct, include_extras=True)
    return {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()}


def fields_of(source: str, prefix: str, struct: type[msgspec.Struct], table: dict[str, Any]) -> dict[str, Any]:
    """Returns the table's values, converted to the types of the struct's fields. source: the file, for messages. prefix: the
    table's path with a dot at the end (`traces.`), for messages. Raises ConfigError, which names the key, for an unknown key or a
    wrong value."""
    types = key_types(struct)
    values = {}
    for key, value in table.items():
        if key not in types:
            near = nearest(key, types)
            hint = f"did you mean {near}?" if near else "known keys: " + ", ".join(types)
            raise ConfigError(source, prefix + key, f"unknown key; {hint}")
        values[key] = _convert(source, prefix + key, types[key], value, key)
    return values


def _convert(source: str, where: str, kind: Any, value: Any, key: str) -> Any:
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(source, where, f"{'' if key in _NOT_QUOTED else f'{value!r} '}must be {_say(kind)}") from None
    check = _CHECKS.get(key)
    if check is not None and converted is not None:
        try:
            check(converted)
        except ValueError as error:
            raise ConfigError(source, where, str(error) if key in _NOT_QUOTED else f"{_refused(value, check)!r} {error}") from None
    return converted


def _refused(value: Any, check: Callable[[Any], None]) -> Any:
    """Returns the part of a wrong value that an error message should quote: the first wrong entry of a list, or the whole value.
    check: the function that found the fault. It raises ValueError for a list that has a wrong entry, so it is called with each
    entry as a list of one."""
    for entry in value if isinstance(value, list) else ():
        try:
            check([entry])
        except ValueError:
            return entry
    return value


def _plain_kinds(kind: Any) -> set[Any]:
    return {kind} if isinstance(kind, type) else {arg for arg in get_args(kind) if isinstance(arg, type)}


def _say(kind: Any) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    if get_origin(kind) is dict:
        return 'a table of texts, as in { "name" = "value" }'
    if get_origin(kind) is list:
        return "a list of whole numbers" if get_args(kind) == (int,) else "a list of texts"
    if list[str] in get_args(kind):
        return "text or a list of texts"
    kinds = _plain_kinds(kind) - {type(None)}
    if kinds == {int, str}:
        return units.SIZE_FORM
    if kinds == {float, str}:
        return units.DURATION_FORM
    words = [f'"{word}"' for one in get_args(kind) if get_origin(one) is Literal for word in get_args(one)]
    return " or ".join([*(names.get(one, one.__name__) for one in kinds), *words])


# ---- what a value may be


def _one_of(*allowed: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if value not in allowed:
            raise ValueError("must be one of " + ", ".join(allowed))

    return check


def _between(least: float, most: float = math.inf) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not least <= value <= most:
            raise ValueError(f"must be at least {least:g}" + ("" if math.isinf(most) else f" and at most {most:g}"))

    return check


def _above_zero(value: Any) -> None:
    if not math.isfinite(value):
        raise ValueError("must be a finite number above 0")
    if value <= 0:
        raise ValueError("must be above 0")


def _stretch(value: Any) -> None:
    if not (value == 0 or (value >= 1 and math.isfinite(value))):
        raise ValueError("must be at least 1, or 0 for no limit")


def _stall(value: Any) -> None:
    if not (value == 0 or (value >= MIN_STALL_S and math.isfinite(value))):
        raise ValueError(f"must be at least {MIN_STALL_S:g}, or 0: what hangs is left alone")


def _chunk(value: Any) -> None:
    num_bytes = units.parse_bytes(value)
    if num_bytes < 64 << 10 or num_bytes & (num_bytes - 1):
        raise ValueError('must be a power of two of at least 64KiB, as in "2MiB"')


def _size(value: Any) -> None:
    units.parse_bytes(value)


def _duration(value: Any) -> None:
    units.parse_duration_s(value)


def _size_or_zero(value: Any) -> None:
    _bytes_or_zero(value)


def _bytes_or_zero(value: int | str) -> int:
    """Returns the number of bytes of a size such as "64MiB"; 0 and "0" are allowed, too. Raises ValueError for another form."""
    return 0 if value in (0, "0") else units.parse_bytes(value)


def _size_or_share(value: Any) -> None:
    units.parse_size_or_share(value, 1 << 40)


def _power_of_two(value: Any) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError("must be a power of two, as in 16")


def _listen(value: Any) -> None:
    units.parse_listen(value)


def _listen_or_none(value: Any) -> None:
    if value:
        units.parse_listen(value)


def _host_names(value: Any) -> None:
    for name in value:
        if not name or any(char in name for char in "/:@ *"):
            raise ValueError('must hold host names without scheme and port, as in "gpu1.example.org"')


def _audit_log(value: Any) -> None:
    if value and value not in AUDIT_IN_LOG and "/" not in value:
        raise ValueError('must be a path with a "/" (./audit.log for one beside this file), log, journal, or "" for none')


def _origins(value: Any) -> None:
    if value == [origins.ANY]:
        return
    for text in value:
        origins.parse_origin(text)


def _endpoint(value: Any) -> None:
    if value:
        trace_endpoint.parse(value)


def _header_values(value: Any) -> None:
    for name, text in value.items():
        if wrong := trace_endpoint.header_problem(name, text):
            raise ValueError(wrong)


def _not_empty(value: Any) -> None:
    if not value.strip():
        raise ValueError("must not be empty")


def _device_specs(value: Any) -> None:
    """Checks the form of the entries of the setting `device`: NAME=BUDGET, or a cuda device's name alone. Raises ValueError for an
    entry of another form. Whether the budgets fit into the memory is checked later."""
    for text in value:
        _, amount = units.parse_device(text)
        if amount:
            units.parse_budget(amount, 1 << 40)


_CHECKS: dict[str, Callable[[Any], None]] = {
    "dtype": _one_of(*DTYPES),
    "quantize": _one_of(*QUANTIZATIONS),
    "resident": _one_of(*RESIDENT_FORMS),
    "kv_cache_dtype": _one_of(*KV_CACHE_DTYPES),
    "speculator": _not_empty,
    "log_level": _one_of(*LOG_LEVELS),
    "log_format": _one_of(*LOG_FORMATS),
    "audit_log": _audit_log,
    "admin_listen": _listen_or_none,
    "allowed_hosts": _host_names,
    "allowed_origins": _origins,
    "runner": _one_of(*RUNNERS),
    "tool_parser": _one_of(*TOOL_PARSERS),
    "reasoning_parser": _one_of(*REASONING_PARSERS),
    "tls_min_version": _one_of(*TLS_VERSIONS),
    "listen": _listen,
    "device": _device_specs,
    "chunk_bytes": _chunk,
    "max_body_bytes": _size,
    "stored_responses_bytes": _size_or_zero,
    "host_tier_bytes": _size_or_share,
    "isolate_bytes": _size,
    "preempt_after_s": _between(0),
    "block_tokens": _power_of_two,
    "max_num_batched_tokens": _between(16, 1 << 20),
    "turn_budget_ms": _above_zero,
    "max_step_stretch": _stretch,
    "threads": _between(0, 1024),
    "test_disk_bytes_per_s": _between(0),
    "test_copy_bytes_per_s": _between(0),
    "loop_watch_ms": _between(0.1, 1000),
    "null_step_ms": _between(0, 60_000),
    "load_deadline_s": _above_zero,
    "overdue_after_s": _between(0),
    "max_wait_s": _above_zero,
    "engine_stall_s": _stall,
    "text_stall_s": _stall,
    "request_timeout_s": _above_zero,
    "body_read_timeout_s": _above_zero,
    "max_queued_per_model": _between(1),
    "max_queued_per_tenant": _between(0),
    "max_connections_per_address": _between(0),
    "drain_timeout_s": _between(0),
    "sse_comment_every_s": _above_zero,
    "max_model_len": _between(1),
    "max_sequences": _between(1, 4096),
    "max_queued": _between(1),
    "kv_floor_tokens": _between(0),
    "priority": _above_zero,
    "keep_alive": _duration,
    "upstream": upstream.check,
    "warm": warm.check,
    "replicas": replicas.check,
    "expert_copies": _between(0, parallel.MOST_COPIES),
    "tensor": _between(1, parallel.MOST_RANKS),
    "expert": _between(1, parallel.MOST_RANKS),
    "pipeline": _between(1, parallel.MOST_RANKS),
    "temperature": _between(0, 2),
    "top_p": _between(0, 1),
    "top_k": _between(0),
    "min_p": _between(0, 1),
    "repetition_penalty": _above_zero,
    "max_tokens": _between(1),
    "address": hosts.check_address,
    "key_file": _not_empty,
    "endpoint": _endpoint,
    "headers": _header_values,
    "sample": _between(0, 1),
    "service_name": _not_empty,
}


def _check_across(source: str, config: NodeConfig) -> None:
    """Checks the rules that involve several keys, for example that no alias belongs to two models. Raises ConfigError, which names
    the keys. source: the configuration file, for messages."""
    if config.tls_certificate and not config.tls_key:
        raise ConfigError(source, "tls_certificate", "needs tls_key beside it: the file with the certificate's private key")
    for key in ("tls_key", "tls_client_ca"):
        if getattr(config, key) and not config.tls_certificate:
            raise ConfigError(source, key, "needs tls_certificate beside it")
    wrong_key, wrong = hosts.problem(config.device, config.hosts)
    if wrong:
        raise ConfigError(source, wrong_key, wrong)
    owners: dict[str, str] = {}
    for name, model in config.models.items():
        where = f'models."{name}"'
        if model.isolate_bytes is not None and not model.isolate:
            raise ConfigError(source, f"{where}.isolate_bytes", f"{model.isolate_bytes!r} needs isolate = true beside it")
        _check_upstream(source, where, config, model)
        _check_base(source, where, name, model)
        for alias in model.aliases:
            if alias in owners:
                raise ConfigError(source, f"{where}.aliases", f'{alias!r} is already an alias of "{owners[alias]}"')
            if alias in config.models and alias != name:
                raise ConfigError(source, f"{where}.aliases", f'{alias!r} is the name of the model "{alias}"')
            owners[alias] = name
        known = [units.parse_device(text)[0] for text in config.device] or ["cpu:0"]
        for device in model.devices:
            if device not in known:
                raise ConfigError(source, f"{where}.devices", f"{device!r} is no device of this node: {', '.join(known)}")
        if model.devices and all(map(host_of, model.devices)):
            message = f"{model.devices!r} must name a device of this machine: the last stage of every model is on one"
            raise ConfigError(source, f"{where}.devices", message)
        if wrong := parallel.problem(model, known):
            raise ConfigError(source, f"{where}.parallel", wrong)
        if wrong := replicas.problem(model, known):
            raise ConfigError(source, f"{where}.replicas", wrong)
        if wrong := parallel.problem_of_copies(model):
            raise ConfigError(source, f"{where}.expert_copies", wrong)
        if model.kv_floor_tokens is not None and model.max_model_len is not None and model.kv_floor_tokens < model.max_model_len:
            raise ConfigError(
                source,
                f"{where}.kv_floor_tokens",
                f"{model.kv_floor_tokens} must be at least max_model_len ({model.max_model_len}): one such request must fit",
            )
    _check_names(source, config, owners)


def _check_upstream(source: str, where: str, config: NodeConfig, model: ModelConfig) -> None:
    """Checks that a model with the setting `upstream`, which another server answers, has no settings that only local models use,
    and that a model without it has none of the `upstream_` settings. where: the path of the model's table. Raises ConfigError,
    which names the key, for such a setting."""
    if model.upstream is None:
        for key in ("upstream_model", "upstream_key_file"):
            if getattr(model, key) is not None:
                raise ConfigError(source, f"{where}.{key}", "needs upstream beside it, the address of the server that it is about")
        return
    if upstream.is_own_address(model.upstream, config.listen):
        raise ConfigError(source, f"{where}.upstream", f"{model.upstream!r} is this node's own address (listen)")
    for key, default in msgspec.structs.asdict(ModelConfig()).items():
        if key not in upstream.ALLOWED_BESIDE and getattr(model, key) != default:
            raise ConfigError(source, f"{where}.{key}", "has no effect beside upstream: another server answers for this name")
    if model.upstream_model == "":
        raise ConfigError(
            source, f"{where}.upstream_model", "'' must be the model's name on that server; leave it out for the same"
        )


def _check_base(source: str, where: str, name: str, model: ModelConfig) -> None:
    """Checks a model with the setting `base`, that is, a LoRA adapter. Raises ConfigError, which names the key, if the base is not
    another model, or if the model's table sets anything but `base` and aliases. where: the path of the table."""
    if model.base is None:
        return
    if model.base in ("", name):
        raise ConfigError(source, f"{where}.base", f"{model.base!r} must be the name of the model that the adapter is for")
    for key, default in msgspec.structs.asdict(ModelConfig()).items():
        if key not in adapters.ALLOWED_FOR_ADAPTERS and getattr(model, key) != default:
            raise ConfigError(source, f"{where}.{key}", "has no effect beside base: a LoRA adapter is computed as its base is")


def _check_names(source: str, config: NodeConfig, owners: Mapping[str, str]) -> None:
    """Checks the table `[names]`. Raises ConfigError for an entry that has the name or alias of a model, or that leads to another
    entry of the table. owners: maps each alias to its model."""
    for name, targets in config.names.items():
        where = f'names."{name}"'
        if name in config.models:
            raise ConfigError(source, where, f"{name!r} is the name of a model, which has a table of its own")
        if name in owners:
            raise ConfigError(source, where, f'{name!r} is already an alias of "{owners[name]}"')
        for target in targets:
            if target in config.names:
                raise ConfigError(source, where, f"{target!r} is an entry of this table, too; name a model or its alias")
