"""Scripted neighbours of a gateway on real sockets: coordinator, scheduler and workers that do as told."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.free_ports import free_port
from shared.ids import Epoch, HandoffId, InstanceId
from shared.kv.block_hash import unpack_tokens
from shared.kv.layout import EngineDescription
from shared.transport.zmq_channel import RouterServer
from shared.wire.handoff import HandoffState
from shared.wire.membership import InstanceList, InstanceView
from shared.wire.placement import (
    FROM_SCHEDULER,
    TO_SCHEDULER,
    Ended,
    GatewayHello,
    Place,
    Placed,
    Rejected,
    Target,
)
from shared.wire.requests import (
    TO_GATEWAY,
    TO_WORKER,
    Abort,
    Failed,
    Finished,
    Generate,
    Prefilled,
    PromptScored,
    StageReceipt,
    TokenChunk,
    TokenLogprob,
    Tokens,
)

MODEL = "rig-model"
MAX_MODEL_LEN = 512
BLOCK_TOKENS = 8
DESCRIPTION = EngineDescription(
    model=MODEL, fingerprint="f" * 64, dtype="float32", layout="layers-blocks", backend="MOCK",
    block_tokens=BLOCK_TOKENS, max_model_len=MAX_MODEL_LEN,
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


USER = [{"role": "user", "content": "the quick brown fox"}]


def chat(**changes: object) -> dict[str, object]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": USER, **changes}


def make_model_dir(folder: Path) -> Path:
    """A byte-level BPE tokenizer of 300-odd entries with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 8], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": 1, "bos_token_id": 0, "max_position_embeddings": MAX_MODEL_LEN,
                    "vocab_size": tokenizer.get_vocab_size(), "architectures": ["LlamaForCausalLM"]})
    )  # fmt: skip
    return folder


class FakeCoordinator:
    """Answers GET /v1/instances with whatever `views` holds."""

    def __init__(self) -> None:
        self.views: list[InstanceView] = []
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader, writer) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    body = msgspec.json.encode(InstanceList(version=1, instances=self.views))
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
                    await writer.drain()
        finally:  # also when the loop ends first: a writer that is left open complains at whatever test runs by then
            writer.close()


