"""Who may come in, and how many at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import config
from services.gateway.auth import KeyRing, load_keys, load_weights, parse_keys_file
from services.gateway.core.admission import Admission, Admitted, Shed
from shared.errors import SettingsError, Unauthorized


def test_bound_is_kept_and_places_come_back():
    gate = Admission(2)
    first, second = gate.enter("", 1, now_ms=0), gate.enter("", 1, now_ms=0)
    refused = gate.enter("", 1, now_ms=0)
    assert isinstance(first, Admitted)
    assert isinstance(second, Admitted)
    assert isinstance(refused, Shed)
    assert refused.http_status == 503
    assert refused.retry_after_ms >= 1_000
    gate.leave(first, now_ms=10)
    assert isinstance(gate.enter("", 1, now_ms=10), Admitted)


def test_tenant_limit_is_429_and_leaves_the_others_alone():
    gate = Admission(10, max_per_tenant=1)
    assert isinstance(gate.enter("a", 1, now_ms=0), Admitted)
    refused = gate.enter("a", 1, now_ms=0)
    assert isinstance(refused, Shed)
    assert refused.http_status == 429
    assert isinstance(gate.enter("b", 1, now_ms=0), Admitted)


def test_a_tenant_at_its_limit_is_told_when_one_of_its_own_requests_will_end():
    gate = Admission(1_000, max_per_tenant=4)
    for _ in range(200):  # answers take a minute
        gate.leave(gate.enter("others", 1, now_ms=0), now_ms=60_000)
    for number in range(300):
        gate.enter(f"other{number}", 1, now_ms=0)
    for _ in range(4):
        gate.enter("a", 1, now_ms=0)
    assert gate.enter("a", 1, now_ms=0).retry_after_ms == 15_000
    assert gate.enter("b", 1_000, now_ms=0).retry_after_ms == 1_000, "of everybody's, one ends soon"


def test_draining_refuses_everybody():
    gate = Admission(10)
    gate.draining = True
    assert isinstance(gate.enter("", 1, now_ms=0), Shed)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans()), max_size=50))
def test_running_equals_what_was_admitted_and_not_given_back(steps):
    gate, held = Admission(8, max_per_tenant=5), []
    for now_ms, (tenant, cost, leave) in enumerate(steps):
        if leave and held:
            gate.leave(held.pop(), now_ms=now_ms)
        else:
            ticket = gate.enter(tenant, cost, now_ms=now_ms)
            if isinstance(ticket, Admitted):
                held.append(ticket)
        assert gate.num_running == sum(t.cost for t in held) <= 8
        for name in "abc":
            assert sum(t.cost for t in held if t.tenant == name) <= 5


def test_keys_name_tenants_and_unknown_keys_are_refused():
    ring = load_keys(["k1", "k2:acme"], "")
    assert ring.tenant_of(b"Bearer k1") == ""
    assert ring.tenant_of(b"bearer k2") == "acme"
    for wrong in (None, b"", b"Bearer k3", b"Basic k1", b"Bearer ", b"k1", b"Bearer k1 x", b"Bearer \xff"):
        with pytest.raises(Unauthorized):
            ring.tenant_of(wrong)


@pytest.mark.parametrize("text", ['["sk-a:ta"]', '["sk-a", "sk-b"]', '"sk-a"', 'sk-b,"sk-a"'])
def test_keys_that_are_given_as_json_are_refused_at_start_and_not_repeated(text):
    """They would be keys with brackets and quotes, which nobody sends."""
    with pytest.raises(SettingsError, match=r"gateway\.api_keys.*without brackets and quotes") as caught:
        config.load(["--api-keys", text])
    assert "sk-" not in caught.value.message


def test_without_keys_everybody_may_enter():
    assert KeyRing().tenant_of(None) == ""


def test_keys_file_names_the_line_but_not_the_key():
    assert parse_keys_file("a\n# x\nb t # y\n", "f") == [("a", ""), ("b", "t")]
    with pytest.raises(SettingsError, match="line 2") as caught:
        parse_keys_file("a\nsecret t u\n", "f")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \n", "# sk-old of acme, withdrawn\n"])
@pytest.mark.parametrize("keys", [[], ["k1"]])
def test_a_keys_file_without_a_key_is_refused_and_does_not_let_everybody_in(tmp_path, text, keys):
    named = tmp_path / "keys.txt"
    named.write_text(text)
    with pytest.raises(SettingsError, match=r"setting gateway\.api_keys_file: no key in") as caught:
        load_keys(keys, str(named))
    assert "sk-old" not in caught.value.message
    named.write_text(f"{text}k2 acme\n")
    assert load_keys(keys, str(named)).tenant_of(b"Bearer k2") == "acme"


def test_tenants_have_the_weights_that_the_settings_say():
    assert load_weights(["acme=4", "a=b=0.5"]) == {"acme": 4.0, "a=b": 0.5}


@pytest.mark.parametrize(
    "entry", ["acme", "acme=", "acme=x", "acme=0", "acme=-1", "acme=nan", "acme=inf", "acme=1e9"]
)
def test_a_weight_that_is_none_is_refused(entry):
    with pytest.raises(SettingsError, match="tenant_weights"):
        load_weights([entry])


def test_a_tenant_has_one_weight():
    with pytest.raises(SettingsError, match="once a tenant"):
        load_weights(["acme=1", "acme=2"])
