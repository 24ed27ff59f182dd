"""Streaming chat load on any OpenAI-compatible server, with right TTFT and TPOT.

    locust -f loadtest/locustfile.py --headless -u 16 -r 4 -t 60s -H http://127.0.0.1:8000 \\
        --csv out/load --html out/load.html --jsonl out/load.jsonl --max-tokens 64

Headless it writes CSV files and one HTML report; --jsonl adds a run file (outcomes.py): a line per request with
unrounded times (locust rounds those above 100 ms to two digits) and what Quire's receipt says, for loadtest.report.
Users wait for answers, so there is no lag, and the offered rate is what they came to. Requests that the run's end cuts
off are lines, too (cut_off). The POST row is the time to the
response's headers only; the LLM rows `ttft`, `tpot` and `e2e` are the measurements. Without --headless the same runs
from locust's web page.

With --workload NAME (loadtest/workloads), users play that workload's sessions instead, each its own, as chat messages
and with the server's real answers as history; with --trace FILE (Mooncake JSONL, Azure CSV) those of the file, once.
Arrival times are the users' then, not the workload's or the file's: loadtest.drive keeps those.
"""

import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

import gevent
from locust import FastHttpUser, constant, events, task
from locust.exception import StopUser

from loadtest.open_loop import NO_ANSWER
from loadtest.outcomes import Outcome, take_cut, take_receipt, take_times, write_head, write_outcome
from loadtest.results import machine
from loadtest.sse import StreamError, StreamTimes, read_stream
from loadtest.workloads import tokens
from loadtest.workloads.catalogue import WORKLOADS, settings
from loadtest.workloads.request import Request
from loadtest.workloads.shelf import NothingLeft, Shelf
from loadtest.workloads.trace_files import TraceError

USERS = itertools.count()
TOPICS = Path(__file__).with_name("prompts.txt").read_text().splitlines()


