"""The placer: AQUA's own mixes, why something has no room, which sizes are refused, the command and its file."""

import json
import re

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.local.cli import app
from deploy.local.placement_file import read
from loadtest.profiler.core.profile import Profile, encode
from shared.errors import InvalidRequest, SettingsError
from shared.placer import packing, patterns
from shared.placer.highs import IntegerAnswer
from shared.placer.matching import Shard, match
from shared.placer.place import place
from shared.placer.problem import Kind, Problem, Shape
from shared.wire import lending
from shared.wire.placer import Placement, PlacementQuestion, PlacerModel, PlacerReply, PlacerServer
from tests.support.placements import GB, check_placement, question


def still():
    return 0.0


def test_a_distributed_consumer_gets_two_lenders_as_in_aquas_figure_8():
    asked = question([(4, 80, 1)], [(2, -20, 1), (1, 40, 1), (1, 35, 1)])
    answer = place(asked, still)
    check_placement(asked, answer)
    assert [(p.consumer_gpu, p.producer) for p in answer.pairs] == [(0, "model2/0"), (1, "model1/0")]
    assert answer.lent_bytes == answer.needed_bytes == 40 * GB


def test_four_consumers_and_a_producer_of_four_gpus_share_a_server_as_in_aquas_figure_11():
    asked = question([(8, 80, 2)], [(4, 15, 2), (1, -10, 8)])
    answer = place(asked, still)
    check_placement(asked, answer)
    assert [balance.imbalance for balance in answer.servers] == [0, 0]
    assert len(answer.pairs) == 8
    assert answer.gap_ratio == 0.0


def test_a_model_that_neither_lends_nor_borrows_counts_in_no_balance():
    for role in ("neutral", "producer", "consumer"):
        servers = [PlacerServer(name="a", gpus=2, gpu_memory_bytes=80 * GB)]
        answer = place(
            PlacementQuestion(servers=servers, models=[PlacerModel(model="m", role=role, count=2)]), still
        )
        assert (answer.objective_bytes, answer.pairs, answer.servers[0].imbalance) == (0, [], 0)


def test_a_consumer_whose_group_is_not_served_as_a_whole_is_not_called_served():
    answer = place(question([(4, 80, 1)], [(2, -20, 1), (1, 40, 1)]), still)
    assert len(answer.pairs) == 1
    assert {i.model: i.lent_bytes_per_gpu for i in answer.instances} == {"model0": 0, "model1": 0}


def test_patterns_of_large_servers_are_counted_no_further_than_is_asked(monkeypatch):
    kinds = [Kind(1 + n % 2, size) for n, size in enumerate(range(-150, 150))]
    large, looks = Problem(kinds, [Shape(1024, 80)]), []
    most_of = patterns._most
    monkeypatch.setattr(patterns, "_most", lambda *args: looks.append(args[2]) or most_of(*args))
    assert patterns.choose_buckets(large, 160_000) is None
    assert len(looks) < 30, "at buckets, of more than 300"


@pytest.mark.parametrize("gpus", [1, 3, 8, 13])
def test_patterns_are_counted_as_they_are_enumerated(gpus):
    kinds = [Kind(1, 5, 3), Kind(2, -7, 9), Kind(4, 1, 2), Kind(1, 0, 20)]
    problem = Problem(kinds, [Shape(gpus, 6)])
    every = patterns.Buckets((0, 1, 2, 3, 4))
    count = len(patterns.enumerate_patterns(problem, every, problem.shapes[0]).contents)
    assert patterns.choose_buckets(problem, count) == every
    assert patterns.choose_buckets(problem, count - 1) != every


def test_large_offers_go_to_large_needs_and_ties_to_the_first_name():
    needs = [Shard("a", 0, 10), Shard("b", 0, 30), Shard("c", 0, 30)]
    offers = [Shard("x", 0, 60), Shard("y", 0, 32), Shard("z", 0, 11)]
    assert [(c.instance, p.instance) for c, p in match(needs, offers)] == [("a", "z"), ("b", "y"), ("c", "x")]
    assert [(c.instance, p.instance) for c, p in match(needs, offers[:1])] == [("b", "x")]


@pytest.mark.parametrize("name", ["a", "z"])
def test_who_can_be_served_is_no_matter_of_names(name):
    servers = [PlacerServer(name="s", gpus=5, gpu_memory_bytes=80 * GB)]
    models = [
        PlacerModel(model="c", role="consumer", tp=2, bytes_per_gpu=20 * GB),
        PlacerModel(model="b", role="producer", tp=2, bytes_per_gpu=30 * GB),
        PlacerModel(model=name, role="producer", bytes_per_gpu=30 * GB),
    ]
    answer = place(PlacementQuestion(servers=servers, models=models), still)
    assert {(pair.producer, pair.why_not) for pair in answer.pairs} == {("b/0", "")}
    assert (answer.lent_bytes, answer.unfit_bytes) == (40 * GB, 0)


