"""Settings of a mempool that cannot be, for most part of one with peers: refused at the start, by name."""

import pytest

from services.mempool.config import MempoolSettings, load
from shared.errors import SettingsError

PEERS = [f"tcp://10.0.0.{n}:1" for n in range(1, 5)]


def started(**given: object) -> MempoolSettings:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return load(["--socket=/tmp/s", "--capacity-bytes=1048576", *words])


def test_more_hosts_for_the_nine_calls_than_links_are_refused():
    listed = ",".join(PEERS)  # itself among them
    assert started(peer_listen=PEERS[0], api_peers=listed, max_peers=3).api_peers == PEERS
    with pytest.raises(SettingsError, match=r"mempool\.max_peers"):
        started(peer_listen=PEERS[0], api_peers=listed, max_peers=2)


def test_hosts_that_could_not_reach_this_one_are_refused():
    with pytest.raises(SettingsError, match=r"mempool\.api_peers"):
        started(api_peers=PEERS[0])


def test_a_stock_smaller_than_engines_keep_for_their_next_steps_is_refused():
    assert started(stock_share=0.5).stock_share == 0.5
    with pytest.raises(SettingsError, match=r"mempool\.stock_share: 0\.2 is not in \[0\.25, 1\]"):
        started(stock_share=0.2)
