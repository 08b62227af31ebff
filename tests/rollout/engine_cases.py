"""Small real models, a tokenizer made here, and a driver that grows trajectories with any engine.

Fixtures for the tests of this folder and for those of engines that need an environment of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from baton.policy.tokenizer import Tokenizer
from baton.rollout.engine import Engine, EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.types import FromWorker, Lease, PolicyVersion, Report, SamplingParams, Segment, Trajectory

VOCABULARY = 80

other_architectures = pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=80, n_embd=64, n_layer=2, n_head=4, n_positions=100),
        MistralConfig(
            vocab_size=80, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=16,
        ),
        Gemma3TextConfig(
            vocab_size=80, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
        ),
    ],
    ids=["learned positions", "sliding windows", "sliding and full layers"],
)  # fmt: skip
"""For tests with a parameter `config`: positions and attention that the models of the fixtures do not have."""


@dataclass
class Driver:
    """Leases in, whole trajectories out."""

    noise_seed: int = 11
    reports: list[FromWorker] = field(default_factory=list)
    """All that the last `run` received, in order."""

    def lease(
        self,
        lease_id: int,
        prompt_ids: list[int],
        max_new_tokens: int = 16,
        *,
        group_id: int | None = None,
        sample_index: int = 0,
        segments: tuple[Segment, ...] = (),
        version: int = 0,
        is_exact: bool = True,
        **sampling: object,
    ) -> Lease:
        group_id = lease_id if group_id is None else group_id
        trajectory = Trajectory(group_id, sample_index, tuple(prompt_ids), segments)
        params = SamplingParams(max_new_tokens, **sampling)
        return Lease(lease_id, trajectory, params, self.noise_seed, version, is_exact)

    def run(
        self, engine: Engine, leases: list[Lease], before_step: Callable[[int], None] = lambda step: None
    ) -> dict[int, Trajectory]:
        """Step until every lease is finished or aborted, applying each report as the hub would."""
        grown = {lease.lease_id: lease.trajectory for lease in leases}
        open_leases = set(grown)
        self.reports = []
        for lease in leases:
            engine.submit(lease)
        for step in range(10_000):
            if not open_leases:
                return grown
            before_step(step)
            for report in engine.step():
                self.reports.append(report)
                assert isinstance(report, Report), report
                trajectory = grown[report.lease_id]
                assert report.token_offset == trajectory.num_tokens
                if report.segments or report.finish_reason:
                    grown[report.lease_id] = trajectory.extended(report.segments, report.finish_reason)
                if report.finish_reason or report.is_aborted:
                    open_leases.remove(report.lease_id)
        raise AssertionError(f"leases {open_leases} never ended")

    def hear(self, engine: Engine) -> list[FromWorker]:
        """Step until the engine has something to report, or nothing is left to grow."""
        for _ in range(10_000):
            if reports := engine.step():
                return reports
        raise AssertionError("nothing was ever reported")

    def grow(self, engine: Engine, num_tokens: int) -> list[FromWorker]:
        """Step until that many tokens have been made since now; return what was reported meanwhile."""
        reports, until = [], engine.stats.decoded_tokens + num_tokens
        for _ in range(10_000):
            if engine.stats.decoded_tokens >= until:
                return reports
            reports += engine.step()
        raise AssertionError(f"{num_tokens} tokens never came")

    def run_beside(self, engine: Engine, lease: Lease) -> Trajectory:
        """Grow one trajectory while whatever else the engine holds goes on, unheard."""
        engine.submit(lease)
        trajectory = lease.trajectory
        while trajectory.finish_reason is None:
            for report in engine.step():
                if report.lease_id == lease.lease_id:
                    trajectory = trajectory.extended(report.segments, report.finish_reason)
        return trajectory


@pytest.fixture
def driver() -> Driver:
    return Driver()


def _saved(config: PretrainedConfig, path: Path, seed: int) -> Path:
    """Save a random model whose weights are large enough for it to have opinions."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
            else:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """qwen3: grouped queries, qk-norm, tied embeddings; 192 wide, so that widths under 16 would change its bits."""
    root = tmp_path_factory.mktemp("models")
    shape = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    wide = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2}
    narrow = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    qwen3 = Qwen3Config(**shape, **wide, head_dim=32, tie_word_embeddings=True)
    return {
        "qwen3": _saved(qwen3, root / "qwen3", 1),
        "qwen3_next": _saved(qwen3, root / "qwen3_next", 2),
        "llama": _saved(LlamaConfig(**shape, **narrow, tie_word_embeddings=False), root / "llama", 3),
    }


@pytest.fixture
def load(model_paths: dict[str, Path]) -> Callable[[str], PreTrainedModel]:
    """Load a fresh copy of one of the models by name."""
    return lambda name: AutoModelForCausalLM.from_pretrained(
        model_paths[name], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One character per id."""
    raw = RawTokenizer(models.WordLevel({chr(48 + i): i for i in range(VOCABULARY)}, unk_token="0"))
    raw.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="0"))


@pytest.fixture
def embedded(load: Callable[[str], PreTrainedModel], tokenizer: Tokenizer) -> Callable[..., EmbeddedEngine]:
    """Build an embedded engine: `embedded("qwen3", slots=8)`."""

    def build(name: str = "qwen3", *, end_ids: tuple[int, ...] = (), **settings: object) -> EmbeddedEngine:
        shape = {"slots": 8, "max_context_tokens": 128, **settings}
        return EmbeddedEngine(load(name), tokenizer, EngineSettings(**shape), PolicyVersion("run", 0), end_ids)

    return build
