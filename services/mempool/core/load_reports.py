"""What the fronts of engines say of their load, and since when each is silent. No I/O."""

from dataclasses import dataclass

from shared.ids import InstanceId
from shared.wire.mempool_lending import ReportLoad


@dataclass(slots=True)
class LoadReport:
    """The newest of one instance."""

    message: ReportLoad
    at_ms: int
    connection: int


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
