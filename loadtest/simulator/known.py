"""What a running cluster says of itself beside its coefficients, as `quire model show --json` prints it, and what is
assumed where it says nothing. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from loadtest.simulator.links import Rate, gb_per_s
from services.mempool.core.pd_caching import PdCaching
from shared.costmodel.model import CostModel
from shared.wire.cost import Cost, CostCoefficients, Count

ASSUMED = "assumed"
GIVEN = "given"
LINK_GB_PER_S = 20.0  # between engines, where nobody has measured
# how `quire model show` names the paths by which an engine's KV comes from other engines
PATHS = {"peer": "another space", "remote": "another host"}
# of which corrections are compared: a factor is of its own instance's coefficients
REFERENCE_TOKENS, REFERENCE_DECODES = 1024, 8

Factor = Annotated[float, Meta(gt=0.0, le=1e6)]
Kind = Literal["prefill", "decode"]


class Correction(Struct, frozen=True):
    """An instance's factor on what its coefficients predict."""

    factor: Factor = 1.0
    num_observed: int = 0


class Link(Struct, frozen=True):
    """A path to an instance. Both counts 0: nobody has measured, and the rate is a careful guess."""

    gb_per_s: Factor = 1.0
    latency_ms: Cost = 0.0
    num_measured: int = 0
    num_given_up: int = 0

    @property
    def num_seen(self) -> int:
        """Transfers that said something of it."""
        return self.num_measured + self.num_given_up

    @property
    def rate(self) -> Rate:
        """As the simulator counts."""
        return gb_per_s(self.gb_per_s, self.latency_ms)


class EngineSizes(Struct, frozen=True):
    """None: it does not say, as older ones."""

    kv_tokens: Count | None = None
    max_num_seqs: Count | None = None
    dram_tokens: Annotated[int, Meta(ge=0)] | None = None  # of host memory behind it
    pd_caching: PdCaching | None = None


class Row(Struct, frozen=True):
    """One instance. coefficients: None: it has no cost model."""

    coefficients: CostCoefficients | None = None
    corrections: dict[str, Correction] = {}
    links: dict[str, Link] = {}
    engine: EngineSizes = EngineSizes()


