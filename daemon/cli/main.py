"""`hearth [--control SOCKET] COMMAND`. Exit codes: 0 ok, 1 hearthd failed, 2 usage, 3 not found, 4 would not fit or is not served,
5 busy, timed out or not running, 6 denied, 7 done but not saved.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr

from config.paths import client_control_path, daemon_status_path
from daemon.cli import (
    completion,
    experts,
    gpus,
    keys,
    lend,
    models,
    node,
    plan,
    queue,
    removal,
    second_name,
    settings,
    simulate,
    story,
    top,
)
from daemon.cli.client import Client, CommandError
from daemon.cli.doctor import command as doctor
from daemon.cli.packing import command as packing
from daemon.cli.pull import command as pull
from daemon.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from daemon.process.arguments import ArgumentParser

# functions that run a command; they return its exit code if that is not 0 although there was no error
Command = Callable[[Client, argparse.Namespace], int | None]

# what writing to standard output may fail with: its disk is full, its owner's share of it is used up, or the device is broken
_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def make_parser() -> argparse.ArgumentParser:
    common = ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    common.add_argument("--control", metavar="SOCKET", default=argparse.SUPPRESS, help="the daemon's control socket")
    parser = ArgumentParser(prog="hearth", description="Looks after a running hearthd.", parents=[common])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Command, text: str, argument: str = "", optional: bool = False) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text, parents=[common])
        one.set_defaults(run=run, goes_on=False)
        if argument:
            one.add_argument("name", metavar=argument, nargs="?" if optional else None, type=_named)
        return one

    add("ps", models.ps, "what is loaded, where, and how busy")
    add("models", models.models, "all models")
    add("status", node.status, "the daemon, its devices and engines")
    add("gpus", gpus.gpus, "the machine's GPUs: who uses them, temperature, memory, faults; also without a daemon")
    load = add("load", models.command, "load a model and wait until it is ready", "NAME")
    load.add_argument(
        "--adapter",
        metavar="DIR",
        type=_named,
        help="serve the LoRA adapter in this folder by the name, from now on; `unload NAME` ends that",
    )
    load.add_argument("--replace", action="store_true", help="with --adapter: in place of one that was loaded under the name")
    unload = add(
        "unload", models.command, "evict a model now; requests that wait for it may bring it back. Or end `load --adapter`", "NAME"
    )
    unload.add_argument(
        "--to", choices=("cold", "warm"), default="cold", help="warm: its weights stay in host memory, if a copy is there"
    )
    pin = add("pin", models.command, "load a model and never evict it", "NAME")
    for each in (load, pin):
        each.add_argument("--no-wait", action="store_true", help="return as soon as the load is accepted")
    add("unpin", models.command, "let a model be evicted again", "NAME")
    add("enable", models.command, "let requests use a model again", "NAME")
    add("disable", models.command, "refuse requests for a model", "NAME")
    add("why", story.why, "what happened to a model or request, and what it waits for", "MODEL|REQUEST")
    planned = add("plan", plan.plan, "what loading a model would do now: who would leave for it, and why", "NAME", optional=True)
    plan.add_plan_options(planned)
    evict = add("evict", plan.evict, "evict a model, as unload does, or say what would leave", "NAME", optional=True)
    evict.add_argument("--dry-run", action="store_true", help="only say what would leave")
    evict.add_argument("--bytes", metavar="BYTES", default="", help="with --dry-run: who would leave to free so many, as in 8GiB")
    evict.add_argument("--device", metavar="DEVICE", default="", help="with --bytes: on this device only")
    add("history", plan.history, "the last placements, with who left for them and their scores", "NAME", optional=True)
    add("experts", experts.experts, "how evenly tokens are spread over the experts of a model, layer by layer", "NAME")
    live = add("top", top.top, "devices, models, rates and swaps, live")
    live.add_argument("--once", action="store_true", help="print once and end")
    live.add_argument("--every", metavar="SECONDS", type=float, default=1.0, help="between two looks (default 1)")
    add("queue", queue.queue, "requests that wait")
    events = add("events", story.events, "what happened on the node")
    events.add_argument("-f", "--follow", action="store_true", help="and what happens from now on, over restarts of hearthd")
    add("drain", node.drain, "take no new requests, for one model or the node", "NAME", optional=True)
    add("resume", node.resume, "take requests again", "NAME", optional=True)
    add("reload", node.reload, "read the configuration file again")
    add("keys", keys.keys, "tenants of the keys file: limits, what is left of them, keys that expire")
    shown = add("config", settings.config, "settings as the daemon uses them, and where each is set")
    shown.add_argument("--all", action="store_true", help="those that are set nowhere, too")
    hash_key = add("hash-key", keys.hash_key, "the line a keys file needs for a key, read from the terminal or standard input")
    hash_key.add_argument("--generate", action="store_true", help="make a new key and print both")
    pulling = add(
        "pull", pull.pull, "download a model from the Hugging Face hub into the models folder; goes on where it was", "REPO"
    )
    pull.add_options(pulling)
    packer = add("pack", packing.pack, "write a model's bfloat16 weights again, losslessly, in 0.7 of the bytes", "NAME")
    packing.add_options(packer)
    removing = add("rm", removal.remove, "delete a model's folder from the disk, or a second name alone", "NAME")
    removal.add_options(removing)
    for each in (pulling, packer, removing):
        each.set_defaults(goes_on=True)
    copying = add("cp", second_name.copy, "give a model a second name, with settings of its own; no weights are copied", "NAME")
    second_name.add_options(copying)
    packing.add_options(add("verify", packing.verify, "prove that packed weights are the original, bit by bit", "NAME"))
    lending = add("lend", lend.lend, "lend devices of this machine to a hearthd on another one, for stages of pipelines")
    lend.add_options(lending)
    examining = add("doctor", doctor.doctor, "what of this machine stands in the way, and what to change; exits 1 if a check fails")
    doctor.add_options(examining)
    what_if = add("simulate", simulate.simulate, "what the scheduler makes of a trace of requests, and other rules", "TRACE", True)
    simulate.add_simulate_options(what_if)
    made = add("trace", simulate.trace, "make such a trace: models by Zipf's law, asked for in bursts", "FILE", True)
    simulate.add_trace_options(made)
    shell = add("completion", completion.completion, "what makes a shell complete this program's commands and models")
    shell.add_argument("shell", metavar="SHELL", choices=completion.SHELLS, help="bash, zsh or fish")
    shell.set_defaults(parser=parser)  # completion scripts are generated from the parser
    add("version", node.version, "versions of this program and of the daemon")
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    # a process may be started with these closed; what is printed is then lost, as it is in /dev/null
    sys.stdout, sys.stderr = (one or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") for one in (sys.stdout, sys.stderr))
    code = EXIT_OK
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader of the pipe (a pager, head) has closed it
        _drop_output()
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename is not None:
            raise
        print(f"hearth: the output cannot be written: {error.strerror}", file=sys.stderr)
        _drop_output()
        return EXIT_FAILED
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser = make_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    options = _parsed(parser, sys.argv[1:] if argv is None else argv)
    if options is None:
        return EXIT_USAGE
    options.json = getattr(options, "json", False)
    if getattr(options, "name", "") is None:  # a command whose NAME may be left out
        options.name = ""
    control = getattr(options, "control", None) or client_control_path()
    client = Client(control, daemon_status_path(control))
    try:
        exit_code: int | None = options.run(client, options)
    except CommandError as error:
        if options.json:
            print(json.dumps(error.error))
        else:
            print(f"hearth: {error}{meant(client, error, options)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if options.goes_on:
            print("hearth: interrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    return exit_code or EXIT_OK


def _named(text: str) -> str:
    """Returns `text`, the name of a model or folder on the command line. Raises ArgumentTypeError for "", which comes from an unset
    variable of a script: without a name, some commands would apply to the whole node or to the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace | None:
    """Returns the parsed words of a command line. If they are not accepted, prints why, as JSON if --json is one of them, and
    returns None. Raises SystemExit after printing help that was asked for."""
    as_json, told = "--json" in words, io.StringIO()
    try:
        with redirect_stderr(told) if as_json else nullcontext():
            return parser.parse_args(words)
    except SystemExit as ended:
        if ended.code != EXIT_USAGE:
            raise
    if as_json:
        message = told.getvalue().strip().partition(": ")[2]  # without the program's name
        print(json.dumps({"code": "invalid_request", "message": message, "details": {}}))
    return None


