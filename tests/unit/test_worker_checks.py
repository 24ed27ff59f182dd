"""What a worker refuses, with which code, and whether trying elsewhere can help."""

import pytest

from shared.engine.worker_attempt import ends_with_first_token, first_token_sampling
from shared.engine.worker_checks import Refusal, WorkerLimits, check_prompt, check_state
from shared.engine.worker_config import WorkerSettings, block_tokens, for_role
from shared.errors import SettingsError
from shared.ids import Epoch, HandoffId, InstanceId, RequestId
from shared.kv.block_hash import pack_tokens
from shared.vmm.geometry import DEFAULT_BLOCK_TOKENS
from shared.wire.requests import Generate, HandoffTarget, SamplingSpec

LIMITS = WorkerLimits(vocab_size=100, max_model_len=16, max_inflight=2)


def message(**changes):
    values = {
        "request_id": RequestId("r"),
        "attempt": 1,
        "stage": "colocated",
        "instance_epoch": Epoch(7),
        "sampling": SamplingSpec(max_tokens=4),
    }
    return Generate(**(values | changes))


def state(**changes):
    return check_state(
        message(), **({"epoch": Epoch(7), "draining": False, "num_inflight": 0, "limits": LIMITS} | changes)
    )


def test_a_worker_takes_requests_for_its_own_epoch_only():
    assert state() is None
    for epoch in (6, 8, 0):
        refused = state(epoch=Epoch(epoch))
        assert isinstance(refused, Refusal)
        assert (refused.code, refused.retryable) == ("epoch.stale", True)
    unregistered = check_state(
        message(instance_epoch=Epoch(0)), epoch=Epoch(0), draining=False, num_inflight=0, limits=LIMITS
    )
    assert unregistered is not None


def test_a_draining_or_full_worker_sends_the_request_elsewhere():
    assert state(draining=True) == Refusal("draining", "the instance is shutting down", retryable=True)
    full = state(num_inflight=2)
    assert full is not None
    assert (full.code, full.retryable) == ("overloaded", True)


@pytest.mark.parametrize("raw", [[], [b""], [b"abc"], [b"abcde"], [b"abcd", b"abcd"]])
def test_a_prompt_that_is_no_frame_of_whole_token_ids_is_refused(raw):
    refused = check_prompt(message(), raw, limits=LIMITS)
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.retryable) == ("invalid_request", False)


def test_length_and_vocabulary_are_checked_at_their_edges():
    assert list(check_prompt(message(), [pack_tokens([99] * 15)], limits=LIMITS)) == [99] * 15
    too_long = check_prompt(message(), [pack_tokens([1] * 16)], limits=LIMITS)
    assert isinstance(too_long, Refusal)
    assert too_long.code == "context_length_exceeded"
    unknown = check_prompt(message(), [pack_tokens([1, 100])], limits=LIMITS)
    assert isinstance(unknown, Refusal)
    assert unknown.code == "invalid_request"


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_a_weight_that_no_tenant_has_is_refused(weight):
    refused = check_prompt(message(weight=weight), [pack_tokens([1])], limits=LIMITS)
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.retryable) == ("invalid_request", False)


def test_senseless_sampling_and_a_prefill_without_a_successor_are_refused():
    raw = [pack_tokens([1])]
    for sampling in (SamplingSpec(max_tokens=-1), SamplingSpec(max_tokens=1, n=0)):
        assert isinstance(check_prompt(message(sampling=sampling), raw, limits=LIMITS), Refusal)
    assert isinstance(check_prompt(message(stage="prefill"), raw, limits=LIMITS), Refusal)
    to = HandoffTarget(handoff_id=HandoffId("h"), target=InstanceId("d"))
    assert list(check_prompt(message(stage="prefill", handoff_to=to), raw, limits=LIMITS)) == [1]


def test_output_in_the_frame_must_be_some_of_it_and_of_a_request_that_can_go_on():
    raw = [pack_tokens([1, 2, 3])]

    def check(count, **sampling):
        spec = SamplingSpec(**{"max_tokens": 3, "temperature": 0.0} | sampling)
        return check_prompt(message(sampling=spec, num_output_tokens=count), raw, limits=LIMITS)

    assert list(check(2)) == [1, 2, 3]
    refused = [check(-1), check(3), check(2, max_tokens=2), check(1, temperature=1.0, seed=3), check(1, n=2)]
    for each in refused:
        assert isinstance(each, Refusal)
        assert (each.code, each.retryable) == ("invalid_request", False)


def test_prefill_samples_one_token_of_one_choice_and_keeps_everything_else():
    spec = SamplingSpec(max_tokens=50, min_tokens=10, n=3, temperature=0.5, seed=4, logprobs=2)
    first = first_token_sampling(spec)
    assert (first.max_tokens, first.n, first.min_tokens) == (1, 1, 1)
    assert (first.temperature, first.seed, first.logprobs) == (0.5, 4, 2)
    assert first_token_sampling(SamplingSpec(max_tokens=0)).max_tokens == 0


@pytest.mark.parametrize(
    ("n", "max_tokens", "reason", "ends"),
    [
        (1, 5, "length", False),
        (1, 5, None, False),
        (1, 5, "stop", True),
        (1, 1, "length", True),
        (1, 0, "length", True),
        (3, 5, "stop", False),
        (3, 1, "length", False),
    ],
)
def test_the_first_token_ends_a_request_only_when_nothing_can_follow(n, max_tokens, reason, ends):
    assert ends_with_first_token(SamplingSpec(max_tokens=max_tokens, n=n), reason) is ends


def test_a_block_has_64_tokens_on_a_gpu_as_the_page_geometry_says_and_32_on_a_cpu_unless_told_otherwise():
    found = WorkerSettings()
    assert block_tokens(found, on_cpu=False) == DEFAULT_BLOCK_TOKENS == 64
    assert block_tokens(found, on_cpu=True) == 32
    told = WorkerSettings(block_tokens=48)
    assert {block_tokens(told, on_cpu=on_cpu) for on_cpu in (False, True)} == {48}


def test_settings_name_the_key_and_a_working_value(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    good = WorkerSettings(model_dir=str(tmp_path))
    filled = for_role(good, role="decode", instance="decode-0", port=8140)
    assert (filled.role, filled.listen, filled.admin_listen) == (
        "decode",
        "tcp://127.0.0.1:8140",
        "127.0.0.1:8141",
    )
    assert filled.model_name == tmp_path.name
    wrong = [
        ({"model_dir": "/nowhere"}, "model_dir"),
        ({"block_tokens": -1}, "block_tokens"),
        ({"drain_deadline_ms": -1}, "drain_deadline_ms"),
        ({"listen": "127.0.0.1:1"}, "worker.listen.*tcp://"),
        ({"listen": "tcp://*:1"}, "worker.advertise"),
        ({"listen": "tcp://[::]:1"}, "worker.advertise"),
    ]
    for change, text in wrong:
        with pytest.raises(SettingsError, match=text):
            for_role(
                WorkerSettings(**({"model_dir": str(tmp_path)} | change)), role="decode", instance="d", port=1
            )
