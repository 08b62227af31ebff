"""Routing replay for mixture-of-experts models: records which experts one pass uses, and reuses them in a later pass.

After a small change of the weights, a router may choose other experts for a token. The probability ratio of current to
proximal policy then jumps at this token. Baton replays the proximal policy's choice in the updates (arXiv 2507.18071,
section 5.3), or the engine's choice in all passes (rollout routing replay, arXiv 2510.11370). Only the choice of
experts is fixed. The weights of the chosen experts come from the current router logits, so routers still get gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from baton.errors import EngineFault, UserError

Routing = Mapping[str, torch.Tensor]
"""Name of a router → experts of each token: [T, k] int16, with tokens in the order of the recorded pass. Where the
value is −1, the router itself chooses the expert."""


class _Choice(TorchFunctionMode):
    """Records the k experts with the highest scores of a router; the scores have shape [T, E]. If experts are given,
    the router uses the given experts, with its own scores for them."""

    def __init__(self, num_experts: int, given: torch.Tensor | None) -> None:
        super().__init__()
        self._num_experts, self._given = num_experts, given
        self.experts: torch.Tensor | None = None
        """[T, k] experts of the pass; None before the pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # Routers with groups of experts call topk also within each group and over the groups; these calls are left
        # unchanged.
        if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self._num_experts:
            return found
        if self._given is not None:
            given = self._given.to(found.indices.device, found.indices.dtype)
            experts = torch.where(given >= 0, given, found.indices)
            found = torch.return_types.topk((args[0].gather(1, experts), experts))
        self.experts = found.indices
        return found


class RoutingReplay:
    """Records and replays the choices of all routers of a model."""

    def __init__(
        self,
        model: PreTrainedModel,
        run: Callable[[Any, Callable[[Any], Any]], Any] = lambda model, work: work(model),
        largest: Callable[[float], float] = float,
    ) -> None:
        """Wrap the model's routers. Raises UserError if the model has no router, or a router that does not choose the
        experts with the highest scores. `run`: function that calls a given function with the model while the model's
        parameters are gathered (`SingleRank.run`). `largest`: function that returns the largest value over all pipeline
        stages (`SingleRank.largest`), because some stages may have no router."""
        self._recorded: dict[str, torch.Tensor] | None = None
        self._replayed: Routing | None = None
        self._routers = routers_of(model)
        for name, router in self._routers.items():
            router.forward = partial(self._route, name, router, router.forward)
        ids = torch.arange(2, device=model.device)[None]
        with torch.no_grad(), self.recorded() as routing:
            run(model, lambda whole: whole(input_ids=ids, use_cache=False).logits)
        if not largest(float(bool(routing))) or routing.keys() != self._routers.keys():
            raise no_replay(model)

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
        """Replay recorded choices within the context. The backward pass must run within the context too, because it may
        recompute blocks."""
        self._replayed = routing
        try:
            yield
        finally:
            self._replayed = None

    def from_engine(
        self, routing: Sequence[bytes], places: Sequence[int], num_places: int, device: torch.device
    ) -> Routing:
        """Convert an engine's reported experts into a `Routing` that has a tensor [`num_places`, k] for each router.
        `routing`: the reported bytes for each of `places`, which are indices into the tokens of the pass. Positions
        outside `places` and positions with empty bytes get −1. Raises EngineFault for bytes that do not match this
        model's routers."""
        known = [(place, chosen) for place, chosen in zip(places, routing, strict=True) if chosen]
        counts = [router.top_k for router in self._routers.values()]
        width = num_bytes(self._routers)
        if any(len(chosen) != width for _, chosen in known):
            raise EngineFault(f"the engine reported other routers than this model's: expected {width} bytes per token")
        laid = np.full((num_places, sum(counts)), -1, dtype=np.int16)
        if known:
            values = np.frombuffer(b"".join(chosen for _, chosen in known), dtype=_item(self._routers))
            laid[[place for place, _ in known]] = values.reshape(len(known), -1)
        limits = np.repeat([router.num_experts for router in self._routers.values()], counts)
        if (laid >= limits).any():
            raise EngineFault(f"the engine reported expert {laid.max()} of a router with {limits.min()} experts")
        parts = torch.split(torch.from_numpy(laid).to(device), counts, dim=1)
        return dict(zip(self._routers, parts, strict=True))

    def as_bytes(self, routing: Routing) -> list[bytes]:
        """Return the recorded experts of each token, router by router, in `num_bytes` bytes per token."""
        chosen = torch.cat(tuple(routing.values()), dim=1).cpu().numpy().astype(_item(self._routers))
        return [row.tobytes() for row in chosen]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled block would keep the first pass's choice
    def _route(self, name: str, router: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._recorded is None and self._replayed is None:
            return forward(*args, **kwargs)
        with _Choice(router.num_experts, None if self._replayed is None else self._replayed[name]) as choice:
            output = forward(*args, **kwargs)
        if self._recorded is not None and choice.experts is not None:
            self._recorded[name] = choice.experts.detach().to(torch.int16)
        return output


def no_replay(model: PreTrainedModel) -> UserError:
    """Return the error for a model whose routers cannot be replayed."""
    return UserError(
        f"trainer.moe_replay: {type(model).__name__} has no routers, or routers that do not choose the experts with "
        "the highest scores; allowed is 'off'"
    )


def routers_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's routers by name: modules with integers `top_k` and `num_experts`. Works on the meta device."""

    def is_router(module: Any) -> bool:
        counts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
        is_leaf = all(isinstance(child, torch.nn.Linear) for child in module.children())
        return is_leaf and all(isinstance(count, int) for count in counts)

    return {name: module for name, module in model.named_modules() if is_router(module)}


def num_bytes(routers: Mapping[str, Any]) -> int:
    """Return the number of bytes that an engine reports for a token: one byte for each expert that each router selects,
    or two bytes if any router has more than 256 experts."""
    return int(_item(routers).itemsize * sum(router.top_k for router in routers.values()))


def _item(routers: Mapping[str, Any]) -> np.dtype[Any]:
    return np.dtype("<u2" if max((router.num_experts for router in routers.values()), default=0) > 256 else "u1")
