"""shared/observe/log.py: one JSON object a line, with origin and ids."""

import json
import logging

import pytest
import structlog

from shared.observe import log


@pytest.fixture
def lines(capsys):
    root = logging.getLogger()
    before = list(root.handlers)
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    root.handlers = before
    structlog.reset_defaults()


def test_a_line_names_its_event_origin_and_ids(lines):
    log.setup("mempool", "mempool-0", "info")
    log.get_logger("lease").info("lease_granted", lease_id="l-1", num_pages=3)
    (line,) = lines()
    assert line.pop("time").endswith("Z")
    assert line == {
        "service": "mempool",
        "instance": "mempool-0",
        "component": "lease",
        "event": "lease_granted",
        "level": "info",
        "lease_id": "l-1",
        "num_pages": 3,
    }


def test_lines_below_the_level_are_dropped(lines):
    log.setup("mempool", "mempool-0", "warning")
    log.get_logger("a").info("quiet")
    log.get_logger("a").error("loud")
    assert [line["event"] for line in lines()] == ["loud"]


def test_values_json_does_not_know_are_shown_not_raised(lines):
    log.setup("mempool", "mempool-0", "info")
    log.get_logger("a").info("odd", value=object(), text="two\nlines")
    (line,) = lines()
    assert line["value"].startswith("<object")
    assert line["text"] == "two\nlines"


def test_exceptions_are_part_of_the_line(lines):
    log.setup("mempool", "mempool-0", "info")
    try:
        raise ValueError("inner")
    except ValueError:
        log.get_logger("a").exception("it_failed")
    (line,) = lines()
    assert "ValueError: inner" in line["exception"]


def test_warnings_of_libraries_come_in_the_same_form_and_only_once(lines):
    log.setup("mempool", "mempool-0", "info")
    log.setup("mempool", "mempool-0", "info")
    logging.getLogger("some.library").warning("careful %d", 7)
    logging.getLogger("some.library").info("chatter")
    (line,) = lines()
    assert (line["event"], line["component"]) == ("library_message", "some.library")
    assert line["message"] == "careful 7"


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="use debug"):
        log.setup("mempool", "mempool-0", "loud")
