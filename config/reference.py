"""Prints the documentation of the settings: `python -m config.reference` prints docs/reference/config.md, `python -m
config.reference example` config/example.toml.

Both are generated only from config/schema.py, and a test compares them with the committed files.
"""

from __future__ import annotations

import sys
from typing import Any, get_args, get_type_hints

import msgspec

from config.load import flag_name
from config.schema import HostConfig, ModelConfig, NodeConfig, SamplingDefaults, TracesConfig

TABLES = ("names", "traces", "hosts", "models")  # keys of the node whose values are tables, which cannot be set by flags
_INTRO = """# Configuration

Made from `config/schema.py` by `python -m config.reference`; do not edit by hand.

`hearthd` reads a TOML file (`--config node.toml`), then the files `conf.d/*.toml` beside it, in the order of their names: the later
ones win key by key (tables are merged, lists replaced), and every flag wins over all of them. Each file must be valid by itself,
and a path in it is relative to its own folder. A size is a number of bytes or text such as
`"512MiB"`, `"1.5GiB"` or `"2GB"`; a key that ends in `_s` is in seconds. *live* keys apply at `hearth reload` (or SIGHUP), the
others need a restart and `hearth reload` names them. A file with an error changes nothing: the running settings stay, and the
error names the file, the line, the key, the value and what is allowed. `hearthd --check-config --config node.toml` checks the files
without starting.

## The node
"""


def fields(struct: type[msgspec.Struct]) -> list[tuple[str, Any, str, str, str]]:
    """Returns (key, default, unit, reload, description) of each field, in the schema's order. default: None for a key that must be
    set. unit: "" if it has none. reload: "live" if a reload applies the key, or "restart"."""
    hints = get_type_hints(struct, include_extras=True)
    rows = []
    for info in msgspec.structs.fields(struct):
        meta = next((arg for arg in get_args(hints[info.name]) if isinstance(arg, msgspec.Meta)), None)
        extra = (meta.extra or {}) if meta is not None else {}
        default = None if info.required else info.default
        if info.default_factory is not msgspec.NODEFAULT:
            default = info.default_factory()
        description = (meta.description or "") if meta is not None else ""
        rows.append((info.name, default, str(extra.get("unit", "")), str(extra.get("reload", "live")), description))
    return rows


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return str(value)


def _default(value: Any) -> str:
    if value is None or isinstance(value, msgspec.Struct | dict):
        return ""
    return f"`{_toml(value)}`"


def reference() -> str:
    lines = [_INTRO, "| key | flag | default | unit | reload | what it is |", "|---|---|---|---|---|---|"]
    for name, default, unit, reload, description in fields(NodeConfig):
        flag = f"`{flag_name(name)}`" if name not in TABLES else ""
        lines.append(f"| `{name}` | {flag} | {_default(default)} | {unit} | {reload} | {description} |")
    lines += [
        "",
        "## Traces: `[traces]`",
        "",
        _TRACES,
        "",
        "| key | default | variable | reload | what it is |",
        "|---|---|---|---|---|",
    ]
    for name, default, _, reload, description in fields(TracesConfig):
        lines.append(f"| `{name}` | {_default(default)} | {_VARIABLES.get(name, '')} | {reload} | {description} |")
    lines += ["", "## A host that lends devices: `[hosts.NAME]`", "", _HOSTS, "", "| key | reload | what it is |", "|---|---|---|"]
    lines += [f"| `{name}` | {reload} | {description} |" for name, _, _, reload, description in fields(HostConfig)]
    lines += ["", '## A model: `[models."org/name"]`', ""]
    lines += ["| key | default | unit | reload | what it is |", "|---|---|---|---|---|"]
    for name, default, unit, reload, description in fields(ModelConfig):
        lines.append(f"| `{name}` | {_default(default)} | {unit} | {reload} | {description} |")
    lines += ["", '## Sampling defaults: `[models."org/name".sampling]`', ""]
    lines += ["Used where a request names none; without them the checkpoint's `generation_config.json` counts.", ""]
    lines += ["| key |", "|---|"] + [f"| `{name}` |" for name, *_ in fields(SamplingDefaults)]
    return "\n".join(lines) + "\n"


