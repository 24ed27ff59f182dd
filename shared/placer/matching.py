"""AQUA-PLACER's second step: inside a server, one producer's GPU for one consumer's, by stable matching.

Both sides rank by whether a mempool can serve the pair at all (shared/kv/page_fit.py), then by how much would be lent,
then by what would be left over: large needs meet large offers, and an offer is not spent on a need that a smaller one
covers. AQUA pairs GPUs, whatever their instances are spread over: pairs that nobody can serve come last. A pair is
never split across a wish: no consumer and producer would both rather have each other than what they got (Gale and
Shapley, consumers propose). Ties go by name and shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shared.kv.page_fit import misfit


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """One GPU's part of an instance. `size_bytes` is offered or needed, above 0; ranks: GPUs of the whole instance;
    page_bytes: of KV memory on one; 0: not known."""

    instance: str
    number: int
    size_bytes: int
    gpu: int = 0
    ranks: int = 1
    page_bytes: int = 0

    @property
    def pages(self) -> tuple[int, int]:
        """As misfit() takes them."""
        return self.ranks, self.page_bytes


Preference = tuple[bool, int, int, str, int]  # smaller is preferred


def consumer_preference(consumer: Shard, producer: Shard) -> Preference:
    """How a consumer ranks a producer: one that can serve it, then most lent, then least of the offer wasted."""
    lent = min(consumer.size_bytes, producer.size_bytes)
    unfit = _is_unfit(producer.pages, consumer.pages)
    return unfit, -lent, producer.size_bytes - lent, producer.instance, producer.number


def producer_preference(producer: Shard, consumer: Shard) -> Preference:
    """How a producer ranks a consumer: one that it can serve, then most lent, then least of the need unmet."""
    lent = min(consumer.size_bytes, producer.size_bytes)
    unfit = _is_unfit(producer.pages, consumer.pages)
    return unfit, -lent, consumer.size_bytes - lent, consumer.instance, consumer.number


@lru_cache(maxsize=4096)
def _is_unfit(lender: tuple[int, int], borrower: tuple[int, int]) -> bool:
    return misfit(lender=lender, borrower=borrower) != ""


def match(consumers: Sequence[Shard], producers: Sequence[Shard]) -> list[tuple[Shard, Shard]]:
    """(consumer, producer) pairs, each GPU in at most one, as many as the shorter side has; sorted by consumer.

    Cost: at most one proposal for each pair of the two sides.
    """
    wishes = {
        consumer: sorted(
            producers, key=lambda producer: consumer_preference(consumer, producer), reverse=True
        )
        for consumer in consumers
    }
    holder: dict[Shard, Shard] = {}
    free = sorted(consumers, reverse=True)
    while free:
        consumer = free.pop()
        if not wishes[consumer]:
            continue
        producer = wishes[consumer].pop()
        rival = holder.get(producer)
        if rival is None:
            holder[producer] = consumer
        elif producer_preference(producer, consumer) < producer_preference(producer, rival):
            holder[producer] = consumer
            free.append(rival)
        else:
            free.append(consumer)
    return sorted((consumer, producer) for producer, consumer in holder.items())
