"""How long answers get, from those that were seen: Kaplan and Meier's estimator, because many are cut. No I/O.

An answer that reached its max_tokens, or whose client left, says that it would have been at least so long, not how
long: counted as an end it would make answers look short, left out it would too. The product-limit estimator (Kaplan,
Meier, "Nonparametric estimation from incomplete observations", 1958) takes both kinds. Of a request that has made some
of its answer only longer ones count, as in Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees"
(ASPLOS'25).
"""

from bisect import bisect_left

LEAST_SEEN = 8  # answers; before, max_tokens is believed, up to FIRST_TOKENS
FIRST_TOKENS = 1_024
SHARE = 0.8  # of answers that are no longer than expected() says
FADE_AFTER = 256  # answers, then what was seen counts half


def _edges() -> list[int]:
    edges = [1]
    while edges[-1] < 1 << 20:
        edges.append(max(edges[-1] + 1, edges[-1] * 9 // 8))
    return edges


NO_EDGE = 1 << 62
EDGES = _edges()  # bucket i: more than EDGES[i - 1] tokens, at most EDGES[i]


class AnswerLengths:
    """Of one engine. Bounded: a count of each bucket."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._ended = [0.0] * len(EDGES)
        self._cut = [0.0] * len(EDGES)
        self._stops: dict[int, tuple[int, int]] = {}  # see _stop(), until the next answer

    def note(self, tokens: int, *, ended: bool) -> None:
        """An answer is over. `ended`: by itself, not by max_tokens or because its client left."""
        if tokens <= 0:
            return
        bucket = min(bisect_left(EDGES, tokens), len(EDGES) - 1)
        (self._ended if ended else self._cut)[bucket] += 1
        self._stops.clear()
        self.num_seen += 1
        if self.num_seen % FADE_AFTER == 0:
            self._ended = [count / 2 for count in self._ended]
            self._cut = [count / 2 for count in self._cut]

    def expected(self, most: int, made: int = 0) -> int:
        """Tokens of an answer in all, made ones too: at least made, else at most `most`. Cost: O(buckets) once behind
        each answer, then O(1): an engine asks this of each request, between two steps.
        """
        if self.num_seen < LEAST_SEEN:
            return max(made, min(most, max(FIRST_TOKENS, 2 * made)))
        first = bisect_left(EDGES, made + 1)
        stop = self._stops.get(first)
        if stop is None:
            stop = self._stops[first] = self._stop(first)
        edge, tokens = stop
        return max(made, most if edge >= most else min(most, tokens))

    def _stop(self, first: int) -> tuple[int, int]:
        """Of those longer than EDGES[first - 1]: the edge behind which none is looked at, and what is expected then, if
        no shorter one is the longest that may be.
        """
        at_risk = sum(self._ended[first:]) + sum(self._cut[first:])
        left = 1.0
        for bucket in range(first, len(EDGES)):
            if at_risk < 0.5:  # nobody was seen to make so much: twice as much, or all of it
                return EDGES[bucket], max(FIRST_TOKENS, 2 * EDGES[bucket])
            left *= 1.0 - self._ended[bucket] / at_risk
            if left <= 1.0 - SHARE + 1e-9:
                return EDGES[bucket], EDGES[bucket]
            at_risk -= self._ended[bucket] + self._cut[bucket]
        return NO_EDGE, NO_EDGE
