"""When slices are worth their switches, and how long they are. No I/O."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FairRules:
    """Settings of the fair scheduler.

    Args:
        slice_steps: engine steps between two plans (AQUA 7's k).
        max_switch_share: slices pay while switching takes less than this share of a turn's time (turn_steps).
        stay_ratio: slices that pay already go on until the share is so many times that (hysteresis).
        hysteresis_tokens: a running request gives its slot only to one that is so much further behind.
        patience_slices: who waited so many slices goes first among its tenant's requests.
        quantum_tokens: what requests were served is compared in units of so many tokens, and who came first goes first
            within one: fewer switches, and answers end nearly as soon as in order of arrival; a slice takes as many
            prompts as fit into all of its steps. 1: to the token.
        spread_ms: while turns are taken, prompts that wait are computed over about so long, in chunks beside the
            decodes: those who decode go on, and newcomers hear that much later. 0: as many at once as a step takes.
        chunk_tokens: the least of such a chunk; so many beside decodes are nearly free (AQUA 4.1, Sarathi-Serve).
    """

    slice_steps: int = 8
    max_switch_share: float = 0.1
    stay_ratio: float = 1.5
    hysteresis_tokens: int = 0
    patience_slices: int = 32
    quantum_tokens: int = 1
    spread_ms: float = 0.0
    chunk_tokens: int = 512

    @property
    def has_units(self) -> bool:
        """Whether service is compared in units of several tokens."""
        return self.quantum_tokens > 1

    @property
    def turn_steps(self) -> int:
        """How long who was given memory has it, as a rule: a slice; with units until a unit was served, a token a step,
        or for half of the time after which those whom it moved are overdue (decision 0025)."""
        if not self.has_units:
            return self.slice_steps
        return max(self.slice_steps, min(self.quantum_tokens, self.slice_steps * self.patience_slices // 2))

    def __post_init__(self) -> None:
        """Raises: ValueError naming the setting."""
        if min(self.slice_steps, self.patience_slices, self.quantum_tokens) < 1 or self.hysteresis_tokens < 0:
            raise ValueError(
                "slice_steps, patience_slices and quantum_tokens begin at 1, hysteresis_tokens at 0"
            )
        if self.chunk_tokens < 1 or self.spread_ms < 0.0:
            raise ValueError("chunk_tokens begin at 1, spread_ms at 0")
        if not 0.0 <= self.max_switch_share <= 1.0 or self.stay_ratio < 1.0:
            raise ValueError("max_switch_share is a share, stay_ratio at least 1")


@dataclass(frozen=True, slots=True)
class Room:
    """What one engine step has.

    Args:
        slots: requests that run at once.
        step_tokens: tokens of one step, prefill and decode together.
        pages: the most that live requests can hold in the engine's memory; 0: they are never short.
        page_bytes, swap_bytes_per_s: of the way that pages leave and come back; 0 bytes per second: there is none.
        step_ms: time of one engine step.
    """

    slots: int
    step_tokens: int
    pages: int = 0
    page_bytes: int = 0
    swap_bytes_per_s: float = 0.0
    step_ms: float = 0.0


def switch_share(moved_pages: int, room: Room, slice_steps: int) -> float:
    """Share of a slice's time that moving pages out and in takes; infinite without a way to move them.

    (kv_out + kv_in) / bandwidth over k * t_iter: AQUA 7 gives slices up where swap space is slow.
    """
    if not moved_pages:
        return 0.0
    slice_s = slice_steps * room.step_ms / 1e3
    if room.swap_bytes_per_s <= 0.0 or slice_s <= 0.0:
        return float("inf")
    return moved_pages * room.page_bytes / room.swap_bytes_per_s / slice_s
