"""Routing replay for mixture-of-experts models: records which experts one pass uses, so that a later pass uses the same
experts.

After a small change of the weights, a router may choose other experts for a token, and the token's probability ratio to
the proximal policy then jumps. Baton replays the proximal policy's choice in the updates (arXiv 2507.18071, section
5.3), or the engine's choice in all passes (rollout routing replay, arXiv 2510.11370). Only the choice of experts is
fixed. The weights of the chosen experts come from the current router logits, so routers get gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from baton.errors import EngineFault, UserError

Routing = Mapping[str, torch.Tensor]
"""Name of a router → experts [T, k] of each token, in the order of the recorded pass. −1 means that the router
chooses."""

_MAX_EXPERTS = 256
"""Maximum number of experts of a router. The limit exists because engines report an expert as one byte."""


@dataclass(frozen=True, slots=True)
class _Router:
    module: torch.nn.Module
    is_normalized: bool
    """True if the weights of the chosen experts are normalised to sum to one."""


class RoutingReplay:
    """Records and replays the choices of all routers of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Register hooks on the model's routers. Raises UserError if the model has no router or an unsupported
        router."""
        self._recorded: dict[str, torch.Tensor] | None = None
        self._replayed: Routing | None = None
        found = _outputs(model)
        if not found:
            raise UserError(
                f"trainer.moe_replay: {type(model).__name__} has no routers that return logits, weights and experts; "
                "allowed is 'off'"
            )
        if any(output[0].shape[-1] > _MAX_EXPERTS for _, output in found.values()):
            raise UserError(
                f"trainer.moe_replay: {type(model).__name__} has more than {_MAX_EXPERTS} experts; allowed is 'off'"
            )
        self._width = sum(output[2].shape[-1] for _, output in found.values())
        self._counts = {name: output[2].shape[-1] for name, (_, output) in found.items()}
        self._routers = {
            name: _Router(module, _is_normalized(model, output)) for name, (module, output) in found.items()
        }
        for name, router in self._routers.items():
            router.module.register_forward_hook(lambda _, __, output, name=name: self._routed(name, output))

    @contextmanager
    def recorded(self) -> Iterator[dict[str, torch.Tensor]]:
        """Record the choices of one forward pass in the mapping that the context yields."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replayed(self, routing: Routing | None) -> Iterator[None]:
        """Replay recorded choices in all passes within the context.

        The context must include the backward pass, which may recompute blocks.
        """
        self._replayed = routing
        try:
            yield
        finally:
            self._replayed = None

    def from_engine(self, routing: Sequence[bytes], places: Sequence[int], num_places: int) -> Routing:
        """Convert the choices that an engine reported for tokens at `places` to a Routing of shape [num_places, k] per
        router, with −1 at all other places.

        Where the engine reported empty bytes, the routers choose. Raises EngineFault for bytes whose length does not
        match this model's routers.
        """
        known = [(place, chosen) for place, chosen in zip(places, routing, strict=True) if chosen]
        if any(len(chosen) != self._width for _, chosen in known):
            raise EngineFault(
                f"the engine reported other routers than this model's: expected {self._width} bytes per token"
            )
        laid = torch.full((num_places, self._width), -1)
        if known:
            values = np.frombuffer(b"".join(chosen for _, chosen in known), dtype=np.uint8).reshape(len(known), -1)
            laid[[place for place, _ in known]] = torch.from_numpy(values.astype(np.int64))
        parts = torch.split(laid, list(self._counts.values()), dim=1)
        return dict(zip(self._counts, parts, strict=True))

    def _routed(self, name: str, output: Any) -> Any:
        logits, scores, experts = output
        if self._recorded is not None:
            self._recorded[name] = experts.detach()
        if self._replayed is None:
            return output
        given = self._replayed[name].to(experts.device)
        kept = torch.where(given >= 0, given, experts)
        return logits, _scores(logits, kept, self._routers[name].is_normalized).to(scores.dtype), kept


def routing_bytes(routing: Routing) -> list[bytes]:
    """Return one bytes object per token, with one byte for each router and chosen expert, in the order of the
    routers."""
    chosen = torch.cat(tuple(routing.values()), dim=1).to("cpu", torch.uint8).numpy()
    return [row.tobytes() for row in chosen]


def _outputs(model: PreTrainedModel) -> dict[str, tuple[torch.nn.Module, Any]]:
    """Return name → (router, its output for two tokens) for every router of the model."""
    found: dict[str, tuple[torch.nn.Module, Any]] = {}

    def look(name: str, module: torch.nn.Module, output: Any) -> None:
        is_routing = isinstance(output, tuple) and len(output) == 3 and all(isinstance(o, torch.Tensor) for o in output)
        if is_routing and not output[2].is_floating_point() and output[1].shape == output[2].shape:
            found[name] = module, output

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: look(name, module, output))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _scores(logits: torch.Tensor, experts: torch.Tensor, is_normalized: bool) -> torch.Tensor:
    """Return the weights [T, k] of the chosen experts: softmax probabilities, normalised to sum to one if the router
    does so."""
    chosen = logits.float().softmax(-1).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) if is_normalized else chosen


def _is_normalized(model: PreTrainedModel, output: Any) -> bool:
    logits, scores, experts = output
    for is_normalized in (True, False):
        if torch.allclose(_scores(logits, experts, is_normalized), scores.float(), atol=1e-3, rtol=1e-2):
            return is_normalized
    raise UserError(
        f"trainer.moe_replay: the routers of {type(model).__name__} do not weight experts by the softmax of their "
        "logits, so a choice cannot be replayed; allowed is 'off'"
    )
