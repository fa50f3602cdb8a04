"""`make demo`: one daemon, three language models that do not fit together, and what happens then.

Every line that begins with `$` is a real command, run as printed. Writes only below .demo/; needs no sudo; leaves no process
behind. usage: python -m demo.run [--model PATH]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import psutil

from demo.chat import ChatError, stream_chat
from demo.node import DemoNode

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUESTIONS = {
    "ember": "What does write do?",
    "birch": "What does open do?",
    "oak": "Tell me about the event loop.",
}
# Each device takes one of the three models at a time, with its KV and work space.
DEVICES = ["cpu:0=32MiB", "cpu:1=32MiB"]
BOLD, DIM, RESET = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")
COLOURS = ("\x1b[33m", "\x1b[36m", "\x1b[35m") if sys.stdout.isatty() else ("", "", "")


def title(text: str) -> None:
    if sys.stdout.isatty():
        time.sleep(1)  # time to read what the last act showed
    print(f"\n{BOLD}── {text}{RESET}", flush=True)


def echo(*command: str) -> None:
    print(f"{DIM}$ {shlex.join(command)}{RESET}", flush=True)


@dataclass(slots=True)
class Chat:
    """One streamed answer, followed in a thread; gaps_s are the silences between pieces."""

    url: str
    model: str
    question: str
    max_tokens: int = 120
    temperature: float = 0.0
    seed: int = 1
    ignore_eos: bool = False
    label: str = ""
    quiet: bool = False
    text: str = ""
    error: str = ""
    num_pieces: int = 0
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def echo(self) -> Chat:
        """Shows the command that does the same."""
        words = ["python", "-m", "demo.chat", self.url, self.model, self.question]
        for name, default in (("max_tokens", 120), ("temperature", 0.0), ("seed", 1)):
            if getattr(self, name) != default:
                words += ["--" + name.replace("_", "-"), str(getattr(self, name))]
        echo(*words, *(["--ignore-eos"] if self.ignore_eos else []))
        return self

    def start(self) -> Chat:
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def join(self) -> Chat:
        assert self._thread is not None
        self._thread.join()
        return self

    def run(self) -> Chat:
        return self.start().join()

    def _follow(self) -> None:
        began = last = time.perf_counter()
        line = ""
        try:
            for piece in stream_chat(
                self.url, self.model, self.question, self.max_tokens, self.temperature, self.seed, self.ignore_eos
            ):
                now = time.perf_counter()
                self.first_s = self.first_s or now - began
                if self.num_pieces:
                    self.gaps_s.append(now - last)
                last = now
                self.num_pieces += 1
                self.text += piece
                if self.quiet:
                    continue
                if not self.label:
                    shown = piece if not self.text.endswith("\n" + piece) else piece.lstrip("\n")
                    print(shown, end="", flush=True)
                else:
                    line += piece
                    if len(line) > 72 and " " in line:
                        ready, line = line.rsplit(" ", 1)
                        self._print(ready)
            if not self.quiet:
                if self.label:
                    self._print(line)
                else:
                    print(flush=True)
        except (ChatError, OSError) as error:
            self.error = str(error)
            print(f"\n{self.model}: {self.error}", flush=True)

    def _print(self, line: str) -> None:
        colour = COLOURS[list(QUESTIONS).index(self.model) % len(COLOURS)] if self.model in QUESTIONS else ""
        print(f"{colour}{self.model:>6} │{RESET} {' '.join(line.split())}", flush=True)


def ask(node: DemoNode, chats: list[Chat], model: str, question: str) -> Chat:
    """A chat as a new user would run it: the command is shown, the answer streams below it."""
    chat = Chat(node.url, model, question).echo().run()
    chats.append(chat)
    return chat


def side_by_side(node: DemoNode, chats: list[Chat], models: list[str]) -> None:
    title("Both devices are taken. The third model is asked while one answers: the idle one makes room")
    before = node.evictions()
    long = Chat(node.url, models[1], "Tell me about objects.", 220, 0.4, 7, True, label="on").echo().start()
    while long.num_pieces < 5 and not long.error:
        time.sleep(0.01)
    third = Chat(node.url, models[2], QUESTIONS[models[2]], label="on").echo().run()
    long.join()
    chats += [long, third]
    node.hearth("ps")
    print(f"{models[2]} answered after {third.first_s:.2f} s, eviction and load included; {models[1]} never paused for longer")
    print(f"than {1e3 * max(long.gaps_s):.0f} ms; evicted: {', '.join(node.evictions()[len(before) :])}.")


def killed_in_mid_sentence(node: DemoNode, chats: list[Chat], model: str, neighbour: str) -> tuple[bool, float]:
    title("An engine is killed in mid-sentence, and the sentence goes on")
    chat = Chat(node.url, model, "Tell me about threads.", 220, 0.4, 1, True).echo()
    pid = node.engine_pid(model)
    other = Chat(node.url, neighbour, "Go on.", 900, 0.5, 3, True, quiet=True).start()
    chat.start()
    while chat.num_pieces < 60 and not chat.error:
        time.sleep(0.002)
    print(f"\n{DIM}$ kill -9 {pid}{RESET}", flush=True)
    os.kill(pid, signal.SIGKILL)
    chat.join()
    other.join()
    again = Chat(node.url, model, chat.question, 220, 0.4, 1, True, quiet=True).run()
    chats += [chat, other, again]
    same = chat.text == again.text
    print(f"Longest silence {max(chat.gaps_s):.2f} s; the text is {'the same as' if same else 'NOT the same as'} without the kill;")
    print(f"{neighbour}, on the other device, never paused for longer than {1e3 * max(other.gaps_s):.0f} ms.")
    return same, max(chat.gaps_s)


def burst(node: DemoNode, chats: list[Chat], models: list[str], num: int) -> float:
    """Returns CPU seconds per output token of all of hearthd's processes."""
    title(f"{num} chats at once for all three models")
    flock = [
        Chat(node.url, models[i % len(models)], QUESTIONS[models[i % len(models)]], 60, 0.5, i, quiet=True) for i in range(num)
    ]
    cpu_s, num_tokens = node.cpu_s(), node.output_tokens()
    for chat in flock:
        chat.start()
    for chat in flock:
        chat.join()
    slowest = max(chat.first_s for chat in flock)
    failed = sum(bool(chat.error) for chat in flock)
    print(f"{num - failed} answered, {failed} failed; slowest first word {slowest:.2f} s.")
    chats += flock
    return (node.cpu_s() - cpu_s) / (node.output_tokens() - num_tokens)


