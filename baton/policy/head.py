"""Computes logits, log-probabilities and entropies from the hidden states of a causal LM, in pieces that save memory.

Matrix products are computed in the dtype of the model's forward pass (bfloat16 in autocast). All values after the
matrix products are float32. The gradient of the head's weight is summed over the pieces in float32, so it hardly
depends on the number of pieces. On a CPU in bfloat16, the gradient of each piece is rounded to bfloat16 before the sum.
Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from baton.errors import UserError
from baton.policy.sampling_masks import kept_logits, places_in

logger = logging.getLogger(__name__)

MAX_LOGITS = 2**24
"""Default of `Head.max_logits` (64 MiB)."""

_ENTROPY_ROWS = 4096
"""Maximum tokens whose entropies are computed at a time, which limits the memory of the probabilities [tokens, V]."""

CACHED_LOGITS = 2**19
"""Maximum number of float32 logits that a CPU processes at a time, except in matrix products (2 MiB, which fit in the
CPU's cache). With more logits, memory reads would take longer than the computation."""

PRODUCT_ROWS = 8192
"""In bfloat16, the gradient [V, H] of the head's weight is computed in blocks of this number of rows. Each block is a
separate tensor before it is added to the float32 gradient, so smaller blocks need less memory."""

_FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Configuration keys of a model's logit scale (Cohere, Falcon-H1, Granite). The value of a key is 1 if logits are
multiplied by the scale, and −1 if they are divided by it."""

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Configuration keys of a model's logit cap c: logits become c · tanh(x / c) (Gemma, RecurrentGemma, xLSTM)."""

_PROBE_LOGIT = 100.0
"""Largest logit with which `_checked` tests a head. The value is far above the usual caps, so `_checked` also detects
caps under keys that `_CAPS` lacks."""


@dataclass(frozen=True, slots=True)
class Head:
    """logits = cap · tanh(scale · linear(hidden) / cap); without a cap, logits = scale · linear(hidden)."""

    linear: torch.nn.Linear
    scale: float = 1.0
    cap: float | None = None
    max_logits: int = MAX_LOGITS
    """Maximum number of float32 logits in memory at the same time. A pass with more logits computes them in pieces, and
    the backward pass recomputes the logits of each piece."""

    @property
    def vocabulary(self) -> int:
        return self.linear.weight.shape[0]

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V], float32."""
        return self.shaped(self.linear(hidden_NH))

    def shaped(self, products_NV: torch.Tensor) -> torch.Tensor:
        """Apply scale and cap to the linear layer's output; return the logits [N, V], float32."""
        logits = products_NV.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


def use_float32_head(model: PreTrainedModel) -> None:
    """Make the head compute float32 logits from bfloat16 inputs and weights, even under autocast. Call this function
    before `find_head`. Raises UserError if the head is not a linear layer."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[no-untyped-call]
    if type(head) is torch.nn.Linear:
        head.forward = partial(_float32_linear, head)  # type: ignore[method-assign]
    else:
        raise UserError(
            f"model.head_dtype: got 'float32', but the head of {type(model).__name__} is not a linear layer; allowed "
            "is 'auto'"
        )


def _float32_linear(head: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
    bias = None if head.bias is None else head.bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return _float32_products(states.to(dtype), head.weight.to(dtype), bias)


def _float32_products(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 output of a linear layer. bfloat16 inputs and weights are first copied to float32 if gradients
    are enabled or `has_wide_products` is False for the device."""
    if states.dtype is torch.float32 or torch.is_grad_enabled() or not has_wide_products(states.device):
        return linear(states.float(), weight.float(), None if bias is None else bias.float())
    found = torch.mm(states.reshape(-1, states.shape[-1]), weight.T, out_dtype=torch.float32)
    return (found if bias is None else found + bias.float()).view(*states.shape[:-1], -1)


