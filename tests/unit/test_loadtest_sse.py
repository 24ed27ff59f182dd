"""loadtest/sse.py: events and times of a streamed answer."""

import io
import json

import pytest

from loadtest.sse import StreamError, StreamTimes, events, read_stream, shown_text


def stream(*events_):
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events_)
    return io.BytesIO(body + b"data: [DONE]\n\n").readline


def delta(text):
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def test_events_end_with_done_and_reading_goes_on_to_the_end():
    source = io.BytesIO(b": comment\ndata: 1\n\ndata:2\r\n\r\ndata: [DONE]\n\n\n")
    assert list(events(source.readline)) == ["1", "2"]
    assert source.read() == b""


@pytest.mark.parametrize("body", [b"", b"data: 1\n\n", b"<html>\n", b"data: " + b"x" * (2 << 20) + b"\n"])
def test_a_stream_that_breaks_off_or_is_none_is_an_error(body):
    with pytest.raises(StreamError):
        list(events(io.BytesIO(body).readline))


def test_the_first_event_with_text_is_the_first_token_and_usage_counts_the_tokens():
    times = StreamTimes(started=10.0)
    for event, at_s in (
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 10.1),
        (delta("a"), 10.2),
        (delta("bc"), 10.3),
        (delta("d"), 10.5),
        ({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4,
                                   "prompt_tokens_details": {"cached_tokens": 3}}}, 10.6),
    ):  # fmt: skip
        times.note(event, at_s)
    assert times.ttft_ms == pytest.approx(200)
    assert times.tpot_ms == pytest.approx(100)
    assert times.gaps_ms == pytest.approx([100, 200])
    assert (times.text, times.output_tokens, times.prompt_tokens, times.cached_tokens) == ("abcd", 4, 7, 3)


def test_without_usage_every_event_counts_as_a_token():
    times = read_stream(stream(delta("a"), delta("b")), started=0.0)
    assert (times.num_events, times.output_tokens) == (2, 0)
    assert times.tpot_ms == pytest.approx(times.gaps_ms[0], abs=0.01)
    assert StreamTimes(0.0).tpot_ms == 0.0


def test_an_error_event_is_an_error():
    with pytest.raises(StreamError, match="went away"):
        read_stream(stream(delta("a"), {"error": {"message": "it went away"}}), started=0.0)


def test_text_of_completions_and_tool_calls_counts_too():
    assert shown_text({"choices": [{"text": "x"}]}) == "x"
    call = {"function": {"name": "f", "arguments": '{"a"'}}
    assert shown_text({"choices": [{"delta": {"tool_calls": [call]}}]}) == '{"a"'
    assert shown_text({"choices": [{"delta": {"role": "assistant"}}]}) == ""
