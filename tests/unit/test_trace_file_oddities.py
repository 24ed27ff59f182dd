"""Trace files as programs and people leave them: read as is meant, or refused by file and line; not cut in silence."""

import json

import pytest

from loadtest import drive
from loadtest.workloads import trace_files
from loadtest.workloads.request import MAX_PROMPT_TOKENS
from loadtest.workloads.trace_files import TraceError, read

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def line(timestamp: object = 0, prompt: object = 10, output: object = 5, ids: str = "[]") -> str:
    return f'{{"timestamp": {timestamp}, "input_length": {prompt}, "output_length": {output}, "hash_ids": {ids}}}\n'


def times(found) -> list[float]:
    return [one.arrival_ms for one in found]


def test_a_mark_that_says_utf_8_hides_no_column_of_times(tmp_path):
    path = tmp_path / "bom.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + (AZURE + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.68,396,109\n").encode()
    )
    assert times(read(path)) == [0.0, pytest.approx(4000)]
    with pytest.raises(TraceError, match="times of its own"):
        read(path, rate_per_s=5.0)
    lines = tmp_path / "bom.jsonl"
    lines.write_bytes(b"\xef\xbb\xbf" + line().encode())
    assert len(read(lines)) == 1


def test_dates_with_whole_seconds_a_time_zone_or_many_digits_are_read(tmp_path):
    path = tmp_path / "azure.csv"
    rows = [
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10 00:00:01+00:00,2399,6",
        "2024-05-10 02:00:02+02:00,1,1",
        "2024-05-10 00:00:03.1234567,1,1",
        "2024-05-10T00:00:04Z,1,1",
    ]
    path.write_text(AZURE + "\n".join(rows) + "\n")
    assert times(read(path)) == pytest.approx([0, 990.07, 1990.07, 3113.526, 3990.07], abs=0.01)
    path.write_text(AZURE + "2024-05-10 25:00:00,1,1\n")
    with pytest.raises(TraceError, match=r"azure\.csv:2: no line of an Azure trace"):
        read(path)


@pytest.mark.parametrize(
    "bad",
    [
        line("NaN"), line("Infinity"), line("1e400"), line("1e300"), line("1" + "0" * 400), line(prompt="1e999"),
        line(output="-Infinity"), line(output=-7), line(output=10**11), line(output=MAX_PROMPT_TOKENS + 1),
        line(ids="[1e999]"), "[" * 100_000 + "\n", '"' + "x" * (2 << 20) + '"\n',
    ],
    ids=[
        "NaN", "infinite", "infinite once read", "too late", "too long for a float", "infinite prompt",
        "infinite output", "output below 0", "endless output", "output above what prompts may be", "infinite id",
        "nested", "long",
    ],
)  # fmt: skip
def test_a_line_of_no_request_is_refused_by_file_and_line(tmp_path, bad):
    path = tmp_path / "odd.jsonl"
    path.write_text(line() + bad)
    with pytest.raises(TraceError, match=r"odd\.jsonl:2: "):
        read(path)


