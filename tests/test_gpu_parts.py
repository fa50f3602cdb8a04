"""What parts of `make gpu` conclude from what they see: places that are no drive, loads from elsewhere, texts, gaps, and what tools
report."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks import (
    gpu_checkpoints,
    gpu_drives,
    gpu_limits,
    gpu_mixed,
    gpu_ncu,
    gpu_node,
    gpu_parts,
    gpu_pipeline,
    gpu_sanitizer,
    gpu_server,
    gpu_soak,
    gpu_split,
    gpu_throughput,
)
from benchmarks.gpu_evictions import gaps_in
from benchmarks.gpu_ranks import HOST, NCCL, Rank, RankProcesses, visible_devices
from benchmarks.gpu_texts import Question, compared, prompt_of, text_of, texts_of
from benchmarks.gpu_watched import watched
from benchmarks.load import Result
from loader.files.direct_io import is_cached
from tests import interpreter
from tests.engine.kernels.kernel_cases import of_dtypes
from tests.gpu import test_kernels as kernel_tests


def test_checkpoints_are_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_drives.file_system(Path("/proc")) == "proc"
    assert gpu_drives.file_system(Path("/dev/shm")) == "tmpfs"
    monkeypatch.delenv(gpu_drives.SHARED, raising=False)
    kinds = {"/tmp": "tmpfs"}
    monkeypatch.setattr(gpu_drives, "file_system", lambda place: kinds.get(str(place), "ext4"))
    monkeypatch.setattr(gpu_drives.tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.setattr(gpu_drives, "ROOT", tmp_path)
    with gpu_drives.checkpoints_folder(1 << 20) as folder:
        assert folder.parent == tmp_path
    assert not folder.exists()
    with pytest.raises(RuntimeError, match="no drive has room"), gpu_drives.checkpoints_folder(1 << 60):
        pass


def test_the_parts_of_a_run_share_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made once, and the models of a part are of different ones. What a part is given costs no time to delete. A part that
    is killed while it makes one leaves it under another name, and the next one makes it."""
    monkeypatch.setenv(gpu_drives.SHARED, str(tmp_path))

    def killed(folder: Path, shapes: dict[str, str], *_: object) -> list[int]:
        (folder / next(iter(shapes))).mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, gpu_drives.checkpoints_folder(0) as of_killed:
        patch.setattr(gpu_checkpoints, "_made_apart", killed)
        with pytest.raises(KeyboardInterrupt):
            gpu_checkpoints.make_apart(of_killed, {"a": "tiny"}, "cpu")
    (half,) = set(tmp_path.iterdir()) - {of_killed}
    assert half.name.startswith("making-")
    with gpu_drives.checkpoints_folder(0) as first:
        made = gpu_checkpoints.make_apart(first, {"a": "tiny"}, "cpu")
    with gpu_drives.checkpoints_folder(0) as second:
        assert gpu_checkpoints.make_apart(second, {"x": "tiny", "y": "tiny"}, "cpu") == 2 * made
    weights = [folder / "model.safetensors" for folder in (first / "a", second / "x", second / "y")]
    assert weights[0].samefile(weights[1])
    assert weights[1].read_bytes() != weights[2].read_bytes()
    assert (second / "x" / "tokenizer.json").read_bytes() == (second / "y" / "tokenizer.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"tiny-0", "tiny-1", first.name, second.name, of_killed.name, half.name}
    monkeypatch.setattr(gpu_checkpoints, "_made_apart", lambda *_: pytest.fail("made again"))
    with gpu_drives.checkpoints_folder(0) as third:
        gpu_checkpoints.make_apart(third, {"b": "tiny"}, "cpu")
    assert gpu_server.dropped(third, "b")
    with weights[0].open("rb") as file:
        assert not is_cached(file.fileno(), 0, 1 << 12), "the page cache holds a shared file by another name"


def test_room_is_made_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that finds too little room deletes what it does not need itself."""
    for name in ("8b-0", "1b-0", "part-before", "part-own", "making-killed"):
        (tmp_path / name).mkdir()
    free = iter([100 << 30, 51 << 30, 60 << 30])
    monkeypatch.setattr(gpu_drives, "free_bytes", lambda _: next(free))
    kept = {tmp_path / "1b-0", tmp_path / "part-own"}
    gpu_drives.make_room(tmp_path, 50 << 30, kept)
    assert len(list(tmp_path.iterdir())) == 5
    gpu_drives.make_room(tmp_path, 50 << 30, kept)
    assert set(tmp_path.iterdir()) == kept
    monkeypatch.setattr(gpu_drives, "free_bytes", lambda _: 10 << 30)
    with pytest.raises(RuntimeError, match="no room"):
        gpu_drives.make_room(tmp_path, 50 << 30, kept)


def test_checkpoints_are_made_in_a_process_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has used the device keeps a context and torch's cache there, and an engine with the default budget has no room
    beside them. So no part that starts a daemon uses torch on the device itself."""
    monkeypatch.setattr(gpu_checkpoints, "make", lambda *_: pytest.fail("made in this process"))
    monkeypatch.delenv(gpu_drives.SHARED, raising=False)
    sizes = gpu_checkpoints.make_apart(tmp_path, {"a": "tiny", "b": "tiny"}, "cpu")
    assert len(sizes) == 2
    for name in "ab":
        assert (tmp_path / name / "model.safetensors").stat().st_size > sizes[0]
        assert (tmp_path / name / "tokenizer.json").exists()
    root = Path(__file__).parents[1] / "benchmarks"
    for name in ("gpu", "gpu_server", "gpu_soak", "gpu_evictions", "gpu_adoption", "gpu_node", "gpu_drives", "gpu_texts"):
        source = (root / f"{name}.py").read_text()
        assert "torch" not in re.findall(r"^ *(?:import|from) (\w+)", source, re.M), name
        assert "gpu_checkpoints.make(" not in source, name


def test_the_tests_of_a_gpu_have_time_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their part has as many processes and seconds as their shapes take by the first run, on a machine of 16 cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    part = gpu_parts.PARTS["tests"]
    num_processes = int(part.command()[part.command().index("-n") + 1])
    shapes = [kernel_tests.shapes_of(each.values[0]) for each in of_dtypes(torch.bfloat16, torch.float16, torch.float32)]
    share = sum(shapes) / (kernel_tests.FIRST_SHAPES * len(shapes))
    assert share * kernel_tests.FIRST_S * kernel_tests.FIRST_PROCESSES <= part.limit_s * num_processes


def test_a_load_from_elsewhere_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A host tier that is smaller than wanted makes a swap a read of the files."""
    rows = [{"source": "host"}, {"source": "disk"}, {"source": ""}]
    server: Any = SimpleNamespace(cli=lambda verb, *_: rows if verb == "history" else {})
    assert not gpu_server.load(server, "m", 1, "load_from_host_memory", "host")
    assert '"source": "disk", "as_asked": false' in capsys.readouterr().out
    rows.pop(1)
    assert gpu_server.load(server, "m", 1, "load_from_host_memory", "host")


def test_a_host_tier_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_node, "machine_memory_bytes", lambda: 16 << 30)
    assert gpu_node.host_tier(20 << 30) == ["--host-tier-bytes", f"{12 << 10}MiB"]
    assert gpu_node.host_tier(0) == ["--host-tier-bytes", "0"]


def test_texts_that_differ_beside_others_are_counted() -> None:
    a, b, c, d = (Question("m", number, 8) for number in range(4))
    alone, again = {a: "one", b: "two", c: "three", d: "four"}, {a: "one", b: "two", c: "three", d: "for"}
    found = compared(alone, again, {a: "one", b: "too", c: "", d: "whatever"})
    assert found == {"compared": 3, "unsteady": 1, "no_answer": 1, "differing": 1, "which": ["m 1"]}
    assert len({prompt_of(Question("m", 800 + row, 8)) for row in range(8)}) == 8
    stream = 'data: {"choices": [{"text": "on"}]}\n\ndata: {"choices": [{"text": "e"}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n'
    assert text_of(stream) == "one"


def test_answers_of_one_request_are_told_apart() -> None:
    pieces = [(1, "t"), (0, "o"), (1, "wo"), (0, "ne")]
    stream = "".join(f'data: {{"choices": [{{"index": {index}, "text": "{text}"}}]}}\n\n' for index, text in pieces)
    assert texts_of(stream + "data: [DONE]\n\n", 2) == ["one", "two"]


def test_a_soak_waits_for_the_captures_of_all_its_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else what it compares may have been computed by two kernels. What it waits for is what an engine logs."""
    log = tmp_path / "log"
    log.write_text("info engine: a: steps of every size are captured device=cuda:0\n")
    server: Any = SimpleNamespace(log=log)

    async def both() -> None:
        waiting = asyncio.create_task(gpu_soak.captured(server, "ab", 30.0))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        with log.open("a") as file:
            file.write("info engine: b: steps of every size are captured device=cuda:0\n")
        await asyncio.wait_for(waiting, 10)
        await gpu_soak.captured(server, "abc", 0.0)

    asyncio.run(both())
    assert [json.loads(line)["lacking"] for line in capsys.readouterr().out.splitlines()] == [[], ["c"]]
    written = (Path(__file__).parents[1] / "engine" / "serve" / "served_models.py").read_text()
    assert gpu_soak.CAPTURED.format("%s") in written


def test_gaps_are_those_that_overlap_a_window() -> None:
    result = Result(0.0, stamps=[1.0, 1.1, 1.5, 1.6, 3.0])
    windows = [("evict", 1.2, 1.3), ("load", 1.55, 1.58), ("evict", 2.0, 2.1)]
    assert gaps_in([result], windows, "evict") == pytest.approx([0.4, 1.4])
    assert gaps_in([result], windows, "load") == pytest.approx([0.1])


def test_metrics_are_read_from_the_csv_of_ncu() -> None:
    head = '"ID","Process ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"'
    rows = [
        ("0", "_piece_kernel(…)", "gpu__time_duration.sum", "nsecond", "81,920"),
        ("0", "_piece_kernel(…)", "launch__registers_per_thread", "register/thread", "128"),
        ("1", "_survey_kernel", "gpu__time_duration.sum", "us", "12.5"),
        ("1", "_survey_kernel", "lts__t_sector_hit_rate.pct", "%", "(!) n/a"),
        ("1", "_survey_kernel", "another.metric", "", "1"),
    ]
    lines = [
        f'"{number}","7","{kernel}","(64, 1, 1)","{metric}","{unit}","{value}"' for number, kernel, metric, unit, value in rows
    ]
    assert gpu_ncu.read(["==PROF== Connected to process 7", head, *lines]) == [
        {"kernel": "_piece_kernel", "grid": "(64, 1, 1)", "us": 81.92, "registers": 128.0},
        {"kernel": "_survey_kernel", "grid": "(64, 1, 1)", "us": 12.5},
    ]


@pytest.mark.parametrize(
    ("tool", "script", "errors"),
    [
        ("memcheck", "echo 'norms: 1.20 s'; echo '========= ERROR SUMMARY: 0 errors'", 0),
        (
            "memcheck",
            "echo '========= Invalid __global__ read of size 4 bytes'; echo '========= ERROR SUMMARY: 3 errors'; exit 9",
            3,
        ),
        ("racecheck", "echo '========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)'; exit 9", 2),
        ("memcheck", "echo 'Traceback'; exit 1", 1),
        ("memcheck", "echo '========= Invalid __shared__ write of size 2 bytes'; sleep 60", 1),
        ("memcheck", "echo 'norms: 1.20 s'; sleep 60", 0),
    ],
    ids=["nothing", "errors", "hazards", "a wrong result", "an error, then no end", "no end"],
)
def test_what_a_sanitizer_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str, script: str, errors: int
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_sanitizer, "LIMIT_S", 2.0)
    assert gpu_sanitizer.run(tool, str(program), ["-m", "shapes"]) == errors
    assert f'"what": "{tool}"' in capsys.readouterr().out


