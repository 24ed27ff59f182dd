"""Trace files into requests: Mooncake's JSONL with hash ids, and CSV of lengths as Azure publishes them.

A wrong line is an error that names it: a trace that is read in part would answer another question.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.simulator.request import BlockNames, SimRequest, private_blocks
from shared.errors import InvalidRequest
from shared.ids import BlockHash

TRACE_BLOCK_TOKENS = 512  # of Mooncake's hash ids
MAX_REQUESTS = 2_000_000
MAX_TOKENS = 10_000_000
TIME_COLUMNS = ("timestamp", "arrived_at", "time")
PROMPT_COLUMNS = ("contexttokens", "num_prefill_tokens", "input_length", "prompt_tokens")
OUTPUT_COLUMNS = ("generatedtokens", "num_decode_tokens", "output_length", "output_tokens")


class TraceError(InvalidRequest):
    """The file is no trace; the message names the line and what was expected there."""


def read_trace(path: Path, *, most: int = MAX_REQUESTS) -> list[SimRequest]:
    """Requests in order of arrival, the first at 0 ms; at most `most` of them.

    Raises: TraceError.
    """
    try:
        with path.open(newline="") as file:
            first = file.readline()
            file.seek(0)
            if not first.strip():
                raise TraceError(
                    f"{path} is empty or begins with an empty line: expected JSON lines or a CSV header"
                )
            found = list(
                _mooncake(path, file, most) if first.lstrip().startswith("{") else _csv(path, file, most)
            )
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text: {error}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    if not found:
        raise TraceError(f"{path} has no requests")
    return found


def _mooncake(path: Path, lines: Iterable[str], most: int) -> Iterator[SimRequest]:
    names, sessions, last_ms, begin_ms = BlockNames(), _Sessions(), 0.0, None
    for number, line in enumerate(lines, 1):
        if number > most:
            return
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: not JSON ({error}); expected {_EXPECTED}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{where}: not an object; expected {_EXPECTED}")
        at_ms = _number(where, row, "timestamp")
        prompt, output = _tokens(where, row, "input_length"), _tokens(where, row, "output_length")
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise TraceError(f"{where}: hash_ids must be a list of whole numbers")
        if len(ids) != -(-prompt // TRACE_BLOCK_TOKENS):
            raise TraceError(
                f"{where}: {len(ids)} hash_ids for {prompt} tokens; expected one per {TRACE_BLOCK_TOKENS} tokens"
            )
        if begin_ms is None:
            begin_ms = at_ms
        if at_ms - begin_ms < last_ms:
            raise TraceError(f"{where}: timestamp {at_ms:g} is before the line above; expected ascending ms")
        last_ms = at_ms - begin_ms
        blocks = names.of(ids)
        yield SimRequest(
            request_id=f"r{number}",
            arrival_ms=last_ms,
            prompt_tokens=prompt,
            output_tokens=max(1, output),
            blocks=blocks,
            output_blocks=_unknown_output(number, prompt, max(1, output)),
            session=sessions.of(number, blocks[: prompt // TRACE_BLOCK_TOKENS]),
        )


class _Sessions:
    """The trace names none: a prompt that begins with all full blocks of an earlier one continues its session."""

    def __init__(self) -> None:
        self._ends: dict[BlockHash, str] = {}  # last full block of a prompt -> its session

    def of(self, number: int, full: tuple[BlockHash, ...]) -> str:
        found = next((self._ends[block] for block in reversed(full) if block in self._ends), f"s{number}")
        if full:
            self._ends[full[-1]] = found
        return found


_EXPECTED = '{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}'


def _unknown_output(number: int, prompt: int, output: int) -> tuple[BlockHash, ...]:
    """Blocks that decode completes; the trace does not say who repeats them, so nobody does."""
    whole = (prompt + output - 1) // TRACE_BLOCK_TOKENS - prompt // TRACE_BLOCK_TOKENS
    return private_blocks(number, whole)


def _number(where: str, row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise TraceError(f"{where}: {key} is {value!r}; expected a number of ms, 0 or more")
    return float(value)


def _tokens(where: str, row: dict[str, Any], key: str) -> int:
    value = row.get(key)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS or (key == "input_length" and value < 1):
        raise TraceError(f"{where}: {key} is {value!r}; expected a number of tokens up to {MAX_TOKENS}")
    return value


def _csv(path: Path, lines: Iterable[str], most: int) -> Iterator[SimRequest]:
    rows = csv.reader(lines)
    header = [name.strip().lower() for name in next(rows)]
    columns = [_column(path, header, wanted) for wanted in (TIME_COLUMNS, PROMPT_COLUMNS, OUTPUT_COLUMNS)]
    begin_ms, last_ms = None, 0.0
    for number, row in enumerate(rows, 2):
        if number - 1 > most:
            return
        where = f"{path} line {number}"
        if len(row) != len(header):
            raise TraceError(f"{where}: {len(row)} fields; expected {len(header)} as in the header")
        at_ms = _time_ms(where, row[columns[0]])
        prompt, output = (_length(where, row[column], header[column]) for column in columns[1:])
        if begin_ms is None:
            begin_ms = at_ms
        if at_ms - begin_ms < last_ms:
            raise TraceError(
                f"{where}: {row[columns[0]]!r} is before the line above; expected ascending times"
            )
        last_ms = at_ms - begin_ms
        yield SimRequest(f"r{number - 1}", last_ms, max(1, prompt), max(1, output))


def _column(path: Path, header: list[str], wanted: tuple[str, ...]) -> int:
    for name in wanted:
        if name in header:
            return header.index(name)
    raise TraceError(
        f"{path} line 1: no column {' or '.join(wanted)}; expected TIMESTAMP,ContextTokens,GeneratedTokens"
    )


def _time_ms(where: str, text: str) -> float:
    """Seconds as a number, or a date and time with up to seven digits of a second."""
    try:
        return float(text) * 1000
    except ValueError:
        pass
    try:
        whole, _, digits = text.strip().partition(".")
        return datetime.fromisoformat(whole + "+00:00").timestamp() * 1000 + float(f"0.{digits or 0}") * 1000
    except ValueError as error:
        raise TraceError(
            f"{where}: {text!r} is no time; expected seconds or 2023-11-16 18:15:46.68"
        ) from error


def _length(where: str, text: str, name: str) -> int:
    if not text.strip().isdigit() or int(text) > MAX_TOKENS:
        raise TraceError(f"{where}: {name} is {text!r}; expected a number of tokens up to {MAX_TOKENS}")
    return int(text)


def faster(requests: list[SimRequest], factor: float) -> list[SimRequest]:
    """The same requests at `factor` times the rate."""
    return [_at(request, request.arrival_ms / factor) for request in requests]


def sample(requests: list[SimRequest], most: int) -> list[SimRequest]:
    """The densest stretch of `most` consecutive requests by tokens a second, from 0 ms: sharing and bursts stay."""
    if len(requests) <= most:
        return requests
    tokens = [0]
    for request in requests:
        tokens.append(tokens[-1] + request.prompt_tokens + request.output_tokens)
    step = max(1, most // 4)
    best = max(
        range(0, len(requests) - most + 1, step),
        key=lambda at: (
            (tokens[at + most] - tokens[at])
            / max(1.0, requests[at + most - 1].arrival_ms - requests[at].arrival_ms)
        ),
    )
    chosen = requests[best : best + most]
    return [_at(request, request.arrival_ms - chosen[0].arrival_ms) for request in chosen]


def mean_rate_per_s(requests: list[SimRequest]) -> float:
    """Arrivals a second; 0 for one request."""
    span_ms = requests[-1].arrival_ms - requests[0].arrival_ms
    return (len(requests) - 1) / span_ms * 1000 if span_ms else 0.0


def _at(request: SimRequest, arrival_ms: float) -> SimRequest:
    return replace(request, arrival_ms=arrival_ms)
