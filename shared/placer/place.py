"""`place`: models and servers in, a placement with its pairs, or why there is none. No I/O: the clock is passed in.

Equal questions get equal answers, in whatever order servers and models are named, as long as no time limit ends the
search (the answer says so). Source: AQUA 5; decision 0015 has the signs and eq 6.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shared.errors import InvalidRequest
from shared.kv.page_fit import misfit
from shared.placer.assign import Assigner, Assignment
from shared.placer.matching import Shard, match
from shared.placer.packing import Packing, pack, reasons
from shared.placer.problem import Kind, Problem, Shape
from shared.wire.placer import (
    LendingPair,
    PlacedInstance,
    Placement,
    PlacementQuestion,
    PlacerModel,
    PlacerReply,
    PlacerServer,
    ServerBalance,
    Unplaceable,
)

MOST_SERVERS = 256
MOST_GPUS = 1024  # of one server
MOST_INSTANCES = 2048
MOST_WIDTHS = 16  # different tensor parallelisms
MOST_BYTES = 1 << 44  # of one GPU, so that sums stay within 64 bits
SIGN = {"producer": 1, "consumer": -1, "neutral": 0}
PACKING_SHARE = 0.3  # of the time limit


@dataclass(frozen=True, slots=True)
class _Named:
    """A question with a name for everything, in an order that does not depend on how it was asked."""

    problem: Problem
    servers: list[str]  # in the order of the problem's
    instances: dict[Kind, list[tuple[str, PlacerModel]]]


def place(question: PlacementQuestion, clock: Callable[[], float]) -> PlacerReply:
    """Place everything.

    Args: clock: seconds, from any origin; only the time limit reads it.
    Raises: InvalidRequest on sizes that make no sense or are above the limits here; `param` names the field.
    Cost: up to the time limit; 128 GPUs take one to two seconds (loadtest/results/placer.json).
    """
    _check(question)
    begin = clock()
    limit_s = question.time_limit_ms / 1000
    named = _name(question)
    problem = named.problem
    start = pack(problem, PACKING_SHARE * limit_s)
    if start.left.any():
        return _unplaceable(named, start)
    return _placement(named, Assigner(problem, start.placed, lambda: clock() - begin, limit_s).search())


def _check(question: PlacementQuestion) -> None:
    """Raises: InvalidRequest."""
    for server in question.servers:
        _positive(f"server {server.name!r}", server, ("gpus", "gpu_memory_bytes", "count"))
        if server.gpus > MOST_GPUS or server.gpu_memory_bytes > MOST_BYTES:
            raise InvalidRequest(
                f"server {server.name!r}: at most {MOST_GPUS} gpus of {MOST_BYTES} bytes", param="servers"
            )
    for model in question.models:
        _positive(f"model {model.model!r}", model, ("tp", "count"))
        if not 0 <= model.bytes_per_gpu <= MOST_BYTES:
            raise InvalidRequest(
                f"model {model.model!r}: bytes_per_gpu is from 0 to {MOST_BYTES}; its role says which way they go",
                param="models",
            )
        if not 0 <= model.page_bytes <= MOST_BYTES:
            raise InvalidRequest(
                f"model {model.model!r}: page_bytes is from 0 to {MOST_BYTES}", param="models"
            )
        if model.role == "neutral" and model.bytes_per_gpu:
            raise InvalidRequest(
                f"model {model.model!r}: role is 'producer' or 'consumer' where bytes_per_gpu is above 0",
                param="models",
            )
    _check_ids(question.models)
    _at_most("servers", sum(server.count for server in question.servers), MOST_SERVERS)
    _at_most("models", sum(model.count for model in question.models), MOST_INSTANCES)
    if any(model.tp > MOST_GPUS for model in question.models):
        raise InvalidRequest(f"models: tp is at most {MOST_GPUS}", param="models")
    _at_most("different values of tp", len({model.tp for model in question.models}), MOST_WIDTHS)
    twice = [name for name, count in Counter(_server_names(question.servers)).items() if count > 1]
    if twice:
        raise InvalidRequest(f"two servers are called {min(twice)!r}", param="servers")
    if question.time_limit_ms < 1:
        raise InvalidRequest("time_limit_ms is at least 1", param="time_limit_ms")


def _check_ids(models: list[PlacerModel]) -> None:
    """Raises: InvalidRequest."""
    for model in models:
        if model.instances and len(model.instances) != model.count:
            raise InvalidRequest(
                f"model {model.model!r}: {len(model.instances)} instances are named and count is {model.count}",
                param="models",
            )
    twice = [
        name for name, count in Counter(name for m in models for name in m.instances).items() if count > 1
    ]
    numbered = {f"{m.model}/" for m in models if not m.instances}
    for name in [
        *twice,
        *(name for m in models for name in m.instances if name[: name.rfind("/") + 1] in numbered),
    ]:
        raise InvalidRequest(f"two instances may be called {name!r}", param="models")


def _positive(what: str, entry: PlacerServer | PlacerModel, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(entry, name) < 1:
            param = "servers" if isinstance(entry, PlacerServer) else "models"
            raise InvalidRequest(f"{what}: {name} is at least 1", param=param)


def _at_most(param: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidRequest(f"{param}: {count} of them, and 1 to {most} can be placed", param=param)


def _server_names(servers: list[PlacerServer]) -> Iterator[str]:
    for server in servers:
        yield from [server.name] if server.count == 1 else (f"{server.name}/{n}" for n in range(server.count))


def _name(question: PlacementQuestion) -> _Named:
    shapes: dict[tuple[int, int], list[str]] = {}
    for server in question.servers:
        names = shapes.setdefault((server.gpus, server.gpu_memory_bytes), [])
        names += _server_names([server])
    instances: dict[tuple[int, int], list[tuple[str, PlacerModel]]] = {}
    numbers: Counter[str] = Counter()
    for model in sorted(question.models, key=lambda m: (m.model, m.tp, m.role, m.bytes_per_gpu, m.instances)):
        alike = instances.setdefault((model.tp, SIGN[model.role] * model.bytes_per_gpu), [])
        if model.instances:
            alike += [(name, model) for name in sorted(model.instances, key=_natural)]
            continue
        for _ in range(model.count):
            alike.append((f"{model.model}/{numbers[model.model]}", model))
            numbers[model.model] += 1
    problem = Problem(
        [Kind(tp, size, len(alike)) for (tp, size), alike in instances.items()],
        [Shape(gpus, size, len(names)) for (gpus, size), names in shapes.items()],
    )
    servers = [
        name
        for shape in problem.shapes
        for name in sorted(shapes[shape.gpus, shape.gpu_memory_bytes], key=_natural)
    ]
    return _Named(problem, servers, {kind: instances[kind.tp, kind.bytes_per_gpu] for kind in problem.kinds})


def _natural(name: str) -> tuple[str, int, str]:
    """h100/9 before h100/10."""
    head, _, number = name.rpartition("/")
    return (head, int(number), name) if number.isdecimal() else (name, -1, name)


def _unplaceable(named: _Named, packed: Packing) -> Unplaceable:
    left: Counter[str] = Counter()
    for kind, count in zip(named.problem.kinds, packed.left, strict=True):
        for _, model in named.instances[kind][len(named.instances[kind]) - int(count) :]:
            left[model.model] += 1
    why = reasons(named.problem)
    if not why and packed.proven:
        why = [
            "the groups of shards do not divide into these servers: every one of them alone has room, together they "
            "do not (eqs 2 and 3)"
        ]
    elif not why:
        why = [
            "no way to divide the groups of shards into these servers was found; more time may find one (eqs 2, 3)"
        ]
    return Unplaceable(reasons=why, left_out=dict(sorted(left.items())))


def _placement(named: _Named, found: Assignment) -> Placement:
    """Names, GPU numbers and pairs for the contents of every server."""
    problem = named.problem
    waiting = {kind: iter(alike) for kind, alike in named.instances.items()}
    rows: list[tuple[int, tuple[int, ...]]] = [
        (shape, tuple(int(n) for n in row)) for shape, row in zip(problem.shape_of, found.placed, strict=True)
    ]
    rows.sort(
        key=lambda row: (row[0], tuple(-n for n in row[1]))
    )  # which of equal servers holds what is free
    instances: list[PlacedInstance] = []
    pairs: list[LendingPair] = []
    balances: list[ServerBalance] = []
    for server, (shape, row) in zip(named.servers, rows, strict=True):
        held = [
            next(waiting[kind]) for kind, count in zip(problem.kinds, row, strict=True) for _ in range(count)
        ]
        here, lent = _server(server, held)
        instances += here
        pairs += lent
        used = sum(len(instance.gpus) for instance in here)
        balances.append(
            ServerBalance(
                server=server,
                memory_bytes=sum(SIGN[i.role] * i.bytes_per_gpu * len(i.gpus) for i in here),
                imbalance=sum(SIGN[i.role] * (i.bytes_per_gpu > 0) * len(i.gpus) for i in here),
                idle_gpus=problem.shapes[shape].gpus - used,
            )
        )
    return Placement(
        instances=sorted(instances, key=lambda instance: _natural(instance.instance)),
        pairs=pairs,
        servers=balances,
        objective_bytes=found.objective_bytes,
        bound_bytes=found.bound_bytes,
        gap_ratio=found.gap_ratio,
        needed_bytes=sum(i.bytes_per_gpu * len(i.gpus) for i in instances if i.role == "consumer"),
        lent_bytes=sum(min(pair.needed_bytes, pair.offered_bytes) for pair in pairs),
        unfit_bytes=sum(min(pair.needed_bytes, pair.offered_bytes) for pair in pairs if pair.why_not),
        timed_out=found.timed_out,
    )


def _server(
    server: str, held: list[tuple[str, PlacerModel]]
) -> tuple[list[PlacedInstance], list[LendingPair]]:
    """One server's instances on consecutive GPUs, widest first, and its pairs."""
    first, shards = 0, {"producer": [], "consumer": [], "neutral": []}
    gpus: dict[str, list[int]] = {}
    for name, model in sorted(held, key=lambda one: (-one[1].tp, _natural(one[0]))):
        gpus[name] = list(range(first, first + model.tp))
        first += model.tp
        if model.bytes_per_gpu:
            shards[model.role] += [
                Shard(name, n, model.bytes_per_gpu, gpu, model.tp, model.page_bytes)
                for n, gpu in enumerate(gpus[name])
            ]
    models = dict(held)
    pairs = match(shards["consumer"], shards["producer"])
    lent: dict[str, list[int]] = {}
    for consumer, producer in pairs:
        if not _why_not(models[producer.instance], models[consumer.instance]):
            lent.setdefault(consumer.instance, []).append(min(consumer.size_bytes, producer.size_bytes))
    instances = [
        PlacedInstance(
            instance=name,
            model=model.model,
            role=model.role,
            server=server,
            gpus=gpus[name],
            bytes_per_gpu=model.bytes_per_gpu,
            lent_bytes_per_gpu=min(lent[name]) if len(lent.get(name, ())) == model.tp else 0,
        )
        for name, model in held
    ]
    return instances, [
        LendingPair(
            server=server,
            consumer=consumer.instance,
            consumer_gpu=consumer.gpu,
            producer=producer.instance,
            producer_gpu=producer.gpu,
            needed_bytes=consumer.size_bytes,
            offered_bytes=producer.size_bytes,
            why_not=_why_not(models[producer.instance], models[consumer.instance]),
        )
        for consumer, producer in pairs
    ]


def _why_not(producer: PlacerModel, consumer: PlacerModel) -> str:
    return misfit(lender=(producer.tp, producer.page_bytes), borrower=(consumer.tp, consumer.page_bytes))
