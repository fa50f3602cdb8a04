"""`python -m daemon.cli.manual hearthd.8|hearth.1|cli.md` prints the files that are committed in docs/man/ and
docs/reference/cli.md.

Commands, flags and settings come from the parsers and config/schema.py; all other texts are here.
"""

from __future__ import annotations

import re
import sys

from config import reference
from config.schema import ModelConfig, NodeConfig
from daemon.cli.completion import Command, Option, commands_of, options_of
from daemon.cli.main import make_parser as make_hearth_parser
from daemon.main import make_parser as make_hearthd_parser
from daemon.process.version import VERSION

EXITS = {
    0: "done",
    1: "hearthd failed on the command; its log says how; doctor, verify: a check failed; the output could not be written",
    2: "usage, or a configuration that is not valid",
    3: "no such model or request",
    4: "it would not fit, or the model is of a kind that is not served",
    5: "busy, timed out, or hearthd does not run",
    6: "no permission",
    7: "done, but not saved: the state folder cannot be written, and a restart would forget it; hearthd tries again",
}
DAEMON_EXITS = {
    0: "stopped when told to",
    1: "could not start: an address or socket is taken, a folder cannot be written",
    2: "wrong flags or configuration; a restart does not help, so the unit does not try",
}
SIGNALS = {
    "SIGTERM, SIGINT": "takes no new requests, lets the open ones end within drain_timeout_s, tells the rest server_restarting; a "
    "second one stops at once",
    "SIGUSR2": "sent by systemd in place of SIGTERM where another start follows (RestartKillSignal): gives open connections and "
    "what was made of their requests to the FD store, for the next hearthd to go on with; without systemd it is a SIGTERM",
    "SIGHUP": "reads the configuration and keys files again, as `hearth reload` does",
    "SIGABRT": "sent by systemd's watchdog: writes where each thread was to the log and ends",
}
FILES = {
    "/etc/hearthd/node.toml": "the service's settings",
    "/etc/hearthd/conf.d/*.toml": "more settings, read after node.toml in the order of their names; the later ones win key by key",
    "/etc/hearthd/keys.toml": "who may use the node, if node.toml names it as keys_file",
    "/var/lib/hearthd/models": "models; a folder with config.json, safetensors and a tokenizer is one, its name is its path",
    "/var/lib/hearthd/state.json": "what pin, unpin, enable and disable decided",
    "/var/cache/hearthd": "compiled kernels; may be emptied while hearthd is stopped",
    "/run/hearthd/control.sock": "takes every command; for root and the group hearthd",
    "/run/hearthd/status.sock": "answers the reading commands; for everybody on the machine",
    "/opt/hearthd/current": "the link to the version in use",
}
VARIABLES = {
    "NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID": "systemd's notify protocol: ready, reloading, stopping, and the watchdog",
    "LISTEN_FDS, LISTEN_FDNAMES, LISTEN_PID": "sockets systemd passes; their names are http, admin, control and status",
    "STATE_DIRECTORY, CACHE_DIRECTORY, CREDENTIALS_DIRECTORY": "folders systemd made for the service",
    "OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "where traces go, if the file does not say it",
    "OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "must not be grpc then: hearthd speaks OTLP over HTTP",
    "OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TRACES_HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, "
    "OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG": "the other keys of [traces], if the file leaves them out",
    "OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER": "true and none leave all of these aside",
    "XDG_RUNTIME_DIR, XDG_STATE_HOME, XDG_CACHE_HOME": "where the same things go when an ordinary user runs hearthd",
}
EXAMPLES = {
    "hearth models": "all models, and why one is incomplete or refused",
    "hearth pull org/name": "download a model from the Hugging Face hub; HF_TOKEN and HF_ENDPOINT count",
    "hearth pack org/name": "its weights again, losslessly, in 0.7 of the bytes; hearth verify proves it",
    "hearth rm org/name": "delete its folder; --dry-run says first what would go",
    "hearth load org/name": "load a model and wait until it is ready",
    "hearth why org/name": "its story, and what it waits for",
    "hearth events -f": "everything, as it happens",
    "hearth doctor": "what of this machine stands in the way, and what to change",
    "hearth models --json": "the same for scripts; all commands take --json",
}
_READING = (
    *("ps", "models", "status", "why", "plan", "history", "top", "experts", "queue", "gpus", "events", "keys", "config"),
    *("doctor", "version"),
)


# ---- roff


def _roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in (".", "'") else line for line in text.splitlines())


def _title(name: str, section: int, text: str) -> list[str]:
    return [
        '.\\" Made by python -m daemon.cli.manual; do not edit by hand.',
        f'.TH {name.upper()} {section} "" "hearthd {VERSION}"',
        ".SH NAME",
        f"{name} \\- {_roff(text)}",
    ]


def _entries(entries: dict[str, str]) -> list[str]:
    lines = []
    for name, text in entries.items():
        lines += [".TP", f"\\fB{_roff(name)}\\fR", _roff(text)]
    return lines


def _flags(options: list[Option]) -> dict[str, str]:
    return {
        ", ".join(option.flags) + (f" {option.value}" if option.value else ""): _plain(option.help).replace("%%", "%")
        for option in options
    }


def _plain(text: str) -> str:
    for old, new in (("show this help message and exit", "print usage"), ("show program's version number and exit", "print it")):
        text = text.replace(old, new)
    return text


