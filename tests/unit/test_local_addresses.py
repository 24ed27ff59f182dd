"""What `cluster.join`, `cluster.address` and `cluster.api_keys` take, and what is said of the rest."""

import pytest

from deploy.local.addresses import Joined, parse_join
from deploy.local.cluster_settings import ClusterSettings, check
from shared.errors import SettingsError


@pytest.mark.parametrize(
    "join",
    [
        "http://127.0.0.1:18100", "a b:18100", "foo/bar:18100", "fd00::2", "[fd00::2]:8100", "::1:8100",
        "user@host:8100", "10.0.0.5", "10.0.0.5:", ":8100", "10.0.0.5:0", "10.0.0.5:65500", "a:b:8100", "0.0.0.0:8100",
        "-host:8100", "host..x:8100", "10.0.0.5:²",
    ],
)  # fmt: skip
def test_a_join_that_no_worker_could_connect_to_is_refused(join):
    with pytest.raises(SettingsError, match=r"cluster\.join") as error:
        parse_join(join)
    assert "the base port, not the gateway's" in str(error.value)


@pytest.mark.parametrize(
    ("join", "host"),
    [("10.0.0.5:8100", "10.0.0.5"), ("node-1.rack_2.local:8100", "node-1.rack_2.local"), ("n:8100", "n")],
)
def test_a_join_names_an_address_or_a_host(join, host):
    assert parse_join(join) == Joined(host, 8100)


def test_an_ipv6_address_is_refused_before_a_mempool_fails_over_it():
    with pytest.raises(SettingsError, match=r"cluster\.address: 'fd00::2' is an IPv6 address; .* IPv4 only"):
        check(ClusterSettings(address="fd00::2"))


@pytest.mark.parametrize("keys", [['["k"]'], ['"k"'], [""], [":tenant"], ["a,b"]])
def test_keys_that_the_gateway_refuses_are_refused_before_anything_starts(keys):
    with pytest.raises(SettingsError, match=r"setting cluster\.api_keys: "):
        check(ClusterSettings(api_keys=keys))


def test_no_key_is_shown():
    with pytest.raises(SettingsError) as error:
        check(ClusterSettings(api_keys=["good", '"secret']))
    assert "secret" not in str(error.value)
    assert check(ClusterSettings(api_keys=["good", "sk-1_2.3"]))
