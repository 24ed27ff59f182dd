"""AQUA tensors on real GPUs: `python -m tests.gpu.aqua_on_gpus` compares every byte of every way and prints rates.

Two GPUs: a consumer on the first, a lender on the second, a mempool, a coordinator and Redis. A tensor of each size
goes to host memory and back, to the lender and back, and off the lender when that reclaims. Rates: call to return.
Host memory is page-locked. `--device cpu` tries the script. Under a minute; it ends with an error when a byte is wrong
or an address moved. Steps are said as they end, the table comes last.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from shared.aqua.consumer import Aqua
from shared.aqua.lender import Lender
from shared.aqua.local_memory import mempool_device
from shared.aqua.tensor import AquaTensor
from shared.errors import Overloaded
from tests.support.aqua_rig import AquaRig

LIMIT_S = 60.0
REPEATS = 3


BEGAN_S = time.monotonic()


def say(what: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.1f} s  {what}", flush=True)


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def lend(lender: Lender, num_bytes: int) -> None:
    def lends() -> bool:
        try:
            return lender.lend(num_bytes) >= num_bytes
        except Overloaded:  # the coordinator has not heard of the mempool yet
            return False

    until(lends, "memory is lent")


def there_and_back(tensor: AquaTensor, data: torch.Tensor, where: str) -> tuple[float, float]:
    """Seconds to come here, and to leave. Checks bytes and address."""
    come, leave = [], []
    for _ in range(REPEATS):
        assert tensor.location == where, f"{tensor.location} instead of {where}"
        come.append(seconds(tensor.to_compute))
        x = tensor.to_compute()
        assert x.data_ptr() == tensor.address, "the address moved"
        assert torch.equal(x, data), f"other bytes came from {where}"
        x += 1
        data += 1
        leave.append(seconds(tensor.offload))
    return median(come), median(leave)


def measure(args: argparse.Namespace, rig: AquaRig, sizes: list[int]) -> list[tuple[str, ...]]:
    most = max(sizes)
    lends_on = torch.device("cpu" if args.device == "cpu" else "cuda:1")
    consumer = rig.consumer(
        device="cpu" if args.device == "cpu" else "cuda:0",
        local_bytes=most + rig.page_bytes,
        borrow_bytes=most,
    )
    device = "" if args.device == "cpu" else mempool_device(lends_on, "lender")
    settings = rig.lender(device=device, num_pages=most // rig.page_bytes)
    rows = []
    with Lender(settings) as lender, Aqua(consumer) as aqua:
        for size in sizes:
            data = torch.randint(0, 1 << 20, (size // 4,), dtype=torch.int32, device=consumer.device)
            with AquaTensor.from_tensor(data, aqua) as tensor:
                say(f"{size >> 20} MiB are in host memory")
                from_dram, to_dram = there_and_back(tensor, data, "dram")
                lend(lender, most)
                until(lambda t=tensor: bool(aqua.step()) or t.location == "peer", "a loan")
                until(lambda t=tensor: aqua.step() is not None and t.location == "peer", "the peer")
                say(f"{size >> 20} MiB are on the peer")
                from_peer, to_peer = there_and_back(tensor, data, "peer")
                reclaim = lender.reclaim(60_000)  # the word of it comes on another connection
                until(lambda t=tensor: t.location == "dram", "the bytes are in host memory")
                assert torch.equal(tensor.to_compute(), data), "the reclaim changed a byte"
            say(f"{size >> 20} MiB are taken back in {1e3 * reclaim:.0f} ms")
            gb = size / 1e9
            rates = [f"{gb / s:.1f}" for s in (from_dram, to_dram, from_peer, to_peer)]
            rows.append((f"{size >> 20}", *rates, f"{1e3 * reclaim:.0f}"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    sizes = [1 << 20, 4 << 20] if on_cpu else [64 << 20, 1 << 30, 4 << 30]
    page_bytes = (64 << 10) if on_cpu else (8 << 20)
    with tempfile.TemporaryDirectory(prefix="quire-aqua-") as folder:
        pool = {} if on_cpu else {"pin-host": "true"}
        rig = AquaRig(Path(folder), page_bytes, 2 * max(sizes) // page_bytes + 8, **pool)
        try:
            say("mempool and coordinator run")
            rows = measure(args, rig, sizes)
        except BaseException:
            print((Path(folder) / "mempool.log").read_text()[-3_000:], flush=True)
            raise
        finally:
            rig.close()
    say("done")
    heads = ("MiB", "from DRAM GB/s", "to DRAM", "from peer", "to peer", "reclaim ms")
    for row in (heads, *rows):
        print("".join(f"{cell:>16}" for cell in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
