"""What modelled bursts are of: an 8B shape on an H200 without graphs, about as a worker's profile had it once.

Fixed here, not read from result files: how full memory gets in these runs, and so what they can show, follows from it.
"""

from loadtest.simulator.hardware import MODELS
from loadtest.simulator.prices import ModelPrices
from shared.wire.cost import CostCoefficients

RATE_PER_S = 5.0  # that the engine can keep
EAGER_H200 = ModelPrices(
    CostCoefficients(
        shape=MODELS["llama-8b"], device="NVIDIA H200", num_processors=132, max_batched_tokens=8192,
        matmul_ms_per_gflop=0.00115, memory_ms_per_gb=0.147, attention_ms_per_gflop=0.00147,
        attention_square_ms_per_gflop=0.00097, kv_read_ms_per_gb=0.278, step_overhead_ms=2.45, decode_request_ms=0.0143,
        request_ms=5.73, launch_ms=8.17, prompt_token_ms=0.00078,
    )
)  # fmt: skip
