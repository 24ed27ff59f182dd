"""What a newly cached token costs others: where memory is short, it pushes out what is asked for again. No I/O.

MemServe's eq 1 counts what a request takes, and not what its pages push out. So copies that are cheap to fetch fill
idle instances, and what nobody else holds is computed again (docs/decisions/0045). Gateways say how many of a prompt's
leading tokens they were asked for before. Those that nobody has any more were pushed out:

    price of a token = weight * ms of computing such tokens again / tokens newly cached, both of the last placements

With memory enough, or where nothing comes twice, the price is 0. The weight stands for what the average leaves out: a
token that is computed again pushes out another, and all behind it in the queue wait. A gateway knows what it asked
itself, so with several the price is lower; a prompt asked for again before it is stored counts as pushed out.
"""

from dataclasses import dataclass, field

from services.scheduler.core.predict import FirstStage, Predictor

HALF_LIFE = 50  # placements, after which what was seen counts half
_KEPT = 0.5 ** (1 / HALF_LIFE)


@dataclass(slots=True)
class Pressure:
    """Of the instances of one model."""

    again_ms: float = 0.0
    new_tokens: float = 0.0

    def add(self, again_ms: float, new_tokens: int) -> None:
        """Of one placement."""
        self.again_ms = self.again_ms * _KEPT + again_ms
        self.new_tokens = self.new_tokens * _KEPT + new_tokens

    @property
    def ms_per_token(self) -> float:
        """Without the weight."""
        return self.again_ms / self.new_tokens if self.new_tokens >= 1.0 else 0.0


@dataclass(slots=True)
class Pressures:
    """By model. Kept: one pair of numbers for every model that was ever placed."""

    _by_model: dict[str, Pressure] = field(default_factory=dict)

    def ms_per_token(self, model: str) -> float:
        """0 where nothing was placed yet."""
        found = self._by_model.get(model)
        return found.ms_per_token if found is not None else 0.0

    def note(self, predictor: Predictor, first: FirstStage) -> None:
        """A request was placed, its prompt on this instance. Later attempts tell nothing new."""
        request = predictor.request
        if request.key[1] > 1:
            return
        held = max(request.reach().values(), default=0)
        again_ms = 0.0
        if request.seen_tokens > held:
            known = first.candidate.known
            again_ms = predictor.exec_ms(known, held) - predictor.exec_ms(known, request.seen_tokens)
        new_tokens = request.num_prompt_tokens - first.local_tokens
        self._by_model.setdefault(request.model, Pressure()).add(max(0.0, again_ms), new_tokens)
