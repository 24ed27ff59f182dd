"""What cannot be fused or woven says why in one line of the log; what is cut where. In process: it imports vLLM."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from shared.engine import weave_host, weave_open, weave_settings, weave_support
from shared.engine.weave_cuts import StepCuts
from shared.engine.weave_layers import FusedNorm, FusedSums
from shared.engine.weave_restart import StartsAnew
from shared.engine.weave_settings import weave_arguments
from shared.engine.weave_tables import StepTables
from shared.engine.worker_config import WorkerSettings, for_role
from shared.kernels.allreduce_rmsnorm.errors import FusedUnavailable
from shared.weave.smart_split import TokenSplit

LLAMA = {"architectures": ["LlamaForCausalLM"]}


def made(tmp_path, model=LLAMA, **changes) -> WorkerSettings:
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = WorkerSettings(
        model_dir=str(tmp_path), mempool_socket="/run/pool", **{"tensor_parallel_size": 2} | changes
    )
    return for_role(found, role="prefill", instance="p", port=7000)


def test_on_a_cpu_ranks_add_up_in_vllms_way_and_nothing_is_said(tmp_path, caplog):
    settings = made(tmp_path, weave="auto")
    with caplog.at_level(logging.INFO):
        assert weave_arguments(settings, {"worker_cls": "anything"}) == {}
    assert not said(caplog)
    assert weave_arguments(made(tmp_path, weave="off"), {"worker_cls": "anything"}) == {}


def said(caplog) -> list[str]:
    """What weaving said to the log."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("shared.engine.weave")]


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (LLAMA, {"tensor_parallel_size": 1}, "one rank has nothing to add up"),
        ({"architectures": ["GemmaForCausalLM"]}, {}, "GemmaForCausalLM is none of LlamaForCausalLM"),
        ({}, {}, "a model without a name is none of"),
    ],
)
def test_what_is_known_before_the_model_is_loaded_is_one_line_of_the_log(
    tmp_path, caplog, model, changes, says
):
    settings = made(tmp_path, model, weave="full", **changes)
    with caplog.at_level(logging.WARNING):
        assert weave_arguments(settings, {}) == {}
    (line,) = said(caplog)
    assert line.startswith("worker.weave = full: vLLM's own all-reduce and norm are used: ")
    assert says in line


def test_every_kind_of_worker_has_one_that_weaves(tmp_path):
    settings = made(tmp_path, weave="fuse", weave_min_tokens=64, weave_sms=8)
    page = "shared.engine.page_worker_cpu.PageCPUWorker"
    found = weave_arguments(settings, {"worker_cls": page})
    assert found["worker_cls"] == "shared.engine.weave_worker_cpu.WeavePageCPUWorker"
    assert found["additional_config"]["quire_weave"] == {
        "mode": "fuse", "fuse_min_tokens": 1, "min_tokens": 64, "sms": 8, "state_dir": "",
        "starts_anew": False, "multicast": False,
    }  # fmt: skip
    assert weave_arguments(settings, {})["worker_cls"].endswith(".WeaveCPUWorker")


# -- loaded models --------------------------------------------------------------------------------------------


class RowParallelLinear:
    reduce_results = True


class RMSNorm(torch.nn.Module):
    has_weight, variance_size_override, variance_epsilon = True, None, 1e-6

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x, residual=None):
        return x if residual is None else (x, residual)


def named(name: str, **fields):
    return type(name, (SimpleNamespace,), {})(**fields)


def model_of(name: str = "LlamaForCausalLM", **layer):
    attention = SimpleNamespace(
        o_proj=RowParallelLinear(),
        attn=SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN")),
    )
    one = {
        "self_attn": attention, "mlp": SimpleNamespace(down_proj=RowParallelLinear()), "input_layernorm": RMSNorm(),
        "post_attention_layernorm": RMSNorm(),
    }  # fmt: skip
    inner = SimpleNamespace(
        layers=[SimpleNamespace(**one | layer)], start_layer=0, end_layer=1, norm=RMSNorm()
    )
    return named(name, model=inner)


