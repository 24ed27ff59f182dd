"""Where the prompts that a prefill engine computes go, known before they are done: for schedulers that send ahead."""

from typing import Any, NamedTuple

from vllm.v1.request import Request, RequestStatus

from shared.engine.block_hasher import given
from shared.engine.page_scheduler import PageSchedulerMixin
from shared.ids import HandoffId, InstanceId


class Destination(NamedTuple):
    """Where a prompt goes when it is computed."""

    handoff_id: HandoffId
    target: InstanceId
    traceparent: str


class DestinationsMixin(PageSchedulerMixin):
    """`_destinations`: of prompts that are not handed over yet, by request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._destinations: dict[str, Destination] = {}

    def _add_request(self, request: Request) -> None:
        params = given(request)
        if params.get("handoff_id") and params.get("handoff_target"):
            self._destinations[request.request_id] = Destination(
                HandoffId(params["handoff_id"]),
                InstanceId(params["handoff_target"]),
                (request.trace_headers or {}).get("traceparent", ""),
            )
        super()._add_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        destination = self._destinations.get(request.request_id)
        if destination is not None and request.status == RequestStatus.FINISHED_ABORTED:
            self.quota.layers_given_up(destination.handoff_id, destination.target)
        self._forget(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    def _forget(self, request_id: str) -> None:
        self._destinations.pop(request_id, None)
