"""One host of two: a keeper, a mempool, two engines with spaces of their own, and a caller of the nine calls."""

import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from shared.kv.page import PageState
from tests.fault.campaign_actors import NUM_RANKS
from tests.fault.campaign_host_instances import CallerInstance, HostInstance
from tests.fault.campaign_instances import QUOTA_PAGES, Instance
from tests.fault.campaign_rig import PAGE_BYTES, Zygote
from tests.fault.campaign_spaces import SpacesOracle, SpaceView
from tests.fault.campaign_world import World

PREFILL_PAGES, DECODE_PAGES, DRAM_PAGES = 40, 36, 52  # unlike each other: spaces are known by them
MAX_TTL_MS = 500  # of leases of a peer, too: one that stands still for longer has lost its pins
NOT_MOVING = ("retiring", "leased", "quarantined", "withdrawn", "released")


class Host(World):
    """The names of its processes begin with its own."""

    def __init__(self, name: str, folder: Path, rng: random.Random, zygote: Zygote, addresses: list[str]):
        self.name, self.addresses = name, addresses
        self.address = addresses["ab".index(name)]
        self.layered: set[str] = set()  # handoffs whose blocks left layer by layer, for readers still to come
        folder.mkdir()
        self.api_socket = folder / "api.sock"
        super().__init__(folder, rng, zygote)

    def flags(self, folder: Path) -> dict[str, object]:
        return super().flags(folder) | {
            "instance": self.name,
            "capacity-bytes": PREFILL_PAGES * PAGE_BYTES * NUM_RANKS,
            "dram-bytes": DRAM_PAGES * PAGE_BYTES * NUM_RANKS,
            "dram-for-host": "true",
            "peer-listen": self.address,
            "api-peers": ",".join(self.addresses),
            "api-socket": self.api_socket,
            "ucx-tls": "tcp",
            "copy-timeout-ms": 3_000,
            "max-ttl-ms": MAX_TTL_MS,
            "transfer-mode": "by-layer",
            "checksum-rate": 0,  # what comes is compared here, not by the mempool
        }

    def make_oracle(self) -> SpacesOracle:
        self.spaces = SpacesOracle(self.mempool)
        return self.spaces

    def make_instances(self, folder: Path) -> Sequence[Instance]:
        socket, log = self.mempool.socket, folder / "actors.log"
        self.prefill = HostInstance(self.zygote, f"{self.name}.prefill", socket, log, PREFILL_PAGES)
        self.decode = HostInstance(self.zygote, f"{self.name}.decode", socket, log, DECODE_PAGES)
        caller = f"{self.name}.caller"
        self.caller = CallerInstance(self.zygote, caller, self.prefill.name, self.api_socket, log)
        self.engines = [self.prefill, self.decode]
        return [*self.engines, self.caller]

    def view_of(self, num_pages: int) -> SpaceView | None:
        """A space's memory, if it has some."""
        return self.spaces.views.get(num_pages)

    def check_memory(self) -> None:
        for engine in self.engines:
            held = [*engine.held(), *self.caller.held_in(engine.num_pages)]
            self.spaces.check_space(engine.num_pages, engine.pinned(), held, self.damaged)
        self.spaces.check_space(DRAM_PAGES, (), self.caller.held_in(DRAM_PAGES), self.damaged)
        self.spaces.check_bytes()
        dram = self.view_of(DRAM_PAGES)
        kept = {block_hash for engine in self.engines for block_hash in engine.kept}
        if dram is not None and kept and not self.damaged:
            named = {dram.named(page) for page in dram.in_state(PageState.SEALED)}
            assert kept <= named, f"{len(kept - named)} blocks are kept, and not in host memory"

    def check_pages_of(self, instance: Instance) -> None:
        if isinstance(instance, HostInstance):
            self.spaces.check_space(instance.num_pages, instance.pinned(), instance.held(), damaged=True)

    def what_is_busy(self) -> str:
        said = super().what_is_busy()
        status = self.oracle.settled() if not said else None
        if status is None:
            return said
        moving = {name: status.pages_by_state.get(name, 0) for name in NOT_MOVING}
        dram = next((s.pages_by_state for s in status.spaces if s.num_pages == DRAM_PAGES), {})
        moving |= {f"{name} in host memory": dram.get(name, 0) for name in ("granted", "writing")}
        for engine in self.engines:  # more than its share of pages were granted to somebody else
            states = next((s.pages_by_state for s in status.spaces if s.num_pages == engine.num_pages), {})
            share = QUOTA_PAGES - len(engine.sealed)
            granted = states.get("granted", 0) + states.get("writing", 0)
            moving[f"{engine.name}: more than {share} granted"] = max(0, granted - share)
        return f"{moving} of {status}" if any(moving.values()) else ""

    # -- faults -----------------------------------------------------------------------------------

    def _cut(self, name: str) -> None:
        api = f"{self.caller.name}.api"
        if name != api:
            super()._cut(name)
        if name in (api, "mempool") and (process := self._process(api)) is not None and process.alive:
            process.cut(self.api_socket)
            self.caller.link_cut([api])

    def check_detection(self) -> None:
        """Callers are known to the nine calls' server by numbers alone."""
        api = f"{self.caller.name}.api"
        callers = [one for one in self._undetected if one[0] == api]
        self._undetected = [one for one in self._undetected if one[0] != api]
        super().check_detection()
        for name, process, since in callers:
            if self.mempool.alive and since == self.mempool.since:
                before_s = process.killed_s - 0.001

                def left_s(since_s: float = before_s) -> float:
                    return at_s if (at_s := self._logged("caller_left", {})) >= since_s else 0.0

                self._measure(name, process, left_s)

    # -- the other one ----------------------------------------------------------------------------

    def link_lines(self) -> list[tuple[str, float]]:
        """What the present mempool said of its link to the other host, and when."""
        events = {"peer_connected", "peer_lost", "peer_not_reached"}
        lines = self.mempool.log.read()[self.mempool.since :]
        return [
            (line["event"], datetime.fromisoformat(line["time"]).timestamp())
            for line in lines
            if line["event"] in events
        ]

    @property
    def is_linked(self) -> bool:
        """Whether it reaches the other host, as far as it knows."""
        lines = self.link_lines()
        return bool(lines) and lines[-1][0] == "peer_connected"

    def num_misses(self) -> int:
        """Links and paths that this mempool has lost so far: what was to come by them is a miss."""
        lost = {"peer_lost", "peer_not_reached", "path_lost", "reader_lost"}
        return sum(line["event"] in lost for line in self.mempool.log.read()[self.mempool.since :])
