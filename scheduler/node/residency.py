"""Defines the states that a model can have on this node, and the groups of states that the scheduler distinguishes. Imports
nothing."""

COLD = "cold"  # only on disk; a request for it leads to a placement
WARM = "warm"  # a copy of its weights is in host memory, so a load needs no disk; otherwise as cold
LOADING = "loading"  # its memory is taken and its weights are being loaded
READY = "ready"  # requests are submitted at once
PAUSED = "paused"  # preempted: off the device, and requests that ran there wait for it to come back; otherwise as cold
DRAINING = "draining"  # leaves the device: what runs goes on to its end, what arrives waits or is refused
FAILED = "failed"  # its last loads failed or it crashed engines; may carry a time when it is tried again
REFUSED = "refused"  # can't be served as it is: not a supported kind, or it fits on no allowed device even when that is empty
HEAD = "head"  # no model of its own: it drafts tokens for other models and is loaded with them
DISABLED = "disabled"  # switched off by the operator
INCOMPLETE = "incomplete"  # files are missing or shorter than their headers say

ALL = frozenset({COLD, WARM, LOADING, READY, PAUSED, DRAINING, FAILED, REFUSED, HEAD, DISABLED, INCOMPLETE})

# States in which a model holds chunks of a device's ledger.
IN_MEMORY = frozenset({LOADING, READY, DRAINING})
# States in which it holds none.
AT_REST = ALL - IN_MEMORY
# States in which it may have requests in an engine. A loading model may, too, while its weights stream in (Model.takes_requests).
RUNNING = frozenset({READY, DRAINING})
# States in which a placement may be made for it.
PLACEABLE = frozenset({COLD, WARM, PAUSED})
# States in which it refuses every request, so nothing may be queued.
CLOSED = frozenset({FAILED, REFUSED, HEAD, DISABLED, INCOMPLETE})
