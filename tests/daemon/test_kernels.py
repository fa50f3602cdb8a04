"""What the daemon tells of kernels that engines are still having compiled."""

from __future__ import annotations

from daemon.engines.kernels import Kernels, sentence
from daemon.record.event_ring import EventRing
from engine.protocol import KernelsTold


def states(ring: EventRing) -> list[tuple[str, str]]:
    return [(event["device"], event["state"]) for event in ring.history() if event["event"] == "kernels"]


def test_what_is_told_is_shown_until_it_is_over() -> None:
    kernels = Kernels(EventRing())
    assert kernels.sentence() == ""
    kernels.told("cpu:0", KernelsTold("bfloat16", 3, 20, 17.4))
    kernels.told("cpu:1", KernelsTold("float32", 19, 20, 0.2))
    assert kernels.row("cpu:0") == {"kind": "bfloat16", "done": 3, "total": 20, "left_s": 17.4} | {
        "loads_wait": False,
        "postponed": False,
    }
    assert kernels.sentence() == (
        "cpu:0: kernels for bfloat16 are being compiled (3 of 20, about 17 s left); until then models are slower. "
        "cpu:1: kernels for float32 are being compiled (19 of 20, nearly done); until then models are slower."
    )
    kernels.told("cpu:0", KernelsTold("", 0, 0, 0.0))
    kernels.forget("cpu:1")
    assert (kernels.row("cpu:0"), kernels.row("cpu:1"), kernels.sentence()) == (None, None, "")
    assert kernels.problem("cpu:0") == kernels.problem("cpu:1") == ""


def test_on_a_gpu_the_load_waits_for_them() -> None:
    kernels = Kernels(EventRing())
    kernels.told("cuda:0", KernelsTold("one-b", 0, 0, 12.0, loads_wait=True))
    assert kernels.sentence() == "cuda:0: kernels for one-b are being compiled (about 12 s left); until then its load cannot end."


def test_why_there_are_none_is_a_problem() -> None:
    kernels = Kernels(EventRing())
    kernels.told("cpu:0", KernelsTold("", 0, 0, 0.0, "kernels for bfloat16: the compiler ended with signal 6 at sample"))
    assert kernels.row("cpu:0") is None
    assert "signal 6" in kernels.problem("cpu:0")


def test_its_beginning_and_end_are_events() -> None:
    ring = EventRing()
    kernels = Kernels(ring)
    for done in range(3):
        kernels.told("cpu:0", KernelsTold("bfloat16", done, 3, 1.0))
    kernels.told("cpu:0", KernelsTold("", 0, 0, 0.0))
    kernels.told("cpu:1", KernelsTold("", 0, 0, 0.0, "broken"))
    assert states(ring) == [("cpu:0", "compiling"), ("cpu:0", "in use"), ("cpu:1", "failed")]


def test_kernels_that_nobody_misses_make_no_model_slower() -> None:
    kernels = Kernels(EventRing())
    kernels.told("cpu:0", KernelsTold("sampling", 14, 19, 8.2, postponed=True))
    row = kernels.row("cpu:0")
    assert kernels.sentence() == "", "a refusal's reason"
    assert row is not None
    assert sentence("cpu:0", row) == (
        "cpu:0: kernels for sampling will be compiled as soon as it is idle or a request needs them (14 of 19, about 8 s left)"
    )
    kernels.told("cpu:0", KernelsTold("sampling", 14, 19, 8.2))
    assert kernels.sentence().endswith("(14 of 19, about 8 s left); until then requests that sample are slower.")


def test_the_sentence_of_one_device() -> None:
    row = {"kind": "k", "done": 0, "total": 2, "left_s": 9.6}
    assert sentence("d", row).startswith("d: kernels for k are being compiled (0 of 2, about 10 s")
