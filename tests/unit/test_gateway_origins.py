"""services/gateway/origins.py: which pages of other origins may read answers."""

import pytest

from services.gateway import config
from services.gateway.origins import Origins, check_origins
from shared import settings
from shared.errors import SettingsError

PAGE = (b"origin", b"https://chat.example.com")
ASKS = [
    (b"access-control-request-method", b"POST"),
    (b"access-control-request-headers", b"authorization,x-a"),
]


def found(origins: Origins, *headers: tuple[bytes, bytes]) -> dict[bytes, bytes]:
    return dict(origins.headers([(b"host", b"x"), *headers]))


def test_any_page_may_read_answers_where_any_origin_is_allowed():
    assert found(Origins(["*"]), PAGE)[b"access-control-allow-origin"] == b"*"
    assert b"x-request-id" in found(Origins(["*"]), PAGE)[b"access-control-expose-headers"]
    assert b"vary" not in found(Origins(["*"]), PAGE)


def test_a_listed_page_is_told_its_own_origin_and_caches_that_it_depends_on_it():
    origins = Origins(["https://chat.example.com", "http://localhost:3000"])
    told = found(origins, PAGE)
    assert told[b"access-control-allow-origin"] == PAGE[1]
    assert told[b"vary"] == b"origin"
    assert found(origins, (b"origin", b"https://evil.example.com")) == {b"vary": b"origin"}
    assert found(origins) == {b"vary": b"origin"}


def test_an_origin_is_written_in_any_case_and_compared_as_browsers_write_it():
    assert b"access-control-allow-origin" in found(Origins(["HTTPS://Chat.Example.com"]), PAGE)


def test_who_is_no_page_of_another_origin_is_told_nothing():
    assert found(Origins(["*"])) == {}
    assert found(Origins([]), PAGE) == {}


def preflight(origins: Origins, *headers: tuple[bytes, bytes]):
    return origins.preflight(list(headers))


def test_a_preflight_is_told_what_it_asked_for():
    told = dict(preflight(Origins(["*"]), PAGE, *ASKS))
    assert told[b"access-control-allow-headers"] == b"authorization,x-a"
    assert told[b"access-control-allow-methods"] == b"GET, POST"
    assert int(told[b"access-control-max-age"]) >= 60


def test_a_preflight_of_a_page_that_is_not_allowed_and_other_options_are_none():
    assert preflight(Origins(["https://a.b"]), PAGE, *ASKS) is None
    assert preflight(Origins([]), PAGE, *ASKS) is None
    assert preflight(Origins(["*"]), PAGE) is None
    assert preflight(Origins(["*"]), *ASKS) is None


def test_names_that_no_header_has_are_not_given_back():
    told = dict(preflight(Origins(["*"]), PAGE, ASKS[0], (b"access-control-request-headers", b"a\x01b: c")))
    assert b"access-control-allow-headers" not in told


def test_origins_are_given_as_browsers_send_them():
    check_origins(["*", "https://a.b", "http://localhost:3000", "http://[::1]:3000", "app://obsidian.md"])
    for wrong in ("a.b", "https://a.b/", "https://a.b/c", "https://*.a.b", "https://", "null", "https://ä.b"):
        with pytest.raises(SettingsError, match=r"gateway\.allowed_origins"):
            check_origins([wrong])


def test_the_setting_allows_any_origin_by_default_and_is_checked_at_start():
    def given(*argv: str) -> list[str]:
        return settings.load(config.GatewaySettings, "gateway", argv, environ={}).allowed_origins

    assert given() == ["*"]
    assert given("--allowed-origins", "") == []
    assert given("--allowed-origins", "https://a.b, https://c.d") == ["https://a.b", "https://c.d"]
    with pytest.raises(SettingsError, match="without a path"):
        config.load(["--allowed-origins", "https://a.b/"])