@cache
def has_wide_products(device: torch.device) -> bool:
    """Return whether a device can compute the float32 product of two bfloat16 matrices. CPUs and some ROCm builds of
    torch cannot."""
    factor = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(factor, factor, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def find_head(model: PreTrainedModel) -> Head | None:
    """Return the head, which maps the base model's last hidden states to logits. Return None if this model's head is
    not supported: a warning is then logged, and callers use the model's `forward`, which computes all logits at once.
    Scale and cap come from the model's configuration. The head's logits are compared once with those of `forward`.
    """
    module: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[no-untyped-call]
    known: tuple[Any, Head | None] | None = getattr(model, "_baton_head", None)
    if known is None or known[0] is not module:  # adapters may have replaced the module
        known = module, _checked(model, _configured(model, module))
        if known[1] is None:
            logger.warning(
                "the head of %s is not recognised: it is not a linear layer on the last hidden states, scaled or "
                "capped by %s; using the model's forward, which needs memory for all logits of a microbatch",
                type(model).__name__,
                ", ".join((*_FACTORS, *_CAPS)),
            )
        model._baton_head = known  # type: ignore[assignment]
    return known[1]


def set_max_logits(model: PreTrainedModel, max_logits: int) -> None:
    """Set `Head.max_logits` of a model's head. Has no effect if `find_head` does not support the head."""
    module, head = model._baton_head  # type: ignore[misc]  # set by find_head
    if head is not None:
        model._baton_head = module, replace(head, max_logits=max_logits)  # type: ignore[assignment]


def _configured(model: PreTrainedModel, module: Any) -> Head | None:
    if not isinstance(module, torch.nn.Linear) or not module.weight.is_floating_point():  # quantised
        return None
    config: PretrainedConfig = model.config.get_text_config()
    try:
        scale = 1.0
        for key, power in _FACTORS.items():
            scale *= float(getattr(config, key, None) or 1.0) ** power
        caps = [float(cap) for key in _CAPS if (cap := getattr(config, key, None))]
    except (TypeError, ValueError):
        return None
    return Head(module, scale, caps[0] if caps else None)


@torch.no_grad()
def _checked(model: PreTrainedModel, head: Head | None) -> Head | None:
    """Return the head if its logits equal those of `forward` for hidden states with large logits, otherwise None."""
    base: Any = getattr(model, "base_model", model)
    if head is None or base is model:
        return None
    seen: list[torch.Tensor] = []

    def enlarge(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        states = output.last_hidden_state
        largest = head.linear(states).abs().max().clamp(min=1e-6) * abs(head.scale)
        output.last_hidden_state = states * (_PROBE_LOGIT / largest)
        seen.append(output.last_hidden_state)
        return output

    hook = base.register_forward_hook(enlarge)
    try:
        logits = model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False).logits.float()
    finally:
        hook.remove()
    if len(seen) != 1 or logits.shape[-1] != head.vocabulary:
        return None
    tolerance = max(1e-3, 4 * torch.finfo(head.linear.weight.dtype).eps)
    return head if torch.allclose(head.logits(seen[0]), logits, rtol=tolerance, atol=tolerance) else None


@dataclass(frozen=True, slots=True)
class RequestedScores:
    """The temperature of scores, and what is computed for each token besides its log-probability."""

    temperature: float = 1.0
    with_entropy: bool = False
    entropy_has_gradient: bool = False


def head_scores(
    head: Head,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    wanted: RequestedScores,
    kept_NK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log π of the targets, and the entropies if requested, both [N] float32. `kept_NK`: sampling masks
    (`sampling_masks.py`). π is normalised over the ids in the mask, or over the whole vocabulary if `kept_NK` is None.
    N may stand for several dimensions, such as [B, K]."""
    hidden_TH, targets_T = hidden_NH.reshape(-1, hidden_NH.shape[-1]), targets_N.reshape(-1)
    kept_TK = None if kept_NK is None else kept_NK.view(-1, kept_NK.shape[-1])
    if kept_TK is not None:
        targets_T = places_in(kept_TK, targets_T)
    device = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.linear.weight.dtype

    def compute(states_TH: torch.Tensor) -> Any:
        weight, bias = head.linear.weight, head.linear.bias
        return _HeadScores.apply(states_TH, weight, bias, targets_T, kept_TK, head, wanted, dtype)  # type: ignore[no-untyped-call]

    call = getattr(head.linear, "compute", None)  # a sharded head gathers its weight first (`sharding.py`)
    with torch.autocast(device, enabled=False):
        logprobs, entropies = compute(hidden_TH) if call is None else call(compute, hidden_TH)
    return logprobs.view(targets_N.shape), None if entropies is None else entropies.view(targets_N.shape)


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        kept_TK: torch.Tensor | None,
        head: Head,
        wanted: RequestedScores,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
        product = _product(head)
        pieces = logit_pieces(len(targets_T), head.vocabulary, head.max_logits)
        found: list[tuple[torch.Tensor, ...]] = []
        products = None
        for piece in pieces:
            products, targets = product(hidden_TH[piece].to(dtype), weight, bias), targets_T[piece]
            for rows in logit_pieces(len(targets), head.vocabulary, _logits_at_once(products.device)):
                kept = None if kept_TK is None else kept_TK[piece][rows]
                scores = score(_logits(head, products[rows], kept), targets[rows], wanted)
                found.append(tuple(each for each in scores if each is not None))
        logprobs, normaliser, *entropies = (torch.cat(parts) for parts in zip(*found, strict=True))
        entropy = entropies[0] if entropies else None
        # Save the weight, not a cast copy, because FSDP gathers a sharded weight again for the backward pass.
        known = products if len(pieces) == 1 else None
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, kept_TK, normaliser, entropy, known)
        ctx.others = head, wanted, dtype
        if entropy is not None and not wanted.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden_TH, weight_VH, bias_V, *by_token, known = ctx.saved_tensors
        head, wanted, dtype = ctx.others
        weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
        product = _product(head)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden_TH) if wants_hidden else None
        of_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        of_bias = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        for piece in logit_pieces(len(hidden_TH), head.vocabulary, head.max_logits):
            hidden = hidden_TH[piece].to(dtype)
            products = product(hidden, weight, bias) if known is None else known
            of_products = torch.empty_like(products, dtype=dtype)
            values = [each if each is None else each[piece] for each in (*by_token, *gradients)]
            for rows in logit_pieces(len(products), head.vocabulary, _logits_at_once(products.device)):
                own: list[Any] = [each if each is None else each[rows] for each in values]
                found = _gradient(head, products[rows], wanted, *own)
                of_products[rows] = found
                if of_bias is not None:
                    of_bias += found.sum(0)
            if of_hidden is not None:
                of_hidden[piece] = (of_products @ weight).to(of_hidden.dtype)
            if of_weight is not None:
                _add_product(of_weight, of_products, hidden)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight_VH.dtype),
            None if of_bias is None else of_bias.to(bias_V.dtype),
            *[None] * 5,
        )


def _product(head: Head) -> Callable[..., torch.Tensor]:
    """Return the function that computes the head's matrix product from hidden states, weight and bias."""
    is_float32 = getattr(vars(head.linear).get("forward"), "func", None) is _float32_linear  # set by `use_float32_head`
    return _float32_products if is_float32 else linear


def logit_pieces(num_tokens: int, vocabulary: int, max_logits: int) -> list[slice]:
    """Divide tokens into pieces with at most `max_logits` logits, but at least one token."""
    size = max(1, max_logits // vocabulary)
    return [slice(begin, begin + size) for begin in range(0, num_tokens, size)]


def _logits_at_once(device: torch.device) -> int:
    return CACHED_LOGITS if device.type == "cpu" else MAX_LOGITS


def _gradient(
    head: Head,
    products: torch.Tensor,
    wanted: RequestedScores,
    targets: torch.Tensor,
    kept: torch.Tensor | None,
    normaliser: torch.Tensor,
    entropy: torch.Tensor | None,
    of_logprobs: torch.Tensor,
    of_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient with respect to the linear layer's output: [n, V] float32. For logits x: ∂ log π(t) / ∂x_v =
    1[v = t] − p_v, and ∂H / ∂x_v = −p_v (log p_v + H). The gradient is 0 outside a sampling mask."""
    shaped = _logits(head, products, kept)
    logits = shaped if wanted.temperature == 1.0 else shaped / wanted.temperature
    logprobs = logits - normaliser[:, None]
    if wanted.entropy_has_gradient:
        assert entropy is not None
        assert of_entropy is not None
        factor = -of_logprobs[:, None] - of_entropy[:, None] * (logprobs + entropy[:, None])
        found = logprobs.exp_().mul_(factor)
    else:
        found = logprobs.exp_().mul_(-of_logprobs[:, None])
    found.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
    if head.cap is not None:
        found *= 1.0 - (shaped / head.cap) ** 2
    if (scale := head.scale / wanted.temperature) != 1.0:
        found.mul_(scale)
    if kept is None:
        return found
    return torch.zeros_like(products, dtype=torch.float32).scatter_add_(-1, kept.clamp(min=0).long(), found)


def _logits(head: Head, products: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Return the logits of the tokens in `kept`, or of the whole vocabulary if `kept` is None."""
    return head.shaped(products) if kept is None else kept_logits(products, kept, head.shaped)


def _add_product(total_VH: torch.Tensor, of_products: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add `of_products`ᵀ · `hidden` to `total_VH`, which is float32."""
    if hidden.dtype is torch.float32:
        total_VH.addmm_(of_products.T, hidden)
        return
    wider: Any = {"out_dtype": torch.float32} if has_wide_products(hidden.device) else {}
    for begin in range(0, len(total_VH), PRODUCT_ROWS):
        rows = slice(begin, begin + PRODUCT_ROWS)
        total_VH[rows] += torch.mm(of_products[:, rows].T, hidden, **wider)


def score(
    logits: torch.Tensor, targets: torch.Tensor, wanted: RequestedScores
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return three tensors [N] for the rows of `logits` [N, V]: log π of the target, the logsumexp of the logits, and
    the entropy. The entropy is None unless requested."""
    logits = logits.float()
    if wanted.temperature != 1.0:
        logits = logits / wanted.temperature
    # log_softmax followed by gather would allocate a second tensor [N, V]; gather − logsumexp allocates only two
    # tensors [N].
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[..., None]).squeeze(-1) - normaliser
    if not wanted.with_entropy:
        return logprobs, normaliser, None
    if wanted.entropy_has_gradient:
        return logprobs, normaliser, normaliser - ((logits - normaliser[..., None]).exp() * logits).sum(-1)
    return logprobs, normaliser, _entropy(logits.detach(), normaliser.detach())


@torch.no_grad()
def _entropy(logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    """Return the entropies −Σ_v p_v log p_v in nats, [N], with log p = `logits` − `normaliser`."""
    logits_TV, normaliser_T = logits.reshape(-1, logits.shape[-1]), normaliser.reshape(-1)
    parts = []
    for piece, norm in zip(*(torch.split(each, _ENTROPY_ROWS) for each in (logits_TV, normaliser_T)), strict=True):
        probs = (piece - norm[:, None]).exp_()
        parts.append(norm - probs.mul_(piece).sum(-1))
    return torch.cat(parts).view_as(normaliser)
