"""Leadership and the market's journal in Redis. Whatever writes says who it is, and a leader of the past
writes nothing.

quire:coordinator:leader    hash: owner, boot, url, term, lease_us, until_us (by Redis's clock, the end of its lease)
quire:coordinator:term      the last term given; at least the wall clock's microseconds, so that terms grow without it
quire:coordinator:market    hash: field of core/market_records.py -> MarketEntry as JSON
quire:coordinator:history   list of [event, subject, detail] as JSON, the newest last

None of them has a TTL: a Redis that is full evicts what has one (the trees; volatile-ttl takes the shortest first).

A key that is of another type, or a term that is no number, goes out of the way to KEY:damaged (the newest is kept)
and a new term begins, in which everything is written anew. Its number is above what the other key and this process
know of terms and at least the wall clock's; a mempool that knows a larger one has it raised again (deposing_term).
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from services.coordinator.core.market_records import MarketEntry
from shared.errors import ClusterError, PeerGone
from shared.observe.log import get_logger
from shared.observe.metrics import counter
from shared.transport.redis_link import RedisLink, RedisRefused, Script
from shared.wire.codec import MALFORMED

DEADLINE_MS = 1_000
MAX_HISTORY = 200
MAX_FIELDS_PER_WRITE = 500

_log = get_logger("coordinator")
_failures = counter("quire_coordinator_market_journal_failures_total", "Market journal calls that failed.")

# a few bounded writes, which a Redis without room takes too: who leads goes on leading (Redis 7; Valkey)
_NOW = """#!lua flags=allow-oom
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
"""
_CLAIM = Script(
    _NOW
    + """
local mended = {}
local function aside(key, why)
  redis.call('RENAME', key, key .. ':damaged')
  table.insert(mended, key .. ' ' .. why)
end
local function mend(key, kind)
  local found = redis.call('TYPE', key)['ok']
  if found ~= 'none' and found ~= kind then aside(key, 'is a ' .. found) end
end
local function number(word, most)
  local found = tonumber(word or '0')
  if found and found >= 0 and found <= most then return found end
end
local MOST = 9007199254740990  -- whole numbers are exact up to here
mend('quire:coordinator:leader', 'hash')
local leader = redis.call('HMGET', 'quire:coordinator:leader', 'owner', 'boot', 'term', 'url', 'until_us', 'lease_us')
local HOUR = 3600000000  -- nobody leads an hour ahead
local until_us = number(leader[5], now_us + HOUR) or 0
if leader[1] and leader[1] ~= ARGV[1] and until_us > now_us then
  local lease_us = leader[6] and number(leader[6], HOUR) or 0  -- 0: a leader of before says none
  local most_us = now_us + (lease_us > 0 and lease_us or HOUR)
  if until_us > most_us then  -- the clock went back; who lives renews it sooner
    redis.call('HSET', 'quire:coordinator:leader', 'until_us', string.format('%.0f', most_us))
  end
  return {'0', leader[4] or '', {}}
end
mend('quire:coordinator:term', 'string')
local last = number(redis.call('GET', 'quire:coordinator:term'), MOST)
if not last then aside('quire:coordinator:term', 'is no number') end
mend('quire:coordinator:market', 'hash')
mend('quire:coordinator:history', 'list')
mend('quire:coordinator:journal', 'hash')
local term = number(leader[3], MOST) or 0
if leader[1] ~= ARGV[1] or leader[2] ~= ARGV[2] or until_us <= now_us or term < tonumber(ARGV[6]) or #mended > 0 then
  term = math.max(math.max(last or 0, term, tonumber(ARGV[7])) + 1, tonumber(ARGV[5]), tonumber(ARGV[6]))
  local words = string.format('%.0f', term)
  redis.call('SET', 'quire:coordinator:term', words)
  redis.call('HSET', 'quire:coordinator:leader', 'owner', ARGV[1], 'boot', ARGV[2], 'url', ARGV[3], 'term', words)
end
redis.call(
  'HSET', 'quire:coordinator:leader', 'until_us', string.format('%.0f', now_us + ARGV[4] * 1000),
  'lease_us', string.format('%.0f', ARGV[4] * 1000)
)
return {string.format('%.0f', term), '', mended}
"""
)
# begins whatever a leader writes; ARGV[1..3]: its owner, boot and term
IS_LEADER = (
    _NOW
    + """
local leader = redis.call('HMGET', 'quire:coordinator:leader', 'owner', 'boot', 'term', 'until_us')
if leader[1] ~= ARGV[1] or leader[2] ~= ARGV[2] or leader[3] ~= ARGV[3] then return 0 end
if tonumber(leader[4] or '0') <= now_us then return 0 end
"""
)
_WRITE = Script(
    IS_LEADER
    + """
local next = 5
for i = 1, tonumber(ARGV[4]) do
  if ARGV[next + 1] == '' then redis.call('HDEL', 'quire:coordinator:market', ARGV[next])
  else redis.call('HSET', 'quire:coordinator:market', ARGV[next], ARGV[next + 1]) end
  next = next + 2
end
for i = next + 1, #ARGV do redis.call('RPUSH', 'quire:coordinator:history', ARGV[i]) end
redis.call('LTRIM', 'quire:coordinator:history', -tonumber(ARGV[next]), -1)
return 1
"""
)
_RESIGN = Script(IS_LEADER + "return redis.call('DEL', 'quire:coordinator:leader')")

Event = tuple[str, str, str]
Fence = tuple[str, str, int]  # a leader's owner, boot and term
T = TypeVar("T")
_ENTRIES: msgspec.json.Decoder[MarketEntry] = msgspec.json.Decoder(MarketEntry)
_EVENTS = msgspec.json.Decoder(Event)


class NotLeading(PeerGone):
    """Another coordinator leads, the leader's lease lapsed, or it leads in a later term than what it wrote was of."""

    code = "market.standby"


