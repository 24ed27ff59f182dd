"""A start that failed is explained by the first error in the log, not by the last of many that followed from it."""

import pytest

from deploy.local.launch import ERROR, MAX_ERROR_CHARS, errors
from deploy.local.terminal import show_log_tail

CAUSE = "ValueError: To serve at least one request, 0.01 GiB KV cache is needed"
LOG = f"""INFO 11-28 11:23:24 [core.py:120] Initializing an engine
ERROR 11-28 11:23:25 [core.py:1330]     raise ValueError(
ERROR 11-28 11:23:25 [core.py:1330] {CAUSE}
(EngineCore pid=8425) Traceback (most recent call last):
(EngineCore pid=8425)     raise ValueError(
(EngineCore pid=8425) {CAUSE}
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_cause_comes_first_and_once_and_lines_of_code_are_none(tmp_path):
    log = tmp_path / "decode-0.log"
    log.write_text(LOG * 3)
    assert errors(log) == [CAUSE, "RuntimeError: Engine core initialization failed. See root cause above."]
    assert errors(log, most=1) == [CAUSE]


def test_errors_of_an_earlier_attempt_are_not_this_ones(tmp_path):
    log = tmp_path / "decode-0.log"
    log.write_text("OSError: of before\n")
    start = log.stat().st_size
    assert errors(log, start=start) == []
    with log.open("a") as more:
        more.write("torch.OutOfMemoryError: CUDA out of memory\n")
    assert errors(log, start=start) == ["torch.OutOfMemoryError: CUDA out of memory"]
    assert errors(log, start=10_000) == ["OSError: of before", "torch.OutOfMemoryError: CUDA out of memory"]
    assert errors(tmp_path / "none.log") == []


def test_a_crash_is_an_error(tmp_path):
    log = tmp_path / "decode-0.log"
    log.write_text(
        "INFO ready\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    )
    assert errors(log) == ["Fatal Python error: Segmentation fault"]


def test_an_endless_line_is_cut_and_what_is_no_text_is_read(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"\xff\xfe\nKeyError: " + b"x" * 100_000 + b"\n")
    (found,) = errors(log)
    assert len(found) == MAX_ERROR_CHARS


@pytest.mark.parametrize(
    "line",
    [
        "the worker had an Error: in words",
        '{"event": "acquire_failed", "error": "ValueError: x"}',
        "Errors: 3",
    ],
)
def test_what_services_log_of_what_they_survived_is_no_cause(line):
    assert ERROR.search(line) is None


def test_the_cause_is_shown_before_the_last_lines_and_not_twice(capsys):
    event = {
        "log_tail": ["one", "RuntimeError: b"],
        "log_errors": ["ValueError: a", "RuntimeError: b"],
        "log": "x.log",
    }
    show_log_tail(event)
    said = capsys.readouterr().err
    assert said.index("ValueError: a") < said.index("one")
    assert said.count("RuntimeError: b") == 1
