"""Messages that start something: to the scheduler and to a worker."""

from services.gateway.call import Call
from services.gateway.core.request_actions import SendGenerate, SendPlace
from shared.wire.placement import Place
from shared.wire.requests import Generate


def place_message(call: Call, action: SendPlace, model: str) -> Place:
    """Where may this attempt run? What is made already is part of the prompt; 0 tokens would mean: not known."""
    return Place(
        request_id=call.request_id,
        attempt=action.attempt,
        num_prompt_tokens=call.num_prompt_tokens + len(call.output_ids),
        max_tokens=max(1, call.sampling.max_tokens - len(call.output_ids)),
        num_choices=call.sampling.n if call.sampling.max_tokens else 1,
        model=model,
        hits=call.found.hits,
        seen_tokens=call.found.seen_tokens,
        session=call.session,
        tenant=call.tenant,
        exclude=action.exclude,
        traceparent=call.schedule_span.traceparent if call.schedule_span is not None else "",
        explain=call.explain,
        continues=call.flow.continues,
        weight=call.weight,
        begun=call.flow.bytes_sent,
    )


def generate_message(call: Call, action: SendGenerate) -> Generate:
    """A stage of an attempt; call.frame goes as its raw frame."""
    return Generate(
        request_id=call.request_id,
        attempt=action.attempt,
        stage=action.stage,
        instance_epoch=action.target.epoch,
        sampling=call.sampling,
        handoff_to=action.handoff_to,
        handoff=action.handoff,
        tenant_salt=call.tenant_salt,
        weight=call.weight,
        deadline_ms=action.deadline_ms,
        traceparent=call.span.traceparent,
        kv=action.kv,
        num_output_tokens=len(call.output_ids),
    )
