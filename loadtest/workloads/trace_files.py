"""Trace files in and out: Mooncake JSONL (lengths, times, hash ids), Azure CSV (lengths, times), CSV of lengths alone.

A Mooncake hash id names 512 tokens with all before them. Read, each id becomes the same pseudo-tokens wherever it
occurs, so that equal ids are equal tokens; written, ids are those of stats.BlockIds. aiperf and Dynamo's mooncake_bench
read the same lines.
"""

import csv
import json
import math
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from loadtest.workloads.arrivals import Poisson, take
from loadtest.workloads.request import MAX_PROMPT_TOKENS, Request, Segment, check, content_id
from loadtest.workloads.stats import BLOCK_TOKENS, BlockIds

MAX_LINE_CHARS = 1 << 20
MAX_REQUESTS = 1_000_000  # that are read where nobody says how many
MAX_MS = 1e15  # of a time: today is 2e12 since 1970
NO_ROW = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
MOONCAKE_LINE = (
    '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one for each 512 tokens]}'
)
AZURE_LINE = (
    "the columns TIMESTAMP (2023-11-16 18:15:46.68), ContextTokens and GeneratedTokens; or timestamp (ms), "
    "input_length and output_length; the time may be missing where a rate is given"
)
# as others name the columns, in any case; numbers in the first are milliseconds, as Mooncake's
CSV_COLUMNS = {
    "timestamp": ("timestamp", "timestamp_ms", "arrival_ms"),
    "contexttokens": ("contexttokens", "input_length", "input_tokens", "prompt_tokens", "num_prefill_tokens"),
    "generatedtokens": ("generatedtokens", "output_length", "output_tokens", "num_decode_tokens"),
}


class TraceError(Exception):
    """A line of a trace file is not what its format says; the message names file and line."""


class NoTimes(TraceError):
    """A CSV of lengths alone, and no rate to make times of."""


def read(
    path: Path, *, speed: float = 1.0, limit: int = 0, rate_per_s: float = 0.0, seed: int = 1
) -> list[Request]:
    """Requests of a trace file, .jsonl (Mooncake) or .csv (Azure), ordered by arrival, the first one at 0 ms.

    Args: speed: 2 replays twice as fast. limit: 0 reads all. rate_per_s: of Poisson arrivals, drawn from the seed, for
    a CSV without times, and for no other. Raises: TraceError (NoTimes: without times and rate), OSError.
    """
    if not 0 < speed < math.inf:
        raise TraceError(f"a speed of {speed} must be above 0 and finite")
    if not 0 <= rate_per_s < math.inf:
        raise TraceError(f"--rate {rate_per_s}: requests a second, above 0")
    if limit < 0:
        raise TraceError(f"{limit} requests of a trace: 0 reads all")
    read_rows = _rows(path, limit)
    if not read_rows:
        raise TraceError(f"{path} holds no requests")
    found = _timed(path, read_rows, rate_per_s, seed)
    first_ms = found[0][0]
    sessions = _Sessions()
    requests = []
    for number, (at_ms, prompt_tokens, output_tokens, hash_ids) in enumerate(found):
        session, turn = sessions.of(number, hash_ids, prompt_tokens)
        requests.append(
            Request(
                request_id=number,
                arrival_ms=(at_ms - first_ms) / speed,
                session=session,
                turn=turn,
                prompt=_parts(path, number, prompt_tokens, hash_ids),
                output_tokens=output_tokens,
            )
        )
    try:
        if not math.isfinite(requests[-1].arrival_ms):
            raise ValueError(f"at a speed of {speed} it has no end")
        check(requests)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None
    return requests


Row = tuple[
    float, int, int, list[int]
]  # arrival ms (NaN: it has none), prompt tokens, output tokens, hash ids


