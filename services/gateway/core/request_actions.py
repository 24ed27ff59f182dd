"""What a RequestFlow wants done, see request_flow.py. No I/O."""

from msgspec import Struct

from services.gateway.core.request_limits import RETRY_AFTER_MS
from shared.ids import HandoffId, InstanceId
from shared.wire.handoff import HandoffState
from shared.wire.placement import Target
from shared.wire.requests import HandoffTarget, KvPlan, Stage


class SendPlace(Struct, frozen=True):
    """Ask the scheduler."""

    attempt: int
    exclude: list[InstanceId]


class SendGenerate(Struct, frozen=True):
    """Start a stage on an instance."""

    attempt: int
    target: Target
    stage: Stage
    deadline_ms: int
    handoff_to: HandoffTarget | None = None
    handoff: HandoffState | None = None
    kv: KvPlan | None = None  # prefill and colocated


class SendAbort(Struct, frozen=True):
    """The instance must stop working on this attempt."""

    attempt: int
    target: Target
    handoff_id: HandoffId | None = None  # of the prefill instance: its pages wait for nobody


class SendEnded(Struct, frozen=True):
    """The scheduler's load view forgets this attempt."""

    attempt: int


class Discard(Struct, frozen=True):
    """Output of the attempt was given up before the client saw any: forget it."""


class GoOn(Struct, frozen=True):
    """The attempt was given up; the next one goes on behind what the client has."""


class Complete(Struct, frozen=True):
    """Terminal: the answer is whole."""


class Cancel(Struct, frozen=True):
    """Terminal: nobody waits for an answer any more."""


class Fail(Struct, frozen=True):
    """Terminal. `code` is a stable code of shared/errors.py."""

    code: str
    message: str
    retry_after_ms: int | None = None


Action = SendPlace | SendGenerate | SendAbort | SendEnded | Discard | GoOn | Complete | Cancel | Fail


def over_budget(code: str, message: str) -> Fail:
    """No retry is left for a request that lost its instance."""
    return Fail(code, f"{sentence(message)} No retry is left in the budget.", RETRY_AFTER_MS)


def sentence(text: str) -> str:
    """What other processes say is a sentence or a clause; here it ends like a sentence."""
    return text if text.endswith(".") else f"{text}."
