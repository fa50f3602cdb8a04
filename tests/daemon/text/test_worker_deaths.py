"""Text workers and the text helper as real processes that hang, crash, take too much memory or are killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
from tokenizers import normalizers

from daemon.errors import BadRequest, HearthError, NotNow
from daemon.process.long_tasks import LongTasks
from daemon.text import deaths, helper
from daemon.text.connection import WorkerDied
from daemon.text.deaths import from_report
from daemon.text.detokenizer import decode
from daemon.text.helper_messages import Ended, Kill
from daemon.text.job_parts import LONG_TEXT
from daemon.text.jobs import LIMIT_BYTES, Deferred, Done, Encode, EncodeChat, Open, Proceed
from daemon.text.service import TextService
from daemon.text.worker import OOM_SCORE_ADJ, TextWorker
from tests.daemon.no_thread import no_thread
from tests.daemon.text.tokenizers_made import CHATML, byte_level, checkpoint, model
from tests.oom import oom_score_adj

MESSAGES = msgspec.msgpack.encode([{"role": "user", "content": "The fox"}])
SPIN = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
T = TypeVar("T")
PATIENCE_S = 120  # what is waited for takes a fraction of a second on a quiet machine


class Service(TextService):
    """Its limit can be set while it runs."""

    def __init__(self) -> None:
        self.limit_s = 60.0
        self.num_deaths: dict[str, int] = {}
        super().__init__(LongTasks(), stall_s=lambda: self.limit_s, num_deaths=self.num_deaths)

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._helper.workers.values() if worker.pid]


@pytest.fixture
async def service():
    service = Service()
    yield service
    await service.close()


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def within(answer: Awaitable[T]) -> T:
    return await asyncio.wait_for(answer, PATIENCE_S)


# ---- files that are none


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
async def test_only_regular_files_are_read(service, tmp_path, name, kind):
    folder = checkpoint(tmp_path / "m", byte_level())
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).mkdir()
    template = "x{{ bos }}" if name == "tokenizer.json" else None  # which says nothing of the other files
    says = rf"model m: .*m/{name} cannot be read: is a (named )?{kind}, not a regular file"
    with pytest.raises(BadRequest, match=says) as error:
        await within(service.encode_chat(model(folder, chat_template=template), MESSAGES, {}))
    assert error.value.code == "unsupported_tokenizer"
    assert service.num_deaths == {}


async def test_a_configured_template_that_is_a_pipe_is_refused(service, tmp_path):
    folder = checkpoint(tmp_path / "m", byte_level())
    os.mkfifo(tmp_path / "own.jinja")
    with pytest.raises(BadRequest, match=r"own\.jinja cannot be read: is a named pipe"):
        await within(service.encode_chat(model(folder, chat_template=str(tmp_path / "own.jinja")), MESSAGES, {}))


async def test_a_file_that_is_too_long_is_refused_unread(service, tmp_path):
    folder = checkpoint(tmp_path / "m", byte_level())
    os.truncate(folder / "tokenizer.json", 1 << 40)  # mostly holes
    with pytest.raises(BadRequest, match=r"tokenizer\.json cannot be read: is longer than \d+ bytes"):
        await within(service.encode(model(folder), "x"))


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 200_000])
async def test_json_that_is_nested_too_deeply_names_its_file(service, tmp_path, content):
    folder = checkpoint(tmp_path / "m", byte_level())
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(BadRequest, match=r"tokenizer_config\.json: its JSON is nested too deeply"):
        await within(service.encode_chat(model(folder), MESSAGES, {}))
    (ids,) = await service.encode(model(folder), "The fox")
    assert len(ids) > 0


async def test_a_template_that_is_no_text_names_its_file(service, tmp_path):
    folder = checkpoint(tmp_path / "m", byte_level())
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(BadRequest, match=r"chat_template\.jinja is no UTF-8 text"):
        await within(service.encode_chat(model(folder), MESSAGES, {}))


# ---- time


async def test_a_worker_that_hangs_is_killed_and_what_waited_behind_it_is_answered(service, tmp_path, caplog):
    tiny = model(checkpoint(tmp_path / "tiny", byte_level()))
    (expected,) = await service.encode(tiny, "The fox")
    (pid,) = await until(lambda: service.worker_pids)
    os.kill(pid, signal.SIGSTOP)
    service.limit_s = 1.5
    first = asyncio.create_task(service.encode(tiny, "stuck"))
    await asyncio.sleep(0)
    others = [asyncio.create_task(service.encode(tiny, "The fox")) for _ in range(20)]
    rows = await until(service.rows)
    assert {"model", "work", "tenant", "bytes", "waiting_s"} == set(rows[0])
    assert (rows[0]["model"], rows[0]["work"]) == ("tiny", "tokenizing")
    service.limit_s = 60.0  # for those that are sent again
    with pytest.raises(NotNow, match="model tiny: the text of this request took longer than 2 s; its worker was waiting") as error:
        await within(first)
    assert (error.value.code, error.value.retry_after_s) == ("text_worker_ended", 10)
    assert [one.tolist() for (one,) in await within(asyncio.gather(*others))] == [expected.tolist()] * 20
    assert service.num_deaths == {deaths.STALLED: 1}
    await until(lambda: not psutil.pid_exists(pid))  # not as a zombie either
    assert "it gave no answer for 2 s (Encode" in caplog.text
    (problem,) = service.problems()
    assert problem.startswith("text worker of model tiny ended")


async def test_a_tokenizer_that_always_hangs_is_not_waited_for_by_every_request(service, tmp_path, monkeypatch):
    good = model(checkpoint(tmp_path / "good", byte_level()))
    bad = model(checkpoint(tmp_path / "bad", byte_level(), chat_template=SPIN))
    await service.encode(good, "x")
    service.limit_s = 0.5  # the template's own limit is 2 s of CPU time
    asking = [asyncio.create_task(service.encode_chat(bad, MESSAGES, {})) for _ in range(12)]
    refused = await within(asyncio.gather(*asking, return_exceptions=True))
    kinds = [(type(one), one.code) for one in refused if isinstance(one, HearthError)]
    assert len(kinds) == 12
    assert kinds.count((BadRequest, "text_work_failed")) == 2
    assert kinds.count((NotNow, "text_worker_ended")) == 10
    assert next(one for one in refused if isinstance(one, NotNow)).retry_after_s > 1
    service.limit_s = 60.0
    assert len(await service.encode(good, "The fox")) == 1


# ---- memory


async def test_text_that_grows_without_bound_is_refused_at_1_gib_with_one_try(service, tmp_path, caplog):
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace("a", "a" * 4000)
    grows = model(checkpoint(tmp_path / "grows", tokenizer))
    with pytest.raises(BadRequest, match="model grows: the text of this request needs more than the 1024 MiB") as error:
        await within(service.encode(grows, "a" * 1_000_000))
    assert error.value.code == "text_work_failed"
    assert service.num_deaths == {deaths.MEMORY: 1}
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hearthd.text"]
    assert "text worker of model grows" in line
    assert "memory allocation of" in line
    assert "backtrace" not in line.lower()
    (ids,) = await service.encode(grows, "x")
    assert len(ids) > 0


async def test_a_template_that_doubles_its_text_is_refused_and_its_worker_lives(service, tmp_path):
    doubling = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    evil = model(checkpoint(tmp_path / "evil", byte_level(), chat_template=doubling))
    with pytest.raises(BadRequest, match="chat template: used too much memory"):
        await within(service.encode_chat(evil, MESSAGES, {}))
    assert service.num_deaths == {}


async def test_a_worker_is_limited_and_is_ended_before_others_when_memory_is_short(service, tmp_path):
    await service.encode(model(checkpoint(tmp_path / "m", byte_level())), "x")
    (pid,) = await until(lambda: service.worker_pids)
    assert psutil.Process(pid).rlimit(psutil.RLIMIT_AS)[0] == LIMIT_BYTES
    assert oom_score_adj(pid) == OOM_SCORE_ADJ


def test_a_long_text_that_no_thread_can_be_started_for_is_refused(tmp_path):
    ours, theirs = socket.socketpair()
    worker, sent = TextWorker(theirs), list[Any]()
    worker._send = sent.append  # type: ignore[method-assign]
    worker._open(Open("m", str(checkpoint(tmp_path / "m", byte_level())), None))
    job = Encode(7, msgspec.msgpack.encode(["The fox " * LONG_TEXT]), True)
    with no_thread():
        worker._answer(job, lambda: worker._do(job))
    (failed,) = sent
    assert failed.message == "model m: the text of this request needs more than the 1024 MiB that a text worker may take"
    ours.close()
    theirs.close()


def test_a_long_text_that_nobody_waits_for_any_more_is_not_encoded(tmp_path):
    ours, theirs = socket.socketpair()
    worker, sent = TextWorker(theirs), SimpleQueue[Any]()
    worker._send = sent.put  # type: ignore[method-assign]
    worker._open(Open("m", str(checkpoint(tmp_path / "m", byte_level())), None))
    for job_id in (7, 8):
        job = Encode(job_id, msgspec.msgpack.encode(["The fox " * LONG_TEXT]), True)
        worker._answer(job, lambda job=job: worker._do(job))
        assert sent.get() == Deferred(job_id)
    worker._proceed(Proceed(7, is_wanted=False))
    worker._proceed(Proceed(8))
    done = sent.get(timeout=PATIENCE_S)
    assert (type(done), done.job_id) == (Done, 8)
    assert not worker._deferred
    ours.close()
    theirs.close()


# ---- crashes


async def test_a_job_that_crashes_its_worker_is_not_tried_again(service, tmp_path):
    evil = model(checkpoint(tmp_path / "evil", byte_level(), chat_template=SPIN))
    asking = asyncio.create_task(service.encode_chat(evil, MESSAGES, {}))
    (pid,) = await until(lambda: service.worker_pids)
    os.kill(pid, signal.SIGSEGV)
    with pytest.raises(BadRequest, match=r"made its tokenizer or template crash \(SIGSEGV\)") as error:
        await within(asking)
    assert (error.value.code, error.value.param) == ("text_work_failed", "messages")
    assert service.num_deaths == {deaths.CRASHED: 1}


async def test_a_job_whose_worker_is_killed_twice_may_be_sent_again(service, tmp_path):
    evil = model(checkpoint(tmp_path / "evil", byte_level(), chat_template=SPIN))
    asking = asyncio.create_task(service.encode_chat(evil, MESSAGES, {}))
    killed: list[int] = []
    for _ in range(2):
        (pid,) = await until(lambda: [pid for pid in service.worker_pids if pid not in killed])
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    with pytest.raises(NotNow, match="was killed, again and again") as error:
        await within(asking)
    assert error.value.code == "text_worker_ended"
    # a worker that is killed before it gets the job fails it at once, and is counted when its socket has ended
    await until(lambda: sum(service.num_deaths.values()) == 2)
    assert service.num_deaths == {deaths.KILLED: 2}


async def test_a_worker_that_dies_before_it_gets_a_job_is_counted(service, tmp_path):
    tiny = model(checkpoint(tmp_path / "tiny", byte_level()))
    worker = await service._helper.connect(Open(tiny.name, tiny.path, None))
    await until(lambda: worker.pid)
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: not worker.alive)
    with pytest.raises(WorkerDied):
        await worker.call(Encode(1, msgspec.msgpack.encode(["x"]), True, 100, "prompt", 0, ""))
    service._helper.release(worker)
    await until(lambda: service.num_deaths)
    assert service.num_deaths == {deaths.KILLED: 1}


async def test_a_killed_worker_costs_nobody_an_answer(service, tmp_path):
    tiny = model(checkpoint(tmp_path / "tiny", byte_level()))
    await service.encode(tiny, "x")
    (pid,) = await until(lambda: service.worker_pids)
    os.kill(pid, signal.SIGSTOP)  # so that they are unanswered when it is killed
    long = "The fox jumps. " * 60_000
    running = [asyncio.create_task(service.encode(tiny, long)) for _ in range(3)]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    results = await within(asyncio.gather(*running))
    assert len({len(ids) for (ids,) in results}) == 1


class Panic(BaseException):
    """What a library written in Rust raises where it panics is no Exception either."""


async def test_a_panic_of_a_library_is_told_and_the_worker_goes_on(tmp_path, monkeypatch):
    worker = TextWorker.__new__(TextWorker)
    sent: list[Any] = []
    worker._send = sent.append  # type: ignore[method-assign]
    folder = checkpoint(tmp_path / "m", byte_level())
    worker._open(Open("m", str(folder), None))
    before = worker._text

    def panic() -> None:
        raise Panic("index out of bounds")

    worker._answer(Encode(7, b"", True), panic)
    (failed,) = sent
    assert (failed.job_id, failed.code, failed.status) == (7, "text_work_failed", 400)
    assert failed.message == "model m: the text of this request made the tokenizer fail: index out of bounds"
    assert worker._text is not before
    assert worker._text is not None


@pytest.mark.parametrize(
    ("exit_code", "words", "cause", "why"),
    [
        (-signal.SIGPROF, "", deaths.CPU_TIME, "took more than 6 s of CPU time in the chat template"),
        (-signal.SIGABRT, "terminate called", deaths.CRASHED, "made its tokenizer or template crash (SIGABRT)"),
        (-signal.SIGABRT, "memory allocation of 5 bytes failed\n", deaths.MEMORY, "needs more than the 1024 MiB"),
        (1, "Traceback ...\nImportError: x", deaths.CRASHED, "ended its text worker (exit code 1)"),
    ],
)
def test_why_a_process_ended(exit_code, words, cause, why):
    death = from_report(Ended(1, exit_code, 5 << 20, words), "m")
    assert death.cause == cause
    assert death.is_of_a_job
    assert death.why.startswith(why)
    assert " ".join(words.split()) in death.details


def test_of_a_worker_for_grammars_cpu_time_is_a_grammars() -> None:
    death = from_report(Ended(1, -signal.SIGPROF, 5 << 20, ""), "")
    assert death.why == "took more than 2 s of CPU time in its grammar"


async def test_what_one_clients_texts_do_to_workers_has_nobody_else_refused(service, tmp_path):
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace("a", "a" * 4000)
    grows = model(checkpoint(tmp_path / "grows", tokenizer))
    await service.encode(grows, "x")
    for _ in range(4):
        with pytest.raises(BadRequest, match="needs more than"):
            await within(service.encode(grows, "a" * 1_000_000))
    assert service.num_deaths == {deaths.MEMORY: 4}
    (ids,) = await service.encode(grows, "x")
    assert len(ids) > 0


# ---- the helper


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_killed_helper_is_told_and_costs_nobody_an_answer(service, tmp_path, caplog, monkeypatch, is_idle):
    monkeypatch.setattr(helper, "SOUND_AFTER_S", 0.0)
    caplog.set_level(logging.WARNING, "hearthd.text")
    tiny = model(checkpoint(tmp_path / "tiny", byte_level(), chat_template=CHATML))
    expected = await service.encode_chat(tiny, MESSAGES, {})
    before = service._helper.pid
    (worker,) = await until(lambda: service.worker_pids)
    running = []
    if not is_idle:
        os.kill(worker, signal.SIGSTOP)
        running = [asyncio.create_task(service.encode_chat(tiny, MESSAGES, {})) for _ in range(5)]
        await asyncio.sleep(0.05)
    os.kill(before, signal.SIGKILL)
    await until(lambda: f"the text helper (pid {before}) ended with -9" in caplog.text)  # without being asked for anything
    await until(lambda: service._helper.pid not in (0, before))
    await until(lambda: not psutil.pid_exists(before) and not psutil.pid_exists(worker))
    assert [ids.tolist() for ids in await within(asyncio.gather(*running))] == [expected.tolist()] * len(running)
    assert await service.encode_chat(tiny, MESSAGES, {}) == expected
    assert service.num_deaths == {deaths.HELPER: 1}


async def test_a_job_outlasts_a_helper_that_is_killed_three_times(service, tmp_path, monkeypatch):
    monkeypatch.setattr(helper, "SOUND_AFTER_S", 0.0)
    evil = model(checkpoint(tmp_path / "evil", byte_level(), chat_template=SPIN))
    asking = asyncio.create_task(service.encode_chat(evil, MESSAGES, {}))
    ended: list[int] = []
    for _ in range(3):
        ended.extend(await until(lambda: [pid for pid in service.worker_pids if pid not in ended]))
        before = service._helper.pid
        os.kill(before, signal.SIGKILL)
        await until(lambda before=before: service._helper.pid not in (0, before))
    await until(lambda: [pid for pid in service.worker_pids if pid not in ended])
    assert not asking.done(), "it is tried again"
    asking.cancel()
    await asyncio.wait([asking])


async def test_a_helper_that_hangs_is_killed_and_another_one_started(service, tmp_path, caplog, monkeypatch):
    await service.start()
    before = service._helper.pid
    os.kill(before, signal.SIGSTOP)
    gone = helper.Helper._gone

    def then_patient(self: helper.Helper, control: socket.socket) -> None:
        monkeypatch.setattr(helper, "FORK_LIMIT_S", 60.0)  # the next one may take its time to start
        gone(self, control)

    monkeypatch.setattr(helper, "FORK_LIMIT_S", 0.5)
    monkeypatch.setattr(helper.Helper, "_gone", then_patient)
    tiny = model(checkpoint(tmp_path / "tiny", byte_level()))
    asking = asyncio.create_task(service.encode(tiny, "The fox"))
    await until(lambda: service._helper.pid not in (0, before))
    (ids,) = await within(asking)
    assert decode(await service.table(tiny), ids) == "The fox"
    assert "has forked no worker for" in caplog.text
    await until(lambda: not psutil.pid_exists(before))


@pytest.mark.parametrize("message", ["a Fork", "a Kill"])
async def test_a_helper_that_reads_no_messages_is_killed_and_another_one_started(service, tmp_path, caplog, message):
    spinning = model(checkpoint(tmp_path / "spinning", byte_level(), chat_template=SPIN))
    tiny = model(checkpoint(tmp_path / "tiny", byte_level()))
    alone = await service._helper.connect(Open(spinning.name, spinning.path, None))
    asking = asyncio.create_task(alone.call(EncodeChat(1, MESSAGES, msgspec.msgpack.encode({}), 100)))
    await until(lambda: alone.pid)
    before = service._helper.pid
    os.kill(before, signal.SIGSTOP)
    with contextlib.suppress(BlockingIOError):
        while True:  # until the socket is full
            service._helper._control.send(msgspec.msgpack.encode(Kill(99)))
    if message == "a Kill":
        service._helper.release(alone)
    (ids,) = await within(service.encode(tiny, "The fox"))
    assert len(ids) > 0
    await until(lambda: not psutil.pid_exists(before) and not psutil.pid_exists(alone.pid))
    with pytest.raises(WorkerDied):
        await within(asking)
    assert f"the text helper (pid {before}) does not read its messages; it is killed" in caplog.text


async def test_a_helper_that_does_not_start_says_so_each_time(service, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    for _ in range(2):
        with pytest.raises(HearthError, match=r"the text helper does not start: .*No such file"):
            await service.check_grammar("f", "regex:a")


async def test_a_helper_that_ends_at_once_is_not_started_for_ever(service, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(HearthError):
        await within(service.check_grammar("f", "regex:a"))
    await asyncio.sleep(0.5)
    assert caplog.text.count("the text helper (pid") < 12


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.05, 0.3])
async def test_what_is_asked_of_a_service_that_is_closed_is_refused(tmp_path, delay_s):
    service = Service()
    tiny = model(checkpoint(tmp_path / "tiny", byte_level()))
    asking = [asyncio.create_task(service.encode(tiny, "The fox " * 100_000)) for _ in range(5)]
    await asyncio.sleep(delay_s)
    await within(service.close())
    for answer in await within(asyncio.gather(*asking, return_exceptions=True)):
        assert isinstance(answer, HearthError | asyncio.CancelledError | list), answer
    with pytest.raises(HearthError, match="has been ended"):
        await service.encode(tiny, "x")
    assert not psutil.Process().children() or all(
        "daemon.text" not in child.cmdline() for child in psutil.Process().children(recursive=True)
    )


async def test_a_worker_has_nothing_open_but_its_own_socket(service, tmp_path):
    for name in ("first", "second"):
        await service.encode(model(checkpoint(tmp_path / name, byte_level())), "The fox")
    assert len(service.worker_pids) == 2
    for pid in service.worker_pids:
        opened = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd") if int(number) > 2]
        assert [each.partition(":")[0] for each in opened] == ["socket"]
