"""Ranks that gather a version bucket by bucket and send it to replicas, over gloo: real processes, on a CPU."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from test_ranks import ranked, setup_of
from trainer_cases import random_batch

sys.path.insert(0, str(Path(__file__).parents[1] / "weights" / "direct"))

from replica_process import STAGES, ProcessLink, await_cause

from baton.errors import UserError, WeightsFault
from baton.policy.load import load_model
from baton.policy.settings import LoraSettings
from baton.rollout.engines.whole_weights import WholeWeights
from baton.types import PolicyVersion
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.remote import RemoteTensors, RemoteTransport
from baton.weights.direct.sender import DirectSender
from tests.all_cases import ALL

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

RULES = DirectRules(connect_s=10, announce_s=5, stall_s=5, commit_s=5, first_wait_s=0.1, longest_wait_s=0.5)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def replicas() -> Iterator[dict[str, ProcessLink]]:
    links = {name: ProcessLink() for name in "ab"}
    yield links
    for link in links.values():
        link.close()


class Sending:
    """A trainer whose ranks send, and the model files of its weights by the usual way."""

    def __init__(self, pool: RankPool, path: str, size: int, **settings: Any) -> None:
        self.trainer = ranked(pool, size, setup_of(path, **settings))
        self.model = load_model(path, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
        self.trainer.bucket_bytes = 4000
        self.sender = DirectSender(RemoteTransport(self.trainer).connect, time.monotonic, RULES)

    def offer(self) -> tuple[PolicyVersion, dict[str, list[float]]]:
        """Offer the current weights; return them as they are published through a file."""
        self.trainer.backend = None
        published = WholeWeights(self.model, None).whole(self.trainer.publish().tensors)
        self.trainer.backend = "gloo"
        weights = self.trainer.publish()
        assert isinstance(weights.tensors, RemoteTensors)
        assert len(weights.tensors.bucket_bytes) > 2
        self.sender.offer(weights.tensors, weights.version)
        return weights.version, {name: tensor.tolist() for name, tensor in published.items()}

    def close(self) -> None:
        self.sender.close()
        self.trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size", "settings"),
    [
        ("model_path", 2, {}),
        ("expert_path", 2, {}),
        ("model_path", 4, {"stages": 2}),
        ("model_path", 4, {"tensor_parallel": 2}),
    ],
    ids=["ranks", "experts", "stages", "tensor parallel"],
)
def test_each_replica_gets_the_tensors_of_the_published_file(
    model: str,
    size: int,
    settings: dict[str, Any],
    request: pytest.FixtureRequest,
    pool: RankPool,
    replicas: dict[str, ProcessLink],
) -> None:
    sending = Sending(pool, request.getfixturevalue(model), size, ranks=size, **settings)
    try:
        for name, link in replicas.items():
            sending.sender.join(name, link)
        for step in (0, 1):
            if step:
                sending.trainer.step(random_batch(1))
            version, expected = sending.offer()
            for name, link in replicas.items():
                sending.sender.wait(name, version, DEADLINE_S, check=sending.trainer.check)
                assert link.ask("served", None, 5.0) == expected
        assert sending.sender.sent_bytes == 2 * 2 * 4 * sum(p.numel() for p in sending.model.parameters())
    finally:
        sending.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "number"),
    list(product(STAGES, (signal.SIGKILL, signal.SIGSTOP)))
    if ALL
    else [(STAGES[0], signal.SIGSTOP), (STAGES[2], signal.SIGKILL)],
)
def test_a_signal_to_a_replica_delays_no_other_and_leaves_the_ranks_intact(
    stage: str, number: int, model_path: str, pool: RankPool, replicas: dict[str, ProcessLink]
) -> None:
    """In CI: while a communicator is built, and between two buckets. `tests/weights/direct/test_sender.py` has all
    stages, without ranks."""
    sending, victim = Sending(pool, model_path, 2, ranks=2), ProcessLink()
    try:
        victim.ask("signal_at", (stage, number), DEADLINE_S)
        for name, link in (("victim", victim), ("a", replicas["a"])):
            sending.sender.join(name, link)
        begin_s = time.monotonic()
        version, expected = sending.offer()
        sending.sender.wait("a", version, DEADLINE_S)
        assert time.monotonic() - begin_s < DEADLINE_S / 2, "the other replica waited for the victim's deadlines"
        assert replicas["a"].ask("served", None, 5.0) == expected
        assert sending.sender.served("victim") is None
        if number == signal.SIGSTOP:
            await_cause(sending.sender, "victim", "no answer|imed out|failed")
            victim.cont()
        else:
            victim.process.join(DEADLINE_S)
            victim.close()
            sending.sender.join("victim", victim := ProcessLink())
        sending.sender.wait("victim", version, DEADLINE_S)
        assert victim.ask("served", None, 5.0) == expected
        sending.trainer.step(random_batch(1))
        with pytest.raises(WeightsFault, match="a train step has replaced version 0"):
            sending.trainer.send_bucket("any", 0, {})
    finally:
        sending.close()
        victim.close()


def test_adapters_of_ranks_are_refused(model_path: str, pool: RankPool) -> None:
    trainer = ranked(pool, 2, setup_of(model_path, lora=LoraSettings(rank=2), ranks=2))
    trainer.backend = "gloo"
    with pytest.raises(UserError, match=r'weights.transport: got "direct" with trainer.ranks above 1, .*; use "store"'):
        trainer.publish()