def config_of(**changes):
    parallel = {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1,
        "enable_expert_parallel": False,
    }  # fmt: skip
    fields = {
        "lora_config": None, "speculative_config": None, "kv_transfer_config": None,
        "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
    }  # fmt: skip
    parallel |= {key: value for key, value in changes.items() if key in parallel}
    fields |= {key: value for key, value in changes.items() if key not in parallel}
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), **fields)


def test_a_plain_dense_model_over_two_ranks_is_fused_and_woven():
    assert weave_support.why_not_fused(model_of(), config_of()) == ""
    assert weave_support.why_not_woven(model_of(), config_of()) == ""


@pytest.mark.parametrize(
    ("model", "config", "says"),
    [
        (model_of(), config_of(tensor_parallel_size=1), "nothing to add up"),
        (model_of("GemmaForCausalLM"), config_of(), "is none of"),
        (model_of(), config_of(pipeline_parallel_size=2), "pipeline"),
        (model_of(), config_of(lora_config=object()), "adapters"),
        (model_of(), config_of(enable_expert_parallel=True), "reduce elsewhere"),
        (model_of(input_layernorm=named("GemmaRMSNorm")), config_of(), "no plain RMSNorm"),
        (model_of(mlp=SimpleNamespace(down_proj=named("QuantRow"))), config_of(), "not vLLM's plain one"),
        (model_of(ada_rms_norm_t_cond=object()), config_of(), "condition"),
    ],
)
def test_what_a_model_or_its_ranks_cannot_do_has_a_reason(model, config, says):
    assert says in weave_support.why_not_fused(model, config)


def test_experts_are_fused_but_stay_whole():
    model = model_of("MixtralForCausalLM", mlp=None)
    assert weave_support.why_not_fused(model, config_of()) == ""
    assert "experts get too few tokens" in weave_support.why_not_woven(model, config_of())


def test_a_connector_that_is_not_ours_and_unknown_attention_keep_steps_whole():
    transfer = SimpleNamespace(kv_connector="NixlConnector")
    assert "connector" in weave_support.why_not_woven(model_of(), config_of(kv_transfer_config=transfer))
    odd = model_of()
    odd.model.layers[0].self_attn.attn.get_attn_backend = lambda: SimpleNamespace(
        get_name=lambda: "QUIRE_SLOTS"
    )
    assert "QUIRE_SLOTS" in weave_support.why_not_woven(odd, config_of())


