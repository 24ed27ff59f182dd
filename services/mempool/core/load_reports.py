"""What the fronts of engines say of their load, and since when each is silent. No I/O."""

from dataclasses import dataclass

from msgspec.structs import replace

from shared.ids import Epoch, InstanceId
from shared.wire.lending_limits import MAX_COUNT
from shared.wire.mempool_lending import ReportLoad


@dataclass(slots=True)
class LoadReport:
    """The newest of one instance."""

    message: ReportLoad
    at_ms: int
    connection: int


def bounded(message: ReportLoad) -> ReportLoad:
    """As a front could have said it: whoever reaches the socket can send any number, also none (NaN)."""
    share, in_use = message.kv_used_share, message.num_pages_in_use
    return replace(
        message,
        instance_epoch=Epoch(_count(message.instance_epoch)),
        num_running=_count(message.num_running), num_waiting=_count(message.num_waiting),
        num_arrived=_count(message.num_arrived), num_preempted=_count(message.num_preempted),
        kv_used_share=min(1.0, share) if share > 0 else 0.0,
        num_pages_in_use=None if in_use is None else _count(in_use),
    )  # fmt: skip


def _count(said: int) -> int:
    return min(max(0, said), MAX_COUNT)


class LoadReports(dict[InstanceId, LoadReport]):
    """By instance. Args: silent_ms: a report that is as old says nothing any more."""

    def __init__(self, silent_ms: int) -> None:
        super().__init__()
        self._silent_ms = silent_ms

    def hear(self, connection: int, instance: InstanceId, message: ReportLoad, now_ms: int) -> None:
        """One of a larger epoch takes the place of an earlier one."""
        known = self.get(instance)
        if known is None or message.instance_epoch >= known.message.instance_epoch:
            self[instance] = LoadReport(message, now_ms, connection)

    def forget(self, connection: int) -> None:
        """It reports no more."""
        for instance in [name for name, report in self.items() if report.connection == connection]:
            del self[instance]

    def is_fresh(self, instance: InstanceId, now_ms: int) -> bool:
        """Whether it is not silent."""
        report = self.get(instance)
        return report is not None and now_ms - report.at_ms < self._silent_ms

    def excuse(self, late_ms: int, now_ms: int) -> None:
        """This process stood still for so long: what fronts said meanwhile is not read yet, and no silence."""
        for report in self.values():
            report.at_ms = min(now_ms, report.at_ms + late_ms)