@dataclass(frozen=True, slots=True)
class Claim:
    """`term` 0: another one leads, at leader_url."""

    term: int
    leader_url: str


@dataclass(frozen=True, slots=True)
class Stored:
    """What an earlier leader wrote."""

    entries: list[MarketEntry]
    history: list[Event]
    knows_mempools: bool


class MarketJournal:
    """One process's connection. Every call has a deadline and raises ClusterError's PeerError on failure.

    Args: owner: stays the same when the same process is started again, so that it need not wait for its own
    lease; boot: differs then; url: where this coordinator is reached.
    """

    def __init__(self, redis_url: str, *, owner: str, boot: str, url: str, on_up: Callable[[], None]) -> None:
        self.who = (owner, boot)
        self._url = url
        self._link = RedisLink(redis_url, on_up=on_up)
        self._pending: dict[str, bytes] = {}  # b"": remove
        self._events: list[bytes] = []
        self._term = 0  # of what is noted; 0: of none, so nothing of it is written
        self._writing = asyncio.Lock()

    @property
    def up(self) -> bool:
        """Whether Redis is connected."""
        return self._link.up

    @property
    def down_reason(self) -> str:
        """Why it is not connected, in words for an operator."""
        return f"Redis is not reached: {self._link.last_error or 'it has not answered yet'}"

    def open(self) -> None:
        """Start connecting."""
        self._link.open()

    async def close(self, *, resign: bool) -> None:
        """Stop; `resign` lets a standby take over at once."""
        if resign and self._link.up:
            try:
                await self._link.run(_RESIGN, *self.who, self._term, timeout_ms=DEADLINE_MS)
            except ClusterError as error:
                _log.warning("resign_failed", error=error.message)
        await self._link.close()

    async def fsync_policy(self) -> str:
        """ "always", "everysec", "no", "off" (no append-only file), or "unknown" (it does not say)."""
        try:
            on, policy = [
                (await self._link.call("CONFIG", "GET", name, timeout_ms=DEADLINE_MS))[1].decode()
                for name in ("appendonly", "appendfsync")
            ]
        except (RedisRefused, IndexError):
            return "unknown"
        return policy if on == "yes" else "off"

    async def claim(self, lease_ms: int, *, above_term: int, known_term: int = 0) -> Claim:
        """Begin to lead, or go on. above_term: terms up to this one are other leaders', so a new one has to begin;
        known_term: a new one is above this one, too."""
        words = (*self.who, self._url, lease_ms, time.time_ns() // 1_000, above_term + 1, known_term)
        term, url, mended = await self._link.run(_CLAIM, *words, timeout_ms=DEADLINE_MS)
        for said in mended:
            key, _, reason = said.decode().partition(" ")
            _log.error("journal_key_unreadable", key=key, reason=reason, moved_to=f"{key}:damaged")
        return Claim(int(term), url.decode())

    async def read(self) -> Stored:
        """Everything."""
        fields = await self._link.call("HGETALL", "quire:coordinator:market", timeout_ms=DEADLINE_MS)
        lines = await self._link.call("LRANGE", "quire:coordinator:history", 0, -1, timeout_ms=DEADLINE_MS)
        knows = any(name.startswith(b"mempool:") for name in fields[::2])
        return Stored(_decoded(fields[1::2], _ENTRIES), _decoded(lines, _EVENTS), knows)

    def begin(self, term: int) -> None:
        """What is noted from now on is of this term. What is not written is dropped, and who waits for it told."""
        self._term, self._pending, self._events = term, {}, []

    def forget(self) -> None:
        """Drop what is not written: another one leads, or a term that has not begun."""
        self.begin(0)

    def note(self, fields: Mapping[str, MarketEntry | None], events: list[Event]) -> None:
        """To be written by the next flush(). Never waits."""
        for name, entry in fields.items():
            self._pending[name] = msgspec.json.encode(entry) if entry is not None else b""
        self._events = (self._events + [msgspec.json.encode(event) for event in events])[-MAX_HISTORY:]

    async def flush(self) -> None:
        """Returns when everything noted so far is stored (with appendfsync always: on disk).

        Raises: NotLeading, also when the term ended meanwhile; PeerError, and what was noted stays noted.
        """
        term = self._term
        async with self._writing:
            while True:
                if self._term != term:
                    raise NotLeading("what was to be written is of a term that is over")
                if not self._pending and not self._events:
                    return
                fields = dict(list(self._pending.items())[:MAX_FIELDS_PER_WRITE])
                events = list(self._events)
                words = [word for pair in fields.items() for word in pair]
                try:
                    stored = await self._link.run(
                        _WRITE, *self.who, term, len(fields), *words, MAX_HISTORY, *events,
                        timeout_ms=DEADLINE_MS,
                    )  # fmt: skip
                except ClusterError:
                    _failures.inc()
                    raise
                if not stored:
                    raise NotLeading("the journal has another leader, or a later term")
                if self._term != term:
                    continue
                for name, raw in fields.items():
                    if self._pending.get(name) is raw:  # else a newer one came meanwhile
                        del self._pending[name]
                del self._events[: len(events)]


def _decoded(lines: Iterable[bytes], decoder: msgspec.json.Decoder[T]) -> list[T]:
    """Those that are one: what is stored may be damaged, or another version's, and who reads it has to lead."""
    found = []
    for line in lines:
        try:
            found.append(decoder.decode(line))
        except MALFORMED as error:
            _log.warning("market_entry_bad", error=str(error))
    return found
