"""What bench_disaggregation compares: layouts (a start of engines), arms (ways to place on them), points, their order.

Which points a short run leaves out is decided here: every layout gets the same ones, the most telling first, and no
layout eats the time of those after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.locality_cluster import Arm

DISAGGREGATED, COLOCATED, AUTO = "always", "never", "auto"
Rates = Mapping[str, Sequence[float]]  # by workload: requests/s of each instance, from the lowest


@dataclass(frozen=True, slots=True)
class Layout:
    """Engines as they are started once. pd_caching: as the cluster's setting; 0 prefill: colocated instances.

    arms: name of the way to place: the scheduler's setting `disaggregation`.
    """

    name: str
    num_prefill: int
    num_decode: int
    pd_caching: str = "3"
    arms: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_instances(self) -> int:
        """GPUs that it takes."""
        return self.num_prefill + self.num_decode

    @property
    def words(self) -> list[str]:
        """For `quire up`. Topology auto takes roles where there are GPUs for both, and leaves pairs to the arm."""
        topology = "auto" if self.num_prefill else "colocated"
        prefill = ["--prefill", str(self.num_prefill)] if self.num_prefill else []
        decode = ["--decode", str(self.num_decode)]
        return ["--topology", topology, *prefill, *decode, "--set", f"pd_caching={self.pd_caching}"]

    def arm(self, name: str) -> Arm:
        """Policy cost: it places by load, by what is cached and by what a prompt costs, in every layout."""
        settings = {} if not self.num_prefill else {"disaggregation": self.arms[name]}
        return Arm(name, "cost", settings)


def _pairs(num_prefill: int, num_decode: int) -> list[Layout]:
    """With caching (and the scheduler free to choose, beside), and without."""
    name = f"{num_prefill}p{num_decode}d"
    cached = Layout(name, num_prefill, num_decode, "3", {name: DISAGGREGATED, f"{name}_auto": AUTO})
    plain = Layout(f"{name}_basic", num_prefill, num_decode, "basic", {f"{name}_basic": DISAGGREGATED})
    return [cached, plain]


def _colocated(num_instances: int) -> Layout:
    return Layout("colocated", 0, num_instances, "3", {"colocated": COLOCATED})


LAYOUTS = {  # by GPUs; in the order of their starts
    2: (_pairs(1, 1)[0], _colocated(2), _pairs(1, 1)[1]),
    4: (_pairs(1, 2)[0], _colocated(3), _pairs(2, 1)[0], _pairs(1, 2)[1], _pairs(2, 1)[1]),
}
RATES: dict[str, Rates] = {
    "cuda": {"sharegpt": (4, 8, 16, 24), "loogle": (8, 24), "react": (4, 12)},
    "cpu": {"sharegpt": (0.25, 0.5, 1, 2), "loogle": (1, 2), "react": (0.25, 0.5)},
}


@dataclass(frozen=True, slots=True)
class Point:
    """One run. rate: requests/s of each instance."""

    arm: str
    workload: str
    rate: float
    seed: int


def points(layout: Layout, rates: Rates, seeds: Sequence[int]) -> Iterator[Point]:
    """A layout's, the most telling first: chats at every rate, then the others from the top; `auto` comes last."""
    for arm, how in layout.arms.items():
        for workload, some in rates.items():
            wanted = [some[0], some[-1]] if how == AUTO and len(some) > 1 else _from_the_middle(some)
            yield from (Point(arm, workload, rate, seed) for rate in wanted for seed in seeds)


def _from_the_middle(rates: Sequence[float]) -> list[float]:
    """The second highest (where the difference shows), the highest, then down."""
    return [*rates[-2:], *reversed(rates[:-2])]


def allowance_s(left_s: float, num_layouts: int) -> float:
    """Time that the next of so many layouts may take, its start included."""
    return left_s / max(1, num_layouts)


def knee(shares: Mapping[float, float], least: float = 0.9) -> float | None:
    """The highest rate at which at least so many requests kept the SLO; None: at none."""
    return max((rate for rate, share in shares.items() if share >= least), default=None)