def test_a_pair_that_can_be_served_is_preferred_to_one_that_would_lend_more():
    need = Shard("c", 0, 20, ranks=2, page_bytes=2)
    offers = [Shard("a", 0, 30, ranks=1), Shard("b", 0, 20, ranks=2, page_bytes=1), Shard("d", 0, 9, ranks=2)]
    assert [producer.instance for _, producer in match([need], offers)] == ["d"]
    assert [producer.instance for _, producer in match([need], offers[:2])] == ["b"], "any, where none fits"
    needs = [need, Shard("e", 0, 20, ranks=1)]
    assert [consumer.instance for consumer, _ in match(needs, offers[:1])] == ["e"]


def test_what_no_mempool_can_lend_is_counted_apart_and_is_nobodys_share():
    asked = question([(4, 80, 1)], [(2, -20, 1), (1, 40, 1), (1, 35, 1)])
    answer = place(asked, still)
    assert (answer.lent_bytes, answer.unfit_bytes) == (40 * GB, 40 * GB)
    assert {one.model: one.lent_bytes_per_gpu for one in answer.instances} == dict.fromkeys(
        ("model0", "model1", "model2"), 0
    )


@pytest.mark.parametrize(
    ("servers", "models", "reason", "left"),
    [
        ([(8, 80, 2)], [(1, 10, 17)], r"17 GPUs are needed and the servers have 16 \(eq 3\)", 1),
        (
            [(4, 80, 4)],
            [(8, 10, 1)],
            r"parallelism 8 needs 8 GPUs in one server, and the largest has 4 \(eq 2\)",
            1,
        ),
        ([(8, 80, 2)], [(5, 10, 3)], r"3 instances of 5 GPUs or more, .* room for 2 of them", 1),
        (
            [(8, 40, 1)],
            [(1, 60, 2)],
            r"lends 60000000000 bytes of a GPU, and no GPU has more than 40000000000",
            2,
        ),
        ([(8, 80, 2)], [(5, 1, 2), (2, 1, 3)], r"every one of them alone has room, together they do not", 1),
    ],
)
def test_what_cannot_be_placed_is_explained_with_the_constraint_and_the_least_that_stays_outside(
    servers, models, reason, left
):
    answer = place(question(servers, models), still)
    assert not isinstance(answer, Placement)
    assert re.search(reason, "; ".join(answer.reasons))
    assert sum(answer.left_out.values()) == left


def test_what_was_not_proven_to_have_no_room_is_not_said_to_have_none(monkeypatch):
    unknown = IntegerAnswer(None, 0.0, optimal=False, infeasible=False)
    monkeypatch.setattr(packing, "solve_integer", lambda *_, **__: unknown)
    answer = place(question([(8, 80, 2)], [(5, 1, 2), (2, 1, 3)]), still)
    assert not isinstance(answer, Placement)
    assert "more time may find one" in answer.reasons[0]


def test_groups_that_only_a_search_packs_are_placed():
    asked = question([(8, 80, 2)], [(5, 10, 1), (4, -10, 2), (3, 5, 1)])
    check_placement(asked, place(asked, still))


def test_a_producer_goes_only_where_a_gpu_has_what_it_lends():
    asked = question([(4, 40, 1), (4, 80, 1)], [(1, 60, 3), (1, -30, 3)])
    answer = place(asked, still)
    check_placement(asked, answer)
    assert {i.server for i in answer.instances if i.model == "model0"} == {"host1"}


@pytest.mark.parametrize(
    ("servers", "models", "words"),
    [
        ([(0, 80, 1)], [(1, 1, 1)], "gpus is at least 1"),
        ([(8, 80, 1)], [(0, 1, 1)], "tp is at least 1"),
        ([(8, 80, 257)], [(1, 1, 1)], "servers: 257 of them, and 1 to 256"),
        ([(8, 80, 1)], [(1, 1, 2049)], "models: 2049 of them"),
        ([(8, 80, 1)], [(1, 10**9, 1)], "bytes_per_gpu is from 0"),
        ([(2000, 80, 1)], [(1, 1, 1)], "at most 1024 gpus"),
        ([(8, 80, 1)], [(2000, 1, 1)], "tp is at most 1024"),
        ([(8, 80, 1)], [(tp, 1, 1) for tp in range(1, 18)], "different values of tp: 17"),
    ],
)
def test_sizes_without_sense_and_above_the_stated_limits_are_refused(servers, models, words):
    with pytest.raises(InvalidRequest, match=words):
        place(question(servers, models), still)


