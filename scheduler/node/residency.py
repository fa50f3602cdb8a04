"""The states a model can be in on this node, and the groups the scheduler asks about. Imports nothing."""

COLD = "cold"  # only on disk; a request for it makes a placement
WARM = "warm"  # a copy of its weights is in host memory, so a load needs no disk; otherwise as cold
LOADING = "loading"  # its memory is taken and its weights are on their way
READY = "ready"  # requests are submitted at once
PAUSED = "paused"  # preempted: off the device, and requests that ran there wait for it to come back; otherwise as cold
DRAINING = "draining"  # leaves the device: what runs goes on to its end, what arrives waits or is refused
FAILED = "failed"  # its last loads failed or it crashed engines; may carry a time when it is tried again
REFUSED = "refused"  # can't be served as it is: of a kind that is not built, or fits on no allowed device even when that is empty
DISABLED = "disabled"  # switched off by the operator
INCOMPLETE = "incomplete"  # files are missing or shorter than their headers say

ALL = frozenset({COLD, WARM, LOADING, READY, PAUSED, DRAINING, FAILED, REFUSED, DISABLED, INCOMPLETE})

# Holds chunks of a device's ledger.
IN_MEMORY = frozenset({LOADING, READY, DRAINING})
# Holds none.
AT_REST = ALL - IN_MEMORY
# May have requests in an engine; while its weights stream in, a loading one, too (Model.takes_requests).
RUNNING = frozenset({READY, DRAINING})
# A placement may be made for it.
PLACEABLE = frozenset({COLD, WARM, PAUSED})
# Refuses every request, so nothing may be queued.
CLOSED = frozenset({FAILED, REFUSED, DISABLED, INCOMPLETE})
