"""First draws of every random stream or digest that takes a text for its seed, so that no rename changes them.

Where a test here fails, such a text has been changed: put the old one back. It is a part of the seed and no name.
"""

from __future__ import annotations

import json
import secrets
from itertools import islice
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from baton.rollout.engines.sampling import noise_key, uniforms
from baton.rollout.rescoring import Claim
from baton.simulator.seeds import Concern, choices, generator
from baton.swarm.auth import AccessGrant, Role
from baton.swarm.identity import WorkerKeys
from baton.swarm.verification.policy import InspectionSettings, SegmentAuthor, TrajectoryFinished, VerificationPolicy
from baton.swarm.verification.verify import WorkerClass
from baton.tasks.dataset import read_demonstrations
from baton.tasks.demonstrations import DemonstrationSettings, demonstrations
from baton.tasks.gym import GymTask
from baton.tasks.problem import Problem
from baton.tasks.stream import AnswerSettings, PromptStream, TaskMixture, TaskSettings
from baton.types import SamplingParams, Trajectory

SIMULATED: dict[Concern, tuple[int, int]] = {
    "day": (373925529, 9550708),
    "faults": (725903333, 104790939),
    "judges": (248787058, 879667664),
    "length of groups": (680167559, 358536701),
    "length of trajectories": (661869095, 603861612),
    "messages": (441336449, 834838975),
    "prompts": (155807945, 740783387),
    "rewards": (811730189, 253578843),
    "victims": (160660731, 151261859),
}
"""Of a simulation with seed 7: a draw of Python's generator and one of numpy's."""


def problems(path: Path, questions: list[str]) -> TaskSettings:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in questions))
    return TaskSettings(name=path.stem, path=str(path))


def test_the_draws_of_a_simulation() -> None:
    assert get_args(Concern) == tuple(SIMULATED)
    for concern, drawn in SIMULATED.items():
        assert (choices(7, concern).randrange(10**9), generator(7, concern, 3).integers(10**9)) == drawn, concern


def test_the_order_of_prompts(tmp_path: Path) -> None:
    tasks = [problems(tmp_path / f"{name}.jsonl", [f"{name}{number}" for number in range(20)]) for name in "ab"]
    prompts = PromptStream(TaskMixture(tasks, AnswerSettings()), 7).take(12)
    questions = " ".join(prompt.messages[-1].content.split()[0] for prompt in prompts)
    assert questions == "b2 a6 b0 a2 b12 b8 a0 b3 b18 a12 b7 a8"


def test_the_order_of_demonstrations_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "demonstrations.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(number), "completion": ""}) + "\n" for number in range(9)))
    order = " ".join(messages[0].content for messages, _ in islice(read_demonstrations(str(file), 7), 12))
    assert order == "2 4 5 6 7 3 0 1 8 5 4 8"


def test_the_mistakes_in_demonstrations(tmp_path: Path) -> None:
    task = problems(tmp_path / "sums.jsonl", [f"{number}+{number}+1" for number in range(20)])
    tasks = TaskMixture([task], AnswerSettings())
    settings = DemonstrationSettings(direct_share=1, direct_wrong_share=0.5)
    responses = [response for _, (response,) in islice(demonstrations(tasks, settings, 7), 4)]
    assert responses == [f"<answer>{value}</answer>" for value in (13, 3, -8, 25)]


def test_the_seeds_of_generated_problems() -> None:
    task = GymTask("sums", "chain_sum", {}, is_compact=True)
    assert [task.draw(7, index).metadata["gym_seed"] for index in (0, 500)] == [143807512107875, 52205968583267]


def test_which_problems_are_held_out() -> None:
    found = [Problem(str(number), str(number), None, {}) for number in range(100)]
    assert found[7].problem_id == "22f36339ae3058eeaf19a529"
    held_out = [number for number, problem in enumerate(found) if problem.is_held_out]
    assert held_out == [26, 34, 42, 45, 46, 48, 51, 57, 62, 73, 88, 91]


def test_the_noise_of_sampling() -> None:
    key = noise_key(7, 3, 1)
    assert key == 14443793949924185386
    assert uniforms(np.array([key], np.uint64), np.array([5])).tolist() == [0.3400974960984038]


def test_which_trajectories_are_checked() -> None:
    verification_policy = VerificationPolicy(InspectionSettings(first=0, share=0.2), b"secret")
    author = SegmentAuthor(
        "worker", AccessGrant("worker", Role.WORKER, False), "", WorkerClass("cpu", "float32", "fake")
    )
    checked = []
    for number in range(40):
        claim = Claim(Trajectory(number, 0, (5,)), SamplingParams(1), 7)
        if verification_policy.handle(TrajectoryFinished(0.0, (7, number, 0), claim, ((author, 0, 1),))):
            checked.append(number)
    assert checked == [0, 5, 12, 15, 24, 29, 31, 32, 36, 38, 39]


def test_the_keys_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "00" * size)
    keys = WorkerKeys(b"secret")
    assert keys.issue("token") == "0000000000000000.1be519bad6f81f5ccc5f80d8b688c246"
    assert keys.worker("token", keys.issue("token")) == "674c1317ca10"