def _timed(path: Path, rows: list[Row], rate_per_s: float, seed: int) -> list[Row]:
    """In the order of arrival. A file has times in all rows or in none."""
    if not math.isnan(rows[0][0]):
        if rate_per_s:
            raise TraceError(f"{path} has times of its own: --rate is for lengths without times")
        return sorted(rows, key=lambda row: row[0])
    if not rate_per_s:
        raise NoTimes(
            f"{path} has no column of times ({', '.join(CSV_COLUMNS['timestamp'])}): give --rate, the requests a "
            "second of Poisson arrivals"
        )
    try:
        times = take(Poisson(rate_per_s), "lengths", seed, num_requests=len(rows))
    except ValueError as error:
        raise TraceError(f"--rate {rate_per_s}: {error}") from None
    return [(at_ms, *row[1:]) for at_ms, row in zip(times, rows, strict=True)]


def _rows(path: Path, limit: int) -> list[Row]:
    """The first so many; 0: MAX_REQUESTS, and a line on stderr where there are more.

    A byte order mark is no part of the first column's name. Raises: TraceError, OSError.
    """
    found: list[Row] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as source:
            for row in (_azure if path.suffix.lower() == ".csv" else _mooncake)(path, source):
                if not limit and len(found) == MAX_REQUESTS:
                    print(f"{path} is longer: its first {MAX_REQUESTS:,} requests are read", file=sys.stderr)
                    break
                found.append(row)
                if len(found) == limit:
                    break
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path} is not text: expected Mooncake's JSON lines, or a CSV of lengths: {error}"
        ) from None
    return found


