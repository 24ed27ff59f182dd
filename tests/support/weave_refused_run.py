"""Two ranks that shall fuse and cannot: `python -m tests.support.weave_refused_run SOCKET OUT`.

An engine in the pool's pages with worker.weave = fuse, as one that gave up compiling for it; its second rank says that
it cannot. Before it the same engine that is never asked to. OUT gets for "off" and "fuse": {"answer": tokens, "ranks":
[class of the workers, whether they are told to fuse], "said": what the log says of it}.
"""

import asyncio
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.pressure_run import (
    Driver,
    ended,
    forked,
    settings,
)  # first: it prepares vLLM's environment

from vllm.distributed import get_tp_group  # isort: skip
from shared.engine import vllm_engine, weave_host  # isort: skip
from shared.kernels.allreduce_rmsnorm.errors import FusedRefused  # isort: skip
from shared.kv.block_hash import chain_seed  # isort: skip

MODEL = Path(__file__).resolve().parents[2] / "deploy" / "models" / "quire-demo"
OPTIONS = {"tensor_parallel_size": 2, "max_model_len": 1472, "max_num_batched_tokens": 512}
CASE = {
    "id": "one",
    "prompt": list(range(5, 90)),
    "params": {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
}


def cannot_in_the_second(*_: Any) -> Any:
    """The fused operation, of which nothing is asked."""
    if get_tp_group().rank_in_group == 1:
        raise FusedRefused("made up for this test")
    return SimpleNamespace(), lambda: None


def run(socket: str, out: Path, weave: str) -> None:
    said: list[str] = []
    log = logging.getLogger("shared.engine.weave_restart")
    log.addFilter(lambda record: said.append(record.getMessage()) or True)
    stock = vllm_engine.weave_arguments

    def as_on_gpus(*args: Any) -> dict[str, Any]:
        found = stock(*args)
        if found:
            found["additional_config"]["quire_weave"]["starts_anew"] = True
        return found

    vllm_engine.weave_arguments = as_on_gpus
    weave_host.open_fused = cannot_in_the_second
    driver = Driver(settings(str(MODEL), socket, f"{weave}-0", weave=weave, **OPTIONS))

    async def asked() -> dict[str, Any]:
        await driver.start()
        driver.seed = chain_seed("fingerprint", weave)
        answer = await driver.answer(CASE)
        config = driver.engine._llm.vllm_config
        await driver.close()
        hosted = "quire_weave" in config.additional_config
        return {"answer": answer, "ranks": [config.parallel_config.worker_cls, hosted], "said": said}

    out.write_text(json.dumps(asyncio.run(asked())))


def main() -> None:
    """See the module's docstring."""
    socket, out = sys.argv[1], Path(sys.argv[2])
    found = {}
    for weave in ("off", "fuse"):
        part = out.with_suffix(f".{weave}")
        assert ended(forked(lambda part=part, weave=weave: run(socket, part, weave))) == 0, weave
        found[weave] = json.loads(part.read_text())
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
