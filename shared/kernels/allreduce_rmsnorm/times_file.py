"""Times as bytes, so that a group's next start need not measure them again. No I/O.

    {"version": 3, "key": "<of the caller>", "few_sms": 8,
     "curves": [["one_shot", "push", 0, [[16384, 5.2], ...]], ["two_shot", "bulk", 16, [...]], ...]}

`key` says what they belong to (GPU, driver, ranks, shape, kernel). Another version or key, or bytes that are no such
file, count as no file. A curve: algorithm, engine, CTAs (0: one an SM), and (bytes, us) at ascending sizes.
"""

from itertools import pairwise
from math import inf

import msgspec

from shared.kernels.allreduce_rmsnorm.plan import MAX_BUDGET_SMS, Algorithm, Engine, Times, Way
from shared.wire.codec import MALFORMED

FILE_VERSION = 3
_ENGINES = {  # of what is measured; MULTIMEM is an algorithm's own, where a group has multicast
    Algorithm.ONE_SHOT: {Engine.PLAIN, Engine.PUSH},
    Algorithm.TWO_SHOT: {Engine.PLAIN, Engine.BULK},
}

_Curve = tuple[Algorithm, Engine, int, list[tuple[int, float]]]


class _TimesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    key: str
    few_sms: int
    curves: list[_Curve]


def pack_times(key: str, times: Times) -> bytes:
    """The file's bytes."""
    curves = [
        (algorithm, way.engine, way.num_sms, list(curve)) for (algorithm, way), curve in times.curves.items()
    ]
    whole = _TimesFile(version=FILE_VERSION, key=key, few_sms=times.few_sms, curves=curves)
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)


def unpack_times(data: bytes, key: str) -> Times | None:
    """What a file's bytes hold; None where they are of something else, or nothing can be picked by them."""
    try:
        found = msgspec.json.decode(data, type=_TimesFile)
    except MALFORMED:
        return None
    if found.version != FILE_VERSION or found.key != key or not 0 <= found.few_sms <= MAX_BUDGET_SMS:
        return None
    if not all(_makes_sense(curve) for curve in found.curves):
        return None
    curves = {
        (algorithm, Way(engine, num_sms)): tuple(points)
        for algorithm, engine, num_sms, points in found.curves
    }
    whole = {algorithm for algorithm, way in curves if not way.num_sms}
    if len(curves) != len(found.curves) or whole != _ENGINES.keys():
        return None
    return Times(curves, found.few_sms)


def _makes_sense(curve: _Curve) -> bool:
    algorithm, engine, num_sms, points = curve
    sizes = [size for size, _ in points]
    return (
        engine in _ENGINES.get(algorithm, ())
        and 0 <= num_sms <= MAX_BUDGET_SMS
        and bool(sizes)
        and sizes[0] >= 1
        and all(one < other for one, other in pairwise(sizes))
        and all(0.0 < us < inf for _, us in points)
    )