def _drop_output() -> None:
    """Discards whatever is written to standard output from now on, also what the interpreter writes as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def meant(client: Client, error: CommandError, options: argparse.Namespace) -> str:
    """Returns a hint to add to the message of `error`, if that error says that there is no model of the given name; "" for other
    errors. The hint is one of: the model of which the name is a replica, why a removed model is still listed, the most similar
    name, how to list all models."""
    if error.error["code"] not in ("model_not_found", "not_found") or not getattr(options, "name", ""):
        return ""
    from difflib import get_close_matches  # imported here, because nothing else needs it

    try:
        rows = client.get("/control/v1/models")
    except CommandError:
        return ""
    for row in rows:
        if row["name"] == options.name and "replica_of" in row:
            return f" It is a replica: commands take its model's name, {row['replica_of']!r}, and are for all of its replicas."
        if row["name"] == options.name:  # its folder is gone, and requests that ran then still do
            return f" What is left of it is {row['state']}: {row['reason']}."
    names = [row["name"] for row in rows if "replica_of" not in row]
    known = {name.lower().rpartition("/")[2]: name for name in names} | {name.lower(): name for name in names}
    close = get_close_matches(options.name.lower(), known, 1)
    return f" Is it {known[close[0]]!r}?" if close else " `hearth models` lists all."
