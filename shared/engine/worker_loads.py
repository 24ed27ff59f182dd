"""The worker's line to the memory market: its load to the host's mempool, and what memory its engine has after changes.

AQUA's northbound interface (AQUA 6): the mempool says at attaching how often it wants to hear, and lends, takes back,
asks and returns by what it hears. Only ever a help: a mempool that is away hears of the load when it is back.
"""

import asyncio
from collections.abc import Callable

from shared.background_task import begin_task
from shared.engine.interface import EngineLoad
from shared.ids import Epoch
from shared.mempool.client import MempoolClient
from shared.observe import metrics
from shared.wire.mempool_lending import MemoryShares, ReportLoad

LOOK_AGAIN_S = 1.0  # for a mempool that wants to hear


class LoadReports:
    """From open() to close().

    Args:
        model: as in profiles.
        load, num_arrived: cheap; called for every report. epoch: of the membership.
    """

    def __init__(
        self,
        client: MempoolClient,
        model: str,
        *,
        load: Callable[[], EngineLoad],
        num_arrived: Callable[[], int],
        epoch: Callable[[], Epoch],
    ) -> None:
        self._client, self._model = client, model
        self._load, self._num_arrived, self._epoch = load, num_arrived, epoch
        self._task: asyncio.Task[None] | None = None
        self._gauges = {
            name: metrics.gauge(f"quire_worker_memory_{name}_bytes", text)
            for name, text in (
                ("offered", "Of the engine's space: lent, or set aside for it."),
                ("lent", "Of the engine's space: on loan to others."),
                ("borrowed", "Lent to the engine's space by others."),
            )
        }

    def open(self) -> None:
        """Begin. Never waits."""
        self._client.on_memory = self._on_memory
        self._task = begin_task(self._run(), "load-reports")

    async def close(self) -> None:
        """Harmless when closed already."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            interval_ms = self._client.load_interval_ms
            if interval_ms and self._epoch():
                self._client.report_load(self._report())
            await asyncio.sleep(interval_ms / 1000 if interval_ms else LOOK_AGAIN_S)

    def _report(self) -> ReportLoad:
        load = self._load()
        return ReportLoad(
            instance_epoch=self._epoch(),
            model=self._model,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_arrived=self._num_arrived(),
            num_preempted=load.num_preempted,
            kv_used_share=load.kv_used_share,
            num_pages_in_use=load.num_pages_in_use,
        )

    def _on_memory(self, shares: MemoryShares) -> None:
        self._gauges["offered"].set(shares.offered_bytes)
        self._gauges["lent"].set(shares.lent_bytes)
        self._gauges["borrowed"].set(shares.borrowed_bytes)