def test_a_watched_program_ends_with_all_that_it_started() -> None:
    """Also where what it started keeps its output open."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('begun', flush=True); time.sleep(60)"
    assert watched([sys.executable, "-c", code], 3.0) == ("begun\n", None)
    assert watched([sys.executable, "-c", "import os; print(os.environ['WHAT'])"], 60.0, WHAT="it") == ("it\n", 0)


def test_a_page_cache_that_keeps_the_weights_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And costs none of the figures after it."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_bytes(bytes(1 << 20))
    assert gpu_server.dropped(tmp_path, "m")
    monkeypatch.setattr(gpu_server, "set_cache", lambda *_, **__: sys.exit("m: in the page cache at 0"))
    assert not gpu_server.dropped(tmp_path, "m")
    assert "in the page cache at 0" in capsys.readouterr().out


def failing_rank(own: Rank) -> None:
    """Waits on rank 0 for rank 1, which raises."""
    if own.rank:
        raise ValueError(f"rank {own.rank} cannot")
    own.connected()


def quickened(own: Rank) -> None:
    """Lets the interpreter of a rank's process compute as that of a test's own."""
    interpreter.quicken()


def test_ranks_that_fail_are_told_and_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that raises while the other one waits for it, one that was killed before it is told what to do, and, after these, one
    that is killed while the other one waits in an exchange."""
    group = gpu_split.Group([""] * 2, "cpu", HOST)

    def killed(ranks: RankProcesses) -> None:
        ranks.kill(1)
        ranks.run(Rank.give_up)

    group.does("raising", lambda ranks: ranks.run(failing_rank) and None)
    group.does("dying", killed)
    assert group.failed
    group.does("going on", lambda ranks: gpu_split.lose_one(ranks, captured=False), ends=True)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["what"] for line in told] == ["started", "failed", "started", "failed", "started", "rank killed"]
    assert told[1]["why"] == "ValueError: rank 1 cannot"
    assert told[3]["why"] == "rank 1 ended with -9"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
