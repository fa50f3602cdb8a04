"""Streams while something happens to the service: begun before it, whole after it."""

from __future__ import annotations

from tests.vm.guest import clients, service
from tests.vm.guest.checks import expect
from tests.vm.guest.clients import Prober, Stream

NUM_STREAMS, TOKENS = 8, 80  # 8 streams of a model with 25 ms a token: 0.2 s a step


def streams_under(what: str) -> tuple[list[Stream], Prober]:
    """Streams that have begun, and a client that connects anew all the time."""
    streams = [Stream("slow", TOKENS, seed) for seed in range(NUM_STREAMS)]
    service.wait_for(f"all streams flow before {what}", lambda: all(one.num_tokens > 3 or one.problem for one in streams))
    return streams, Prober()


def judge(streams: list[Stream], prober: Prober) -> str:
    """Waits for the streams. Raises AssertionError where one was lost, or has another text than undisturbed."""
    lost = [f"seed {seed}: {problem}" for seed, one in enumerate(streams) if (problem := one.end())]
    seen = prober.stop()
    expect(not lost, f"{len(lost)} of {len(streams)} streams lost: {lost[:3]}")
    for seed, one in enumerate(streams):
        status, body = clients.request("POST", "/v1/completions", clients.completion("fast", TOKENS, seed))
        is_same = status == 200 and one.text == body["choices"][0]["text"]
        expect(is_same, f"seed {seed} has another text: {status} {one.text[-60:]!r}")
    return f"{len(streams)} of {len(streams)} streams whole, with the same text; {seen}"


def go_on(what: str, pid: int, streams: list[Stream], prober: Prober) -> str:
    """What is seen of streams that began before `what`; the service's process was pid then."""
    before = [one.num_tokens for one in streams]
    after = service.wait_active(pid)
    expect(after != pid, f"the same process after {what}")
    running = sum(not one.is_done for one in streams)
    expect(running == len(streams), f"only {running} streams were still running after {what}: nothing is shown ({before})")
    return judge(streams, prober)
