"""A model's trunk computed in two parts of a step's tokens, one's communication under the other's compute.

The order is shared/weave/woven_order.py's. On a GPU communication has a stream of its own, of a higher priority, and
events tie the two together without the host (TokenWeave 3.1.2); on a CPU the same calls come one after the other.
"""

from typing import Any, Protocol

import torch
from vllm.forward_context import get_forward_context, override_forward_context

from shared.engine.weave_cuts import CutStep, StepCuts
from shared.engine.weave_layers import FusedSums
from shared.weave.woven_order import PARTS, woven_order


class Streams(Protocol):
    """Where communication goes, and who waits for it. One step at a time."""

    def begin(self) -> None:
        """What the caller's stream has been given so far comes before all communication."""
        ...

    def send(self, part: int) -> None:
        """From here on calls are communication of this part, behind its compute; ended by `sent`."""
        ...

    def sent(self, part: int) -> None:
        """From here on calls are compute again."""
        ...

    def wait(self, part: int) -> None:
        """What follows comes behind this part's communication."""
        ...


class OneAfterTheOther:
    """A CPU's."""

    def begin(self) -> None:
        """See Streams."""

    def send(self, part: int) -> None:
        """See Streams."""

    def sent(self, part: int) -> None:
        """See Streams."""

    def wait(self, part: int) -> None:
        """See Streams."""


class TwoStreams:
    """A GPU's. Nothing here waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._comm = torch.cuda.Stream(device, priority=-1)
        self._compute = torch.cuda.current_stream(device)
        self._computed = [torch.cuda.Event() for _ in PARTS]
        self._communicated = [torch.cuda.Event() for _ in PARTS]

    def begin(self) -> None:
        """See Streams."""
        self._compute = torch.cuda.current_stream(self._device)

    def send(self, part: int) -> None:
        """See Streams."""
        self._computed[part].record(self._compute)
        self._comm.wait_event(self._computed[part])
        torch.cuda.set_stream(self._comm)

    def sent(self, part: int) -> None:
        """See Streams."""
        self._communicated[part].record(self._comm)
        torch.cuda.set_stream(self._compute)

    def wait(self, part: int) -> None:
        """See Streams."""
        self._compute.wait_event(self._communicated[part])


class WovenForward:
    """In the place of a model's forward: steps that are cut go through the trunk in two parts, others vLLM's way.

    Args: num_sms: what communication may take of the GPU while the other part computes.
    """

    def __init__(self, model: Any, sums: FusedSums, cuts: StepCuts, streams: Streams, num_sms: int) -> None:
        self._stock = model.forward
        self._inner = model.model
        self._sums, self._cuts, self._streams, self._num_sms = sums, cuts, streams, num_sms

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """vLLM's forward."""
        cut = None
        if positions is not None and positions.dim() == 1 and not kwargs:
            cut = self._cuts.take(get_forward_context(), positions.shape[0])
        if cut is None:
            self._sums.counters["whole"] += 1
            return self._stock(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        self._sums.counters["woven"] += 1
        hidden = self._inner.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        return self.weave(hidden, positions, cut)

    def weave(
        self, hidden: torch.Tensor, positions: torch.Tensor | None, cut: CutStep, end_layer: int = 0
    ) -> torch.Tensor:
        """All layers, or those before `end_layer`, and the last norm.

        Args: hidden: [tokens, hidden], becomes the residual and is overwritten.
        """
        assert positions is not None
        self._sums.is_woven = True
        try:
            return self._weave(hidden, positions, cut, end_layer)
        finally:
            self._sums.is_woven = False

    def _weave(
        self, hidden: torch.Tensor, positions: torch.Tensor, cut: CutStep, end_layer: int
    ) -> torch.Tensor:
        inner, sums, streams = self._inner, self._sums, self._streams
        end_layer = end_layer or inner.end_layer
        residual = [hidden[tokens] for tokens in cut.tokens]
        place = [positions[tokens] for tokens in cut.tokens]
        normed = [inner.layers[inner.start_layer].input_layernorm.plain(rows) for rows in residual]
        partial = list(normed)  # kept until communication has read it
        streams.begin()
        for step in woven_order(inner.start_layer, end_layer):
            part, layer = step.part, inner.layers[step.layer]
            if step.waits_for_own:
                streams.wait(part)
            sums.lane = part
            if step.stage == "attn":
                with override_forward_context(cut.contexts[part]):
                    partial[part] = layer.self_attn(positions=place[part], hidden_states=normed[part])
                norm = layer.post_attention_layernorm
            else:
                partial[part] = layer.mlp(normed[part])
                is_last = step.layer + 1 == end_layer
                norm = inner.norm if is_last else inner.layers[step.layer + 1].input_layernorm
            streams.send(part)
            try:
                normed[part], _ = sums.fused.run(
                    partial[part],
                    residual[part],
                    norm.weight.data,
                    norm.eps,
                    lane=part,
                    num_sms=self._num_sms,
                )
            finally:
                streams.sent(part)
        sums.lane = 0
        for part in PARTS:
            streams.wait(part)
        return torch.cat(normed)
