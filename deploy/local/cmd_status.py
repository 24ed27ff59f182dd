"""`quire status`: services, model, pages by state, queues."""

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deploy.local import first_machine
from deploy.local.addresses import served_at
from deploy.local.terminal import FAILED, OK, bytes_text, connect, duration_text, get_json, out
from deploy.local.troubles import WORKERS, joined_troubles, troubles

COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "backoff": "red",
    "stopping": "yellow",
}
COORDINATORS = ("coordinator", "standby")


def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Show what runs, how it is, which pages exist and what waits. Exit code 1: not all is well."""
    with connect() as client:
        found = client.call(op="status")
    found["mempool"] = get_json(found["mempool_admin"] + "/status")
    found["workers"] = {
        service["name"]: get_json(service["probe"].removesuffix("/ready") + "/status")
        for service in found["services"]
        if service["name"].startswith(WORKERS)
    }
    found["troubles"] = _troubles(found)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _show(found)
    sys.exit(OK if found["ready"] and not found["troubles"] else FAILED)


def _troubles(found: Mapping[str, Any]) -> list[str]:
    """Of those that run here. Raises: SettingsError of the key for the first machine."""
    services = found["services"]
    if joined := found["joined"]:
        first = first_machine.look_at(found.get("coordinators", ()), joined, found["model"])
        problem = "" if first.is_of_key else first.problem
        return joined_troubles(services, found["workers"], joined, problem)
    probes = {service["name"]: service["probe"] for service in services}
    addresses = {name: probe.removesuffix("/ready") for name, probe in probes.items()}
    coordinators = {name: get_json(probes[name]) for name in COORDINATORS if name in probes}
    scheduler = get_json(addresses["scheduler"] + "/status") if "scheduler" in addresses else None
    asked = {"scheduler": scheduler, "mempool": found["mempool"]}
    asked |= {"gateway": get_json(addresses["gateway"] + "/health")} if "gateway" in addresses else {}
    return troubles(services, scheduler, coordinators, [name for name, said in asked.items() if said is None])


def _show(found: dict[str, Any]) -> None:
    state = "ready" if found["ready"] else "stopping" if found["stopping"] else "not ready"
    if found["ready"] and found["troubles"]:
        state = "in trouble"
    colour = "green" if state == "ready" else "yellow"
    where = f"{found['url']}/v1" if found["url"] else served_at(found)
    out.print(
        f"[bold]{escape(found['model'])}[/bold] at {escape(where)}  [{colour}]{state}[/]"
        f"  {found['device']}, {found['topology']}, up {duration_text(found['uptime_s'])}",
        markup=True,
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("service", "state", "health", "pid", "for", "restarts", "last exit"):
        table.add_column(column, justify="right" if column in ("pid", "restarts") else "left")
    for service in found["services"]:
        colour = COLOURS.get(service["state"], "dim")
        table.add_row(
            service["name"],
            Text(service["state"], style=colour),
            service["health"] + (f": {said}" if (said := service.get("says")) else ""),
            str(service["pid"] or "-"),
            duration_text(service["state_s"]),
            str(service["restarts"]),
            service["last_exit"] or "-",
        )
    out.print(table)
    if said := found.get("journal"):
        out.print(f"redis    {said}", style="yellow")
    for said in found["troubles"]:
        out.print(f"trouble  {said}", style="red")
    _show_pages(found["mempool"])
    _show_lending(found["mempool"])
    _show_queues(found["workers"])


def _show_pages(pool: dict[str, Any] | None) -> None:
    if not pool or "pages_by_state" not in pool:
        out.print("pages    the mempool does not answer", style="yellow")
        return
    counts = ", ".join(f"{count} {state}" for state, count in pool["pages_by_state"].items() if count)
    size = f" of {bytes_text(pool['page_bytes'])}" if pool.get("page_bytes") else ""
    out.print(f"pages    {pool.get('num_pages', 0)}{size}: {counts or 'none yet'}")
    counters = pool.get("counters", {})
    changed, wrong = counters.get("checks_pages_corrupt", 0), counters.get("checks_copies_wrong", 0)
    if changed or wrong:
        out.print(
            f"checks   {changed} pages changed while they were sealed, {wrong} copies came wrong: "
            "nobody reads them any more; `quire logs mempool` says which", style="red",
        )  # fmt: skip


def _show_lending(pool: dict[str, Any] | None) -> None:
    """Nothing where the memory market is off."""
    spaces = (pool or {}).get("lending", {}).get("spaces", {})
    for space in spaces.values():
        parts = [
            f"{bytes_text(space[f'{share}_bytes'])} {share}"
            for share in ("offered", "lent", "borrowed")
            if space[f"{share}_bytes"]
        ]
        role = "" if space["may_lend"] else ", no producer by its profile"
        names = ", ".join(space["instances"]) or "engines that are gone"
        out.print(
            f"lending  {names}: {', '.join(parts) or 'nothing'} of {bytes_text(space['total_bytes'])}{role}",
        )


def _show_queues(workers: dict[str, dict[str, Any] | None]) -> None:
    for name, worker in workers.items():
        if worker is None:
            out.print(f"queue    {name}: does not answer", style="yellow")
            continue
        running, waiting = worker.get("num_running", "?"), worker.get("num_waiting", "?")
        out.print(f"queue    {name}: {running} running, {waiting} waiting")
