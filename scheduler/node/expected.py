"""Handles announced requests. The daemon announces a request as soon as it knows its model, while the prompt is still being read
and tokenized, so that the model's load need not wait for that.

An announced request's model is loaded as for a request, but only if the load can begin at once. Otherwise the model takes its place
in line when the request itself arrives. The announcement ends when the request arrives or is given up.
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
    """Ends the announcement of a request, which has arrived or was given up. If nothing else waits for the model, a placement that
    has not begun to load is dropped; a load under way continues."""
    model = node.models.get(event.model)
    if model is not None and event.expectation in model.expected:
        del model.expected[event.expectation]
        node.touch(model)