@dataclass(frozen=True, slots=True)
class Known:
    """What the instances say together; None: nobody says.

    prefill_correction, decode_correction: factors on the predictions of the coefficients that were taken. sizes: of
    each the least that an engine has. link: the path between engines that most transfers took; dram: from host memory.
    """

    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    correction_words: str = ""
    sizes: EngineSizes = field(default_factory=EngineSizes)
    link: Link | None = None
    link_words: str = ""
    dram: Link | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated around the engines' prices and KV. sources: where a field is from, by its name, in words for
    people; what is not in it is assumed."""

    link_gb_per_s: float = LINK_GB_PER_S
    link_latency_ms: float = 0.1
    max_running: int = 256
    dram_tokens: int = 0
    dram: Rate = field(default_factory=lambda: Rate(0.05, 40e6))
    pd_caching: PdCaching = PdCaching.FULL
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    def source(self, name: str) -> str:
        """In words."""
        return self.sources.get(name, ASSUMED)


def setting_of(known: Known, source: str, link_gb_per_s: float | None = None) -> Setting:
    """Args: source: whose sizes they are, in words; link_gb_per_s: None: as measured, else LINK_GB_PER_S."""
    values: dict[str, Any] = {"max_running": known.sizes.max_num_seqs}
    values |= {"dram_tokens": known.sizes.dram_tokens, "pd_caching": known.sizes.pd_caching}
    values = {name: value for name, value in values.items() if value is not None}
    sources = dict.fromkeys(values, source)
    if known.dram is not None:
        values["dram"], sources["dram"] = known.dram.rate, "measured"
    if known.link is not None:
        values |= {"link_gb_per_s": known.link.gb_per_s, "link_latency_ms": known.link.latency_ms}
        sources["link_gb_per_s"] = known.link_words
    if link_gb_per_s is not None:
        values["link_gb_per_s"], sources["link_gb_per_s"] = link_gb_per_s, GIVEN
        values.pop("link_latency_ms", None)  # of another link
    return replace(Setting(), **values, sources=sources)


def known_of(rows: Mapping[str, Any]) -> tuple[CostCoefficients | None, Known]:
    """The first instance's coefficients that there are, and what all of its kind say.

    Args: rows: by instance. Raises: msgspec.ValidationError.
    """
    read = {name: msgspec.convert(row, Row) for name, row in rows.items() if isinstance(row, dict)}
    base = next((row.coefficients for row in read.values() if row.coefficients is not None), None)
    if base is None:
        return None, Known()
    same = {
        name: row
        for name, row in read.items()
        if (own := row.coefficients) is not None and (own.shape, own.tp, own.pp) == (base.shape, base.tp, base.pp)
    }  # fmt: skip
    factors = {kind: _correction(base, same, kind) for kind in ("prefill", "decode")}
    link, link_words = _link(same)
    dram, _ = _most_seen(same, "dram")
    known = Known(
        factors["prefill"][0],
        factors["decode"][0],
        ", ".join(words for _, words in factors.values() if words),
        _sizes([row.engine for row in same.values()]),
        link,
        link_words,
        dram,
    )
    return base, known


def _correction(base: CostCoefficients, rows: Mapping[str, Row], kind: Kind) -> tuple[float, str]:
    """By who has seen most of this kind of work, a prefill instance no decode steps: its factor on its own
    coefficients, as one on those that were taken. 1 where nobody has seen any."""
    seen = {name: row.corrections.get(kind, Correction()) for name, row in rows.items()}
    name = max(seen, key=lambda one: seen[one].num_observed)
    found, own = seen[name], rows[name].coefficients
    if not found.num_observed or own is None:
        return 1.0, ""
    whole, its = _reference_ms(base, kind), _reference_ms(own, kind)
    factor = found.factor * its / whole if whole > 0 and its > 0 else found.factor
    return factor, f"{kind} x {factor:.3g} ({found.num_observed} seen by {name})"


def _reference_ms(coefficients: CostCoefficients, kind: Kind) -> float:
    model = CostModel(coefficients)
    if kind == "prefill":
        return model.prefill_ms(REFERENCE_TOKENS)
    return model.decode_step_ms(REFERENCE_DECODES, REFERENCE_DECODES * REFERENCE_TOKENS)


def _sizes(each: Sequence[EngineSizes]) -> EngineSizes:
    """The least, so that every engine has as much; of pd_caching, which is one setting, the first that is said."""

    def least(name: str) -> int | None:
        return min((size for one in each if (size := getattr(one, name)) is not None), default=None)

    caching = next((one.pd_caching for one in each if one.pd_caching is not None), None)
    return EngineSizes(least("kv_tokens"), least("max_num_seqs"), least("dram_tokens"), caching)


def _link(rows: Mapping[str, Row]) -> tuple[Link | None, str]:
    """Between engines, by the path that most transfers took; None: nobody has seen any."""

    def num_seen(path: str) -> int:
        return sum(row.links[path].num_seen for row in rows.values() if path in row.links)

    path = max(PATHS, key=num_seen)
    found, name = _most_seen(rows, path)
    if found is None:
        return None, ""
    more = f", {found.num_given_up} given up" if found.num_given_up else ""
    return found, f"measured by {name}: {found.num_measured} transfers from {PATHS[path]}{more}"


def _most_seen(rows: Mapping[str, Row], path: str) -> tuple[Link | None, str]:
    """By the instance to which most came this way; None: to none."""
    seen = {
        name: row.links[path] for name, row in rows.items() if path in row.links and row.links[path].num_seen
    }
    if not seen:
        return None, ""
    name = max(seen, key=lambda one: seen[one].num_seen)
    return seen[name], name
