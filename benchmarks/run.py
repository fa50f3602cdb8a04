"""Runs the benchmarks of the serving node and writes the tables of docs/performance.md and the README, and one result file.

Each figure is taken on the machine at hand; what carries over between machines are ratios within a run.
usage: python -m benchmarks.run [--only serve,stall,crash,scheduler]
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import subprocess
import sys
from typing import Any

import psutil

from benchmarks import aims
from benchmarks.server import ROOT
from engine.host.processor import this_processor

SCRIPTS = (
    *("serve", "overhead", "stall", "crash", "scheduler", "grammar", "roofline", "kernels", "cpu", "latency", "loading"),
    *("first_token", "pauses"),
)
ARGUMENTS = {"kernels": ["--only", "attention,prefill", "--dtypes", "bfloat16"]}
# Benchmarks of the cpu device, whose lines are of several kinds: (benchmark, kind) -> title. "": all kinds in one table.
CPU_SECTIONS = {
    ("roofline", ""): "Where a step's time goes on the cpu device, beside what bytes and operations take at best",
    ("kernels", "attention"): "Attention of decode over 4,096 tokens a row; of reading: its time over that of reading its KV",
    ("kernels", "prefill"): "Attention of prompts' last tokens; of gemm: operations a second over those of F.linear at 128 rows",
    ("cpu", "load"): "The cpu device beside other servers on the same checkpoint, in turn",
    ("cpu", "missing"): "Peers that took no part",
    ("cpu", "swap-in"): "A model that is not loaded: request to first token, its file in the page cache",
    ("latency", "prompt"): "Inter-token latency of 8 streams while prompts of 2,000 tokens arrive",
    ("latency", "models"): "Inter-token latency of one stream while two other models are busy on the same device",
    ("latency", "daemon"): "The daemon beside a decoding engine",
    ("loading", "cold"): "A checkpoint of 2.2 GB from the drive into memory; ratio: to raw reads into as much memory",
    ("loading", "warm"): "The same from the page cache; ratio: to buffered reads, each byte to its own place",
    ("first_token", "cold"): "A request to a model that is only on the drive, beside loading first and computing afterwards",
}
MEASURED, AIMS, SPLIT_AIMS = "measured", "aims", "aims of split models"  # the marks between which tables are written


def commit_of(folder: pathlib.Path) -> str:
    """The commit of a checkout; "" if the folder is none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, Any]:
    """Returns a description of the machine that the figures were taken on, without its name."""
    cpu = platform.processor() or "unknown"
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {
        "machine": cpu,
        "features": sorted(this_processor().features),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "commit": commit_of(ROOT),
        "date": datetime.date.today().isoformat(),
    }


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """A Markdown table; columns: key -> heading."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def report(lines: list[dict[str, Any]]) -> str:
    """The Markdown between the markers of docs/performance.md."""
    about = lines[0]
    parts = [
        f"Measured {about['date']} on {about['cores']} cores of {about['machine']}, {about['memory_gib']} GiB, "
        f"Python {about['python']}; client on the same machine."
    ]
    serve = [line for line in lines if line.get("benchmark") == "serve" and "streams" in line]
    for kind, title in (("null", "Null runner, 10 ms a step"), ("feather", "feather, 128 words in, 128 tokens out, temperature 0")):
        rows = [line for line in serve if line["kind"] == kind]
        columns = {"streams": "streams", "cpu_us_per_out_token": "CPU µs per output token"}
        if kind == "feather":
            columns |= {"bare_forward_cpu_us": "bare forward", "serving_cpu_us": "serving"}
        columns |= {
            "out_tok_s": "tokens/s",
            "itl_p50_ms": "ITL p50 ms",
            "itl_p99_ms": "ITL p99 ms",
            "ttft_p50_ms": "TTFT p50 ms",
            "events_per_token": "SSE events per token",
            "failed": "failed",
        }
        if rows:
            parts += [f"### {title}", table(rows, columns)]
    still = [line for line in lines if line.get("benchmark") == "serve" and "ready_s" in line]
    if still:
        columns = {
            "kind": "runner",
            "ready_s": "start to ready s",
            "daemon_rss_mb_at_ready": "daemon RSS MB at ready",
            "daemon_rss_mb": "daemon RSS MB after load",
            "engine_rss_mb": "engine RSS MB, prepared memory included",
            "quiet_after_s": "free memory prepared after s",
            "idle_core_percent": "then idle, % of a core",
            "event_loop_stall_ms_max": "longest loop stall ms",
        }
        parts += ["### At rest", table(still, columns)]
    for name, title in (
        ("overhead", "Keys, a log line a request and metrics scraped every second, against none of them"),
        ("stall", "A 1 MB prompt and a 128,000-entry vocabulary arrive while 50 streams run"),
        ("crash", "kill -9 of the engine under 50 streams"),
        ("crash_host_tier", "The same with three models of 125 M parameters resident and kept in host memory"),
        ("crash_adopted", "The same three, their weights taken over on the device by the next engine"),
        ("pauses", "Streams paused three times for other models' overdue work"),
        ("scheduler", "Node scheduler, cost of an event"),
        ("grammar", "Grammars: masks on a vocabulary of 32,000, and 500 schemas of everyday difficulty"),
    ):
        rows = [line for line in lines if line.get("benchmark") == name]
        if name == "scheduler":
            rows = [flat for line in rows for flat in _scheduler_rows(line)]
        if rows:
            parts += [f"### {title}", table(rows, {key: key.replace("_", " ") for key in rows[0] if key != "benchmark"})]
    for (name, kind), title in CPU_SECTIONS.items():
        rows = [line for line in lines if line.get("benchmark") == name and kind in ("", line.get("kind"))]
        if rows:
            keys = dict.fromkeys(key for row in rows for key in row if key != "benchmark" and (key != "kind" or not kind))
            parts += [f"### {title}", table(rows, {key: key.replace("_", " ") for key in keys})]
    return "\n\n".join(parts)


def _scheduler_rows(line: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per number of models; `net`: less 2 us per action."""
    return [
        {
            "models": run["models"],
            "queued": run["queued"],
            "events": run["events"],
            "mean µs": run["all"]["mean_us"],
            "p99 µs": run["all"]["p99_us"],
            "net mean µs": run["all"]["net_mean_us"],
            "net p99 µs": run["all"]["net_p99_us"],
        }
        for run in line["runs"]
    ]


