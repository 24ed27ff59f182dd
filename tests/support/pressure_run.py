"""Real engines in a pool that is too small for them: `python -m tests.support.pressure_run MODEL SOCKET CASES OUT`.

vLLM is imported once; three processes are forked from here: stock vLLM, which answers the cases one after another;
engine A, which answers the crowd (see CROWD) and then the others all at once, again and again, among requests that
are aborted; and engine B, which comes while A works and is killed in the middle of its own work. OUT gets {"stock",
"crowd", "rounds" (A's answers), "b", "counters"}.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.engine.vllm_setup import prepare_environment

prepare_environment("cpu", 1, in_pages=True)

from shared.engine.interface import EngineRequest  # noqa: E402
from shared.engine.vllm_engine import VllmEngine  # noqa: E402
from shared.engine.worker_config import WorkerSettings  # noqa: E402
from shared.engine.worker_pages import PromptPages  # noqa: E402
from shared.ids import InstanceId  # noqa: E402
from shared.kv.block_hash import chain_seed, pack_tokens  # noqa: E402
from shared.mempool.client import MempoolClient  # noqa: E402
from shared.wire.requests import SamplingSpec, StructuredSpec  # noqa: E402
from tests.support.stock_reference import run_cases  # noqa: E402

MAX_MODEL_LEN = 1472
ABORTED_PER_ROUND = 8
B_WORKS_S = 3.0
CROWD = "crowd-"  # cases that are asked together, before the rounds


def settings(model: str, socket: str, instance: str, **changes: Any) -> WorkerSettings:
    common = {
        "model_dir": model, "model_name": "m", "instance": instance, "mempool_socket": socket, "kv_cache": "pages",
        "dtype": "float32", "device": "cpu", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "acquire_timeout_ms": 2_000, "gpu_memory_utilization": 0.1,
    }  # fmt: skip
    return WorkerSettings(**common | changes)


class Driver:
    """One engine with a front's leases, made before there is an event loop."""

    def __init__(self, config: WorkerSettings) -> None:
        self.engine = VllmEngine(config)
        self.config = config
        self.rng = random.Random(config.instance)
        self.seed = chain_seed("fingerprint", "")
        self.num = 0

    async def start(self) -> None:
        client = MempoolClient(self.config.mempool_socket, InstanceId(self.config.instance))
        client.start()
        assert await client.wait_connected(30_000)
        self.client = client
        self.pages = PromptPages(client, self.engine.description, self.config, kept=True)
        await self.engine.start()

    async def answer(self, case: dict[str, Any], leave_after: int | None = None) -> list[list[int]]:
        """Token ids of every choice; `leave_after`: the client leaves once it has so many deltas."""
        self.num += 1
        name = f"{self.config.instance}-{self.num}"
        prompt = case["prompt"]
        lease = None
        if self.rng.random() < 0.7:
            lease = await self.pages.for_prompt(self.seed, pack_tokens(prompt), "")
        params = dict(case["params"])
        if "structured" in case:
            params["structured"] = StructuredSpec(kind="json_schema", value=case["structured"])
        request = EngineRequest(
            name, "colocated", prompt, SamplingSpec(**params), self.seed,
            held=lease.held if lease else None,
        )  # fmt: skip
        out: dict[int, list[int]] = {index: [] for index in range(params.get("n", 1))}
        is_done = False
        async with contextlib.aclosing(self.engine.generate(request)) as deltas:
            async for count, delta in _numbered(deltas):
                out[delta.index] += delta.token_ids
                is_done |= delta.request_done
                if leave_after is not None and count >= leave_after:
                    break
        if lease is not None:
            self.pages.settle(lease.lease_id, self.engine, is_done)
        return [out[index] for index in sorted(out)]

    async def crowd(self, cases: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
        """All cases at once and nothing else."""
        answers = await asyncio.gather(*(self.answer(case) for case in cases))
        return {case["id"]: answer for case, answer in zip(cases, answers, strict=True)}

    async def round(self, cases: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
        """All cases at once, in any order, with others that are aborted."""
        order = self.rng.sample(cases, len(cases))
        left = [(case, self.rng.randrange(12)) for case in self.rng.choices(cases, k=ABORTED_PER_ROUND)]
        tasks = [asyncio.create_task(self.answer(case, after)) for case, after in left]
        answers = await asyncio.gather(*(self.answer(case) for case in order))
        await asyncio.gather(*tasks)
        return {case["id"]: answer for case, answer in zip(order, answers, strict=True)}

    async def close(self) -> None:
        await asyncio.sleep(0.3)  # the last leases are settled
        await self.client.close()
        await self.engine.close()


async def _numbered(deltas: Any) -> Any:
    count = 0
    async for delta in deltas:
        yield count, delta
        count += 1


def run_a(config: WorkerSettings, cases: list[dict[str, Any]], out: Path, say: int, hear: int) -> None:
    """The crowd, then a round alone, a round beside B, which dies in it, and a round alone."""
    driver = Driver(config)
    crowd = [case for case in cases if case["id"].startswith(CROWD)]
    cases = [case for case in cases if case not in crowd]

    async def run() -> None:
        await driver.start()
        crowded = await driver.crowd(crowd)
        preempted = driver.engine.load().num_preempted
        rounds = [await driver.round(cases)]
        os.write(say, b"1")
        await asyncio.to_thread(os.read, hear, 1)
        beside = asyncio.create_task(driver.round(cases))
        await asyncio.sleep(0.2)
        os.write(say, b"2")
        rounds += [await beside, await driver.round(cases)]
        counters = {"preempted": preempted, "leases": driver.pages.num_leases}
        await driver.close()
        write_whole(out, {"crowd": crowded, "rounds": rounds, "counters": counters})

    asyncio.run(run())


def run_b(config: WorkerSettings, cases: list[dict[str, Any]], out: Path, say: int) -> None:
    """Answers until it is killed."""
    driver = Driver(config)

    async def run() -> None:
        await driver.start()
        answers: list[Any] = []
        os.write(say, b"b")
        while True:
            case = driver.rng.choice(cases)
            answers.append([case["id"], await driver.answer(case)])
            write_whole(out, answers)
            os.write(say, b"a")

    asyncio.run(run())


def forked(work: Callable[[], None]) -> int:
    """Process id of a child that does the work and ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  the child of a fork ends here, whatever it was
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """See the module's docstring."""
    model, socket, cases_path, out_path = sys.argv[1:5]
    folder = Path(out_path).parent
    cases = json.loads(Path(cases_path).read_text())
    parts = {name: folder / f"{name}.json" for name in ("stock", "a", "b")}
    stock = forked(lambda: write_whole(parts["stock"], run_cases(model, cases)))
    assert ended(stock) == 0, "stock vLLM"
    from_a, say_a = os.pipe()
    hear, to_a = os.pipe()
    a = forked(lambda: run_a(settings(model, socket, "a"), cases, parts["a"], say_a, hear))
    os.close(say_a)  # reading ends when the child does
    assert os.read(from_a, 1) == b"1"
    short = [case for case in cases if len(case["prompt"]) < 600 and not case["id"].startswith(CROWD)]
    from_b, say_b = os.pipe()
    b = forked(lambda: run_b(settings(model, socket, "b"), short, parts["b"], say_b))
    os.close(say_b)
    assert os.read(from_b, 1) == b"b"
    os.write(to_a, b"b")
    assert os.read(from_a, 1) == b"2"
    time.sleep(B_WORKS_S)
    assert os.read(from_b, 1) == b"a"  # it has answered something, however slow the machine is
    os.kill(b, signal.SIGKILL)
    ended(b)
    assert ended(a) == 0, "engine A"
    found = {name: json.loads(path.read_text()) for name, path in parts.items() if path.exists()}
    Path(out_path).write_text(json.dumps({"stock": found["stock"], "b": found.get("b", []), **found["a"]}))


def write_whole(path: Path, found: Any) -> None:
    """Whole or not at all: the writer may be killed."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(found))
    beside.replace(path)


if __name__ == "__main__":
    main()