@events.init_command_line_parser.add_listener
def add_arguments(parser: Any) -> None:
    """Our own options, beside locust's."""
    parser.add_argument("--model", default="", help="model name; default: the first that /v1/models lists")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3, help="turns of a conversation before a new one")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts")
    parser.add_argument(
        "--jsonl", default="", help="file for the run, a JSON line per request: see loadtest.report"
    )
    parser.add_argument("--no-receipts", action="store_true", help="do not ask for Quire's receipts")
    parser.add_argument(
        "--workload", default="", choices=["", *WORKLOADS], help="play this workload's sessions"
    )
    parser.add_argument(
        "--set", default="", help="options of the workload: NAME=VALUE, commas between several"
    )
    parser.add_argument(
        "--trace", default="", help="play the sessions of this Mooncake JSONL or Azure CSV file"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths; what sessions share stays")
    parser.add_argument(
        "--context", type=int, default=0, help="tokens that the model takes; longer prompts are cut"
    )
    parser.add_argument("--bearer", default="", env_var="QUIRE_API_KEY", is_secret=True, help="API key")


@events.init.add_listener
def check_options(environment: Any, **_: Any) -> None:
    """What cannot be played is said before anything starts."""
    shelf_of(environment.parsed_options)


@events.test_start.add_listener
def open_log(environment: Any, **_: Any) -> None:
    """One line-buffered file per run."""
    options = environment.parsed_options
    environment.shelf, environment.num_playing = shelf_of(options), 0
    environment.numbers, environment.began_s = itertools.count(), time.perf_counter()
    path = options.jsonl
    environment.request_log = None
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        environment.request_log = Path(path).open("w", buffering=1)  # noqa: SIM115  closed at test_stop
        write_head(environment.request_log, head_of(options))


def head_of(options: Any) -> dict[str, Any]:
    """What the run is."""
    return {
        "name": Path(options.jsonl).stem,
        "workload": Path(options.trace).name if options.trace else options.workload or "chat",
        "client": "locust",
        "num_users": options.num_users,
        "seed": options.seed,
        "scale": options.scale,
        "options": [text for text in options.set.split(",") if text],
        "real_history": True,
        "model": options.model,
        "started_unix_s": round(time.time(), 3),
        "machine": machine(),
    }


def shelf_of(options: Any) -> Shelf | None:
    """What users play; None: chats about a topic. Ends the process with status 2 on what cannot be played."""
    how = {"factor": options.scale, "context_tokens": options.context}
    texts = [text for text in options.set.split(",") if text]
    try:
        if options.trace:
            if options.workload or texts:
                raise ValueError("--trace is a workload of its own: leave --workload and --set out")
            return Shelf.of_trace(Path(options.trace), **how)
        if options.workload:
            return Shelf.of_workload(options.workload, options.seed, settings(texts), **how)
        if texts:
            raise ValueError("--set wants a --workload")
    except (ValueError, TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    return None


@events.test_stop.add_listener
def close_log(environment: Any, **_: Any) -> None:
    """The run is over."""
    if environment.request_log is not None:
        environment.request_log.close()


class ChatUser(FastHttpUser):
    """Talks: each turn sends the whole conversation so far, as chat front ends do."""

    wait_time = constant(0)
    network_timeout = 120.0
    connection_timeout = 10.0

    def on_start(self) -> None:
        """Learn the model's name and start a conversation."""
        options = self.environment.parsed_options
        self.options = options
        self.number, self.num_talks = next(USERS), 0
        self.random = random.Random(f"{options.seed}-{self.number}")
        self.headers = {"authorization": f"Bearer {options.bearer}"} if options.bearer else {}
        self.model = self._first_model()
        self.messages: list[dict[str, str]] = []

    def _first_model(self) -> str:
        """--model, or the first that the server lists. Ends the run where nothing answers, or none is listed."""
        named = self.options.model
        with self.client.get("/v1/models", headers=self.headers, catch_response=True) as response:
            if named and response.status_code:
                response.success()  # not every server lists models
                return named
            try:
                if response.status_code != 200:
                    raise ValueError(f"status {response.status_code or '0, nothing answers'}")
                return str(response.json()["data"][0]["id"])
            except (*NO_ANSWER, IndexError) as error:
                response.failure(str(error))
                why = f"{self.host}/v1/models lists no model ({error}): is the server up? --model names one"
        self._end_in_vain(why)
        raise gevent.GreenletExit  # locust logs a traceback of a StopUser before the first task

    def _end_in_vain(self, why: str) -> None:
        """The first user says why, and ends the run: the process with status 2, where there is no web page."""
        environment = self.environment
        if environment.process_exit_code is None:
            environment.process_exit_code = 2
            print(f"error: {why}", file=sys.stderr)
            gevent.spawn(environment.runner.stop if environment.web_ui else environment.runner.quit)

    @task
    def chat(self) -> None:
        """One streamed turn, or one session of the workload."""
        if self.environment.shelf is not None:
            self._play_next(self.environment.shelf)
            return
        if len(self.messages) >= 2 * self.options.turns:
            self.messages = []
        self.num_talks += not self.messages
        outcome = Outcome(
            next(self.environment.numbers),
            f"user-{self.number}-{self.num_talks}",
            len(self.messages) // 2,
            planned_output_tokens=self.options.max_tokens,
        )
        self.messages.append({"role": "user", "content": self.random.choice(TOPICS)})
        text = self._turn(outcome, self.messages, {"max_tokens": self.options.max_tokens})
        self.messages = [] if text is None else [*self.messages, {"role": "assistant", "content": text}]

    def _play_next(self, shelf: Shelf) -> None:
        """Ends the run where nothing is left of a trace, and nobody plays any more."""
        environment = self.environment
        try:
            session = shelf.take()
        except NothingLeft:
            if not environment.num_playing:
                environment.runner.quit()
            raise StopUser from None
        environment.num_playing += 1
        try:
            self._play(session)
        finally:
            environment.num_playing -= 1

    def _play(self, session: list[Request]) -> None:
        """Its turns in order; a failed one ends it."""
        answers: dict[int, str] = {}
        for request in session:
            if request.turn:
                gevent.sleep(request.think_ms / 1000)
            limits = {"max_tokens": request.output_tokens, "ignore_eos": True, "user": request.session}
            outcome = Outcome(
                next(self.environment.numbers),
                request.session,
                request.turn,
                planned_prompt_tokens=request.prompt_tokens,
                planned_output_tokens=request.output_tokens,
            )
            text = self._turn(outcome, tokens.messages(request.prompt, answered=answers.get), limits)
            if text is None:
                return
            answers[request.request_id] = text

    def _turn(self, outcome: Outcome, messages: list[dict[str, str]], limits: dict[str, Any]) -> str | None:
        """Stream one answer and report what became of it: its text, or None when it failed."""
        body = {
            "model": self.model,
            "messages": messages,
            **limits,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.options.no_receipts:
            body["quire_receipt"] = True
        started = time.perf_counter()
        # nobody is late: a user's next request is due when it is sent
        outcome.due_ms = outcome.sent_ms = round((started - self.environment.began_s) * 1000, 3)
        times = StreamTimes(started)
        try:
            self._stream(body, outcome, times)
        except gevent.GreenletExit:  # the run ends
            take_cut(outcome, times, (time.perf_counter() - started) * 1000)
            raise
        finally:
            self._report(outcome, (time.perf_counter() - started) * 1000)
        return times.text if outcome.ok else None

    def _stream(self, body: dict[str, Any], outcome: Outcome, times: StreamTimes) -> None:
        """Send it and read the answer, as long as the run goes on."""
        with self.client.post(
            "/v1/chat/completions", json=body, headers=self.headers, stream=True, catch_response=True
        ) as response:
            try:
                if response.status_code != 200:
                    raise StreamError(f"status {response.status_code}: {(response.text or '')[:200]}")
                read_stream(lambda: response.stream.readline(b"\n"), times.started, times)
                take_receipt(outcome, times.receipt)
                take_times(outcome, times)
            except (StreamError, OSError, *NO_ANSWER) as failure:
                outcome.error = f"{type(failure).__name__}: {failure}"
                outcome.jct_ms = round((time.perf_counter() - times.started) * 1000, 3)
            if outcome.error:
                response.failure(outcome.error)
            else:
                response.success()

    def _report(self, outcome: Outcome, took_ms: float) -> None:
        for name, value in (("ttft", outcome.ttft_ms), ("tpot", outcome.tpot_ms), ("e2e", took_ms)):
            if outcome.ok and value:
                self.environment.events.request.fire(
                    request_type="LLM",
                    name=name,
                    response_time=value,
                    response_length=outcome.output_tokens,
                    exception=None,
                    context={},
                )
        if self.environment.request_log is not None:
            write_outcome(self.environment.request_log, outcome)
