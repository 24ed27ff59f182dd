"""shared/observe/log.py: one JSON object a line, with origin and ids."""

import io
import json
import logging
import os
import sys

import pytest
import structlog

from shared.observe import log
from shared.observe.log_file import LogFile


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


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """stderr is a file on a full disk; calling this makes room. Yields (make room, lines of the log)."""
    path = tmp_path / "service.log"
    with open("/dev/full", "w") as stream, path.open("wb") as log_file:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stream)
            log.setup("mempool", "mempool-0", "info")
        yield (
            lambda: os.dup2(log_file.fileno(), stream.fileno()),
            lambda: [json.loads(line) for line in path.read_text().splitlines() if line],
        )
    structlog.reset_defaults()


def test_a_full_disk_costs_lines_and_nobody_who_logs(full_disk):
    make_room, logged = full_disk
    for number in range(3):
        log.get_logger("a").info("while_full", number=number)
    make_room()
    for number in range(2):
        log.get_logger("a").info("later", number=number)
    first, *rest = logged()
    assert first.pop("time").endswith("Z")
    assert first == {
        "service": "mempool",
        "instance": "mempool-0",
        "component": "log",
        "event": "log_lines_lost",
        "level": "warning",
        "num_lines": 3,
    }
    assert [(line["event"], line["number"]) for line in rest] == [("later", 0), ("later", 1)]


class NearlyFull(io.RawIOBase):
    """Takes so many bytes, then none."""

    def __init__(self, room):
        super().__init__()
        self.room = room
        self.taken = b""

    def writable(self):
        return True

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        self.taken += taken
        return len(taken)


def test_a_line_of_which_a_part_was_written_is_lost_and_spoils_no_other():
    raw = NearlyFull(room=10)
    file = LogFile(io.TextIOWrapper(io.BufferedWriter(raw)), lambda number: b"%d lost\n" % number)
    file.write(b"first\n")
    file.write(b"second\n")
    file.write(b"third\n")
    raw.room = 100
    file.write(b"fourth\n")
    assert raw.taken == b"first\nseco\n2 lost\nfourth\n"


def test_a_closed_stderr_costs_lines_only(tmp_path):
    stream = (tmp_path / "log").open("w")
    file = LogFile(stream, lambda number: b"")
    stream.close()
    file.write(b"line\n")
    assert file.num_lost == 1


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="use debug"):
        log.setup("mempool", "mempool-0", "loud")


def test_no_line_raises_into_who_writes_it_whatever_is_in_it(lines):
    log.setup("x", "x", "info")
    log.get_logger("a").info("found", path="a\udc80", more={"b\udc80": ("c\udc80", 1)})
    root = logging.getLogger()
    # pytest's raises
    root.handlers = [each for each in root.handlers if isinstance(each, log._StdlibHandler)]
    library = logging.getLogger("some.library")
    library.warning("%d of them", "two")
    library.warning("half a pair \ud800")
    ours, unformatted, half = lines()
    assert (ours["path"], ours["more"]) == (r"a\udc80", {r"b\udc80": [r"c\udc80", 1]})
    assert unformatted["message"] == "'%d of them': not formatted, TypeError"
    assert half["message"] == r"half a pair \ud800"
