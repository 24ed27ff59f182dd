"""The profiler's runs in the simulator: one colocated instance with chunked prefill."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from loadtest.profiler.runner import Observed, Spans
from loadtest.registry import RESULTS
from loadtest.results import load_result
from loadtest.simulator.cluster import Simulation
from loadtest.simulator.hardware import (
    MODELS,
    Machine,
    from_coefficients,
    from_data_sheet,
    kv_bytes_of,
    measured,
    with_slots,
)
from loadtest.simulator.links import gb_per_s
from loadtest.simulator.local import PEER_GB_PER_S, WAIT_MS, Local, rules_for
from loadtest.simulator.prices import ModelPrices
from loadtest.simulator.request import from_workload
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.simulator.task import EngineLimits
from loadtest.workloads.request import Request
from services.gateway.core.request_flow import Limits
from services.scheduler.core.limits import PlacementLimits
from shared.errors import InvalidRequest, SettingsError

BLOCK_TOKENS = 64  # of an 8B shape's page
MAX_RUNNING = 1 << 14  # memory and the chunk are the bounds, as AQUA 4.1 has it; nothing is shed
# in fair slices: a worker's slots; with more of them than a step has tokens no prompt would go before decodes
TURNS_RUNNING, TURNS_OVERLOAD = 256, 1e6
DEADLINE_MS = 100_000_000  # of a request: a burst's last one is waited for
GAP_DIGITS = 3  # of ms: equal gaps are counted together


class SimulatedRunner:
    """Args: chunk_tokens: of a step, prompts and decodes together. local: whose turn it is in the engine."""

    def __init__(
        self, machine: Machine, *, model: str, tp: int, chunk_tokens: int, local: Local | None = None
    ) -> None:
        self._local = local or Local()
        coefficients = with_slots(machine.prices.coefficients, MAX_RUNNING)
        coefficients = msgspec.structs.replace(coefficients, max_batched_tokens=chunk_tokens)
        self._prices = ModelPrices(
            coefficients,
            prefill_correction=machine.prices.prefill_correction,
            decode_correction=machine.prices.decode_correction,
        )
        self._memory_tokens, self.chunk_tokens = machine.memory_tokens, chunk_tokens
        self.model, self.tp, self.num_instances = model, tp, 1
        self.words, self.is_calibrated = f"simulated: {machine.words}", machine.calibrated
        self.bytes_per_token = kv_bytes_of(coefficients.shape, tp) / tp
        self.pool_bytes = round(machine.memory_tokens * self.bytes_per_token)

    def run(self, requests: Sequence[Request]) -> Observed:
        """See Runner. Deterministic. Raises: InvalidRequest when a request could never fit."""
        longest = max(one.prompt_tokens + one.output_tokens for one in requests)
        if longest > self._memory_tokens:
            raise InvalidRequest(
                f"a request of {longest} tokens has no room in the {self._memory_tokens} of an instance: see --tp, "
                "--gpu, --context"
            )
        limits = EngineLimits(MAX_RUNNING, self.chunk_tokens)
        placement = PlacementLimits(max_prefill_tokens=1 << 40)
        if self._local.policy == "cfs":
            limits = replace(limits, max_running=min(TURNS_RUNNING, self.chunk_tokens // 2))
            placement = replace(placement, overload_factor=TURNS_OVERLOAD)
        spec = ClusterSpec(
            roles_of(0, 0, 1),
            block_tokens=BLOCK_TOKENS,
            memory_tokens=self._memory_tokens,
            limits=limits,
            local=self._local,
            placement=placement,
            flow=Limits(request_deadline_ms=DEADLINE_MS),
        )
        simulation = Simulation(spec, self._prices, from_workload(requests, BLOCK_TOKENS))
        watch = _Watch(simulation)
        found = simulation.run()
        return Observed(
            found.outcomes,
            list(watch.gaps.items()),
            round(watch.peak_share * self.pool_bytes),
            watch.full.spans,
            round(found.turns.peak_swap_bytes / self._prices.kv_bytes_per_token * self.bytes_per_token),
        )


def always_in_turns(swap_gb_per_s: float) -> Local:
    """Fair slices for bursts over as much lent memory as they want, whatever moving costs: what they need shows.

    Raises: SettingsError for a rate that is not above 0.
    """
    if not swap_gb_per_s > 0.0:
        raise SettingsError(f"--swap-gb-per-s {swap_gb_per_s:g}: above 0; try {PEER_GB_PER_S:g}")
    peer = gb_per_s(swap_gb_per_s, WAIT_MS)
    return Local("cfs", rules_for("bursts"), peer, peer_bytes=1 << 50, dram_bytes=0, counted_gb_per_s=1e6)


class _Watch:
    """Sees every step of the one engine: gaps between tokens, memory, and whether somebody waits for it."""

    def __init__(self, simulation: Simulation) -> None:
        (engine,) = simulation.engines
        engine.on_steps = self._see
        self._store = engine.store
        self._num_refused = 0
        self.gaps: Counter[float] = Counter()
        self.peak_share = 0.0
        self.full = Spans()

    def _see(self, began_ms: float, took_ms: float, num_steps: int, num_decodes: int) -> None:
        store = self._store
        self.peak_share = max(self.peak_share, store.used_share)
        self.full.note(began_ms, began_ms + took_ms, holds=store.num_refused > self._num_refused)
        self._num_refused = store.num_refused
        if num_decodes:
            self.gaps[round(took_ms / num_steps, GAP_DIGITS)] += num_steps * num_decodes


def machine_of(gpu: str, model: str, tp: int, *, chunk_tokens: int, results: Path = RESULTS) -> Machine:
    """Coefficients that `make measure NAME=cost-model` found on this GPU with this shape; else its data sheet.

    Memory is the data sheet's either way. Raises: SettingsError on an unknown GPU or model, or no room for weights.
    """
    sheet = from_data_sheet(gpu, model, tp=tp, max_batched_tokens=chunk_tokens)
    path = results / "cost-model.json"
    samples = load_result(path)["samples"] if path.is_file() else ()
    for row in measured(samples, gpu=gpu, model=model, tp=tp):
        words = f"{model} on {tp} x {row['device']}, costs as measured"
        found = from_coefficients(row, memory_tokens=sheet.memory_tokens, source=path.name)
        return replace(found, words=words, memory_source=sheet.memory_source)
    return sheet


def known_models() -> list[str]:
    """By name; a folder with a config.json is one too."""
    return list(MODELS)
