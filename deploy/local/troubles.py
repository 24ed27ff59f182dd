"""What the services' probes do not see: each one answers, and the cluster does not serve as it should."""

from collections.abc import Mapping, Sequence
from typing import Any

WORKERS = ("prefill-", "decode-", "colocated-")
Answer = Mapping[str, Any] | None


def troubles(
    services: list[dict[str, Any]],
    scheduler: Answer,
    coordinators: Mapping[str, Answer],
    silent: Sequence[str] = (),
) -> list[str]:
    """A line each, for an operator.

    Args: services: of the supervisor's status; scheduler: its /status, None where none runs here or answers;
    coordinators: each one's /ready by its service, None as above; silent: services that were asked just now in vain.
    """
    out = [
        f"{service['name']} does not answer"
        for service in services
        if service["name"] in silent and (service["state"], service["health"]) == ("ready", "ok")
    ]
    out += [
        f"{name} does not lead: {said.get('problem') or 'it does not say why'}"
        for name, said in coordinators.items()
        if said is not None and said.get("role") == "unknown"
    ]
    if scheduler is None:
        return out
    known = {one["instance"]: one for one in scheduler.get("instances", [])}
    refused = {one["instance"]: one["reason"] for one in scheduler.get("refused", [])}
    for service in services:
        name = service["name"]
        if not name.startswith(WORKERS) or (service["state"], service["health"]) != ("ready", "ok"):
            continue
        reason = _unplaced(known.get(name), refused.get(name, ""))
        if reason:
            out.append(f"{name} gets no requests: {reason}")
    return out


def joined_troubles(
    services: list[dict[str, Any]], workers: Mapping[str, Answer], joined: str, problem: str
) -> list[str]:
    """As troubles(), of a machine that joined `joined`, which has the scheduler.

    Args: workers: what each one says itself; problem: of the first machine, as first_machine.look_at() saw it.
    """
    out = [problem] if problem else []
    for service in services:
        said = workers.get(service["name"])
        if said is None or (service["state"], service["health"]) != ("ready", "ok"):
            continue
        reason = _unserved(said, joined)
        if not reason and said.get("coordinator_problem") and not problem:
            reason = f"does not reach the coordinator of {joined}: {said['coordinator_problem']}"
        if reason:
            out.append(f"{service['name']} {reason}")
    return out


def _unserved(said: Mapping[str, Any], joined: str) -> str:
    """Why a worker that speaks for itself gets no requests; "" when it does, or ends."""
    if said.get("scheduler_problem"):
        return f"gets no requests: the scheduler refuses it: {said['scheduler_problem']}"
    if said.get("scheduler") == "down":
        return f"gets no requests: it does not reach the scheduler of {joined}"
    return "gets no requests: the scheduler has not welcomed it" if said.get("scheduler") == "up" else ""


def _unplaced(known: Answer, refused: str) -> str:
    """Why nothing is placed on an instance; "" when something is."""
    if known is not None and (known.get("live") or known.get("draining")):
        return ""
    if refused:
        return f"the scheduler refuses it: {refused}"
    if known is None:
        return "the scheduler does not know it"
    return f"the scheduler has not heard of it for {known.get('silent_ms', 0) / 1000:.1f} s"
