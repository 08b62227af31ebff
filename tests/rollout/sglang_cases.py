"""An SGLang engine before the contract server, built from a skeleton as a worker builds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_server import SglangServer

from baton.policy.load import save_skeleton
from baton.policy.tensors import policy_tensors
from baton.rollout.engine import EngineSettings, SglangSettings
from baton.rollout.engines.factory import engine_from_skeleton
from baton.rollout.engines.sglang.engine import SglangEngine
from baton.types import PolicyVersion

V0 = PolicyVersion("run", 0)


@pytest.fixture
def server(embedded: Any) -> Iterator[SglangServer]:
    """A server with other weights than those it will be given."""
    made = SglangServer(embedded("qwen3_next", report_every_tokens=1))
    yield made
    made.close()


@pytest.fixture
def skeleton(load: Any, tokenizer: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Write a model without its weights."""

    def write(name: str) -> Path:
        directory = tmp_path / f"skeleton-{name}"
        if not directory.exists():
            directory.mkdir()
            tokenizer.hf.chat_template = "{{ messages[0]['content'] }}"
            save_skeleton(load(name), tokenizer, directory)
        return directory

    return write


@pytest.fixture
def sglang(skeleton: Any, load: Any, tmp_path: Path) -> Iterator[Callable[..., SglangEngine]]:
    """Build an engine of a server, with the first weights of the run loaded."""
    made: list[Any] = []

    def build(
        server: SglangServer, *, name: str = "qwen3", shape: dict[str, Any] | None = None, **own: Any
    ) -> SglangEngine:
        common = {"url": server.url, "weights_directory": str(tmp_path), "answer_timeout_s": 120.0}
        given = SglangSettings(**common | own)
        wanted = {"slots": 8, "max_context_tokens": 128, **(shape or {})}
        settings = EngineSettings(kind="sglang", sglang=given, **wanted)
        engine = engine_from_skeleton(skeleton(name), None, settings, device="auto", attention="sdpa")
        made.append(engine)
        engine.load_weights(policy_tensors(load(name)), V0)
        return engine

    yield build
    for engine in made:
        engine.close()