def test_two_servers_of_one_name_and_a_lending_neutral_are_refused():
    server = PlacerServer(name="a", gpus=8, gpu_memory_bytes=80 * GB)
    with pytest.raises(InvalidRequest, match="two servers are called 'a'"):
        place(PlacementQuestion(servers=[server, server], models=[PlacerModel(model="m")]), still)
    with pytest.raises(InvalidRequest, match="role is 'producer' or 'consumer'"):
        place(PlacementQuestion(servers=[server], models=[PlacerModel(model="m", bytes_per_gpu=5)]), still)


def test_a_spent_time_limit_still_gives_a_placement_and_says_so():
    asked = question([(8, 80, 4)], [(1, 30, 9), (2, -20, 5), (1, -7, 8)], time_limit_ms=10)
    ticks = iter(range(10_000))
    answer = place(asked, lambda: float(next(ticks)))
    check_placement(asked, answer)
    assert answer.timed_out


def test_question_and_reply_survive_the_wire():
    asked = question([(8, 80, 2)], [(2, -20, 3), (1, 30, 9)])
    assert msgspec.json.decode(msgspec.json.encode(asked), type=PlacementQuestion) == asked
    for models in ([(2, -20, 3), (1, 30, 9)], [(9, 1, 1)]):
        answer = place(question([(8, 80, 2)], models), still)
        assert msgspec.json.decode(msgspec.json.encode(answer), type=PlacerReply) == answer


FILE = """
[[servers]]
name = "h100"
gpus = 8
gpu_memory_bytes = "80 GB"
[[models]]
model = "llama-8b"
bytes_per_gpu = "25 GiB"
count = 2
[[models]]
profile = "opt.json"
count = 2
"""
PROFILE = {
    "model": "opt-30b",
    "role": "consumer",
    "tp": 2,
    "bytes_per_gpu": -10 * GB,
    "stable_rate_per_s": 2.5,
}


def quire(*words):
    return CliRunner().invoke(app, ["place", *map(str, words), "--time-limit", "60"])


@pytest.fixture
def file(tmp_path):
    (tmp_path / "opt.json").write_text(json.dumps(PROFILE))
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return path


def test_a_file_names_sizes_in_words_and_models_by_their_profile(file):
    asked = read(file, time_limit_ms=5000)
    assert asked.servers == [PlacerServer(name="h100", gpus=8, gpu_memory_bytes=80 * GB)]
    assert asked.models == [
        PlacerModel(model="llama-8b", role="producer", bytes_per_gpu=25 << 30, count=2),
        PlacerModel(model="opt-30b", role="consumer", tp=2, bytes_per_gpu=10 * GB, count=2),
    ]
    same = file.with_suffix(".json")
    same.write_text(
        msgspec.json.encode(msgspec.structs.replace(asked)).decode().replace(',"time_limit_ms":5000', "")
    )
    assert read(same, time_limit_ms=5000) == asked


def test_signed_sizes_say_the_role_themselves(file):
    file.write_text(FILE.replace('"25 GiB"', '"-1.5 GB"').replace('profile = "opt.json"', 'model = "x"'))
    assert [(m.role, m.bytes_per_gpu) for m in read(file, time_limit_ms=1).models] == [
        ("consumer", 1_500_000_000),
        ("neutral", 0),
    ]


def test_a_profile_as_the_profiler_writes_it_is_read(file):
    found = Profile(
        model="opt-30b", tp=2, role="consumer", bytes_per_gpu=-10 * GB, stable_rate_per_s=2.5,
        pool_bytes=1, peak_kv_bytes=1, free_bytes=0,
    )  # fmt: skip
    (file.parent / "opt.json").write_bytes(encode(found))
    opt = read(file, time_limit_ms=5000).models[1]
    assert (opt.model, opt.tp, opt.role, opt.bytes_per_gpu, opt.count) == (
        "opt-30b",
        2,
        "consumer",
        10 * GB,
        2,
    )


def test_with_ids_of_running_instances_the_answer_is_the_coordinators_placement(file):
    named = FILE.replace("count = 2\n[[models]]", 'instances = ["a-10", "a-9"]\n[[models]]').replace(
        'profile = "opt.json"\ncount = 2', 'profile = "opt.json"\ninstances = ["decode-1"]'
    )
    file.write_text(named)
    body = msgspec.json.decode(quire(file, "--json").stdout, type=lending.Placement)
    assert {(pair.consumer, pair.producer) for pair in body.pairs} == {
        ("decode-1", "a-9"),
        ("decode-1", "a-10"),
    }
    file.write_text(named.replace('"a-9"', '"decode-1"'))
    assert "two instances may be called 'decode-1'" in str(quire(file).exception)
    file.write_text(
        named.replace('"decode-1"', '"llama-8b/0"').replace('instances = ["a-10", "a-9"]', "count = 1")
    )
    assert "two instances may be called 'llama-8b/0'" in str(quire(file).exception)
    file.write_text(named.replace('["decode-1"]', '["decode-1"]\ncount = 3'))
    assert "1 instances are named and count is 3" in str(quire(file).exception)


