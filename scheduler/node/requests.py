"""Handles the life of a request: it arrives, waits or is submitted, and ends. If its model's copy is gone before it ends, it
returns to the front of its queue."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from scheduler.node import admission, routing
from scheduler.node.actions import AbortInEngine, Refusal, Reject, RequestsPaused, Submit
from scheduler.node.events import RequestArrived, RequestCancelled, RequestFinished
from scheduler.node.node import Model, Node, Request

# Most requests that one event expires, so that its cost is bounded; the others are due again at once.
MAX_EXPIRED_PER_EVENT = 32


def arrived(node: Node, event: RequestArrived) -> None:
    """Handles a new request: it is rejected, submitted or queued. If no other request waits for the model and a replica can take
    the request, it is submitted at once, whatever else is loading (rule 4 of docs/design/models.md). Raises ValueError if its id is
    known already."""
    facts = event.request
    if facts.request_id in node.requests:
        raise ValueError(f"request {facts.request_id} has arrived before")
    model = node.models.get(facts.model)
    refusal = admission.refuse(node, model, facts)
    if model is None or refusal is not None:
        assert refusal is not None
        node.emit(Reject(cause=node.cause, request_id=facts.request_id, refusal=refusal))
        node.ended.note(facts.request_id, node.now, facts.model, refusal.code)
        return
    request = Request(facts, node.now, model)
    node.requests[facts.request_id] = request
    model.arrivals.note(node.now)
    model.last_used = node.now
    if facts.keep_alive_s is not None:
        model.asked_keep_alive_s = facts.keep_alive_s
    if model.copy is not None:
        model.copy.requested = True
    model.mean_prompt_tokens += (facts.num_prompt_tokens - model.mean_prompt_tokens) * (0.1 if model.mean_prompt_tokens else 1.0)
    if not model.queue and (replica := routing.choose(node, model, facts)) is not None:
        submit(node, replica, request)
        if model.others:
            touch_used(node, model)
        return
    model.enqueue(request)
    limit_wait(node, request)
    node.touch(model)


def touch_used(node: Node, model: Model) -> None:
    """Marks as changed, for `settle`, the replica that a request has joined or left, and the primary, because another replica may
    have to be loaded. If the model has several replicas and a keep-alive, all of them are marked, because the time at which each
    may be evicted has changed."""
    if model.primary.others and model.keep_alive_s != inf:
        node.touch(model)
    else:
        node.touched[model.name] = node.touched[model.primary.name] = None


def limit_wait(node: Node, request: Request) -> None:
    """Sets the time until which a request may wait, unless it was submitted before. If a client's request has several sequences,
    only the first is limited: once it runs, the answer has begun, and the others may wait without limit."""
    if not request.resubmission and not request.facts.part_of:
        node.waits.set(request.facts.request_id, request.arrived + node.settings.max_wait_s)


def submit(node: Node, model: Model, request: Request) -> None:
    copy = model.copy
    assert copy is not None
    if model.primary.others:
        model.last_used, copy.requested = node.now, True
    request.device, request.submitted_at, request.paused_at = copy.leader, node.now, None
    request_id = request.facts.request_id
    model.start(request)
    node.actions.append(Submit(cause=node.cause, request_id=request_id, model=model.facts.name, device=request.device))


def submit_queued(node: Node, model: Model) -> None:
    """Submits a model's waiting requests to its replicas until the engines' windows are full, each time the oldest one of the
    tenant with the fewest running requests for its weight."""
    while model.queue and routing.has_room(node, model):
        request = model.dequeue_next()
        node.waits.discard(request.facts.request_id)
        replica = routing.choose(node, model, request.facts)
        assert replica is not None
        submit(node, replica, request)
        if replica is not model:
            node.touch(model)  # fewer requests wait for its own copy


def finished(node: Node, event: RequestFinished) -> None:
    """Handles a finished request. Unknown ids are ignored: such requests were cancelled or rejected before."""
    request = leave(node, event.request_id, "finished")
    if request is not None:
        request.model.primary.served.note(node.now)


def cancelled(node: Node, event: RequestCancelled) -> None:
    request = leave(node, event.request_id, "cancelled")
    if request is not None and request.device:
        node.emit(AbortInEngine(cause=node.cause, request_id=event.request_id, device=request.device))


def leave(node: Node, request_id: int, how: str) -> Request | None:
    request = node.requests.pop(request_id, None)
    if request is None:
        return None
    model = request.model
    if request.device:
        model.stop(request_id)
    else:
        model.dequeue(request_id)
        node.waits.discard(request_id)
    model.last_used = node.now
    if model.copy is not None:
        model.copy.requested = True
    node.ended.note(request_id, node.now, request.facts.model, how)
    touch_used(node, model)
    return request


def take_back(node: Node, model: Model, running: Iterable[Request]) -> None:
    """Returns to the front of the queue, in their order of arrival, the requests that ran on a copy which is gone. They may wait
    without limit, because their clients have been promised an answer. model: the replica that ran them."""
    for request in reversed(list(running)):
        model.stop(request.facts.request_id)
        request.device, request.resubmission = "", True
        model.primary.enqueue(request, first=True)
    node.touch(model)


def recall(node: Node, model: Model) -> None:
    """Returns to the queue the requests that were submitted to a load which has failed. They have no output yet, and wait as if
    they had never been submitted."""
    for request in reversed(list(model.running.values())):
        model.stop(request.facts.request_id)
        request.device = ""
        model.primary.enqueue(request, first=True)
        limit_wait(node, request)
    node.touch(model)


def pause(node: Node, model: Model) -> None:
    """Returns all running requests of a replica to the queue, because its copy is evicted from the device, and reports them as
    paused. Their streams to the clients stay open, and they continue when the model is back."""
    paused = tuple(model.running.values())
    if not paused:
        return
    node.emit(RequestsPaused(cause=node.cause, model=model.name, request_ids=tuple(each.facts.request_id for each in paused)))
    for request in paused:
        request.paused_at = node.now
    take_back(node, model, paused)


def crashed(node: Node, model: Model, request: Request) -> None:
    """Rejects a request that was running in max_crashes crashes of engines, because it may be their cause."""
    model.stop(request.facts.request_id)
    message = f"the engine of {model.name} died {request.crashes} times while this request was running"
    node.reject(request, Refusal("crashed_twice", message))


def expire(node: Node) -> None:
    """Rejects requests that have waited longer than max_wait_s and were never submitted. Time in which loads on their model's
    devices waited for kernels to be compiled does not count. At most MAX_EXPIRED_PER_EVENT requests are rejected in one call."""
    for _ in range(MAX_EXPIRED_PER_EVENT):
        request_id = node.waits.pop_due(node.now)
        if request_id is None:
            return
        request = node.requests[request_id]
        model = request.model
        devices = {device for one in model.replicas for device in one.devices}
        until = request.arrived + node.settings.max_wait_s + node.kernel_waits.seconds(devices, request.arrived)
        if until > node.now:
            node.waits.set(request_id, until)
            continue
        refusal = admission.wait_exceeded(node, model)
        node.reject(model.dequeue(request_id), refusal)
        node.touch(model)
