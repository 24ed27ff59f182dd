"""`quire place FILE`: which model on which server, and whose idle memory goes to whom (AQUA-PLACER)."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.table import Table

from deploy.local.addresses import check_url
from deploy.local.config import api_key
from deploy.local.placement_file import read
from deploy.local.terminal import FAILED, bytes_text, err, fail, out
from shared.errors import ClusterError, InvalidRequest, SettingsError
from shared.ids import InstanceId
from shared.transport.lending_client import LendingClient
from shared.wire.lending import Pair
from shared.wire.lending import Placement as Pairs
from shared.wire.placer import LendingPair, Placement, PlacementQuestion, Unplaceable

TELL_MS = 5_000


def place(
    file: Annotated[
        Path,
        typer.Argument(help="TOML or JSON: tables `servers` and `models`; docs/memory-market.md has one."),
    ],
    time_limit: Annotated[float, typer.Option(help="Seconds for the search at most.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
    apply: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Tell this coordinator, such as http://127.0.0.1:8103, who borrows from whom first; with a standby "
            "both, separated by a comma. Models name their running instances. QUIRE_API_KEY is sent if set.",
        ),
    ] = "",
) -> None:
    """Place models on servers so that lenders and borrowers of memory meet.

    Exit code 1: not everything has room, or the coordinator was not told.
    """
    if not 0.1 <= time_limit <= 3600:
        raise SettingsError("--time-limit is from 0.1 to 3600 seconds")
    question = read(file, time_limit_ms=round(1000 * time_limit))
    # here and not above: no other command needs numpy and HiGHS
    from shared.placer.place import place as answer_of

    begin = time.monotonic()
    try:
        answer = answer_of(question, time.monotonic)
    except InvalidRequest as error:
        raise SettingsError(f"{file}: {error.message}") from error
    seconds = time.monotonic() - begin
    if apply and not isinstance(answer, Unplaceable):
        told = asyncio.run(_tell(apply, answer))
        if not as_json:
            err.print(told)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")
        sys.exit(FAILED if isinstance(answer, Unplaceable) else 0)
    if isinstance(answer, Unplaceable):
        _explain(answer)
    else:
        _show(question, answer, seconds)


async def _tell(urls: str, answer: Placement) -> str:
    """What the coordinator has now. Exits where it has not."""
    for url in urls.split(","):
        check_url("--apply", url.strip(), "http://127.0.0.1:8103")
    client = LendingClient(urls, key=api_key(), patience_ms=TELL_MS)
    pairs = [
        Pair(consumer=InstanceId(p.consumer), producer=InstanceId(p.producer))
        for p in answer.pairs
        if not p.why_not  # their loans would all be refused, and the producer would be kept from others
    ]
    try:
        refused = await client.place(Pairs(pairs=pairs))
    except ClusterError as error:
        fail(f"the coordinator at {urls} was not told: {error.message}")
    finally:
        await client.close()
    if refused is not None:
        fail(f"the coordinator at {urls} was not told: {refused.code}: {refused.message}")
    left_out = len(answer.pairs) - len(pairs)
    rest = f"; {left_out} pairs are left out, which no mempool can serve (why_not)" if left_out else ""
    num_consumers = len({pair.consumer for pair in pairs})  # a pair is of two GPUs
    return f"{urls} pairs {num_consumers} consumers with their producers from now on{rest}"


def _explain(answer: Unplaceable) -> NoReturn:
    for reason in answer.reasons:
        err.print(f"  {reason}")
    left = ", ".join(f"{count} x {model}" for model, count in answer.left_out.items())
    fail(f"not everything has room; with the most GPUs in use, these stay outside: {left}")


def _show(question: PlacementQuestion, answer: Placement, seconds: float) -> None:
    _show_servers(answer)
    unfit = [pair for pair in answer.pairs if pair.why_not]
    if answer.pairs:
        _show_pairs(answer)
        _show_misfits(answer, unfit)
    gpus = sum(server.gpus * server.count for server in question.servers)
    lent = answer.lent_bytes - answer.unfit_bytes
    rest = answer.needed_bytes - lent
    out.print(
        f"{len(answer.instances)} instances on {gpus} GPUs in {seconds:.1f} s. "
        f"{bytes_text(lent)} of the {bytes_text(answer.needed_bytes)} needed are lent on the same server"
        + (f"; {bytes_text(rest)} go to host memory." if rest else "."),
    )
    out.print(
        f"Eq 6: {bytes_text(answer.objective_bytes)}; no placement has less than {bytes_text(answer.bound_bytes)} "
        f"(gap {answer.gap_ratio:.2%}).",
        style="dim",
    )
    if answer.timed_out:
        out.print(
            "The time limit ended the search: another run may answer otherwise; see --time-limit.",
            style="yellow",
        )


def _show_servers(answer: Placement) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("server", "GPUs", "lends - needs", "producers - consumers", "idle"):
        table.add_column(column, justify="left" if column in ("server", "GPUs") else "right")
    for balance in answer.servers:
        here = sorted((i for i in answer.instances if i.server == balance.server), key=lambda i: i.gpus)
        held = "  ".join(f"{_numbers(i.gpus)} {i.instance}" for i in here)
        table.add_row(
            balance.server,
            held,
            bytes_text(balance.memory_bytes),
            f"{balance.imbalance:+d}",
            str(balance.idle_gpus),
        )
    out.print(table)


def _show_pairs(answer: Placement) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("server", "consumer", "GPU", "producer", "GPU", "needs", "offered"):
        table.add_column(column, justify="right" if column in ("GPU", "needs", "offered") else "left")
    for pair in answer.pairs:
        table.add_row(
            pair.server,
            pair.consumer,
            str(pair.consumer_gpu),
            pair.producer,
            str(pair.producer_gpu),
            bytes_text(pair.needed_bytes),
            bytes_text(pair.offered_bytes),
        )
    out.print(table)


def _show_misfits(answer: Placement, unfit: list[LendingPair]) -> None:
    """AQUA pairs GPUs, whatever the instances are spread over."""
    for text in dict.fromkeys(
        f"{pair.producer} cannot lend to {pair.consumer}: {pair.why_not}" for pair in unfit
    ):
        out.print(text, style="yellow")
    if unfit:
        out.print(
            f"{len(unfit)} of {len(answer.pairs)} pairs can be served by no mempool; --apply leaves them out.",
            style="yellow",
        )


def _numbers(gpus: list[int]) -> str:
    """3, or 4-7: an instance's GPUs are side by side."""
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"