def table(node: DemoNode, chats: list[Chat], cpu_s_per_token: float) -> None:
    title("Measured in this run")
    failed = sum(bool(c.error) for c in chats)
    loads = node.load_seconds()
    rows = [
        ("requests", len(chats)),
        ("failed", failed),
        ("engines killed", 1),
        ("loads", len(loads)),
        ("evictions", len(node.evictions())),
        ("load ms, median / longest", f"{1e3 * sorted(loads)[len(loads) // 2]:.0f} / {1e3 * max(loads):.0f}"),
        ("output tokens", node.output_tokens()),
        ("CPU µs per output token, all processes, in the burst", f"{1e6 * cpu_s_per_token:.0f}"),
        ("daemon memory", f"{psutil.Process(node.pid).memory_info().rss / 1e6:.0f} MB"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def own_model(path: str) -> int:
    """`make demo MODEL=path`: one chat with the user's own checkpoint."""
    source = pathlib.Path(path).resolve()
    if not (source / "config.json").exists():
        print(f"MODEL={path}: no config.json there; a Hugging Face folder is wanted", file=sys.stderr)
        return 2
    models = ROOT / ".demo" / "own"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir(parents=True)
    (models / source.name).symlink_to(source)
    with DemoNode(models, ["cpu:0=60%"], []) as node:
        node.hearth("models")
        node.hearth("load", source.name)
        chats: list[Chat] = []
        ask(node, chats, source.name, "Hello! What can you do?")
        farewell(node, source.name)
    return int(any(c.error for c in chats))


def farewell(node: DemoNode, model: str) -> None:
    print(f"\nServing on {BOLD}{node.url}{RESET}. Try, in another terminal:\n")
    print(f"  .venv/bin/hearth --control {node.control_shown} ps")
    print(f'  .venv/bin/python -m demo.chat {node.url} {model} "What is a list?"')
    print(f"  curl -N {node.url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f'    -d \'{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"What is a list?"}}]}}\'')
    if not sys.stdout.isatty():
        print("\nNo terminal: stopping here.")
        return
    print("\nCtrl-C stops it.", flush=True)
    try:
        while node.alive():
            time.sleep(0.5)
    except KeyboardInterrupt:
        print("\nStopping.")


def show() -> int:
    models = list(QUESTIONS)
    print(f"{BOLD}hearthd: one daemon, three language models, a memory budget that holds two of them.{RESET}")
    print("Takes about 15 seconds, 2 cores, 1 GB of memory and 5 MB of disk, all below .demo/.")
    print("Lines with $ are real commands. Ctrl-C ends it.")
    with DemoNode(ROOT / "demo" / "models", DEVICES, ["--dtype", "float32"]) as node:
        node.hearth("models")
        chats: list[Chat] = []
        title("Nothing is loaded. The first question brings its model in")
        ask(node, chats, models[0], QUESTIONS[models[0]])
        ask(node, chats, models[1], QUESTIONS[models[1]])
        side_by_side(node, chats, models)
        title("The evicted model is asked again: it comes back, with the same words")
        first = chats[0].text
        back = ask(node, chats, models[0], QUESTIONS[models[0]])
        print(f"First word after {back.first_s:.2f} s; the same text as before: {'yes' if back.text == first else 'NO'}.")
        same, _ = killed_in_mid_sentence(node, chats, models[0], node.resident_beside(models[0]))
        cpu_s_per_token = burst(node, chats, models, 60)
        title("Why did that happen?")
        node.hearth("why", models[0])
        table(node, chats, cpu_s_per_token)
        farewell(node, models[0])
    return int(not same or back.text != first or any(c.error for c in chats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder of your own instead of the three tiny models")
    args = parser.parse_args()
    try:
        sys.exit(own_model(args.model) if args.model else show())
    except KeyboardInterrupt:
        print("\nStopped.")
        sys.exit(130)
    except subprocess.TimeoutExpired as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
