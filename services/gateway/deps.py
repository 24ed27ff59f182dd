"""What one gateway process shares between its routes."""

import time
from functools import cached_property
from typing import Any

import msgspec

from services.gateway import tally
from services.gateway.auth import KeyRing, load_keys, load_weights
from services.gateway.cluster import Cluster
from services.gateway.config import GatewaySettings
from services.gateway.core.admission import Admission
from services.gateway.core.request_flow import Limits
from services.gateway.core.retry_budget import RetryBudget
from services.gateway.core.tools import ToolFormat, format_of
from services.gateway.membership import Membership
from services.gateway.openai import SamplingDefaults
from services.gateway.text import ModelText
from shared.errors import SettingsError
from shared.kv.layout import EngineDescription
from shared.mempool.api_hashes import HashMemory
from shared.prompttree.asked_before import AskedBefore
from shared.prompttree.client import PromptTreeClient
from shared.prompttree.lookup_cache import LookupCache

UNKNOWN_MODEL_LEN = 2_048
# of a process: at most 10 MiB; with blocks of 16 tokens, prompts' last million tokens
MAX_HASH_CHUNKS = 2_048


class Gateway:
    """start() once, then the routes, then stop()."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.keys: KeyRing = load_keys(settings.api_keys, settings.api_keys_file)
        self.weights = load_weights(settings.tenant_weights)
        self.text = ModelText(settings.model_dir, threads=settings.tokenizer_threads)
        self.tool_format: ToolFormat = format_of(
            self.text.tool_template_source, self.text.tokenizer.token_to_id
        )
        self.sampling_defaults = _sampling_defaults(self.text.generation_config)
        self.started_s = int(time.time())
        self.in_flight = 0  # while it drains: answers that run, or are not read yet
        self._hashes = HashMemory(1, max_chunks=MAX_HASH_CHUNKS)
        self.admission = Admission(settings.max_concurrent_requests, settings.max_concurrent_per_tenant)
        limits = Limits(
            placement_deadline_ms=settings.placement_deadline_ms,
            shed_wait_ms=settings.shed_wait_ms,
            place_reply_ms=settings.place_reply_ms,
            request_deadline_ms=settings.request_deadline_ms,
            resume_deadline_ms=settings.resume_deadline_ms,
            worker_silent_ms=settings.worker_silent_ms,
        )
        budget = RetryBudget(settings.retry_share, settings.retry_floor_per_s, settings.retry_burst)
        self.cluster = Cluster(
            settings.scheduler, model=settings.model_name, limits=limits, retry_budget=budget
        )
        self.membership = Membership(
            settings.coordinator_url,
            key=settings.coordinator_key,
            model=settings.model_name,
            interval_ms=settings.membership_interval_ms,
            on_change=self.cluster.on_members,
        )
        self.tree: PromptTreeClient | None = None
        if settings.redis_url:
            self.tree = PromptTreeClient(
                settings.redis_url,
                deadline_ms=settings.tree_lookup_deadline_ms,
                max_blocks=settings.tree_max_blocks,
                cache=LookupCache(settings.tree_cache_answers, settings.tree_cache_age_ms)
                if settings.tree_cache_answers
                else None,
            )

    @property
    def description(self) -> EngineDescription | None:
        """Of the model that the cluster serves; None until the coordinator has named an instance."""
        return self.membership.description

    @property
    def max_model_len(self) -> int:
        """Context length in tokens: the instances', else the model's own."""
        found = self.membership.description
        if found is not None and found.max_model_len:
            return found.max_model_len
        return int(self.text.config.get("max_position_embeddings") or UNKNOWN_MODEL_LEN)

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's name for the version that answered: the head of the model's content fingerprint."""
        found = self.membership.description
        return f"fp_{found.fingerprint[:12]}" if found else "fp_unknown"

    @cached_property
    def asked_before(self) -> AskedBefore:
        """Made for the first prompt that is looked up: 8 MiB, of no use without a prompt tree."""
        return AskedBefore()

    def hash_memory(self, block_tokens: int) -> HashMemory:
        """Block hashes of prompts whose beginnings were seen before cost a tenth of hashing them again."""
        if self._hashes.block_tokens != block_tokens:
            self._hashes = HashMemory(block_tokens, max_chunks=MAX_HASH_CHUNKS)
        return self._hashes

    async def start(self) -> None:
        """Connect. Nothing here needs the others to be there already."""
        self.cluster.start()
        if self.tree is not None:
            self.tree.open()
        await self.membership.start()

    async def stop(self) -> None:
        """Fail what still runs, close every connection."""
        await self.membership.stop()
        await self.cluster.stop()
        if self.tree is not None:
            await self.tree.close()
        self.text.close()
        tally.settle()

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether a request could be served now, and why not."""
        details: dict[str, Any] = {
            "draining": self.admission.draining,
            "scheduler": self.cluster.scheduler_up,
            "workers": len(self.cluster.workers_up),
            "model": self.description is not None,
            "coordinator": self.membership.reachable,
        }
        if self.admission.draining:
            details["in_flight"] = self.in_flight
        ready = (
            not self.admission.draining
            and self.cluster.scheduler_up
            and bool(self.cluster.workers_up)
            and self.description is not None
        )
        return ready, details


def _sampling_defaults(generation_config: dict[str, Any]) -> SamplingDefaults:
    """What the model's generation_config.json says, where it says something."""
    known = SamplingDefaults.__struct_fields__
    found = {key: generation_config[key] for key in known if generation_config.get(key) is not None}
    try:
        return msgspec.convert(found, SamplingDefaults, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"generation_config.json: {error}") from error
