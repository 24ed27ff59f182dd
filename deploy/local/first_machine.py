"""The first machine of a cluster, as one that joins asks it: does it answer, take the key, and serve the same model?"""

import json
import re
import time
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from deploy.local import config
from deploy.local.addresses import parse_join
from deploy.local.cluster_settings import ClusterSettings
from deploy.local.port_table import Ports, coordinator_urls
from shared import http_get
from shared.wire.codec import MALFORMED
from shared.wire.membership import InstanceList

TIMEOUT_S = 2.0
WAIT_S = 15.0  # both machines may be starting
PAUSE_S = 0.5
MAX_REPLY_BYTES = 8 << 20
ITS_WORKER = re.compile(r"(prefill|decode|colocated)-\d+")  # names of workers elsewhere have more parts


@dataclass(frozen=True, slots=True)
class Look:
    """What keeps this machine's workers from serving; "": nothing that can be seen."""

    problem: str
    may_pass: bool = False  # by itself: it starts, or starts again
    is_of_key: bool = False  # of this command, which the workers may know better


def look(found: ClusterSettings, model: str) -> Look:
    """Ask once, for at most 2 TIMEOUT_S a coordinator. Args: model: the name that workers here serve.

    Raises: SettingsError.
    """
    joined = parse_join(found.join)
    if joined is None:
        return Look("")
    urls = coordinator_urls(joined.host, Ports(0, joined.base_port), standby=found.standby)
    seen = look_at(urls, joined.host, model)
    if seen.may_pass:
        hint = f"is its cluster up, with cluster.address, and {joined.base_port} its base port (not the gateway's)?"
        return Look(f"{seen.problem}; {hint}", may_pass=True)
    return seen


def look_at(urls: Sequence[str], host: str, model: str) -> Look:
    """As look(), at the coordinators of `host`. Raises: SettingsError of the key."""
    key = str(config.settings_of("worker")["coordinator_key"])
    seen = Look("")
    for url in urls:
        members = _members(url, key)
        if isinstance(members, InstanceList):
            return _compare(members, host, model)
        seen = members
        if not seen.may_pass:
            break
    return seen


def wait_for(found: ClusterSettings, model: str, say: Callable[[str], None]) -> str:
    """What is wrong still after WAIT_S, or at once where waiting does not help; "": nothing."""
    end = time.monotonic() + WAIT_S
    seen = look(found, model)
    if seen.may_pass:
        say(f"{seen.problem} Trying for {WAIT_S:.0f} s")
    while seen.may_pass and time.monotonic() < end:
        time.sleep(PAUSE_S)
        seen = look(found, model)
    return seen.problem


def _members(url: str, key: str) -> InstanceList | Look:
    status, said = _get(url + "/ready", "")
    if not status:
        return Look(
            f"the first machine's coordinator at {url} does not answer ({said.decode()})", may_pass=True
        )
    try:
        ready = json.loads(said)
    except ValueError:
        ready = None
    if not isinstance(ready, dict) or not ready.get("role"):
        return Look(f"what answers at {url} is no coordinator of Quire; name the first machine's base port")
    if ready["role"] == "standby":
        return Look(f"the coordinator at {url} stands by, and the other one leads", may_pass=True)
    status, said = _get(url + "/v1/instances", key)
    if status in (401, 403):
        does = "refuses the key" if key else "wants a key"
        return Look(
            f"the first machine's coordinator at {url} {does}: set worker.coordinator_key "
            "(QUIRE_WORKER_COORDINATOR_KEY) to one of its coordinator.api_keys",
            is_of_key=True,
        )
    try:
        return msgspec.json.decode(said, type=InstanceList)
    except MALFORMED:
        return Look(f"the first machine's coordinator at {url} answers with status {status}", may_pass=True)


def _compare(members: InstanceList, host: str, model: str) -> Look:
    names = {
        one.description.model
        for one in members.instances
        if one.state == "live" and ITS_WORKER.fullmatch(one.instance) and one.description.model
    }
    if not names or model in names:
        return Look("")
    serves = ", ".join(map(repr, sorted(names)))
    return Look(
        f"the cluster of {host} serves {serves}, not {model!r}: workers here would get no requests; name the same "
        "model, and the same cluster.model_name"
    )


def _get(url: str, key: str) -> tuple[int, bytes]:
    """Status and body; 0 and why there is none."""
    try:
        with http_get.open_directly(
            url, timeout_s=TIMEOUT_S, headers={"x-api-key": key} if key else {}
        ) as reply:
            return reply.status, reply.read(MAX_REPLY_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(MAX_REPLY_BYTES)
    except http_get.NO_ANSWER as error:
        return 0, str(getattr(error, "reason", error)).encode()
