"""What one gateway process shares between its routes."""

import time
from typing import Any

from shared.prompttree.client import PromptTreeClient

from services.gateway.auth import KeyRing, load_keys
from services.gateway.cluster import Cluster
from services.gateway.config import GatewaySettings
from services.gateway.core.admission import Admission
from services.gateway.core.request_flow import Limits
from services.gateway.membership import Membership
from services.gateway.text import ModelText
from shared.ids import InstanceId
from shared.kv.layout import EngineDescription
from shared.observe.log import get_logger

_log = get_logger("gateway")


class Gateway:
    """start() once, then the routes, then stop()."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.keys: KeyRing = load_keys(settings.api_keys, settings.api_keys_file)
        self.text = ModelText(settings.model_dir)
        self.started_s = int(time.time())
        self.admission = Admission(settings.max_concurrent_requests, settings.max_concurrent_per_tenant)
        limits = Limits(
            placement_deadline_ms=settings.placement_deadline_ms,
            shed_wait_ms=settings.shed_wait_ms,
            place_reply_ms=settings.place_reply_ms,
            request_deadline_ms=settings.request_deadline_ms,
        )
        self.cluster = Cluster(settings.scheduler, model=settings.model_name, limits=limits)
        self.membership = Membership(
            settings.coordinator_url,
            key=settings.coordinator_key,
            model=settings.model_name,
            interval_ms=settings.membership_interval_ms,
            on_change=self.cluster.on_members,
        )
        self.tree: PromptTreeClient | None = None

    @property
    def description(self) -> EngineDescription | None:
        """Of the model that the cluster serves; None until the coordinator has named an instance."""
        return self.membership.description

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's name for the version that answered: the head of the model's content fingerprint."""
        found = self.membership.description
        return f"fp_{found.fingerprint[:12]}" if found else "fp_unknown"

    async def start(self) -> None:
        """Connect. Nothing here needs the others to be there already."""
        self.cluster.start()
        await self.membership.start()

    async def stop(self) -> None:
        """Fail what still runs, close every connection."""
        await self.membership.stop()
        await self.cluster.stop()

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether a request could be served now, and why not."""
        details: dict[str, Any] = {
            "draining": self.admission.draining,
            "scheduler": self.cluster.scheduler_up,
            "workers": len(self.cluster.workers_up),
            "model": self.description is not None,
            "coordinator": self.membership.reachable,
        }
        ready = (
            not self.admission.draining
            and self.cluster.scheduler_up
            and bool(self.cluster.workers_up)
            and self.description is not None
        )
        return ready, details

    async def lookup(self, hashes: list[bytes]) -> dict[InstanceId, int]:
        """Placeholder."""
        return {}
