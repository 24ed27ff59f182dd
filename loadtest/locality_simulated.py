"""The cluster of bench_locality in the simulator: the real scheduler, prompt tree and caches under a virtual clock.

Costs are those of a GPU's data sheet or of measured coefficients (loadtest/simulator/hardware.py). Caches are empty at
the beginning of every run. Pages come from other instances only where the arm allows it: then all are of one host.
"""

from collections.abc import Sequence
from pathlib import Path

from loadtest.locality_cluster import Arm
from loadtest.outcomes import Outcome
from loadtest.simulator.cluster import simulate
from loadtest.simulator.hardware import from_data_sheet, from_file
from loadtest.simulator.links import gb_per_s
from loadtest.simulator.request import from_workload
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.simulator.task import EngineLimits
from loadtest.workloads.request import Request
from services.scheduler.core.policies import PolicyName
from services.scheduler.core.predict import CostSettings

BLOCK_TOKENS = 64  # of an 8B shape's page
PEER_GB_PER_S = 300.0  # between two H200s: results/h200x2-transfer.json
MAX_RUNNING = 256


class SimulatedCluster:
    """As LocalityCluster, without processes. Raises: SettingsError on an unknown GPU, model or a bad file."""

    def __init__(self, gpu: str, model: str, cost: Path | None, memory_tokens: int) -> None:
        self._machine = (
            from_file(cost, memory_tokens=memory_tokens) if cost is not None else from_data_sheet(gpu, model)
        )
        self._memory_tokens = memory_tokens
        self._arm: Arm | None = None
        self.words = self._machine.words

    def use(self, arm: Arm) -> None:
        """Place by this arm from now on."""
        self._arm = arm

    def run(self, requests: Sequence[Request], *, is_measured: bool = True) -> list[Outcome]:
        """What becomes of the requests; the client is never the bottleneck here."""
        del is_measured
        assert self._arm is not None, "use() comes first"
        fetch = self._arm.settings["kv_fetch"]
        policies: dict[str, PolicyName] = {
            name: name for name in ("session", "least_load", "prompt_tree", "cost")
        }
        spec = ClusterSpec(
            roles_of(3, 1),
            block_tokens=BLOCK_TOKENS,
            memory_tokens=self._memory_tokens,
            policy=policies[self._arm.policy],
            cost=CostSettings(fetch=fetch, disaggregation=self._arm.settings.get("disaggregation", "auto")),
            limits=EngineLimits(MAX_RUNNING, self._machine.prices.coefficients.max_batched_tokens),
            instances_per_host=1 if fetch == "never" else 4,
            peer=gb_per_s(PEER_GB_PER_S),
        )
        return simulate(spec, self._machine.prices, from_workload(requests, BLOCK_TOKENS)).outcomes
