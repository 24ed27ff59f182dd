"""Full batches: what its clients count, and what its metrics say of rounds."""

import asyncio
import json

import pytest

from loadtest import bench_full_batches as bench
from loadtest import closed_client


class Server:
    """Answers completions as they are asked: an event for each token, or all at once. `most`: at once so far."""

    def __init__(self) -> None:
        self.now = self.most = self.asked = 0
        self.refuse_after = 10_000
        self.open, self.all_closed = 0, asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        while head := await reader.readline():
            length = 0
            while (line := await reader.readline()) != b"\r\n":
                head += line
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            body = json.loads(await reader.readexactly(length))
            self.asked += 1
            is_refused = self.asked > self.refuse_after
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.002)
            self.now -= 1
            status, text = "200 OK", self.text(body)
            if is_refused:
                status, text = "503 Busy", '{"error": "no"}'
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
        writer.close()
        await writer.wait_closed()
        self.open -= 1
        if not self.open:
            self.all_closed.set()

    def text(self, body: dict) -> str:
        usage = {"usage": {"completion_tokens": body["max_tokens"]}}
        if not body.get("stream"):
            return json.dumps({"choices": [{"text": "a"}], **usage})
        one = 'data: {"choices": [{"text": "a"}]}\n\n'
        return one * body["max_tokens"] + f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n"


async def ran_against(server: Server, *words: str) -> closed_client.Ran:
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        argv = [f"http://127.0.0.1:{port}", "m", "--count", "24", "--width", "6", "--tokens", "20", *words]
        ran = await closed_client.run(closed_client.parse(argv))
        await server.all_closed.wait()
        return ran


@pytest.mark.parametrize("words", [("--stream",), ()])
async def test_so_many_requests_are_asked_at_once_and_every_token_is_counted(words):
    server = Server()
    ran = await ran_against(server, *words)
    asked = closed_client.bodies(
        closed_client.parse(["u", "m", "--count", "24", "--width", "6", "--tokens", "20", *words])
    )
    tokens = sum(body["max_tokens"] for body in asked)
    assert (ran.requests, ran.failed, ran.tokens) == (24, 0, tokens)
    assert server.most == 6
    assert len(ran.ttft_ms) == (24 if words else 0)
    assert ran.num_events == (tokens + 2 * 24 if words else 0)
    assert all(10 <= body["max_tokens"] <= 30 and len(body["prompt"]) == 128 for body in asked)
    assert ran.end_s > ran.begin_s


async def test_refused_requests_are_failures_and_no_tokens():
    server = Server()
    server.refuse_after = 20
    ran = await ran_against(server)
    assert (ran.failed, ran.requests) == (4, 24)
    assert ran.tokens <= 20 * 30


def row(number, side, tokens_per_s, ttft_ms=(10.0,), way="stream", failed=0, stock_processes=2):
    return {
        "round": number, "side": side, "on": "0", "way": way, "width": 256, "failed": failed,
        "stock_processes": stock_processes, "tokens_per_s": tokens_per_s, "ttft_ms": list(ttft_ms),
        "cpu_us_per_token": {"a": 20.0, "b": 5.0},
    }  # fmt: skip


ROUNDS = [
    row(0, "quire", 12_000.0, [30.0]), row(0, "stock", 10_000.0, [50.0], failed=2),
    row(1, "quire", 9_000.0, [40.0]), row(1, "stock", 10_000.0, [60.0]),
    row(2, "quire", 1.0, way="whole"),
]  # fmt: skip


def test_a_ratio_is_of_one_round_and_one_side_alone_makes_none():
    metrics = bench.metrics_from_samples(ROUNDS)
    assert (
        metrics["stream_256_ratio"]
        == metrics["stream_256_over_2_processes_ratio"]
        == pytest.approx((1.2 + 0.9) / 2)
    )
    assert metrics["stream_256_least_ratio"] == pytest.approx(0.9)
    assert metrics["stream_256_quire_tokens_per_s"] == 10_500.0
    assert metrics["stream_256_quire_cpu_us_per_token"] == 25.0
    assert metrics["stream_256_stock_ttft_p50_ms"] == pytest.approx(55.0, abs=5.1)
    assert "whole_256_ratio" not in metrics
    assert metrics["failed_requests"] == 2.0


@pytest.mark.parametrize("tokens_per_s", [8_000.0, 20_000.0])
def test_plain_vllm_is_compared_with_as_many_processes_as_suit_it(tokens_per_s):
    more = [row(3, "quire", 10_000.0, [30.0], stock_processes=4)]
    more += [row(3, "stock", tokens_per_s, [55.0], stock_processes=4)]
    metrics = bench.metrics_from_samples([*ROUNDS, *more])
    assert metrics["stream_256_over_4_processes_ratio"] == pytest.approx(10_000.0 / tokens_per_s)
    assert metrics["stream_256_ratio"] == pytest.approx(min(1.05, 10_000.0 / tokens_per_s))
    assert metrics["stream_256_stock_tokens_per_s"] == max(10_000.0, tokens_per_s)
    assert metrics["stream_256_least_ratio"] == pytest.approx(min(0.9, 10_000.0 / tokens_per_s))


def test_the_sides_change_gpus_with_every_round_and_have_two_http_processes(tmp_path):
    options = bench.parse([])
    assert options.set == ["gateway_processes=2"]
    assert [bench.Sides(options, tmp_path, number, 2).on for number in range(3)] == [
        {"quire": "0", "stock": "1"}, {"quire": "1", "stock": "0"}, {"quire": "0", "stock": "1"},
    ]  # fmt: skip
    assert bench.parse(["--device", "cpu"]).set == []


class Part:
    """A server that starts or does not."""

    def __init__(self, starts: bool) -> None:
        self.starts, self.ended = starts, 0

    def __enter__(self) -> "Part":
        if not self.starts:
            raise RuntimeError("it did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.ended += 1


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True), (False, False)])
def test_a_side_that_does_not_start_ends_the_other(tmp_path, monkeypatch, ours, theirs):
    sides = bench.Sides(bench.parse([]), tmp_path, 0, 2)
    monkeypatch.setattr(sides, "_quire", Part(ours))
    monkeypatch.setattr(sides, "_stock", Part(theirs))
    with pytest.raises(RuntimeError, match="did not start"):
        sides.__enter__()
    assert (sides._quire.ended, sides._stock.ended) == (int(ours), int(theirs))