def test_on_gpus_only_an_engine_that_gave_up_compiling_has_to_start_again(tmp_path, monkeypatch):
    monkeypatch.setattr(weave_settings, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    for is_eager in (False, True):
        found = weave_arguments(made(tmp_path, weave="fuse", enforce_eager=is_eager), {})
        assert found["additional_config"]["quire_weave"]["starts_anew"] is not is_eager
        assert ("compilation_config" in found) is not is_eager


def hosted(monkeypatch, opener, others: str = "", **more):
    """The first rank's host over a fake model, whose ranks open what `opener` gives. others: why the second cannot."""

    def first_reason(mine: str) -> str:
        return f"rank 0: {mine}" if mine else others and f"rank 1: {others}"

    monkeypatch.setattr(weave_host, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(weave_open, "first_reason", first_reason)
    monkeypatch.setattr(weave_host, "open_fused", opener)
    config = config_of()
    config.additional_config = {
        "quire_weave": {"mode": "full", "fuse_min_tokens": 1, "min_tokens": 8, "sms": 16, **more}
    }
    model = model_of()
    before = dict(vars(model.model.layers[0]))
    host = weave_host.HostedWeave(model, config, torch.device("cpu"))
    assert vars(model.model.layers[0]) == before, "the model is as it was"
    assert model.model.layers[0].self_attn.o_proj.reduce_results
    return host


def test_gpus_that_cannot_map_each_others_memory_keep_vllms_way_and_say_so(monkeypatch, caplog):
    def refuse(*_):
        raise FusedUnavailable("no symmetric memory: these GPUs have no way to each other")

    with caplog.at_level(logging.WARNING):
        host = hosted(monkeypatch, refuse)
    host.check()
    host.close()
    assert host.sums is None
    (line,) = said(caplog)
    assert line == (
        "worker.weave = full: vLLM's own all-reduce and norm are used: rank 0: no symmetric memory: these GPUs have no "
        "way to each other"
    )


def test_ranks_that_gave_up_compiling_do_not_go_on_in_vllms_way_without_it(monkeypatch, tmp_path):
    def refuse(*_):
        raise FusedUnavailable("no symmetric memory")

    said = tmp_path / "said"
    with pytest.raises(StartsAnew, match="no symmetric memory"):
        hosted(monkeypatch, refuse, starts_anew=True, said=str(said))
    assert said.read_text() == "rank 0: no symmetric memory"


def test_where_another_rank_cannot_this_one_closes_what_it_opened_and_says_why_that_cannot(
    monkeypatch, caplog
):
    closed = []
    with caplog.at_level(logging.WARNING):
        host = hosted(monkeypatch, lambda *_: (Recording(), lambda: closed.append(1)), "no memory of peers")
    assert (host.sums, closed) == (None, [1])
    (line,) = said(caplog)
    assert line.endswith("norm are used: rank 1: no memory of peers")


# -- layers and cuts ------------------------------------------------------------------------------------------


class Recording:
    """A fused operation that says what it was called with."""

    max_tokens, dtype, few_sms = 16, torch.float32, 0

    def __init__(self):
        self.calls = []

    def run(self, partial, residual, weight, eps, *, lane=0, num_sms=0):
        self.calls.append((partial.shape[0], lane))
        self.out = partial * 2
        return self.out, residual


def test_a_norm_reduces_in_the_lane_in_use_and_the_last_one_hands_out_a_copy():
    fused = Recording()
    sums = FusedSums(fused)
    x, residual = torch.ones(4, 8), torch.zeros(4, 8)
    middle, last = (FusedNorm(RMSNorm(), sums, is_last=flag) for flag in (False, True))
    assert [name for name, _ in middle.named_parameters()] == ["weight"]
    sums.lane = 1
    assert middle(x, residual)[0] is fused.out
    normed, _ = last(x, residual)
    assert normed is not fused.out
    assert torch.equal(normed, fused.out)
    assert fused.calls == [(4, 1), (4, 1)]
    assert middle(x) is x  # without a residual nothing is reduced


def test_steps_that_are_too_small_or_too_large_go_vllms_way(monkeypatch):
    fused = Recording()
    sums = FusedSums(fused, min_tokens=4)
    monkeypatch.setattr("shared.engine.weave_layers.tensor_model_parallel_all_reduce", lambda x: x + 1)
    norm = FusedNorm(RMSNorm(), sums, is_last=False)
    for count in (3, 17):
        out, _ = norm(torch.zeros(count, 8), torch.zeros(count, 8))
        assert torch.equal(out, torch.ones(count, 8))
    assert not fused.calls


class Builder:
    """A metadata builder of which only calls are recorded."""

    def __init__(self, kv_cache_spec=None, layer_names=(), vllm_config=None, device=None):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = None, ["l"], None, None

    def build(self, common_prefix_len, common_attn_metadata):
        return SimpleNamespace(of=common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)


def common_of(counts: list[int], computed: list[int]):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    lens = torch.tensor([a + b for a, b in zip(counts, computed, strict=True)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=lens, num_reqs=len(counts),
        num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=int(lens.max()),
        block_table_tensor=torch.arange(len(counts))[:, None], slot_mapping=torch.arange(sum(counts)),
        seq_lens_cpu_upper_bound=lens.clone(),
    )  # fmt: skip


def watched(first: int):
    builder = Builder()
    cuts = StepCuts(lambda num_tokens: TokenSplit(first, num_tokens - first, 0, 0, 0.0))
    group = SimpleNamespace(layer_names=["l"], get_metadata_builder=lambda index: builder)
    assert cuts.watch([[group]]) == ""
    return builder, cuts


def context_of(whole):
    from vllm.config import CUDAGraphMode

    return SimpleNamespace(
        attn_metadata={"l": whole}, slot_mapping={"l": torch.arange(12)},
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
    )  # fmt: skip


def test_a_cut_request_attends_in_the_second_part_to_all_before_it():
    builder, cuts = watched(5)
    whole = builder.build(0, common_of([1, 8, 3], [9, 0, 4]))
    cut = cuts.take(context_of(whole), 12)
    first, second = (context.attn_metadata["l"].of for context in cut.contexts)
    assert cut.tokens == (slice(0, 5), slice(5, 12))
    assert first.query_start_loc.tolist() == [0, 1, 5]
    assert first.seq_lens.tolist() == [10, 4]  # the second request's first four tokens
    assert second.query_start_loc.tolist() == [0, 4, 7]
    assert second.seq_lens.tolist() == [8, 7]
    assert [t.tolist() for t in (first.block_table_tensor, second.block_table_tensor)] == [
        [[0], [1]], [[1], [2]],
    ]  # fmt: skip
    assert [context.slot_mapping["l"].tolist() for context in cut.contexts] == [
        list(range(5)), list(range(5, 12)),
    ]  # fmt: skip


def test_parts_are_taken_once_and_only_with_the_whole_that_they_were_cut_from():
    builder, cuts = watched(5)
    whole = builder.build(0, common_of([12], [0]))
    assert cuts.take(context_of(SimpleNamespace()), 12) is None  # a dummy run's
    assert cuts.take(context_of(whole), 12) is None  # gone with it
    whole = builder.build(0, common_of([12], [0]))
    assert cuts.take(context_of(whole), 16) is None  # padded
    whole = builder.build(0, common_of([12], [0]))
    assert cuts.take(context_of(whole), 12) is not None
    assert cuts.take(context_of(whole), 12) is None


def test_a_step_that_is_captured_is_never_cut():
    builder, cuts = watched(5)
    whole = builder.build_for_cudagraph_capture(common_of([12], [0]))
    assert cuts.take(context_of(whole), 12) is None


def test_a_step_is_kept_whole_when_it_is_said_to():
    builder, cuts = watched(5)
    cuts.keeps_whole = True
    assert cuts.take(context_of(builder.build(0, common_of([12], [0]))), 12) is None
    cuts.keeps_whole = False
    assert cuts.take(context_of(builder.build(0, common_of([12], [0]))), 12) is not None


def step_of(new=(), going_on=(), resumed=(), finished=()):
    """A SchedulerOutput. Of each request: (name, its blocks, tokens computed before, tokens of the step)."""
    cached = [*going_on, *resumed]
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, blocks, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached], resumed_req_ids={name for name, *_ in resumed},
            new_block_ids=[(blocks,) if blocks else None for _, blocks, *_ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
        ),
        num_scheduled_tokens={name: count for name, _, _, count in [*new, *cached]},
    )  # fmt: skip


def test_a_step_in_which_one_request_reads_what_another_computes_is_known():
    reads = StepTables(4).reads_own_blocks
    assert not reads(step_of(new=[("a", [1, 2, 3], 0, 10)]))
    assert not reads(step_of(going_on=[("a", None, 10, 1)], new=[("b", [1, 2, 4], 8, 3)]))  # written before
    assert reads(step_of(going_on=[("a", None, 11, 1)], new=[("c", [1, 2, 3, 5], 12, 1)]))  # a fills block 3
    assert reads(step_of(new=[("d", [6, 7], 0, 8), ("e", [6, 7, 8], 8, 1)]))  # a prompt asked twice
    assert not reads(step_of(going_on=[("c", None, 13, 1), ("d", [9], 8, 1), ("e", None, 9, 1)]))
    assert reads(step_of(resumed=[("b", [1, 2, 10], 8, 4)], new=[("f", [1, 2, 10], 12, 1)], finished=["a"]))
    assert reads(step_of(resumed=[("e", [6, 7, 8, 11], 12, 2)], going_on=[("d", None, 9, 1)])) is False


def test_two_kinds_of_attention_are_not_cut():
    cuts = StepCuts(lambda num_tokens: None)
    assert cuts.watch([[object(), object()]]) == "2 kinds of attention"
