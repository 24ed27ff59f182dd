"""For the placer's tests: questions by seed, the best placement by trying them all, and what every answer must keep."""

from itertools import product
from random import Random

from shared.wire.placer import Placement, PlacementQuestion, PlacerModel, PlacerServer

GB = 10**9
SIGN = {"producer": 1, "consumer": -1, "neutral": 0}


def question(servers, models, time_limit_ms=60_000):
    """servers: (gpus, GB a GPU, count); models: (tp, signed GB a GPU, count). Nobody waits for the time limit."""
    return PlacementQuestion(
        servers=[
            PlacerServer(name=f"host{n}", gpus=gpus, gpu_memory_bytes=size * GB, count=count)
            for n, (gpus, size, count) in enumerate(servers)
        ],
        models=[
            PlacerModel(
                model=f"model{n}",
                tp=tp,
                role="producer" if size > 0 else "consumer" if size < 0 else "neutral",
                bytes_per_gpu=round(abs(size) * GB),
                count=count,
            )
            for n, (tp, size, count) in enumerate(models)
        ],
        time_limit_ms=time_limit_ms,
    )


def small_question(seed):
    """Up to three servers and six GPUs in all: every placement can be tried."""
    rng = Random(seed)
    servers = [(rng.randint(1, 3), rng.choice([40, 80]), 1) for _ in range(rng.randint(1, 3))]
    models = []
    left = sum(gpus for gpus, _, _ in servers) + rng.choice([0, 0, 0, 1])
    while left > 0 and (len(models) < 2 or rng.random() < 0.9):
        tp = min(left, rng.choice([1, 1, 1, 2, 2, 3]))
        left -= tp
        size = rng.choice([0, rng.randint(1, 39), -rng.randint(1, 39), rng.choice([10, -10, 60, -60])])
        models.append((tp, size, 1))
    return question(servers, models)


def shards_of(asked):
    """(tp, signed bytes) of every instance."""
    return [(m.tp, SIGN[m.role] * m.bytes_per_gpu) for m in asked.models for _ in range(m.count)]


def servers_of(asked):
    """(gpus, bytes a GPU) of every server."""
    return [(s.gpus, s.gpu_memory_bytes) for s in asked.servers for _ in range(s.count)]


def eq6(asked, where):
    """Eq 6 of instances[i] on servers[where[i]]; None where eqs 1 to 3 or a GPU's size forbid it."""
    servers, instances = servers_of(asked), shards_of(asked)
    used, memory, signs = ([0] * len(servers) for _ in range(3))
    for (tp, size), s in zip(instances, where, strict=True):
        if size > servers[s][1]:
            return None
        used[s] += tp
        memory[s] += tp * size
        signs[s] += tp * ((size > 0) - (size < 0))
    if any(n > gpus for n, (gpus, _) in zip(used, servers, strict=True)):
        return None
    return max(map(abs, memory)) + max(abs(n) * size for n, (_, size) in zip(signs, servers, strict=True))


def best_of_all(asked):
    """The least eq 6 over every placement; None where there is none."""
    servers = range(len(servers_of(asked)))
    values = [eq6(asked, where) for where in product(servers, repeat=len(shards_of(asked)))]
    return min((value for value in values if value is not None), default=None)


def check_placement(asked, answer):
    """Eqs 1 to 6 of an answer, its pairs, its sums."""
    assert isinstance(answer, Placement)
    names = [s.name if s.count == 1 else f"{s.name}/{n}" for s in asked.servers for n in range(s.count)]
    by_name = dict(zip(names, servers_of(asked), strict=True))
    assert sorted(i.model for i in answer.instances) == sorted(
        m.model for m in asked.models for _ in range(m.count)
    )
    assert len({i.instance for i in answer.instances}) == len(answer.instances)
    spec = {m.model: m for m in asked.models}
    taken = [(i.server, gpu) for i in answer.instances for gpu in i.gpus]
    assert len(set(taken)) == len(taken), "a GPU is used twice"
    assert all(0 <= gpu < by_name[server][0] for server, gpu in taken)
    assert all(len(i.gpus) == spec[i.model].tp for i in answer.instances)
    where = {i.instance: names.index(i.server) for i in answer.instances}
    ordered = sorted(answer.instances, key=lambda i: [m.model for m in asked.models].index(i.model))
    assert eq6(asked, [where[i.instance] for i in ordered]) == answer.objective_bytes
    assert 0 <= answer.bound_bytes <= answer.objective_bytes
    check_balances(answer, by_name)
    check_pairs(answer)


def check_balances(answer, by_name):
    """Eqs 4 and 5 of each server."""
    assert [b.server for b in answer.servers] == sorted(by_name, key=[b.server for b in answer.servers].index)
    for balance in answer.servers:
        here = [i for i in answer.instances if i.server == balance.server]
        assert balance.memory_bytes == sum(SIGN[i.role] * i.bytes_per_gpu * len(i.gpus) for i in here)
        lending = [i for i in here if i.bytes_per_gpu]
        assert balance.imbalance == sum(SIGN[i.role] * len(i.gpus) for i in lending)
        assert balance.idle_gpus == by_name[balance.server][0] - sum(len(i.gpus) for i in here)


def check_pairs(answer):
    """1:1, inside a server, of GPUs that are there; and nobody on both sides would rather have each other."""
    at = {(i.server, gpu): i for i in answer.instances for gpu in i.gpus}
    consumers = [(p.server, p.consumer_gpu) for p in answer.pairs]
    producers = [(p.server, p.producer_gpu) for p in answer.pairs]
    assert len(set(consumers)) == len(consumers)
    assert len(set(producers)) == len(producers)
    for pair in answer.pairs:
        consumer, producer = at[pair.server, pair.consumer_gpu], at[pair.server, pair.producer_gpu]
        assert (consumer.instance, consumer.role) == (pair.consumer, "consumer")
        assert (producer.instance, producer.role) == (pair.producer, "producer")
        assert (consumer.bytes_per_gpu, producer.bytes_per_gpu) == (pair.needed_bytes, pair.offered_bytes)
        assert bool(pair.why_not) == (len(consumer.gpus) != len(producer.gpus))
    lent = {unfit: sum(min(p.needed_bytes, p.offered_bytes) for p in answer.pairs if bool(p.why_not) is unfit)
            for unfit in (True, False)}  # fmt: skip
    assert (answer.lent_bytes, answer.unfit_bytes) == (lent[True] + lent[False], lent[True])
    for server in {i.server for i in answer.instances}:
        blocking = blocking_pairs(answer, server)
        assert not blocking, blocking


def blocking_pairs(answer, server):
    """(consumer GPU, producer GPU) that both gain by leaving their partners, ties not counted as a gain."""
    here = {gpu: i for i in answer.instances if i.server == server for gpu in i.gpus if i.bytes_per_gpu}
    partner = {}
    for pair in answer.pairs:
        if pair.server == server:
            partner[pair.consumer_gpu], partner[pair.producer_gpu] = pair.producer_gpu, pair.consumer_gpu

    def likes(mine, other):  # more is better
        lent = min(here[mine].bytes_per_gpu, here[other].bytes_per_gpu)
        fits = len(here[mine].gpus) == len(here[other].gpus)
        return fits, lent, lent - here[other].bytes_per_gpu

    def would(mine, other):
        return mine not in partner or likes(mine, other) > likes(mine, partner[mine])

    consumers = [gpu for gpu, i in here.items() if i.role == "consumer"]
    producers = [gpu for gpu, i in here.items() if i.role == "producer"]
    return [(c, p) for c, p in product(consumers, producers) if would(c, p) and would(p, c)]
