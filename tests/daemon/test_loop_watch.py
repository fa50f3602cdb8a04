import asyncio
import time

from daemon.process.loop_watch import LoopWatch

PERIOD_S = 0.005


async def test_a_hold_is_seen_and_idle_has_no_timer() -> None:
    watch = LoopWatch(asyncio.get_running_loop())
    watch.start()
    await asyncio.sleep(3 * PERIOD_S)
    time.sleep(0.05)  # noqa: ASYNC251 - the hold
    await asyncio.sleep(3 * PERIOD_S)
    assert watch.stall_s >= 0.04
    watch.stop()
    assert watch._timer is None
    watch.close()


async def test_a_busy_hold_counts_as_much() -> None:
    watch = LoopWatch(asyncio.get_running_loop())
    watch.start()
    await asyncio.sleep(PERIOD_S)
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    await asyncio.sleep(3 * PERIOD_S)
    assert watch.stall_s >= 0.04
    watch.close()
