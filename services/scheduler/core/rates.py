"""What predictions need of an instance and no request changes: kept for as long as its load is. No I/O.

A decode step is linear in its context, and so is what a request adds to it; the rest is a handful of products that are
the same for every request until the next report.
"""

from functools import lru_cache

from msgspec import Struct

from services.scheduler.core.instances import Instance
from services.scheduler.core.load import LoadView
from shared.costmodel.model import CostModel

KV_FULL_SHARE = 0.95  # of an instance's KV blocks: beyond it a new request waits for another's end
_MANY_TOKENS = 1_000_000


class Rates(Struct, frozen=True, gc=False):
    """Of one instance with its load now. Times in ms."""

    model: CostModel
    prefill_correction: float
    num_decodes: int
    reading_ms: float  # what the context of those that decode adds to a step
    before_ms: float  # their step as it is
    step_ms: float  # the step with one more, but for that one's context
    token_ms: float  # each token of which costs so much
    wait_share: float  # of the new one's decode time, for a place in the batch or in memory


def rates_of(known: Instance, view: LoadView) -> Rates | None:
    """None: it sent no coefficients."""
    model = known.model
    if model is None:
        return None
    n, context, correction = view.num_decodes, view.context_tokens, known.decode_correction
    fixed_ms, token_ms = _step_parts(model, n + 1)
    most = known.load.max_running
    wait_share = (n + 1 - most) / most if n >= most else 0.0
    if view.kv_used_share >= KV_FULL_SHARE:
        wait_share = max(wait_share, 1.0)
    before_ms = reading_ms = 0.0
    if n:
        before_fixed_ms, before_token_ms = _step_parts(model, n)
        before_ms = (before_fixed_ms + before_token_ms * context) * correction
        reading_ms = _step_parts(model, 1)[1] * context * correction
    return Rates(
        model, known.prefill_correction, n, reading_ms, before_ms,
        (fixed_ms + token_ms * context) * correction, token_ms * correction, wait_share,
    )  # fmt: skip


@lru_cache(maxsize=65_536)
def _step_parts(model: CostModel, num_requests: int) -> tuple[float, float]:
    """(ms without context, ms per context token) of a decode step, which is linear in its context."""
    fixed_ms = model.decode_step_ms(num_requests, 0)
    return fixed_ms, (model.decode_step_ms(num_requests, _MANY_TOKENS) - fixed_ms) / _MANY_TOKENS
