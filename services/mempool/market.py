"""This mempool's line to the coordinator's memory market: reports what is lent, does what is answered."""

from pathlib import Path
from typing import Any

from services.mempool.core.lending_report import make_report
from services.mempool.shell import MempoolShell
from shared.ids import InstanceId
from shared.observe.log import get_logger
from shared.transport.lending_client import MempoolReporter
from shared.wire.lending import MempoolReport, ReportReply

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = get_logger("mempool.market")


class Market:
    """Reports from open() to close(), on the mempool's loop.

    Args: address: where consumers of this host reach the mempool, for the grants that name it.
    """

    def __init__(self, url: str, key: str, instance: str, address: str, shell: MempoolShell) -> None:
        self._shell = shell
        self._address = address
        self._host = _BOOT_ID.read_text().strip()
        self._reporter = MempoolReporter(
            url, InstanceId(instance), key=key, make_report=self._report, on_reply=self._on_reply,
            on_event=self._say,
        )  # fmt: skip
        shell.pool.lending.on_change = self._reporter.hurry

    def open(self) -> None:
        """Begin to report. Never waits."""
        self._reporter.open()

    async def close(self) -> None:
        """Stop; loans live on until their time is over."""
        self._shell.pool.lending.on_change = None
        await self._reporter.close()

    def _report(self, seq: int) -> MempoolReport:
        core, now_ms = self._shell.pool, self._shell.clock.now_ms()
        return make_report(core.lending, core.pools, seq, now_ms, address=self._address, host=self._host)

    def _on_reply(self, reply: ReportReply) -> None:
        shell = self._shell
        shell.perform(shell.pool.on_market_reply(reply, shell.clock.now_ms()))

    def _say(self, event: str, ids: dict[str, Any]) -> None:
        log.info(event, **ids)
