"""A hub and its workers in miniature: a small random model, engines on it, and checks of what they grow."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import msgspec
import torch
from transformers import PreTrainedModel

from baton.policy.load import end_ids
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.policy.tokenizer import Tokenizer
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.embedded.rescore import Rescorer
from baton.rollout.rescoring import Claim, Rescored
from baton.swarm.verification.verify import DEFAULTS, VerificationResult, judge
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Segment, Trajectory

NOISE_SEED = 7
PROMPTS = tuple(tuple(range(20 + i, 26 + i)) for i in range(12))


@cache
def tokenizer() -> Tokenizer:
    """Byte-level."""
    return scratch_tokenizer(["the sum of one and two is three"], 300)


@cache
def policy(seed: int = 0) -> PreTrainedModel:
    """A random model whose weights are large enough for it to have opinions. Not to be changed."""
    shape = ScratchSettings(vocab_size=300, hidden_size=64, num_layers=2, intermediate_size=96, max_context_tokens=128)
    model = scratch_model(shape, tokenizer(), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(7.0)
    return model.eval()


def near(model: PreTrainedModel, by: float) -> PreTrainedModel:
    """A copy each of whose weights is off by a random share, as one train step would leave it."""
    generator, found = torch.Generator().manual_seed(1), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(1 + by * torch.randn(parameter.shape, generator=generator))
    return found


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose linear layers went to int8 and back, with one scale for each output."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for module in found.modules():
            if isinstance(module, torch.nn.Linear) and module is not found.get_output_embeddings():
                scale = module.weight.abs().amax(1, keepdim=True) / 127
                module.weight.copy_((module.weight / scale).round() * scale)
    return found


def engine(model: PreTrainedModel, dtype: str = "float32", version: int = 0) -> EmbeddedEngine:
    """An engine on its own copy of a model."""
    own = copy.deepcopy(model).to({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    settings = EngineSettings(slots=16, max_context_tokens=128, dtype=dtype)
    return EmbeddedEngine(own, tokenizer(), settings, PolicyVersion("run", version), end_ids(model, tokenizer()))


def lease(
    group_id: int,
    sample_index: int = 0,
    *,
    prompt: Sequence[int] | None = None,
    segments: tuple[Segment, ...] = (),
    version: int = 0,
    max_new_tokens: int = 40,
    noise_seed: int = NOISE_SEED,
    **sampling: object,
) -> Lease:
    """The lease of one trajectory; its prompt follows from the group."""
    trajectory = Trajectory(group_id, sample_index, tuple(prompt or PROMPTS[group_id % len(PROMPTS)]), segments)
    params = SamplingParams(max_new_tokens, **sampling)
    return Lease(1000 * group_id + sample_index, trajectory, params, noise_seed, version)


def grow(worker: EmbeddedEngine, leases: Sequence[Lease]) -> list[Trajectory]:
    """What the engine makes of leases."""
    grown = {given.lease_id: given.trajectory for given in leases}
    for given in leases:
        worker.submit(given)
    while any(t.finish_reason is None for t in grown.values()):
        for report in worker.step():
            assert isinstance(report, Report)
            grown[report.lease_id] = grown[report.lease_id].extended(report.segments, report.finish_reason)
    return list(grown.values())


@cache
def honest(count: int = 12) -> tuple[tuple[Lease, ...], tuple[Trajectory, ...]]:
    """Leases of version 0 and what an honest worker makes of them."""
    leases = tuple(lease(group_id) for group_id in range(count))
    return leases, tuple(grow(engine(policy()), leases))


def submitted(given: Lease, answer: Trajectory) -> Trajectory:
    """An answer, sent in for a lease that it need not have been grown for."""
    return given.trajectory.extended(answer.segments, answer.finish_reason)


def with_tokens(trajectory: Trajectory, token_ids: Sequence[int], logprobs: Sequence[float]) -> Trajectory:
    """The same trajectory with one segment of other content."""
    version = trajectory.segments[0].policy_version
    return msgspec.structs.replace(trajectory, segments=(Segment(tuple(token_ids), tuple(logprobs), version),))


@cache
def scorer() -> Rescorer:
    """The hub's; `rescored` loads what it wants into it."""
    return Rescorer(copy.deepcopy(policy()))


def rescored(given: Lease, answer: Trajectory, version: int = 0, model: PreTrainedModel | None = None) -> Rescored:
    """One answer, scored by a version's weights, those of `policy()` unless others are given."""
    scorer().load(dict((model or policy()).named_parameters()), version)
    return scorer().score([Claim(answer, given.sampling, given.noise_seed)])[0]


def verdict(given: Lease, answer: Trajectory, dtype: str = "float32") -> VerificationResult:
    """The hub's verdict on an answer to a lease of version 0."""
    return judge([rescored(given, answer)], DEFAULTS[dtype])
