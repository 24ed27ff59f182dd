"""Which instances a space serves, and through what medium: its audience, for the prompt tree. No I/O.

An engine that works in the pages of its space has them as its own; one that copies has them one copy away, as every
engine has what lies in host memory behind its space. A space outlives its engines: it keeps the instances that were
there, because the next process of an instance begins in the space of the last one, and others fetch under its name what
it left. They are told as *remembered*, since an instance may come back on another host, and this mempool never hears.
Who has not come for as long as a deserted space keeps its blocks is forgotten.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.mempool.core.dram import Dram
from services.mempool.core.loan_pool import LoanPool
from services.mempool.core.pool import Pool
from shared.ids import InstanceId
from shared.wire.placement import Medium

MAX_INSTANCES = 1_024  # of one space, the ones that came last


@dataclass(frozen=True, slots=True)
class SpaceAudience:
    """`behind`: number of the space of host memory behind this one, 0 without; is_dram: it is such memory itself;
    `remembered`: whose engines are not attached now."""

    media: dict[InstanceId, Medium]
    behind: int = 0
    is_dram: bool = False
    remembered: frozenset[InstanceId] = frozenset()


@dataclass(slots=True)
class Audience:
    """Of one mempool: views of its spaces. Remembers instances whose engines are gone, for `_idle_ms`; 0: for ever."""

    _pools: Mapping[int, Pool]
    _space_of: Mapping[InstanceId, int]
    _dram: Dram
    _idle_ms: int
    _media: dict[int, dict[InstanceId, Medium]] = field(default_factory=dict)  # by number of the space
    _left_ms: dict[InstanceId, int] = field(default_factory=dict)  # seen without its engine first then

    def now(self, now_ms: int) -> dict[int, SpaceAudience]:
        """Of every space that has memory, by its number. Cost: a step for each engine and instance."""
        for number in self._media.keys() - self._pools.keys():  # it is over
            del self._media[number]
        attached: dict[int, set[InstanceId]] = {}
        for number, pool in self._pools.items():
            media, here = self._media.setdefault(number, {}), attached.setdefault(number, set())
            engines = pool.memory.engines.attached.values() if pool.memory is not None else ()
            for engine in engines:
                media.pop(engine.instance, None)
                media[engine.instance] = "hbm" if engine.works_in_pages else "dram"
                here.add(engine.instance)
            while len(media) > MAX_INSTANCES:
                del media[next(iter(media))]
        for instance, number in self._space_of.items():  # of an earlier mempool, or in another space by now
            for other, media in self._media.items():
                if other != number:
                    media.pop(instance, None)
            if instance in attached[number]:
                self._left_ms.pop(instance, None)
            elif 0 < self._idle_ms <= now_ms - self._left_ms.setdefault(instance, now_ms):
                self._media[number].pop(instance, None)
            else:
                self._media[number].setdefault(instance, "dram")
        for instance in self._left_ms.keys() - self._space_of.keys():  # its space is over
            del self._left_ms[instance]
        for number, pool in self._pools.items():
            if isinstance(pool, LoanPool):  # one copy away from whom the pages are lent to
                self._media[number] = dict.fromkeys(self._media[pool.consumer.number], "dram")
                attached[number] = attached[pool.consumer.number]
        return {
            number: SpaceAudience(
                media := dict(self._media[number]), self._behind(number), pool.is_dram,
                frozenset(media.keys() - attached[number]),
            )
            for number, pool in self._pools.items()
            if pool.memory is not None
        }  # fmt: skip

    def _behind(self, number: int) -> int:
        tiers = self._dram.tiers.get(number)
        return int(tiers.slow.space) if tiers is not None else 0