def test_stages_of_a_pipeline_are_compared_with_one_device_timed_and_killed(capsys: pytest.CaptureFixture[str]) -> None:
    """The second figure of the whole model is that of the first. At last a stage is killed while the next one waits for its
    states."""
    group = gpu_split.Group([""] * 2, "cpu", HOST)
    group.does("quickened", lambda ranks: ranks.run(quickened) and None)
    group.does("logits", lambda ranks: gpu_split.stages_logits(ranks, "llama", 0))
    group.does("decode", lambda ranks: gpu_split.decoding(ranks, "tiny", 20, 4, 0, [1e6], staged=True))
    group.does("killing", lambda ranks: gpu_split.lose_stage(ranks, 0), ends=True)
    assert not group.failed
    _, logits, of_stages, decode, killed = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (logits["what"], logits["stages"]) == ("logits of a pipeline", 2)
    assert logits["difference"] <= 2e-4 < 1.0 < logits["largest"]
    assert (of_stages["what"], decode["what"]) == ("decode of a pipeline", "decode in stages")
    assert decode["faster"] == pytest.approx(1e6 / decode["ms"], rel=1e-3)
    assert killed == {
        "benchmark": "gpu_split",
        "what": "stage killed",
        "stages": 2,
        "captured": False,
        "goes_on_s": killed["goes_on_s"],
    }
    assert 0.0 <= killed["goes_on_s"] < 20.0


