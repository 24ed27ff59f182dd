"""How long each step of a request may take, and how often it is tried. No I/O."""

from dataclasses import dataclass

BACKOFF_FIRST_MS = 50
RETRY_AFTER_MS = 1_000  # what a client is told when the retry budget is spent
BACKOFF_MAX_MS = 1_000
# Beyond any placement deadline at BACKOFF_MAX_MS; a bound even if settings say otherwise. What was in vain because of
# the request's own other prompts comes on top.
MAX_ATTEMPTS = 64
# Instances lost with one request, in a row without a token in between, and in all: it may be what kills them.
MAX_LOSSES_IN_A_ROW, MAX_LOSSES = 3, 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Durations in ms."""

    placement_deadline_ms: int = 15_000
    shed_wait_ms: int = 1_000
    place_reply_ms: int = 1_000
    request_deadline_ms: int = 600_000
    resume_deadline_ms: int = 1_800  # of a begun stream, from the loss of its instance to its next token
    worker_silent_ms: int = 1_500  # an instance that answers no heartbeat for so long is lost
