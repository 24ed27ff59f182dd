"""vLLM workers whose ranks fuse, or weave, what they add up; weave_worker_cpu.py and _gpu.py have the classes."""

import os
from typing import Any

from shared.engine.weave_calibration import calibrate, prepare
from shared.engine.weave_host import HostedWeave
from shared.engine.weave_peers import Peers
from shared.weave.threshold import WeaveRule


class WeaveWorkerMixin:
    """Over any of our workers, or vLLM's own."""

    _woven: HostedWeave | None = None
    _peers: Peers | None = None

    def init_device(self: Any) -> None:
        """vLLM's; torch's symmetric memory leaves multicast alone, unless the setting asks for it.

        torch takes it for every memory that ranks share where GPUs report it, and on many machines it must stay off. A
        variable is all there is to say so, so sums that go vLLM's own way in this rank have none of it either.
        """
        if not self.vllm_config.additional_config["quire_weave"]["multicast"]:
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # noqa: TID251  torch's, not ours
        super().init_device()

    def load_model(self: Any, **kwargs: Any) -> None:
        """vLLM's; then its layers are changed, before anything ran through them and before memory is measured."""
        super().load_model(**kwargs)
        self._woven = HostedWeave(self.model_runner.get_model(), self.vllm_config, self.device)
        self._peers = Peers(self._woven.check)

    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:
        """vLLM's."""
        super().initialize_from_config(kv_cache_config)
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._woven.watch(self.model_runner.attn_groups, block_tokens)

    def compile_or_warm_up_model(self: Any) -> Any:
        """vLLM's; before it captures anything, it is found out where steps are cut, and from where on, if unset."""
        prepare(self._woven)
        return super().compile_or_warm_up_model()

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        """vLLM's. The process ends when another rank is awaited in vain."""
        self._woven.hear(scheduler_output)
        with self._peers.awaited():
            output = super().execute_model(scheduler_output)
        return self._peers.checked(output)

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; as execute_model()."""
        with self._peers.awaited():
            output = super().sample_tokens(*args, **kwargs)
        return self._peers.checked(output)

    def shutdown(self: Any) -> None:
        """vLLM's."""
        if self._peers is not None:
            self._peers.close()
        if self._woven is not None:
            self._woven.close()
        super().shutdown()

    def quire_weave_from(self, fuse_min_tokens: int, full_min_tokens: int) -> None:
        """For tests and measurements, while nothing runs: another rule (0: never) from the next step on."""
        if self._woven is not None:
            rule = WeaveRule(fuse_min_tokens=fuse_min_tokens, full_min_tokens=full_min_tokens)
            self._woven.follow(rule)

    def quire_weave_calibrate(self) -> int:
        """For tests, while nothing runs: measure, or read what was; tokens from which steps are cut from then on."""
        assert self._woven is not None
        calibrate(self._woven)
        return self._woven.min_tokens

    def quire_weave_counters(self) -> dict[str, int]:
        """For tests and measurements: fused operations of whole steps, woven steps, whole steps."""
        return dict(self._woven.sums.counters) if self._woven and self._woven.sums else {}
