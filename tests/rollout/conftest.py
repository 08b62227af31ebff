"""The engines that every machine has, as the contract of all engines asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_cases import driver, embedded, load, model_paths, tokenizer
from sglang_cases import server, sglang, skeleton

from baton.rollout.engine import Engine, EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.fake import FakeEngine
from baton.types import PolicyVersion

pytest.register_assert_rewrite("engine_contract")
__all__ = ["any_engine", "driver", "embedded", "load", "model_paths", "server", "sglang", "skeleton", "tokenizer"]


@pytest.fixture(params=["embedded", "fake"])
def any_engine(request: pytest.FixtureRequest, embedded: Callable[..., EmbeddedEngine]) -> Callable[..., Engine]:
    """Build either engine; what they do with leases must not differ."""

    def fake(**settings: object) -> FakeEngine:
        shape = {"slots": 8, "max_context_tokens": 128, **settings}
        return FakeEngine(EngineSettings(**shape), PolicyVersion("run", 0), lambda group, sample: 1000)

    def small(**settings: object) -> EmbeddedEngine:
        return embedded("llama", **settings)

    return fake if request.param == "fake" else small
