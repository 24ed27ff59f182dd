"""`quire chat "text"`: one streamed answer through the gateway, then its receipt."""

import json
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.table import Table

from deploy.local import addresses, config, receipt_text
from deploy.local.terminal import bytes_text, err, fail, out, program, status_or_none
from shared.errors import PeerGone, SettingsError

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 120.0
RECEIPT_HEADER = {"x-quire-receipt": "1"}
TIMES = ("queue_ms", "fetch_ms", "compute_ms")
TOKENS = ("tokens_engine", "tokens_pool", "tokens_computed")

NOT_UTF8 = "what is to be said is not UTF-8 text"
MIN_RATE_S = 0.05  # a shorter answer came in one piece: no rate

Message = dict[str, str]


# Of OpenAI's API what is shown here; that another kind of server answers is found out by these, too.


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    quire_receipt: Any = None
    error: Any = None


def chat(
    text: Annotated[
        str, typer.Argument(help="What to say. Without it: a conversation, ended by Ctrl-D.")
    ] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    url: Annotated[str, typer.Option(help="Gateway. Default: QUIRE_URL, else the local cluster.")] = "",
    receipt: Annotated[bool, typer.Option(help="Show where the tokens' KV came from.")] = True,
) -> None:
    """Chat with the served model. QUIRE_API_KEY is sent if set."""
    base = config.gateway_url(url) or _local_url()
    options = {"max_tokens": max_tokens, "temperature": temperature}
    addresses.check_url("--url (or QUIRE_URL)", base, DEFAULT_URL)
    messages: list[Message] = [{"role": "system", "content": _utf8(system)}] if system else []
    said = [_utf8(text)] if text else []
    key = config.api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False) as client:
        try:
            options["model"] = _model(client)
            for line in said or _typed():
                messages.append({"role": "user", "content": line})
                reply = Reply()
                reply.stream(client, {**options, "messages": messages})
                messages.append({"role": "assistant", "content": reply.text})
                if receipt:
                    reply.show_receipt()
        except httpx.ConnectError as error:
            raise PeerGone(f"no gateway answers at {base}; `quire up` starts one") from error
        except msgspec.MsgspecError as error:  # of a str
            fail(f"{base} answers, but not as OpenAI's API: {error}")
        except httpx.HTTPError as error:
            fail(f"{base}: {type(error).__name__} {error}")
        except KeyboardInterrupt:
            out.print()


class Reply:
    """One answer as it streams."""

    def __init__(self) -> None:
        self.text = ""
        self._id = ""
        self._usage: dict[str, Any] = {}
        self._receipt: Any = None
        self._begin = time.monotonic()
        self._first: float | None = None

    def stream(self, client: httpx.Client, body: dict[str, Any]) -> None:
        """Print tokens as they come. Exits 1 on an error from the gateway."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=RECEIPT_HEADER) as response:
            if response.status_code != 200:
                response.read()
                fail(f"HTTP {response.status_code}: {_error_text(response.text)}")
            num_events = 0
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self._hear(msgspec.json.decode(line[6:], type=_Event))
                    num_events += 1
        if not num_events:
            raise msgspec.DecodeError("an answer without events")
        sys.stdout.write("\n")

    def _hear(self, event: _Event) -> None:
        if event.error is not None:
            sys.stdout.write("\n")
            fail(f"the stream broke off: {_error_text(json.dumps({'error': event.error}))}")
        self._id = event.id or self._id
        self._usage = event.usage or self._usage
        self._receipt = event.quire_receipt or self._receipt
        for choice in event.choices:
            piece = (choice.delta and choice.delta.content) or ""
            if piece and self._first is None:
                self._first = time.monotonic()
            self.text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()

    def show_receipt(self) -> None:
        """On stderr, so that stdout is the answer alone."""
        prompt, output = self._usage.get("prompt_tokens", 0), self._usage.get("completion_tokens", 0)
        now = time.monotonic()
        first = self._first or now
        took_s = now - first
        speed = f", {(output - 1) / took_s:.0f} tokens/s" if output > 1 and took_s > MIN_RATE_S else ""
        err.print(
            f"\n{self._id}: {prompt} + {output} tokens, "
            f"first after {(first - self._begin) * 1000:.0f} ms{speed}",
            style="dim",
        )
        if isinstance(self._receipt, dict):
            err.print(_receipt_table(self._receipt))
            for line in receipt_text.lines(self._receipt):
                err.print(line, style="dim")
        err.print(f"{program()} trace {self._id}", style="dim")


def _receipt_table(receipt: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", style="dim")
    for column in ("stage", "instance", "queue/fetch/compute ms", "tokens: cached/pool/computed", "moved"):
        table.add_column(column, no_wrap=True)
    for stage in receipt.get("stages", []):
        times = "/".join(f"{stage.get(key, 0):.1f}" for key in TIMES)
        tokens = "/".join(str(stage.get(key, 0)) for key in TOKENS)
        moved = "-"
        if stage.get("blocks_moved"):
            size = bytes_text(stage.get("bytes_moved", 0))
            moved = f"{stage['blocks_moved']} blocks, {size}, {stage.get('path', '')}"
        table.add_row(str(stage.get("stage")), str(stage.get("instance")), times, tokens, moved)
    return table


def _local_url() -> str:
    status = status_or_none()
    return addresses.gateway_of(status) if status else DEFAULT_URL


def _model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.status_code != 200:
        fail(f"HTTP {response.status_code}: {_error_text(response.text)}")
    models = msgspec.json.decode(response.text, type=_Models).data
    if not models:
        fail("the gateway serves no model yet; look at `quire status`")
    return models[0].id


def _typed() -> Iterator[str]:
    """Lines of the user until end of file."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise SettingsError(NOT_UTF8) from error
        if line.strip():
            yield _utf8(line)


def _utf8(text: str) -> str:
    """The text itself. Raises: SettingsError where it came as other bytes, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(NOT_UTF8) from error
    return text


def _error_text(body: str) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{error['message']} ({error.get('code') or error.get('type')})"
    except (ValueError, KeyError, TypeError):
        return body[:500]
