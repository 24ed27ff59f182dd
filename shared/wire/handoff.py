"""What a decode instance needs to continue what prefill began (ARCHITECTURE.md, "Handoff")."""

from typing import Literal

from msgspec import Struct

from shared.ids import HandoffId, InstanceId
from shared.kv.layout import EngineDescription

HandoffMode = Literal["resample", "continue"]


class HandoffState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Made by the prefill instance.

    `resample`: decode loads the KV of the prompt, recomputes its last position and samples the first
    token itself with the same seed, grammar and penalties: exact for every sampling feature.
    `continue`: the first token is final, and the client may have it. Decode is asked to go on behind the prompt and it,
    which only some requests allow: requests.can_continue().
    """

    handoff_id: HandoffId
    source: InstanceId
    description: EngineDescription  # of the source: pages are used only if family_key agrees
    mode: HandoffMode = "resample"
    valid_tokens: int = 0  # leading prompt tokens whose KV is in pages, the partial last block included
    output_token_ids: list[int] = []
    output_logprobs: list[float] = []
    num_sampler_draws: int = 0  # draws taken from the request's generator
    grammar_token_ids: list[int] = []  # tokens that the structured-output grammar has accepted
    source_mempool: str = ""  # address of the mempool that has the pages, for one on another host; "": none
    stop_tail: str = ""  # text held back because a stop string may begin in it
