"""The coordinator's journal in Redis: one hash, one field per instance. Best effort: nobody waits for it.

quire:coordinator:journal    hash: instance -> JournalEntry as JSON
"""

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from services.coordinator.core.membership import JournalEntry
from shared.background_task import begin_task
from shared.errors import ClusterError
from shared.ids import InstanceId
from shared.observe.log import get_logger
from shared.observe.metrics import counter
from shared.transport.redis_link import RedisLink
from shared.wire.codec import MALFORMED

KEY = "quire:coordinator:journal"
DEADLINE_MS = 1_000
RETRY_S = 1.0

_log = get_logger("coordinator")
_failures = counter("quire_coordinator_journal_failures_total", "Journal calls without an answer in time.")
_bad = counter("quire_coordinator_journal_bad_entries_total", "Entries that could not be read.")


class Journal:
    """Calls `restore(entries)` after every connection, then writes what was noted.

    Args: restore: takes the entries over and notes again whatever must be in a store that may be empty.
    """

    def __init__(self, redis_url: str, restore: Callable[[list[JournalEntry]], None]) -> None:
        self._restore = restore
        self._pending: dict[InstanceId, JournalEntry] = {}  # newest per instance, so bounded by them
        self._link = RedisLink(redis_url, on_up=self._on_up)
        self._must_read = True
        self._was_read = asyncio.Event()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether Redis is connected and has everything."""
        return self._link.up and not self._must_read and not self._pending

    async def start(self, wait_ms: int) -> bool:
        """Begin; wait at most `wait_ms` for the first restore. False: it comes later, if Redis does."""
        self._link.open()
        self._task = begin_task(self._run(), "journal")
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._was_read.wait()
        except TimeoutError:
            return False
        return True

    def note(self, entries: Iterable[JournalEntry]) -> None:
        """Write these soon. Never waits."""
        for entry in entries:
            self._pending[entry.instance] = entry
            self._wake.set()

    def read_again(self) -> None:
        """Restore from the store once more, as after a new connection."""
        self._on_up()

    async def close(self) -> None:
        """Write what is pending, if Redis answers, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link.up and not self._must_read:
            try:
                await self._write()
            except ClusterError as error:
                _log.warning("journal_failed", error=error.message)
        await self._link.close()

    def _on_up(self) -> None:
        self._must_read = True
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._link.up:
                continue  # _on_up wakes us
            try:
                if self._must_read:
                    await self._read()
                await self._write()
            except ClusterError as error:
                _failures.inc()
                _log.warning("journal_failed", error=error.message)
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _read(self) -> None:
        reply = await self._link.call("HGETALL", KEY, timeout_ms=DEADLINE_MS)
        self._must_read = False
        self._restore(_entries(reply))
        self._was_read.set()

    async def _write(self) -> None:
        while self._pending:
            entries = dict(self._pending)
            words: list[bytes | str] = []
            for instance, entry in entries.items():
                words += [instance, msgspec.json.encode(entry)]
            await self._link.call("HSET", KEY, *words, timeout_ms=DEADLINE_MS)
            for instance, entry in entries.items():
                if self._pending.get(instance) is entry:  # else a newer one came meanwhile
                    del self._pending[instance]


def _entries(reply: list[bytes]) -> list[JournalEntry]:
    entries = []
    for raw in reply[1::2]:
        try:
            entries.append(msgspec.json.decode(raw, type=JournalEntry))
        except MALFORMED as error:
            _bad.inc()
            _log.warning("journal_entry_bad", error=str(error))
    return entries
