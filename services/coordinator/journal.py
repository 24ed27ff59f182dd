"""The coordinator's journal in Redis: one hash, one field per instance. Best effort: nobody waits for it.

quire:coordinator:journal    hash: instance -> JournalEntry as JSON

Only who leads writes, which Redis checks in the same step (market_journal.py): what a leader of the past had still to
write when its Redis was away is older than what the next one has written. A hash has at most as many fields as
core/membership.py remembers epochs: what falls out there is removed here.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from services.coordinator.core.membership import JournalEntry
from services.coordinator.market_journal import IS_LEADER, MAX_FIELDS_PER_WRITE, Fence, NotLeading
from shared.background_task import begin_task
from shared.errors import ClusterError
from shared.ids import InstanceId
from shared.observe.log import get_logger
from shared.observe.metrics import counter
from shared.transport.redis_link import RedisLink, Script
from shared.wire.codec import MALFORMED

KEY = "quire:coordinator:journal"
DEADLINE_MS = 1_000
RETRY_S = 1.0
CLOSE_S = 2.0  # for what is not written at the end

_log = get_logger("coordinator")
_failures = counter("quire_coordinator_journal_failures_total", "Journal calls without an answer in time.")
_bad = counter("quire_coordinator_journal_bad_entries_total", "Entries that could not be read.")

_WRITE = Script(
    IS_LEADER
    + """
for i = 4, #ARGV, 2 do
  if ARGV[i + 1] == '' then redis.call('HDEL', 'quire:coordinator:journal', ARGV[i])
  else redis.call('HSET', 'quire:coordinator:journal', ARGV[i], ARGV[i + 1]) end
end
return 1
"""
)


class Journal:
    """Calls `restore(entries)` after every connection, then writes what was noted.

    Args:
        restore: takes the entries over and notes again whatever must be in a store that may be empty.
        fence: who writes, in which term; None while the store has not said who leads: until then nothing is read, as
            another one may lead and write, nor written.
    """

    def __init__(
        self,
        redis_url: str,
        restore: Callable[[list[JournalEntry]], None],
        fence: Callable[[], Fence | None],
    ) -> None:
        self._restore = restore
        self._fence = fence
        # newest per instance, so bounded by them; None: to be removed
        self._pending: dict[InstanceId, JournalEntry | None] = {}
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

    async def read_members(self) -> list[JournalEntry]:
        """What the store has now, without restore(). Raises: ClusterError when it does not answer in time."""
        return _entries(await self._link.call("HGETALL", KEY, timeout_ms=DEADLINE_MS))

    def note(self, entries: Iterable[JournalEntry], forgotten: Iterable[InstanceId] = ()) -> None:
        """Write these soon, and remove the others. Never waits."""
        for entry in entries:
            self._pending[entry.instance] = entry
        self._pending.update(dict.fromkeys(forgotten))
        if self._pending:
            self._wake.set()

    def forget(self) -> None:
        """Drop what is not written: another one leads."""
        self._pending.clear()

    def read_again(self) -> None:
        """Restore from the store once more, as after a new connection."""
        self._on_up()

    async def close(self) -> None:
        """Write what is pending, if Redis answers, and stop. Cost: at most CLOSE_S."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link.up and not self._must_read:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._write()
            except (ClusterError, TimeoutError) as error:
                _log.warning("journal_failed", error=str(error))
        await self._link.close()

    def _on_up(self) -> None:
        self._must_read = True
        self._wake.set()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                # also without a word: a term may go on whose end this process had thought to see
                async with asyncio.timeout(RETRY_S):
                    await self._wake.wait()
            self._wake.clear()
            if not self._link.up or self._fence() is None:
                continue
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
        self._must_read = False  # a new connection, or a new term, meanwhile sets it again
        try:
            entries = await self.read_members()
        except BaseException:
            self._must_read = True
            raise
        for entry in entries:  # what another leader knows better; what is to be removed is decided again
            mine = self._pending.get(entry.instance)
            if mine is None or mine.epoch < entry.epoch:
                self._pending.pop(entry.instance, None)
        self._restore(entries)
        self._was_read.set()

    async def _write(self) -> None:
        """Raises: NotLeading, and what was noted stays noted."""
        while self._pending and not self._must_read and (fence := self._fence()) is not None:
            entries = dict(list(self._pending.items())[:MAX_FIELDS_PER_WRITE])
            words: list[bytes | str] = []
            for instance, entry in entries.items():
                words += [instance, msgspec.json.encode(entry) if entry is not None else b""]
            if not await self._link.run(_WRITE, *fence, *words, timeout_ms=DEADLINE_MS):
                raise NotLeading("the journal has another leader, or a later term")
            for instance, entry in entries.items():
                if instance in self._pending and self._pending[instance] is entry:  # else a newer one came
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
