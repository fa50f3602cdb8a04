"""Random scripts for batch schedulers whose steps are read later than they are started, as engines read them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.scheduler.batch.fake_model import BLOCK_TOKENS, Harness, expected_output
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.test_batch_scheduler import prompt_of

Script = list[tuple[str, int, int]]  # what is done, and two numbers that say how
_ACTIONS = st.sampled_from(["submit", "step", "step", "step", "abort", "preempt", "lease", "prefixes"])
# for one request of full length, and some more
SCRIPT_MEMORY = {"reserved_chunks": -(-64 // BLOCK_TOKENS * 16 // 64) + 1, "lease_chunks": 6}


class UnderWayHarness(Harness):
    """A harness that may have steps under way."""

    def take_in_all(self) -> None:
        """Takes in what is under way."""
        raise NotImplementedError


def scripts() -> st.SearchStrategy[Script]:
    return st.lists(st.tuples(_ACTIONS, st.integers(0, 100), st.integers(0, 5)), max_size=60)


def run_script(harness: UnderWayHarness, script: Script) -> None:
    """Runs a script to its end, and checks the texts and that nothing is left behind."""
    requests: dict[int, tuple[list[int], Params]] = {}
    aborted = set()
    for action, number, kind in script:
        if action == "submit":
            request_id = len(requests) + 1
            prompt = prompt_of(40, kind % 2)[: 1 + number % 40]
            params = Params(max_tokens=1 + number % 17, min_tokens=kind % 4, ignore_eos=kind == 1, logprobs=0 if kind == 3 else -1)
            requests[request_id] = (prompt, params)
            harness.submit(request_id, prompt, params, tenant="ab"[kind == 4], priority=kind % 2)
        elif action == "step":
            harness.step()
        else:  # the engine reads what is under way before all else
            harness.take_in_all()
            if action == "abort" and requests:
                request_id = 1 + number % len(requests)
                if harness.scheduler.abort(request_id):
                    aborted.add(request_id)
            elif action == "preempt":
                harness.scheduler.preempt_one()
            elif action == "lease":
                harness.chunks.set_lease(max(number % 7, harness.chunks.num_drawn))
            elif action == "prefixes":
                harness.kv.give_up_prefixes(kind)
        harness.kv.groups[0].pool.check()
    harness.run()
    for request_id, (prompt, params) in requests.items():
        whole = expected_output(prompt, params, 64, windows=harness.windows)
        if request_id in aborted:
            assert harness.output[request_id] == whole[: len(harness.output[request_id])]
        else:
            assert harness.output[request_id] == whole
    harness.check_no_leak()