def test_a_pair_that_no_mempool_can_serve_says_why_and_by_what_the_file_knows():
    servers = [PlacerServer(name="a", gpus=4, gpu_memory_bytes=80 * GB)]

    def pairs(**consumer):
        lends = PlacerModel(model="p", role="producer", bytes_per_gpu=20 * GB, page_bytes=2 << 20)
        needs = PlacerModel(model="c", role="consumer", bytes_per_gpu=9 * GB, **consumer)
        answer = place(PlacementQuestion(servers=servers, models=[lends, needs]), still)
        assert isinstance(answer, Placement)
        return [pair.why_not for pair in answer.pairs]

    assert pairs() == pairs(page_bytes=2 << 20) == [""]
    assert pairs(tp=2) == ["its pages lie on 1 rank, the borrower's blocks on 2 ranks"]
    assert "smaller than the borrower's of 4194304" in pairs(page_bytes=4 << 20)[0]
    with pytest.raises(InvalidRequest, match="page_bytes"):
        pairs(page_bytes=-1)


def test_the_command_says_which_pairs_no_mempool_can_serve(file):
    told = quire(file)
    assert "llama-8b/0 cannot lend to opt-30b/0: its pages lie on 1 rank" in told.stdout
    assert "2 of 2 pairs can be served by no mempool" in told.stdout
    assert "0 B of the 37.3 GiB needed are lent" in told.stdout
    file.write_text(
        FILE.replace('profile = "opt.json"', 'model = "x"\nbytes_per_gpu = "-9 GB"\npage_bytes = "2 MiB"')
    )
    assert "cannot lend" not in quire(file).stdout


def test_the_command_shows_servers_and_pairs_or_the_same_as_json(file):
    told, read_back = quire(file), json.loads(quire(file, "--json").stdout)
    assert told.exit_code == 0
    assert "0-1 opt-30b/0" in told.stdout
    assert "gap 0.00%" in told.stdout
    assert (read_back["type"], len(read_back["pairs"]), read_back["gap_ratio"]) == ("placement", 2, 0.0)
    assert read_back["instances"][0]["instance"] == "llama-8b/0"


def test_what_has_no_room_exits_with_1_and_the_reason(file):
    file.write_text(FILE.replace("gpus = 8", "gpus = 1"))
    told = quire(file)
    assert told.exit_code == 1
    assert "(eq 3)" in told.stderr
    assert "stay outside: 1 x llama-8b, 2 x opt-30b" in told.stderr
    assert json.loads(quire(file, "--json").stdout)["left_out"] == {"llama-8b": 1, "opt-30b": 2}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gpus = 8", "gpu = 8", r"servers\[0\]: unknown key 'gpu'; did you mean 'gpus'\?"),
        ("[[models]]", "[[modells]]", "did you mean 'models'"),
        ('"80 GB"', '"80 parsec"', r"servers\[0\].gpu_memory_bytes: '80 parsec' is no size"),
        ("gpus = 8", "gpus = 'x'", r"servers\[0\].gpus: Expected `int`"),
        ("count = 2", 'role = "lender"', r"models\[0\].role: Invalid enum value 'lender'"),
        ('"opt.json"', '"none.json"', "none.json cannot be read: No such file"),
        ('"opt.json"', "7", "is the name of a file"),
        ('"opt.json"', '"opt.json"\nrole = "producer"', r"below 0 is needed, and role is 'producer'"),
        ('"25 GiB"', '"-25 GiB"\nrole = "neutral"', r"below 0 is needed, and role is 'neutral'"),
        ("[[servers]]", "servers = 1\n[other]", r"unknown key 'other'|needs \[\[servers\]\]"),
        ('name = "h100"', "name =", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_nearest_right_key(file, old, new, words):
    file.write_text(FILE.replace(old, new))
    with pytest.raises(SettingsError, match=words):
        read(file, time_limit_ms=5000)


def test_a_profile_that_lacks_what_is_needed_is_refused(file):
    (file.parent / "opt.json").write_text('{"model": "opt"}')
    with pytest.raises(SettingsError, match=r"'opt.json' lacks role, tp, bytes_per_gpu"):
        read(file, time_limit_ms=5000)
