"""Where time goes: stages of all recent requests, from the spans of the local store, as a table (`quire stages`)."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean

from msgspec import Struct

from shared.observe.span_owner import REQUEST, owners
from shared.observe.span_record import SpanRecord
from shared.observe.timeline import local_spans

MAX_SPANS = 500_000  # that are looked at: 400 bytes each
FIRST_TOKEN = "first_token"  # the end of an event's name: its own row, from the request's begin


class Stage(Struct, frozen=True, kw_only=True):
    """One name of one service, over all requests. starts_ms: after the request's own begin."""

    service: str
    name: str
    count: int
    errors: int
    starts_p50_ms: float
    took_p50_ms: float
    took_mean_ms: float
    took_p99_ms: float


class _Seen(Struct, gc=False):
    trace: str
    key: int  # of its span, in its trace
    parent: int
    service: str
    name: str
    begin_ns: int
    end_ns: int
    is_request: bool
    failed: bool


def read_stages(directory: Path, *, since_ns: int = 0) -> tuple[list[Stage], int, bool]:
    """(stages in the order in which they begin, requests, whether spans beyond MAX_SPANS were left out) of those that
    began since then. ([], 0, False): there are none.

    Cost: two passes over the store's files, 3 us a span on two EPYC cores.
    """
    return stages_of(_requests_first(directory, since_ns))


def _requests_first(directory: Path, since_ns: int) -> Iterator[SpanRecord]:
    """Then what belongs to these: files are read by name, and other services' spans may be all that are looked at."""
    traces: set[str] = set()
    for span in local_spans(directory, containing=REQUEST):
        if span.name == REQUEST and span.start_ns >= since_ns:
            traces.add(span.trace_id)
            yield span
    for span in local_spans(directory):
        if span.trace_id in traces and span.name != REQUEST and span.start_ns >= since_ns:
            yield span


def stages_of(spans: Iterable[SpanRecord]) -> tuple[list[Stage], int, bool]:
    """The same of any spans; of a trace without a request nothing counts."""
    coming = iter(spans)
    seen = list(_seen(islice(coming, MAX_SPANS)))
    is_cut = next(coming, None) is not None
    requests: dict[str, dict[int, _Seen]] = defaultdict(dict)  # by trace
    for one in seen:
        if one.is_request:
            requests[one.trace][one.key] = one
    owner_of = owners(
        (one.key, one.parent, one.is_request) for one in seen if len(requests.get(one.trace, ())) > 1
    )
    rows: dict[tuple[str, str], list[tuple[_Seen, int]]] = defaultdict(list)
    for one in seen:
        own = requests.get(one.trace, {})
        request = next(iter(own.values())) if len(own) == 1 else own.get(owner_of.get(one.key, 0))
        # later ones are of another, which has not ended yet
        if request is not None and one.begin_ns <= request.end_ns:
            rows[one.service, one.name].append((one, request.begin_ns))
    stages = [_stage(service, name, row) for (service, name), row in rows.items()]
    num_requests = sum(map(len, requests.values()))
    return sorted(stages, key=lambda s: (s.starts_p50_ms, -s.took_p50_ms, s.name)), num_requests, is_cut


def _seen(spans: Iterable[SpanRecord]) -> Iterator[_Seen]:
    for span in spans:
        service = span.service.removeprefix("quire-")
        times = span.start_ns, max(span.start_ns, span.end_ns)
        is_request = span.name == REQUEST
        keys = hash((span.trace_id, span.span_id)), hash((span.trace_id, span.parent_id))
        yield _Seen(span.trace_id, *keys, service, span.name, *times, is_request, bool(span.error))
        if is_request:
            for event in span.events:
                if event.name.endswith(FIRST_TOKEN):
                    first = span.start_ns, event.time_ns
                    yield _Seen(
                        span.trace_id, hash((*keys, event.name)), keys[0], service, "first token", *first, False, False
                    )  # fmt: skip


def _stage(service: str, name: str, seen: list[tuple[_Seen, int]]) -> Stage:
    """Args: seen: each with its request's begin."""
    starts = sorted((one.begin_ns - begin_ns) / 1e6 for one, begin_ns in seen)
    took = sorted((one.end_ns - one.begin_ns) / 1e6 for one, _ in seen)
    return Stage(
        service=service,
        name=name,
        count=len(seen),
        errors=sum(one.failed for one, _ in seen),
        starts_p50_ms=round(_at(starts, 0.5), 3),
        took_p50_ms=round(_at(took, 0.5), 3),
        took_mean_ms=round(fmean(took), 3),
        took_p99_ms=round(_at(took, 0.99), 3),
    )


def _at(ordered: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def warning(is_cut: bool) -> str:
    """What to know before any figure is read; "": nothing."""
    return f"more than {MAX_SPANS:,} spans: give a shorter --last" if is_cut else ""


def render(stages: list[Stage], num_requests: int, is_cut: bool = False) -> str:
    """A line a stage."""
    lines = [f"{num_requests} requests; ms from a request's begin, and of each stage"]
    if is_cut:
        lines.insert(0, f"{warning(is_cut)}; what follows is of some of them")
    names = max([len("stage"), *(len(f"{s.service}/{s.name}") for s in stages)])
    lines.append(f"{'stage':{names}}  {'count':>7} {'begins':>9} {'p50':>9} {'mean':>9} {'p99':>9}")
    for s in stages:
        failed = f"  {s.errors} failed" if s.errors else ""
        lines.append(
            f"{f'{s.service}/{s.name}':{names}}  {s.count:7} {s.starts_p50_ms:9.2f} {s.took_p50_ms:9.2f}"
            f" {s.took_mean_ms:9.2f} {s.took_p99_ms:9.2f}{failed}"
        )
    return "".join(line + "\n" for line in lines)
