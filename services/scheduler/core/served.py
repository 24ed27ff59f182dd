"""What instances of one role tell each other through their reports: whom each has served how much. No I/O."""

from collections.abc import Iterable

from services.scheduler.core.instances import Instance
from shared.wire.reports import Report, ServedElsewhere


def served_elsewhere(report: Report, live: Iterable[Instance]) -> ServedElsewhere | None:
    """For an instance whose requests take turns: what the others of its role and model said last. None: it has no use
    for it.
    """
    known = {each.instance: each for each in live}
    own = known.pop(report.instance, None)
    if own is None or not report.served:
        return None
    others = {
        f"{each.instance}/{each.epoch}": each.load.report.served
        for each in known.values()
        if each.role == own.role
        and each.description.model == own.description.model
        and each.load.report is not None
        and each.load.report.served
    }
    return ServedElsewhere(served=others) if others else None
