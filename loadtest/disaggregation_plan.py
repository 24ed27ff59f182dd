"""What bench_disaggregation compares: layouts (a start of engines), arms (ways to place on them), points, their order.

Which points a short run leaves out is decided here: it measures whole groups, a point of every layout in each, the most
telling first, as many as its time is enough for, engines' starts included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.locality_cluster import Arm

DISAGGREGATED, COLOCATED, AUTO = "always", "never", "auto"
STOCK = "stock"
Rates = Mapping[str, Sequence[float]]  # by workload: requests/s of each instance, from the lowest


@dataclass(frozen=True, slots=True)
class Layout:
    """Engines as they are started once. pd_caching: as the cluster's setting; 0 prefill: colocated instances.

    arms: name of the way to place: the scheduler's setting `disaggregation`. is_stock: plain vLLM servers.
    """

    name: str
    num_prefill: int
    num_decode: int
    pd_caching: str = "3"
    arms: Mapping[str, str] = field(default_factory=dict)
    is_stock: bool = False

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


def _stock(num_instances: int) -> Layout:
    return Layout(STOCK, 0, num_instances, arms={STOCK: COLOCATED}, is_stock=True)


LAYOUTS = {  # by GPUs; in the order of their starts
    2: (_pairs(1, 1)[0], _colocated(2), _stock(2), _pairs(1, 1)[1]),
    4: (_pairs(1, 2)[0], _colocated(3), _stock(3), _pairs(2, 1)[0], _pairs(1, 2)[1], _pairs(2, 1)[1]),
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


Group = list[tuple[Layout, Point]]  # what is compared with each other: the same workload, rate and seed


def groups(layouts: Sequence[Layout], rates: Rates, seeds: Sequence[int]) -> Iterator[Group]:
    """All points, the most telling first: every workload once before the first comes again; the pairs with caching and
    what they are compared with at every rate, then the pairs without caching, then what `auto` does at both ends."""
    basic = [one for one in layouts if one.pd_caching == "basic"]
    for some in ([one for one in layouts if one not in basic], basic):
        for workload, rate in _in_turn(rates):
            for seed in seeds:
                yield [
                    (one, Point(arm, workload, rate, seed))
                    for one in some
                    for arm, how in one.arms.items()
                    if how != AUTO
                ]
    for workload, found in rates.items():
        for rate in dict.fromkeys((found[0], found[-1])):
            for seed in seeds:
                yield [
                    (one, Point(arm, workload, rate, seed))
                    for one in layouts
                    for arm, how in one.arms.items()
                    if how == AUTO
                ]


def _in_turn(rates: Rates) -> list[tuple[str, float]]:
    """(workload, rate): of each workload its second highest (where the difference shows), its highest, then down."""
    order = {workload: [*some[-2:], *reversed(some[:-2])] for workload, some in rates.items()}
    most = max((len(some) for some in order.values()), default=0)
    return [
        (workload, some[number])
        for number in range(most)
        for workload, some in order.items()
        if number < len(some)
    ]


def by_layout(some: Sequence[Group]) -> list[tuple[Layout, list[Point]]]:
    """Their points by layout, in order: engines start once for all of a layout's."""
    found: dict[str, tuple[Layout, list[Point]]] = {}
    for layout, point in (one for group in some for one in group):
        found.setdefault(layout.name, (layout, []))[1].append(point)
    return list(found.values())


def num_fitting(
    left: Sequence[Group], left_s: float, start_s: float, point_s: Callable[[Point], float]
) -> int:
    """How many of the first groups fit into left_s with the starts of their layouts; at least 1 (where one
    is left), which goes on when the run is called again. start_s, point_s: of a layout's engines, of a point; s."""
    for number in range(len(left), 1, -1):
        found = by_layout(left[:number])
        if len(found) * start_s + sum(point_s(one) for _, mine in found for one in mine) <= left_s:
            return number
    return min(1, len(left))


def knee(shares: Mapping[float, float], least: float = 0.9) -> float | None:
    """The highest rate at which at least so many requests kept the SLO; None: at none."""
    return max((rate for rate, share in shares.items() if share >= least), default=None)
