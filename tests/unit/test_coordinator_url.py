"""Under which name a coordinator leads: no two on one Redis may have the same."""

import socket

import pytest

from services.coordinator.__main__ import own_url


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_no_name_so_that_two_hosts_do_not_both_lead(host, monkeypatch):
    urls = set()
    for name in ("host-a", "host-b"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        urls.add(own_url("", host, 8103))
    assert urls == {"http://host-a:8103", "http://host-b:8103"}


def test_what_is_advertised_is_the_name_and_else_the_address():
    assert own_url("https://c.example", "0.0.0.0", 8103) == "https://c.example"
    assert own_url("", "127.0.0.1", 8103) == "http://127.0.0.1:8103"
    assert own_url("", "::1", 8103) == "http://[::1]:8103"
