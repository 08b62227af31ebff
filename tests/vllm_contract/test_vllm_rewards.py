"""A generative reward model with the real vLLM: Baton starts its server, and starts it again after its death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import JudgeSettings, RewardSettings
from baton.types import Message, Prompt
from tests.reward_models import servers

MODEL = Path(__file__).parents[2] / "models" / "quickstart"


@pytest.mark.timeout(900)
def test_a_server_of_vllm_replies_and_is_started_again_after_its_death() -> None:
    keys = {"pattern": r"(-?\d+)", "max_new_tokens": 16, "context_tokens": 256, "concurrency": 4}
    reward = RewardSettings(kind="model", model=str(MODEL), template="{prompt}", devices=("cpu",), **keys)
    prompt = Prompt("p", "some", (Message("user", "3 + 4"),))
    with RewardScorer({}, [reward], {}, JudgeSettings(retries=3)) as scorer:
        scorer.start()
        first = scorer.score(prompt, "")
        assert first.failure is None, first.failure
        (server,) = servers()
        os.kill(server, signal.SIGKILL)
        assert scorer.score(prompt, "").reward == first.reward
