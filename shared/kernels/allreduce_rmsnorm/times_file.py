"""Times as bytes, so that a group's next start need not measure them again. No I/O.

    {"version": 2, "key": "<of the caller>", "sizes_bytes": [...], "times_us": {"one_shot": [...], ...},
     "ways": [[16777216, "plain", 0], ...], "few_sms": 8, "one_shot_ways": [[16384, "push", 0], ...]}

`key` says what they belong to (GPU, driver, ranks, shape, kernel). Another version or key, or bytes that are no such
file, count as no file. `ways`, of two-shot sums, and `one_shot_ways`: (bytes, engine, CTAs, 0: one an SM).
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from shared.kernels.allreduce_rmsnorm.plan import MAX_BUDGET_SMS, Algorithm, Engine, Times, Way
from shared.wire.codec import MALFORMED

FILE_VERSION = 2
_ONE_SHOT_ENGINES = {Engine.PLAIN, Engine.PUSH}
_TWO_SHOT_ENGINES = {Engine.PLAIN, Engine.BULK}  # MULTIMEM is an algorithm's own, where a group has multicast

_Ways = list[tuple[int, Engine, int]]


class _TimesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    key: str
    sizes_bytes: list[int]
    times_us: dict[Algorithm, list[float]]
    ways: _Ways
    few_sms: int
    one_shot_ways: _Ways


def pack_times(key: str, times: Times) -> bytes:
    """The file's bytes."""
    whole = _TimesFile(
        version=FILE_VERSION, key=key, sizes_bytes=list(times.sizes_bytes),
        times_us={name: list(us) for name, us in times.times_us.items()},
        ways=_packed(times.ways), few_sms=times.few_sms, one_shot_ways=_packed(times.one_shot_ways),
    )  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)


def unpack_times(data: bytes, key: str) -> Times | None:
    """What a file's bytes hold; None where they are of something else, or nothing can be picked by them."""
    try:
        found = msgspec.json.decode(data, type=_TimesFile)
    except MALFORMED:
        return None
    sizes = found.sizes_bytes
    if found.version != FILE_VERSION or found.key != key or not sizes or not found.times_us:
        return None
    if min(sizes) < 1 or any(one >= other for one, other in pairwise(sizes)):
        return None
    if any(len(us) != len(sizes) or min(us) <= 0.0 for us in found.times_us.values()):
        return None
    ways = [*found.ways, *found.one_shot_ways]
    budgets = [found.few_sms, *(num_sms for _, _, num_sms in ways)]
    if any(size < 1 for size, _, _ in ways) or not all(0 <= one <= MAX_BUDGET_SMS for one in budgets):
        return None
    if not {engine for _, engine, _ in found.one_shot_ways} <= _ONE_SHOT_ENGINES:
        return None
    if not {engine for _, engine, _ in found.ways} <= _TWO_SHOT_ENGINES:
        return None
    return Times(
        tuple(sizes),
        {name: tuple(us) for name, us in found.times_us.items()},
        _unpacked(found.ways),
        found.few_sms,
        _unpacked(found.one_shot_ways),
    )


def _packed(ways: Sequence[tuple[int, Way]]) -> _Ways:
    return [(size, way.engine, way.num_sms) for size, way in ways]


def _unpacked(ways: _Ways) -> tuple[tuple[int, Way], ...]:
    return tuple((size, Way(engine, num_sms)) for size, engine, num_sms in ways)