def _mooncake(path: Path, source: TextIO) -> Iterator[Row]:
    lines = iter(lambda: source.readline(MAX_LINE_CHARS + 1), "")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if len(line) > MAX_LINE_CHARS:
            raise TraceError(f"{where}: more than {MAX_LINE_CHARS} characters")
        try:
            row: Any = json.loads(line)
            at_ms, length, output = (
                float(row["timestamp"]),
                _whole(row["input_length"]),
                _whole(row["output_length"]),
            )
            ids = _hash_ids(row.get("hash_ids"))
        except NO_ROW as error:
            raise TraceError(
                f"{where}: no line of a Mooncake trace: {error!r}; expected {MOONCAKE_LINE}"
            ) from None
        if not math.isfinite(at_ms):
            raise TraceError(f"{where}: {at_ms} is no time")
        blocks = -(-length // BLOCK_TOKENS)
        if ids and len(ids) != blocks:
            raise TraceError(f"{where}: {length} tokens are {blocks} blocks, not {len(ids)} hash ids")
        yield _checked(where, at_ms, length, output, ids)


def _whole(value: Any) -> int:
    """Raises: ValueError, TypeError, OverflowError; of a part of a token too."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is no whole number")
    return int(value)


def _hash_ids(value: Any) -> list[int]:
    """Raises: see _whole."""
    if value is not None and not isinstance(value, list):
        raise TypeError(f"hash_ids {value!r} are no list")
    return [_whole(one) for one in value or ()]


def _azure(path: Path, source: TextIO) -> Iterator[Row]:
    reader = csv.DictReader(source)
    try:
        yield from _azure_rows(path, reader)
    except csv.Error as error:  # a field of more than 128 KiB, say
        raise TraceError(f"{path}:{reader.line_num + 1}: no line of a CSV file: {error}") from None


def _azure_rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[Row]:
    names = [name.strip().lower() for name in reader.fieldnames or () if name]
    for known in CSV_COLUMNS.values():
        if len(same := [name for name in names if name in known]) > 1:
            raise TraceError(f"{path}:1: the columns {' and '.join(same)} mean the same: leave one")
    has_times = not set(names).isdisjoint(CSV_COLUMNS["timestamp"])
    has_dates: bool | None = None
    for row in reader:
        if not any(value.strip() if isinstance(value, str) else value for value in row.values()):
            continue
        where = f"{path}:{reader.line_num}"
        try:
            length, output = (_count(_column(row, name)) for name in ("contexttokens", "generatedtokens"))
            at_ms, is_date = _at_ms(_column(row, "timestamp")) if has_times else (math.nan, False)
            if has_dates not in (None, is_date):
                raise ValueError("dates and milliseconds in one file")
            has_dates = is_date
        except NO_ROW as error:
            raise TraceError(
                f"{where}: no line of an Azure trace: {error!r}; expected {AZURE_LINE}"
            ) from None
        yield _checked(where, at_ms, length, output, [])


def _count(text: str) -> int:
    """Of tokens: 100, or 100.0 as data frames write it. Raises: see _whole."""
    try:
        return int(text)
    except ValueError:
        return _whole(float(text))


def _column(row: dict[str, str], name: str) -> str:
    """Raises: KeyError."""
    known = {(key or "").strip().lower(): value for key, value in row.items() if isinstance(key, str)}
    for each in CSV_COLUMNS[name]:
        if each in known:
            return known[each]
    raise KeyError(name)


def _at_ms(at: str) -> tuple[float, bool]:
    """Of a date with or without fractions of seconds and a time zone (UTC), or milliseconds; and whether it is a date.

    Raises: ValueError.
    """
    try:
        found = float(at)
    except ValueError:
        day = datetime.fromisoformat(at.strip())  # of more than six digits it takes the first
        return (day if day.tzinfo else day.replace(tzinfo=UTC)).timestamp() * 1000, True
    if not math.isfinite(found):
        raise ValueError(f"{at!r} is no time")
    return found, False


def _checked(where: str, at_ms: float, length: int, output: int, ids: list[int]) -> Row:
    """An answer of no tokens is one of one: a request that makes none cannot be sent."""
    if not 1 <= length <= MAX_PROMPT_TOKENS:
        raise TraceError(f"{where}: a prompt of {length} tokens")
    if not 0 <= output <= MAX_PROMPT_TOKENS:
        raise TraceError(f"{where}: an answer of {output} tokens")
    if abs(at_ms) > MAX_MS:
        raise TraceError(f"{where}: {at_ms:g} ms is no time")
    return at_ms, length, max(1, output), ids


def _parts(path: Path, number: int, prompt_tokens: int, hash_ids: list[int]) -> tuple[Segment, ...]:
    if not hash_ids:
        return (Segment(content_id("trace", path.name, number), prompt_tokens),)
    whole = [Segment(content_id("hash", path.name, one), BLOCK_TOKENS) for one in hash_ids[:-1]]
    rest = prompt_tokens - BLOCK_TOKENS * len(whole)
    return (*whole, Segment(content_id("hash", path.name, hash_ids[-1]), rest))


class _Sessions:
    """Sessions of a trace that names none: who continues more than one known block, or most of a prompt, goes on."""

    def __init__(self) -> None:
        self._of_block: dict[int, str] = {}
        self._turns: dict[str, int] = {}

    def of(self, number: int, hash_ids: list[int], prompt_tokens: int) -> tuple[str, int]:
        known = 0
        while known < len(hash_ids) and hash_ids[known] in self._of_block:
            known += 1
        goes_on = known > 1 or (known == 1 and prompt_tokens < 2 * BLOCK_TOKENS)
        session = self._of_block[hash_ids[known - 1]] if goes_on else f"trace-{number}"
        for one in hash_ids[known:]:
            self._of_block[one] = session
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return session, turn


def mooncake_lines(requests: Iterable[Request]) -> Iterator[str]:
    """Lines of a Mooncake trace; answers in histories count as planned."""
    ids = BlockIds()
    for request in requests:
        row = {
            "timestamp": round(request.arrival_ms),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": ids.of(request.prompt),
        }
        yield json.dumps(row)


def write_mooncake(path: Path, requests: Iterable[Request]) -> int:
    """Write a Mooncake trace: number of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    num_lines = 0
    with path.open("w") as target:
        for line in mooncake_lines(requests):
            target.write(line + "\n")
            num_lines += 1
    return num_lines