def test_a_first_line_without_a_number_as_its_time_is_not_taken_for_a_file_without_times(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text(line("NaN") + line(5))
    with pytest.raises(TraceError, match=r"odd\.jsonl:1: nan is no time"):
        read(path, rate_per_s=2.0)


@pytest.mark.parametrize(("before", "at"), [("", 1), (AZURE, 2), (AZURE + "0,374,44\n", 3)])
def test_a_field_that_csv_does_not_take_is_refused_by_file_and_line(tmp_path, before, at):
    path = tmp_path / "big.csv"
    path.write_text(before + "0,374,44," + "x" * 200_000 + "\n")
    with pytest.raises(TraceError, match=rf"big\.csv:{at}: no line of a CSV file: field larger"):
        read(path)


@pytest.mark.parametrize("name", ["binary.csv", "binary.jsonl"])
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\x80\xff\x00" * 50)
    with pytest.raises(TraceError, match=rf"{name} is not text"):
        read(path)


def test_an_output_of_no_tokens_is_one_of_one(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(line(output=0))
    assert read(path)[0].output_tokens == 1


@pytest.mark.parametrize(
    "how", [{"limit": -5}, {"speed": float("nan")}, {"speed": float("inf")}, {"speed": 1e-308}]
)
def test_a_limit_or_a_speed_that_makes_no_sense_is_refused(tmp_path, how):
    path = tmp_path / "t.jsonl"
    path.write_text(line() + line(10**6))
    with pytest.raises(TraceError):
        read(path, **how)


def test_a_trace_that_is_longer_than_what_is_read_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trace_files, "MAX_REQUESTS", 3)
    path = tmp_path / "t.jsonl"
    path.write_text(line() * 3)
    assert len(read(path)) == 3
    assert capsys.readouterr().err == "", "nothing is left out"
    path.write_text(line() * 4)
    assert len(read(path)) == 3
    assert f"{path} is longer: its first 3 requests are read" in capsys.readouterr().err
    assert len(read(path, limit=2)) == 2
    assert len(read(path, limit=4)) == 4
    assert capsys.readouterr().err == "", "so many were asked for"


def test_the_driver_says_in_one_line_what_is_wrong_with_a_trace(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps([[[]]]) + "\n")
    assert drive.main(["--trace", str(path), "--write-trace", str(tmp_path / "out")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{path}:1" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (line(prompt=10.9), "10.9 is no whole number"), (line(output="true"), "True is no whole number"),
        (line(ids='"7"'), "hash_ids '7' are no list"), (line(ids="[7.5]"), "7.5 is no whole number"),
    ],
)  # fmt: skip
def test_what_is_no_count_and_no_list_is_not_taken_for_one(tmp_path, bad, why):
    path = tmp_path / "t.jsonl"
    path.write_text(bad)
    with pytest.raises(TraceError, match=rf"t\.jsonl:1: .*{why}"):
        read(path)
    path.write_text(line(prompt="10.0", ids="[7.0]") + line(ids="null"))
    assert [one.prompt_tokens for one in read(path)] == [10, 10]


@pytest.mark.parametrize(
    "rows", ["0,10,1\n2023-11-16 18:15:46.68,10,1\n", "2023-11-17,10,1\n20231116,10,1\n"]
)
def test_dates_and_milliseconds_in_one_file_are_refused(tmp_path, rows):
    path = tmp_path / "mixed.csv"
    path.write_text(AZURE + rows)
    with pytest.raises(TraceError, match=r"mixed\.csv:3: .*dates and milliseconds in one file"):
        read(path)


@pytest.mark.parametrize("names", ["timestamp,arrival_ms", "timestamp,prompt_tokens", "timestamp,Timestamp"])
def test_two_columns_of_one_meaning_are_refused(tmp_path, names):
    path = tmp_path / "twice.csv"
    path.write_text(f"{names},input_length,output_length\n0,5,10,1\n")
    with pytest.raises(TraceError, match=r"twice\.csv:1: the columns .* mean the same"):
        read(path)


def test_blank_rows_are_no_requests(tmp_path):
    path = tmp_path / "gaps.csv"
    path.write_text(AZURE + "0,10,1\n\n   \n , ,\n5,10,1\n   \n")
    assert times(read(path)) == [0.0, 5.0]


@pytest.mark.parametrize("scale", [("--scale", "3e4"), ("--scale", "1e308"), ("--output-scale", "1e6")])
def test_lengths_that_are_scaled_beyond_what_a_request_may_have_are_refused_in_one_line(
    tmp_path, capsys, scale
):
    path = tmp_path / "t.jsonl"
    path.write_text(line(prompt=100))
    words = ["--trace", str(path), "--write-trace", str(tmp_path / "out"), *scale]
    assert drive.main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "3000000 prompt" in said or "endless lengths" in said or "5000000 output" in said
    if scale == ("--scale", "3e4"):
        assert "see --scale" in said
        assert drive.main([*words, "--context", "4096"]) == 0, "cut, it fits"