def highlights(lines: list[dict[str, Any]]) -> str:
    """The README's table: a few of the same figures."""

    def one(name: str, **wanted: Any) -> dict[str, Any]:
        return next(r for r in lines if r.get("benchmark") == name and all(r.get(k) == v for k, v in wanted.items()))

    feather, null = one("serve", kind="feather", streams=200), one("serve", kind="null", streams=200)
    rest = next(r for r in lines if r.get("kind") == "feather" and "ready_s" in r)
    stall, crash = one("stall"), one("crash")
    rows = {
        "CPU per streamed token, whole process tree, 200 streams, near-weightless model": f"{feather['cpu_us_per_out_token']} µs",
        "the same with no model at all": f"{null['cpu_us_per_out_token']} µs",
        "start to ready": f"{rest['ready_s']} s",
        "idle with a model loaded": f"{rest['idle_core_percent']} % of a core",
        "daemon's memory": f"{rest['daemon_rss_mb']} MB",
        "longest hold of the event loop: 1 MB prompt, new 128,000-entry tokenizer, 50 streams": f"{stall['stall_max_ms']} ms",
        "engine killed under 50 streams: failed, tokens flow again after": f"{crash['failed']}, {crash['serving_again_s']} s",
    }
    cold = [r for r in lines if r.get("benchmark") == "first_token"]
    if cold:
        first = cold[0]
        name = f"2.2 GB model only on the drive: request to first token, beside the drive's raw read of its file ({first['model']})"
        rows[name] = f"{first['cold_s']} s, {first['raw_s']} s"
    peer = [r for r in lines if r.get("peer") == "llama-server" and r.get("model") == "mid" and "ours_over_it" in r]
    if peer:
        streams = " / ".join(str(r["streams"]) for r in peer)
        name = f"tokens per second over llama.cpp's server, same 125 M checkpoint in bfloat16, {streams} streams"
        rows[name] = " / ".join(str(r["ours_over_it"]) for r in peer) + " times"
    about = lines[0]
    where = f"{about['cores']} cores of {about['machine']}, {about['date']}, client on the same machine"
    return "\n".join([f"| {where} | |", "|---|---|", *[f"| {name} | {value} |" for name, value in rows.items()]])


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def between_marks(page: pathlib.Path, name: str) -> str:
    begin, end = marks(name)
    return page.read_text().split(begin)[1].split(end)[0].strip()


def write_between_marks(page: pathlib.Path, name: str, body: str) -> None:
    text, (begin, end) = page.read_text(), marks(name)
    head, tail = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{head}{begin}\n\n{body}\n\n{end}{tail}")


def write_docs(lines: list[dict[str, Any]]) -> None:
    """lines: of the newest result file, which is written already."""
    write_between_marks(ROOT / "docs" / "performance.md", AIMS, aims.table(aims.results()))
    write_between_marks(ROOT / "docs" / "performance.md", SPLIT_AIMS, aims.split_table())
    write_between_marks(ROOT / "docs" / "performance.md", MEASURED, report(lines))
    write_between_marks(ROOT / "README.md", MEASURED, highlights(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {','.join(SCRIPTS)}")
    parser.add_argument("--llama-server", help="handed to benchmarks.cpu, as is --gguf")
    parser.add_argument("--gguf")
    args = parser.parse_args()
    peers = [
        each
        for name in ("llama_server", "gguf")
        if (value := getattr(args, name))
        for each in (f"--{name}".replace("_", "-"), value)
    ]
    lines = [machine()]
    for script in args.only.split(",") if args.only else SCRIPTS:
        print(f"$ python -m benchmarks.{script}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{script}", *ARGUMENTS.get(script, []), *(peers if script == "cpu" else [])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for text in done.stdout.splitlines():
            if text.startswith("{"):
                print(text, flush=True)
                lines.append(json.loads(text))
    if args.only:
        print(report(lines))
        return
    results = ROOT / "benchmarks" / "results" / f"{lines[0]['date']}-cpu.jsonl"
    results.parent.mkdir(exist_ok=True)
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_docs(lines)
    print(f"\n{report(lines)}\n\nwritten to {results.relative_to(ROOT)}, docs/performance.md and README.md")


if __name__ == "__main__":
    main()
