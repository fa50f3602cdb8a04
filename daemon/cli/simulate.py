"""`hearth simulate` and `hearth trace`, which need no daemon. daemon/simulate does the work and is imported when needed."""

from __future__ import annotations

import argparse

from daemon.cli.client import Client
from daemon.simulate.trace_shape import ARRIVALS, TraceShape


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--device",
        metavar="NAME=BYTES",
        action="append",
        default=[],
        help="a device and its budget, as in cuda:0=80GiB; repeatable",
    )
    add("--costs", metavar="FILE", default="", help="TOML or JSON: what things cost, the models, devices, how to make a trace")
    add("--generate", action="store_true", help="make the trace as the costs file says, in place of TRACE")
    add("--seed", metavar="N", type=int, default=None, help="for --generate, in place of the file's")
    add("--models", metavar="FOLDER", default="", help="take the models' sizes from the checkpoints in this folder")
    add("--weights", metavar="BYTES", default="", help="size of models that neither the file nor the folder knows")
    add("--disk", metavar="BYTES", default="", help="read from disk in a second, as in 6.5GB")
    add("--copy", metavar="BYTES", default="", help="copied to the device in a second")
    add("--host-tier", metavar="BYTES", default=None, help="the node's host_tier_bytes; 0: none (default: as the costs file says)")
    add("--prefill", metavar="TOKENS", type=float, default=None, help="prompt tokens a second, of models that were not measured")
    add("--step", metavar="SECONDS", type=float, default=None, help="of a decode step, of models that were not measured")
    add("--slo", metavar="SECONDS", type=float, default=10.0, help="to the first token: the objective (default 10)")
    add("--overdue-after", metavar="SECONDS", type=float, default=None, help="the node's overdue_after_s")
    add("--max-wait", metavar="SECONDS", type=float, default=None, help="the node's max_wait_s; without it nobody is refused")
    add("--chunk", metavar="BYTES", default="", help="the node's chunk_bytes (default 2MiB, 16MiB with a cuda device)")
    add("--policy", metavar="NAME", action="append", default=[], help="only this one; repeatable")
    add("--per-model", action="store_true", help="a table of the models too")


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, TraceShape(())
    add("--num-models", metavar="N", type=int, default=8, help="model-1 to model-N, where no FILE names them (default 8)")
    add(
        "--rate",
        metavar="N",
        type=float,
        default=None,
        help=f"requests a second, of all models (default {default.requests_per_s:g})",
    )
    add("--duration", metavar="SECONDS", type=float, default=None, help=f"length of the trace (default {default.duration_s:g})")
    add(
        "--zipf",
        metavar="S",
        type=float,
        default=None,
        help=f"the share of rank k falls as k to the -S (default {default.zipf:g})",
    )
    add("--arrivals", choices=ARRIVALS, default=None, help="in bursts of each model's own (default), or evenly")
    add("--burst", metavar="SECONDS", type=float, default=None, help=f"mean length of a burst (default {default.burst_s:g})")
    add(
        "--active-share",
        metavar="SHARE",
        type=float,
        default=None,
        help=f"of the time, with requests (default {default.active_share:g})",
    )
    add("--input-tokens", metavar="A-B", default="", help="lengths of prompts (default {}-{})".format(*default.input_tokens))
    add("--output-tokens", metavar="A-B", default="", help="lengths of answers (default {}-{})".format(*default.output_tokens))
    add("--seed", metavar="N", type=int, default=None, help=f"the same seed makes the same trace (default {default.seed})")


def simulate(client: Client, options: argparse.Namespace) -> None:
    from daemon.cli.simulation.command import simulate as run

    run(options)


def trace(client: Client, options: argparse.Namespace) -> None:
    from daemon.cli.simulation.command import trace as run

    run(options)