class FakeWorker:
    """Runs `script(worker, identity, generate, prompt_ids)` as a task for every Generate; records aborts."""

    def __init__(self, instance: str, role: str = "decode") -> None:
        self.instance = InstanceId(instance)
        self.role = role
        self.epoch = Epoch(1)
        self.generated: list[Generate] = []
        self.prompts: list[list[int]] = []
        self.aborted: list[Abort] = []
        self.abort_seen = asyncio.Event()
        self.script: Callable = answer_tokens([])
        self._tasks: set[asyncio.Task] = set()

    async def start(self, address: str = "") -> None:
        """`address`: of the one that is back; else one that nobody gets while this one is away."""
        address = address or f"tcp://127.0.0.1:{free_port()}"
        self.server = RouterServer(address, into=TO_WORKER, out=TO_GATEWAY, on_message=self._hear)
        await self.server.start()

    @property
    def target(self) -> Target:
        return Target(instance=self.instance, epoch=self.epoch, role=self.role, endpoint=self.server.address)

    @property
    def view(self) -> InstanceView:
        return InstanceView(
            instance=self.instance, role=self.role, endpoint=self.server.address, host="h", epoch=self.epoch,
            description=DESCRIPTION, age_ms=0, state="live",
        )  # fmt: skip

    def _hear(self, identity, seq, message, raw) -> None:
        if isinstance(message, Generate):
            self.generated.append(message)
            self.prompts.append(unpack_tokens(raw[0]))
            task = asyncio.ensure_future(self.script(self, identity, message, self.prompts[-1]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, Abort):
            self.aborted.append(message)
            self.abort_seen.set()

    def die(self) -> None:
        """As a killed process: the connection ends, nothing is said."""
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        self.server.close()

    def tokens(self, identity, gen: Generate, ids: list[int], *, index=0, finish=None, logprobs=None) -> None:
        chunk = TokenChunk(gen.request_id, gen.attempt, index, ids, finish, None, logprobs)
        self.server.send(identity, Tokens(chunks=[chunk]))

    def finished(self, identity, gen: Generate, prompt_tokens: int, **receipt) -> None:
        stage = StageReceipt(instance=self.instance, stage=gen.stage, prompt_tokens=prompt_tokens, **receipt)
        self.server.send(identity, Finished(request_id=gen.request_id, attempt=gen.attempt, receipt=stage))

    def failed(self, identity, gen: Generate, code: str, retryable: bool) -> None:
        self.server.send(identity, Failed(
            request_id=gen.request_id, attempt=gen.attempt, code=code, message="scripted",
            retryable=retryable,
        ))  # fmt: skip

    def prefilled(
        self,
        identity,
        gen: Generate,
        first: int | None,
        *,
        prompt_tokens: int,
        end: str | None = None,
        mode: str = "resample",
        rows: list[list[TokenLogprob] | None] | None = None,
    ) -> None:
        handoff = None
        if end is None:
            handoff = HandoffState(
                handoff_id=gen.handoff_to.handoff_id, source=self.instance, description=DESCRIPTION, mode=mode
            )
        stage = StageReceipt(
            instance=self.instance,
            stage="prefill",
            prompt_tokens=prompt_tokens,
            tokens_engine=8,
            tokens_pool=8,
        )
        self.server.send(identity, Prefilled(
            request_id=gen.request_id, attempt=gen.attempt, receipt=stage, handoff=handoff,
            first=TokenChunk(gen.request_id, gen.attempt, 0, [] if first is None else [first], end),
            prompt_logprobs=rows,
        ))  # fmt: skip

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self.server.close()


def answer_tokens(ids: list[int], *, gap_s: float = 0.0, finish: str = "stop", logprobs: bool = False):
    """A script: every choice gets these tokens one at a time, max_tokens obeyed; prefill hands off.

    An attempt that goes on behind some of them gets the others.
    """

    async def script(worker: FakeWorker, identity, gen: Generate, prompt: list[int]) -> None:
        rows: list[list[TokenLogprob] | None] | None = None
        if gen.sampling.prompt_logprobs is not None:
            rows = [None, *([TokenLogprob(token, -0.25, 1)] for token in prompt[1:])]
        if gen.stage == "prefill":
            if gen.sampling.max_tokens:
                worker.prefilled(identity, gen, ids[0], prompt_tokens=len(prompt), rows=rows)
            else:
                worker.prefilled(identity, gen, None, prompt_tokens=len(prompt), rows=rows, end="length")
            return
        if rows is not None and gen.stage == "colocated":
            scored = PromptScored(request_id=gen.request_id, attempt=gen.attempt, prompt_logprobs=rows)
            worker.server.send(identity, scored)
        if not gen.sampling.max_tokens:
            for index in range(gen.sampling.n):
                worker.tokens(identity, gen, [], index=index, finish="length")
        num = min(len(ids), gen.sampling.max_tokens)
        reason = finish if num == len(ids) else "length"
        for position in range(gen.num_output_tokens, num):
            for index in range(gen.sampling.n):
                probs = None
                if logprobs or gen.sampling.logprobs is not None:
                    token = ids[position]
                    probs = [[TokenLogprob(token, -0.5, 1), TokenLogprob(token + 1, -1.5, 2)]]
                last = reason if position == num - 1 else None
                worker.tokens(identity, gen, [ids[position]], index=index, finish=last, logprobs=probs)
            await asyncio.sleep(gap_s)
        worker.finished(identity, gen, len(prompt), tokens_computed=len(prompt))

    return script


class FakeScheduler:
    """`decide(place)` gives Placed, Rejected or None (silence)."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.ended: list[Ended] = []
        self.decide: Callable[[Place], Placed | Rejected | None] = lambda place: None

    async def start(self, address: str = "") -> None:
        """`address`: as a worker's."""
        address = address or f"tcp://127.0.0.1:{free_port()}"
        self.server = RouterServer(address, into=TO_SCHEDULER, out=FROM_SCHEDULER, on_message=self._hear)
        await self.server.start()

    def _hear(self, identity, seq, message, raw) -> None:
        if isinstance(message, GatewayHello):
            return
        if isinstance(message, Ended):
            self.ended.append(message)
            return
        self.places.append(message)
        verdict = self.decide(message)
        if verdict is not None:
            self.server.send(identity, verdict)

    async def stop(self) -> None:
        self.server.close()


def colocate(*workers: FakeWorker):
    """Place on the first worker that is not excluded."""

    def decide(place: Place) -> Placed | Rejected:
        for worker in workers:
            if worker.instance not in place.exclude:
                return Placed(
                    request_id=place.request_id, attempt=place.attempt, kind="colocated",
                    decode=worker.target, policy="least_load", reason="it was the first",
                )  # fmt: skip
        return Rejected(
            request_id=place.request_id, attempt=place.attempt, code="unavailable", reason="no instance",
            retry_after_ms=50,
        )  # fmt: skip

    return decide


def disaggregate(prefill: FakeWorker, decode: FakeWorker):
    """Always the same pair."""

    def decide(place: Place) -> Placed:
        return Placed(
            request_id=place.request_id, attempt=place.attempt, kind="disaggregated", prefill=prefill.target,
            decode=decode.target, handoff_id=HandoffId(f"h-{place.attempt}"), policy="prompt_tree",
            reason="longest prefix",
        )  # fmt: skip

    return decide


def free_listener() -> socket.socket:
    """A listening address on loopback, taken."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something that another task or process will make true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition belongs to code that signals nothing
            await asyncio.sleep(0.005)
