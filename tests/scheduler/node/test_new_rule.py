"""A rule of the node scheduler is one file and one line: a made-up one, added in a copy of scheduler/ as CONTRIBUTING.md says."""

from __future__ import annotations

from pathlib import Path

from tests.changed_package import changed_package, told_by

FILE = '''
"""Idle models without a host copy leave 30 s after they were loaded, however often they are used."""

from scheduler.node.leave_rule import LeaveRule
from scheduler.node.node import Model


def leaves_at(model: Model) -> float | None:
    return None if model.copy is None or model.copy.ready_at is None else model.copy.ready_at + 30.0


MAX_AGE = LeaveRule(
    name="aged",
    meaning="it was on its device for 30 s",
    leaves_at=leaves_at,
    because=lambda model: "it was there for 30 s",
    by="by its age",
)
'''
LINE = "from scheduler.node.max_age import MAX_AGE"

# FakeNode validates the scheduler's invariants after each event.
PROGRAM = """
import json, sys
import scheduler
from scheduler.node import leave_rules
from tests.scheduler.node.fake_node import FakeNode, facts

node = FakeNode()
node.register(facts("a", 20), facts("b", 20, keep_alive_s=10.0))
node.bring_up("a", "b")
node.finish(node.arrive("b"))
told = {"meaning": leave_rules.EVICT_REASONS["aged"], "states": []}
node.sleep(9.0)
told["states"].append([node.state("a"), node.state("b")])
node.sleep(2.0)
node.evicted()
told["states"].append([node.state("a"), node.state("b")])
request = node.arrive("a")
node.sleep(30.0)
told["states"].append([node.state("a"), node.state("b")])  # a is busy
node.finish(request)
told["reasons"] = [action.reason for action in node.log if type(action).__name__ == "Evict"]
node.evicted()
told["states"].append([node.state("a"), node.state("b")])
told["why"] = node.scheduler.why("a")
print(json.dumps(told | {"scheduler": scheduler.__file__}))
"""


def test_a_rule_is_one_file_and_one_line(tmp_path: Path) -> None:
    tree = changed_package(
        tmp_path, "scheduler", "node/max_age.py", FILE, "node/leave_rules.py", LINE, "from scheduler.node.keep_alive "
    )
    told = told_by(tree, PROGRAM)
    assert told["states"] == [["ready", "ready"], ["ready", "cold"], ["ready", "cold"], ["cold", "cold"]]
    assert told["reasons"] == ["idle", "aged"], "the rule that was there still works beside it"
    assert told["meaning"] == "it was on its device for 30 s"
    assert any("it was there for 30 s" in line for line in told["why"])
