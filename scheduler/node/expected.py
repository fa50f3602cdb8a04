"""Handles requests that are still being read, so that a load of their model need not wait until their prompts are tokenized.

From then until the request arrives or is given up, its model is expected: it is loaded as for a request if the load can begin at
once, as a load ahead of requests may. Otherwise the model gets its place in line only when the request itself arrives.
"""

from __future__ import annotations

from scheduler.node import admission, commands
from scheduler.node.events import ExpectationOver, RequestExpected, RequestFacts
from scheduler.node.node import Node


def begins(node: Node, event: RequestExpected) -> None:
    model = node.models.get(event.model)
    if model is None or model.copy is not None or model.served_elsewhere:
        return
    facts = RequestFacts(request_id=0, model=event.model, num_prompt_tokens=0, max_tokens=0, tenant=event.tenant)
    if admission.refuse(node, model, facts) is not None:
        return
    if model.expected:  # another request expects it, which may be given up
        model.expected[event.cause] = None
        return
    if model.placement is not None or commands.in_use(node, model) is not None:
        return
    if not node.wanted(model):
        model.asked_at = node.now
    model.expected[event.cause] = None
    model.story.tell(node.now, node.cause, "a request for it is being read")
    node.touch(model)


def over(node: Node, event: ExpectationOver) -> None:
    """Ends an expectation. A placement that nobody waits for any more is dropped; a load under way goes on, as it does when its
    last request is cancelled."""
    model = node.models.get(event.model)
    if model is not None and event.expectation in model.expected:
        del model.expected[event.expectation]
        node.touch(model)