def hearthd_8() -> str:
    lines = _title("hearthd", 8, "serves the models of one folder over the OpenAI API")
    lines += [".SH SYNOPSIS", r".B hearthd", r"[\fIOPTION\fR]..."]
    lines += [".SH DESCRIPTION"]
    lines += [
        _roff(
            "One daemon per host. It keeps several language models on one memory budget per device, decides by itself which are "
            "loaded, and answers the OpenAI API. hearth(1) looks after it. As a service it runs from hearthd.service; requests "
            "come in through hearthd.socket, which holds them while hearthd restarts."
        ),
        ".PP",
        _roff(
            "Settings come from a TOML file, from the files conf.d/*.toml beside it, which win over it, and from flags, which win "
            "over all of them. The files are watched, as is that of the keys: a change applies by itself, except of keys that "
            "need a restart, which the log names. A file with an error changes nothing."
        ),
    ]
    lines += [".SH OPTIONS", *_entries(_flags(options_of(make_hearthd_parser())))]
    lines += [".SH SETTINGS", _roff("The same names as the flags, with _ for -. Besides, per model, in a table:")]
    lines += [".PP", _roff('[models."org/name"]')]
    lines += _entries({name: description for name, _, _, _, description in reference.fields(ModelConfig)})
    live = [name for name, _, _, reload, _ in reference.fields(NodeConfig) if reload == "live"]
    lines += [".PP", _roff("Of the node's keys a reload applies " + ", ".join(live) + "; the others need a restart.")]
    lines += [".SH SIGNALS", *_entries(SIGNALS)]
    lines += [".SH EXIT STATUS", *_entries({str(code): text for code, text in DAEMON_EXITS.items()})]
    lines += [".SH ENVIRONMENT", *_entries(VARIABLES), ".SH FILES", *_entries(FILES)]
    lines += [".SH SEE ALSO", ".BR hearth (1),", ".BR systemd.service (5),", ".BR systemd.socket (5)"]
    return "\n".join(lines) + "\n"


def hearth_1() -> str:
    parser = make_hearth_parser()
    lines = _title("hearth", 1, "looks after a running hearthd")
    lines += [".SH SYNOPSIS", r".B hearth", r"[\fIOPTION\fR]... \fICOMMAND\fR [\fIARGUMENT\fR]"]
    lines += [".SH DESCRIPTION"]
    lines += [
        _roff(
            "Talks to hearthd(8) over its control socket: the service's, or the user's own below XDG_RUNTIME_DIR. Who may not open "
            f"it can still read through the status socket ({', '.join(_READING)})."
        )
    ]
    lines += [".SH OPTIONS", *_entries(_flags(options_of(parser)))]
    lines += [".SH COMMANDS"]
    common = {flag for option in options_of(parser) for flag in option.flags}
    for command in commands_of(parser):
        lines += [".TP", f"\\fB{_roff(command.name)}\\fR \\fI{_roff(command.argument)}\\fR".replace(" \\fI\\fR", "")]
        lines.append(_roff(command.help))
        for name, text in _flags([option for option in command.options if not common & set(option.flags)]).items():
            lines += [".RS", ".TP", f"\\fB{_roff(name)}\\fR", _roff(text), ".RE"]
    lines += [".SH EXIT STATUS", *_entries({str(code): text for code, text in EXITS.items()})]
    lines += [".SH EXAMPLES", *_entries(EXAMPLES)]
    lines += [".SH SEE ALSO", ".BR hearthd (8)"]
    return "\n".join(lines) + "\n"


# ---- Markdown


def _cell(text: str) -> str:
    return _plain(text).replace("%%", "%").replace("|", "\\|")


def _command_row(command: Command, common: set[str]) -> str:
    own = [option for option in command.options if not common & set(option.flags)]
    options = "; ".join(f"`{', '.join(option.flags)}` {_cell(option.help)}" for option in own)
    argument = f" {_cell(command.argument)}" if command.argument else ""
    reads = "yes" if command.name in _READING else ""
    return f"| `{command.name}{argument}` | {_cell(command.help)} | {options} | {reads} |"


def cli_md() -> str:
    parser = make_hearth_parser()
    common = {flag for option in options_of(parser) for flag in option.flags}
    lines = [
        "# Command lines",
        "",
        "Made by `python -m daemon.cli.manual cli.md` from the parsers; do not edit by hand. The same as manual pages:",
        "hearthd(8) and hearth(1).",
        "",
        "## `hearth`",
        "",
        "Talks to hearthd over its control socket. Every command takes `--json` and `--control SOCKET`, before or after its name.",
        "*Reads* commands also work through the status socket, for users who may not open the control socket.",
        "",
        "| command | what it does | options | reads |",
        "|---|---|---|---|",
        *[_command_row(command, common) for command in commands_of(parser)],
        "",
        "| exit code | meaning |",
        "|---|---|",
        *[f"| {code} | {text} |" for code, text in EXITS.items()],
        "",
        "With `--json` a command that fails prints `{code, message, details}` on stdout; without, `hearth: message` on stderr.",
        "`hearth completion bash|zsh|fish` prints a completion script; model names are asked of the daemon.",
        "",
        "## `hearthd`",
        "",
        "| flag | what it is |",
        "|---|---|",
        *[f"| `{name}` | {_cell(text)} |" for name, text in _flags(options_of(make_hearthd_parser())).items()],
        "",
        "| exit code | meaning |",
        "|---|---|",
        *[f"| {code} | {text} |" for code, text in DAEMON_EXITS.items()],
        "",
        "| signal | what it does |",
        "|---|---|",
        *[f"| {name} | {text} |" for name, text in SIGNALS.items()],
        "",
        "| environment | what it is |",
        "|---|---|",
        *[f"| `{name}` | {text} |" for name, text in VARIABLES.items()],
    ]
    return re.sub(r"[ ]+\|$", " |", "\n".join(lines), flags=re.M) + "\n"


PAGES = {"hearthd.8": hearthd_8, "hearth.1": hearth_1, "cli.md": cli_md}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