@pytest.mark.parametrize("fails", [False, True])
def test_what_one_gpu_cannot_show_is_named(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one GPU the part does what one can show, says what it left out and why, and ends with 0 only if all it did went well."""
    done: list[tuple[int, str, str]] = []

    class Told(gpu_split.Group):
        def does(self, what: str, work: Any, ends: bool = False) -> None:
            done.append((self.size, self.through, what))
            self.failed |= fails and what == "a stage killed"

    monkeypatch.setattr(gpu_split, "Group", Told)
    monkeypatch.setattr(gpu_split.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    monkeypatch.setattr(sys, "argv", ["gpu_split"])
    with pytest.raises(SystemExit) as ended:
        gpu_split.main()
    assert ended.value.code == fails
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["what"] == "skipped"
    assert line["why"].startswith("this machine has one GPU, and two are needed for exchanges between GPUs")
    assert {size for size, through, _ in done if through == NCCL} == {1}, "NCCL joins no two ranks on one GPU"
    assert {what for size, _, what in done if size == 2} == {"logits", "logits of a pipeline", "a stage killed"}
    assert not {"sums", "a rank killed", "decode", "decode in stages"} & {what for *_, what in done}, "these need two"


def test_each_rank_sees_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert visible_devices(2) == ["GPU-a", "GPU-b"]


def test_logits_that_are_no_numbers_differ() -> None:
    numbers, nothing = np.ones((2, 3), np.float32), np.full((2, 3), np.nan, np.float32)
    assert gpu_split._difference([numbers, numbers + 0.5], [numbers, numbers]) == 0.5
    assert gpu_split._difference([numbers, nothing], [numbers, numbers]) == float("inf")


def test_a_wait_for_the_host_is_no_work_of_the_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A step's time on the device is that in which something ran there, once where two things did."""
    cpu, cuda = gpu_pipeline.DeviceType.CPU, gpu_pipeline.DeviceType.CUDA
    ran = [(cuda, 100, 110), (cuda, 0, 10), (cuda, 5, 15), (cuda, 6, 9), (cpu, 0, 1000)]
    events = [SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=begin, end=end)) for kind, begin, end in ran]
    profiler: Any = SimpleNamespace(events=lambda: events)
    assert gpu_pipeline.executed_us(profiler, "cuda") == 25
    assert gpu_pipeline.executed_us(profiler, "cpu") == 1000
    graphs = SimpleNamespace(size_for=lambda *_: None, none=lambda: None)
    bench: Any = SimpleNamespace(name="tiny", device="cpu", model=SimpleNamespace(mixed_graphs=graphs, tile_tokens=16))
    monkeypatch.setattr(gpu_mixed, "pipelined", lambda *_: gpu_pipeline.StepSeconds(wall=0.004, device=0.0039, host=0.003))
    for busy_s, over_device in ((0.002, 2.0), (0.0, None)):
        monkeypatch.setattr(gpu_mixed, "busy_s", lambda *_, busy_s=busy_s: busy_s)
        gpu_mixed.mixed(bench, 2, 20, 8, 2)
        assert json.loads(capsys.readouterr().out)["over_device"] == over_device


