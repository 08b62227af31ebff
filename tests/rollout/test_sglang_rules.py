"""The contract of all engines, kept by SGLang's side of Baton before a server that keeps SGLang's contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_contract import *  # noqa: F403
from sglang_server import SglangServer

from baton.policy.tensors import policy_tensors
from baton.rollout.engine import Engine

pytestmark = [pytest.mark.numerics, pytest.mark.timing]


@pytest.fixture
def any_engine(embedded: Any, sglang: Any) -> Iterator[Callable[..., Engine]]:
    """Build an engine with a server of its own: an older one, whose events have the new tokens only."""
    servers: list[SglangServer] = []

    def build(**settings: object) -> Engine:
        servers.append(SglangServer(embedded("llama", report_every_tokens=1), is_incremental=True, is_old=True))
        engine = sglang(servers[-1], name="llama", shape=settings)
        servers[-1].keep_pace(engine)  # it would end what is to be aborted where this process is slow
        return engine

    yield build
    for server in servers:
        server.close()


@pytest.fixture
def same_weights(load: Any) -> dict[str, Any]:
    """The weights that the engine serves already."""
    return dict(policy_tensors(load("llama")))
