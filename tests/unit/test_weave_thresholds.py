"""From where on steps are woven: by weaving's own threshold, whatever fusing's is; never in engines of small steps."""

import logging
from types import SimpleNamespace

import pytest
import torch

from shared.engine import weave_calibration
from shared.engine.weave_forward import OneAfterTheOther, WovenForward
from shared.engine.weave_host import NEVER, HostedWeave
from shared.engine.weave_layers import FusedSums, leave_unreduced
from shared.weave.role_choice import Choice, choose
from shared.weave.threshold import Timing, WeaveRule

MAX_TOKENS = 8192
TIMES = [
    Timing(num_tokens=tokens, off_us=100.0, fuse_us=fuse, full_us=full)
    for tokens, fuse, full in [
        (512, 105.0, 110.0),
        (1024, 99.0, 80.0),
        (2048, 99.0, 80.0),
        (4096, 90.0, 75.0),
    ]
]


def sums_of(min_tokens: int, max_tokens: int = MAX_TOKENS) -> FusedSums:
    fused = SimpleNamespace(max_tokens=max_tokens, dtype=torch.float32)
    return FusedSums(fused, min_tokens=min_tokens)  # pyright: ignore[reportArgumentType]


def host_of(fuse_min_tokens: int, full_min_tokens: int) -> HostedWeave:
    """As weave_settings' choice makes one."""
    host = object.__new__(HostedWeave)
    host.sums, host.device = sums_of(fuse_min_tokens), torch.device("cpu")
    host._min_tokens = full_min_tokens
    return host


def test_steps_between_the_threshold_of_weaving_and_that_of_fusing_are_woven():
    choice = choose(TIMES, "prefill")
    assert choice is not None
    assert choice == Choice("full", fuse_min_tokens=4096, full_min_tokens=1024)
    host = host_of(choice.fuse_min_tokens, choice.full_min_tokens)
    assert [host._choose(tokens) is not None for tokens in (1023, 1024, 2048, 4095, 4096, MAX_TOKENS)] == [
        False, True, True, True, True, True,
    ]  # fmt: skip
    assert host._choose(MAX_TOKENS + 1) is None, "there is no room for more"
    host.follow(WeaveRule(full_min_tokens=512))
    assert host._choose(1000) is not None, "fusing alone never pays"


def test_a_part_of_a_woven_step_is_written_where_the_sum_reads_however_few_tokens_it_has():
    given: list[tuple[int, int]] = []
    weight = torch.empty(4, 8, device="meta")
    linear = SimpleNamespace(
        quant_method=type("UnquantizedLinearMethod", (), {})(), bias=None, weight=weight, return_bias=False,
        reduce_results=True, forward=lambda x: "stock",
    )  # fmt: skip
    sums = sums_of(4096)

    def lane(tokens: int, number: int) -> torch.Tensor:
        given.append((tokens, number))
        return torch.empty(tokens, 4, device="meta")

    sums.fused.input = lane  # pyright: ignore[reportAttributeAccessIssue]
    leave_unreduced(linear, sums)
    rows = torch.empty(512, 8, device="meta")
    assert linear.forward(rows) == "stock"
    sums.is_woven = True
    assert linear.forward(rows).shape == (512, 4)
    assert given == [(512, 0)]
    assert not sums.takes(MAX_TOKENS + 1)


@pytest.mark.parametrize("fails", [False, True])
def test_parts_go_the_fused_way_while_a_step_is_woven_and_not_behind_it(fails):
    sums, seen = sums_of(NEVER), []

    def attention(positions, hidden_states):
        seen.append(sums.takes(1))
        if fails:
            raise RuntimeError("no")
        return hidden_states

    norm = SimpleNamespace(plain=lambda rows: rows, weight=torch.ones(2), eps=0.0)
    layer = SimpleNamespace(
        input_layernorm=norm, post_attention_layernorm=norm, self_attn=attention, mlp=lambda rows: rows
    )
    model = SimpleNamespace(
        forward=None, model=SimpleNamespace(layers=[layer], start_layer=0, end_layer=1, norm=norm)
    )
    sums.fused.run = lambda rows, residual, *_, **__: (rows, residual)  # pyright: ignore
    forward = WovenForward(model, sums, SimpleNamespace(), OneAfterTheOther(), 1)  # pyright: ignore
    context = SimpleNamespace()
    cut = SimpleNamespace(tokens=(slice(0, 1), slice(1, 2)), contexts=(context, context))
    try:
        forward.weave(torch.ones(2, 2), torch.arange(2), cut)  # pyright: ignore
    except RuntimeError:
        assert fails
    assert seen
    assert all(seen)
    assert not sums.takes(1)


def test_an_engine_whose_steps_are_smaller_than_what_is_measured_starts_and_never_cuts_one(
    monkeypatch, caplog
):
    def looks(*_):
        raise AssertionError("nothing is to be measured, read or told to other ranks")

    for name in ("_path", "_measure", "_shared"):
        monkeypatch.setattr(weave_calibration, name, looks)
    followed: list[WeaveRule] = []
    host = SimpleNamespace(rank=0, sums=sums_of(1, max_tokens=256), is_measured=True, follow=followed.append)
    with caplog.at_level(logging.INFO):
        weave_calibration.prepare(host)  # pyright: ignore[reportArgumentType]
    assert followed == [WeaveRule(fuse_min_tokens=1)]
    (record,) = caplog.records
    assert "steps of at most 256 tokens are never cut" in record.getMessage()