_TRACES = """OpenTelemetry's own variables count for keys that the file leaves out; `hearth config` shows which did. Those of
`OTEL_EXPORTER_OTLP_TRACES_*` win over those without `TRACES`. `OTEL_SDK_DISABLED=true` and `OTEL_TRACES_EXPORTER=none` leave all
of them aside. [operations.md](../operations.md#traces) says what a trace holds."""
_HOSTS = """`device` names what it lends as `cpu:0@NAME=8GiB` or `cuda:1@NAME=70GiB`. NAME is chosen here, of small letters, digits
and `-`. Both keys are needed."""
_VARIABLES = {
    "endpoint": "`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT` (then with `/v1/traces` below it)",
    "headers": "`OTEL_EXPORTER_OTLP_TRACES_HEADERS`, `OTEL_EXPORTER_OTLP_HEADERS`",
    "sample": "`OTEL_TRACES_SAMPLER_ARG`, `OTEL_TRACES_SAMPLER` (the `parentbased_` ones)",
    "service_name": "`OTEL_SERVICE_NAME`",
    "resource_attributes": "`OTEL_RESOURCE_ATTRIBUTES`",
}
_EXAMPLES = {
    "models_dir": '"/var/lib/hearthd/models"',
    "control": '"/run/hearthd/control.sock"',
    "status_socket": '"/run/hearthd/status.sock"',
    "keys_file": '"/etc/hearthd/keys.toml"',
    "audit_log": '"/var/log/hearthd/audit.log"',
    "admin_listen": '"127.0.0.1:8001"',
    "tls_certificate": '"/etc/letsencrypt/live/gpu1.example.org/fullchain.pem"',
    "tls_key": '"/etc/letsencrypt/live/gpu1.example.org/privkey.pem"',
    "tls_client_ca": '"/etc/hearthd/clients-ca.pem"',
    "allowed_hosts": '["gpu1.example.org"]',
    "allowed_origins": '["https://chat.example.org"]',
    "device": '["cpu:0=25%", "cpu:1=25%", "cpu:0@b=8GiB"]',
    "address": '"10.0.0.2:7100"',
    "key_file": '"/etc/hearthd/b.key"',
    "state_dir": '"/var/lib/hearthd"',
    "cache_dir": '"/var/cache/hearthd"',
    "host_tier_bytes": '"64GiB"',
    "adopt_weights": "true",
    "load_deadline_s": "120.0",
    "aliases": '["gpt-4o-mini", "default"]',
    "warm": '["start", "08:00"]',
    "max_model_len": "8192",
    "max_queued": "64",
    "kv_floor_tokens": "16384",
    "devices": '["cpu:0"]',
    "parallel": "{ tensor = 2 }",
    "replicas": '"auto"',
    "isolate": "true",
    "isolate_bytes": '"6GiB"',
    "chat_template": '"/etc/hearthd/llama.jinja"',
    "temperature": "0.7",
    "quantize": '"int8"',
    "resident": '"packed"',
    "tool_parser": '"hermes"',
    "reasoning_parser": '"think"',
    "top_p": "0.9",
    "top_k": "40",
    "min_p": "0.05",
    "repetition_penalty": "1.1",
    "max_tokens": "1024",
    "endpoint": '"http://127.0.0.1:4318"',
    "headers": '{ "x-scope-orgid" = "models" }',
    "headers_file": '"credential:traces"',
    "resource_attributes": '{ "deployment.environment.name" = "production" }',
    "base": '"org/name"',
    "upstream": '"http://gpu2:8000/v1"',
    "upstream_model": '"org/name-there"',
    "upstream_key_file": '"/etc/hearthd/gpu2.key"',
}


_NAMES = ('# "gpt-4*" = "meta/llama-3-8b"', '# "fast" = ["qwen3-4b", "qwen3-1.7b"]', '# "*" = "qwen3-4b"')


def example() -> str:
    """Returns the text of config/example.toml: all keys, each with its default, or with an example if the default is empty. All
    keys but `models_dir` are commented out, and so is the head of a host's table, which would be incomplete without its keys."""
    lines = [
        "# Every key of hearthd. What is commented out shows the default, or an example where the default is empty.",
        "# Files conf.d/*.toml beside this one are read after it, in the order of their names; the later ones win key by key.",
        "",
    ]
    for name, default, unit, reload, description in fields(NodeConfig):
        if name not in TABLES:
            lines += _entry(name, default, unit, reload, description)
        elif name == "names":
            lines += ["", f"# {description} ({reload})", "[names]", *_NAMES]
        elif name == "traces":
            lines += ["", f"# {description} ({reload})", "[traces]"]
            for each in fields(TracesConfig):
                lines += _entry(*each)
        elif name == "hosts":
            lines += ["", f"# {description} ({reload})", "# [hosts.b]"]
            for each in fields(HostConfig):
                lines += _entry(*each)
    lines += ["", '[models."org/name"]']
    of_upstreams = [field for field in fields(ModelConfig) if field[0].startswith("upstream")]
    for field in fields(ModelConfig):
        if field[0] not in ("sampling", "base", "parallel", "expert_copies", "replicas") and field not in of_upstreams:
            lines += _entry(*field)
    lines += ["", '[models."org/name".sampling]  # live']
    lines += [f"# {name} = {_EXAMPLES[name]}" for name, *_ in fields(SamplingDefaults)]
    lines += ["", '[models."org/large"]  # a model that is split over devices, or on several at once']
    for field in fields(ModelConfig):
        if field[0] in ("parallel", "expert_copies", "replicas"):
            lines += _entry(*field)
    lines += ["", '[models."org/elsewhere"]  # a name that another server answers']
    for field in of_upstreams:
        lines += _entry(*field)
    lines += ["", '[models."org/adapter"]  # a LoRA adapter']
    lines += next(_entry(*field) for field in fields(ModelConfig) if field[0] == "base")
    return "\n".join(lines) + "\n"


def _entry(name: str, default: Any, unit: str, reload: str, description: str) -> list[str]:
    notes = ", ".join(part for part in (unit, reload) if part)
    unset = default in (None, "", [], {})
    value = _EXAMPLES.get(name, '"bfloat16"' if name == "dtype" and unset else None if unset else _toml(default))
    return [f"# {description} ({notes})", f"{'' if name == 'models_dir' else '# '}{name} = {value}"]


if __name__ == "__main__":
    sys.stdout.write(example() if sys.argv[1:] == ["example"] else reference())
