"""What the placer is asked and answers (AQUA 5): a REST body, and a file of `quire place`.

Bytes are of one GPU unless a name says otherwise. Names are the caller's. Where they are ids of running instances, a
Placement is a body of the coordinator's PUT /v1/placement too: of it the pairs without a why_not are kept.
"""

from typing import Literal

from msgspec import Struct

PlacerRole = Literal["producer", "consumer", "neutral"]


class PlacerServer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`count` servers alike, called name/0, name/1, ...; a single one keeps its name."""

    name: str
    gpus: int
    gpu_memory_bytes: int
    count: int = 1


class PlacerModel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`count` instances of a model under one workload, as `quire profile` found it."""

    model: str
    role: PlacerRole = "neutral"  # a neutral one is placed and neither lends nor borrows
    tp: int = 1  # GPUs of one instance, all in one server
    bytes_per_gpu: int = 0  # that each of its GPUs can lend (producer) or needs (consumer)
    count: int = 1
    instances: list[str] = []  # ids of the running ones, `count` of them; otherwise model/0, model/1, ...
    page_bytes: int = 0  # of KV memory on one of its GPUs; 0: not known


class PlacementQuestion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which server for which instance, and who lends to whom."""

    servers: list[PlacerServer]
    models: list[PlacerModel]
    time_limit_ms: int = 5000


class PlacedInstance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instance and its GPUs, by their numbers in the server."""

    instance: str  # the id that the question gave, or model/0, model/1, ...
    model: str
    role: PlacerRole
    server: str
    gpus: list[int]
    bytes_per_gpu: int = 0
    # consumer: what every shard gets from pairs without a why_not, because all of them swap the same blocks
    lent_bytes_per_gpu: int = 0


class LendingPair(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One producer's GPU for one consumer's, for as long as the placement stands. AQUA pairs GPUs, whatever their
    instances are spread over; a mempool lends whole pages to spaces of as many ranks: `why_not` says what does not fit.
    """

    server: str
    consumer: str
    consumer_gpu: int
    producer: str
    producer_gpu: int
    needed_bytes: int
    offered_bytes: int
    why_not: str = ""  # in words about the producer; "": the mempool can lend as much


class ServerBalance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server's instances add up to."""

    server: str
    memory_bytes: int = 0  # eq 4: offered minus needed
    imbalance: int = 0  # eq 5: producers' GPUs minus consumers'
    idle_gpus: int = 0


class Placement(Struct, frozen=True, kw_only=True, tag="placement"):
    """Everything placed. The objective is eq 6; no placement's is below the bound."""

    instances: list[PlacedInstance]
    pairs: list[LendingPair]
    servers: list[ServerBalance]
    objective_bytes: int
    bound_bytes: int
    gap_ratio: float  # (objective - bound) / objective
    needed_bytes: int  # all consumers' GPUs together
    lent_bytes: int  # of it by the pairs, also those with a why_not: unfit_bytes
    timed_out: bool = False  # the time limit ended the search: another run may answer otherwise
    unfit_bytes: int = (
        0  # of lent_bytes, by pairs with a why_not: they and what is not lent go to host memory
    )


class Unplaceable(Struct, frozen=True, kw_only=True, tag="unplaceable"):
    """Why not everything can be placed, and what would have to stay outside."""

    reasons: list[str]
    left_out: dict[str, int]  # instances by model, with the most GPUs in use


PlacerReply = Placement | Unplaceable