def test_what_graphs_take_of_the_driver_is_told_without_what_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products are measured before the graphs are captured and tiles are compared behind them, which load kernels."""
    mib, captured = {"taken": 700}, dict[int, None]()

    class Model:
        graphs, mixed_graphs, at = SimpleNamespace(captured=captured), SimpleNamespace(captured={}), 0

        @property
        def num_uncaptured(self) -> int:
            return 5 - self.at

        def capture_next(self) -> None:
            self.at += 1
            mib["taken"] += (50, 2, 6, 1, 90)[self.at - 1]  # the second graph gains nothing, and is not kept
            if self.at in (2, 4):
                captured[self.at] = None

    monkeypatch.setattr(gpu_mixed, "driver_bytes", lambda _: mib["taken"] << 20)
    gpu_mixed.capture(SimpleNamespace(name="8b", device="cuda", model=Model()))  # type: ignore[arg-type]
    line = json.loads(capsys.readouterr().out)
    assert (line["graphs"], line["driver_mib"], line["driver_mib_a_graph"]) == (2, 9.0, 4.5)


def test_torchs_memory_is_not_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 19 << 30)
    assert (gpu_limits.driver_bytes("cuda"), gpu_limits.driver_bytes("cpu")) == (1 << 30, 0)


def test_both_engines_are_compared_and_one_that_fails_ends_the_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each engine's own process tells its rate; that of its warm-up does not count."""
    program = tmp_path / "engine"

    def told(run: str, rate: int) -> str:
        return json.dumps({"benchmark": "gpu_throughput", "run": run, "out_tokens_per_s": rate})

    ours, theirs = told("measured", 9), told("measured", 2)
    program.write_text(f"#!/bin/sh\necho '{told('warm-up', 1)}'\n[ $4 = ours ] && echo '{ours}' || echo '{theirs}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_throughput.sys, "executable", str(program))
    gpu_throughput.both([])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ours_over_it"] == 4.5
    program.write_text(f"#!/bin/sh\necho '{ours}'\nexit 3\n")
    with pytest.raises(SystemExit, match="ours ended with 3"):
        gpu_throughput.both([])


def test_a_cold_load_is_told_beside_a_raw_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_bytes(bytes(3 << 20))
    assert gpu_server.raw_read_s(tmp_path, "m") > 0
    server: Any = SimpleNamespace(cli=lambda verb, *_: [{"source": "disk"}] if verb == "history" else {})
    gpu_server.load(server, "m", 3 << 20, "cold_load", "disk", 1e9)
    read, load = map(json.loads, capsys.readouterr().out.splitlines())
    assert (read["what"], load["what"]) == ("raw read", "cold_load")
    assert load["of_raw"] > 1
