"""An episode is rebuilt from its seed and its actions, and a difference is an error."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from environment_cases import WAIT_S, play, pool_of, request, results, running_with, spec, turns_of

from baton.environments.adapters import load_environment
from baton.environments.calls import ActFailure, EnvironmentSpec, EpisodeKey, Observation, Turn
from baton.environments.grid import MOVES
from baton.environments.instances import EnvironmentInstances
from baton.types import FailureCause

pytestmark = [pytest.mark.timeout(300), pytest.mark.timing]


def observed(found: list[Observation | ActFailure]) -> list[tuple[object, ...]]:
    assert all(isinstance(one, Observation) for one in found)
    return [
        (one.turn, one.text, one.reward, one.is_terminated, one.is_truncated, one.digest, one.is_success, one.metrics)
        for one in found
        if isinstance(one, Observation)
    ]


def test_an_episode_of_sokoban_that_moves_to_a_new_pool_after_each_turn_is_the_same() -> None:
    dice = random.Random(3)
    sokoban = EnvironmentSpec("sokoban", "baton.environments.sokoban:Sokoban", {"size": 6, "max_turns": 6})
    actions = [f"<answer>{' || '.join(dice.choices(list(MOVES), k=3))}</answer>" for _ in range(6)]
    pool = pool_of(sokoban, processes=1)
    whole = observed(play(pool, 11, actions, environment="sokoban"))
    pool.close()
    parts: list[Observation | ActFailure] = []
    for number, action in enumerate(actions[: len(whole)]):
        pool = pool_of(sokoban, processes=1)
        turns = tuple(Turn(a, one.digest) for a, one in zip(actions[:number], parts, strict=True) if done(one))
        pool.submit(request(11, action, turns=turns, environment="sokoban"))
        parts += results(pool, 1).values()
        assert pool.metrics().get("env/replays", 0) == (number > 0)
        pool.close()
    assert observed(parts) == whole


def done(one: Observation | ActFailure) -> bool:
    return isinstance(one, Observation)


def instances(**fields: object) -> EnvironmentInstances:
    chosen = spec(**fields)  # type: ignore[arg-type]
    return EnvironmentInstances({"counter": load_environment(chosen)}, 1000)


def test_a_replay_that_differs_is_malformed_and_names_the_turn() -> None:
    first = instances().act(request(1, "time"))
    assert isinstance(first, Observation)
    found = instances().act(request(1, "5", turns=(Turn("time", first.digest),)))
    assert isinstance(found, ActFailure)
    assert found.cause is FailureCause.MALFORMED
    assert found.message.startswith("the replay of turn 1 differs from the recorded turn")


def test_a_reset_that_differs_from_the_prompt_is_malformed() -> None:
    reset = instances().act(request(1, None))
    assert isinstance(reset, Observation)
    assert isinstance(instances().act(request(1, "5", first_digest=reset.digest)), Observation)
    found = instances().act(request(2, "5", first_digest=reset.digest))
    assert isinstance(found, ActFailure)
    assert "an observation that differs from the one in the prompt" in found.message


def test_another_history_of_an_open_episode_is_rebuilt_or_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for cls in ("Counter", "Unrepeatable"):
        opened = instances(cls=cls, mark=str(mark))
        first, other = opened.act(request(1, "5")), opened.act(request(1, "6"))
        assert isinstance(first, Observation)
        if cls == "Counter":
            assert isinstance(other, Observation)
            assert other.text == "value 7"
        else:
            assert isinstance(other, ActFailure)
            assert other.message == (
                "the environment's instance has executed other actions, and replay = 'never' forbids a new one"
            )
    assert mark.read_text().split() == ["5", "6", "5"]


def test_a_discarded_instance_is_gone_before_it_has_closed() -> None:
    opened, closing = instances(), []
    opened.act(request(1, None))
    opened.discard(EpisodeKey(0, 1, 0), run=closing.append)
    found = opened.act(request(7, None, key=EpisodeKey(0, 1, 0)))
    assert isinstance(found, Observation)
    assert found.text == "value 7", "the observation of the new reset"


def test_an_older_turn_is_answered_from_memory(tmp_path: Path) -> None:
    opened = instances(cls="Unrepeatable", mark=str(tmp_path / "mark"))
    first = opened.act(request(1, "5"))
    assert isinstance(first, Observation)
    opened.act(request(1, "6", turns=(Turn("5", first.digest),)))
    assert opened.act(request(1, "5")) == first
    assert (tmp_path / "mark").read_text().split() == ["5", "6"]
    opened.discard(EpisodeKey(0, 1, 0))
    gone = opened.act(request(1, "6", turns=(Turn("5", first.digest),)))
    assert isinstance(gone, ActFailure)
    assert gone.cause is FailureCause.CRASHED


def test_a_request_without_the_executed_turns_is_never_answered_from_another_history(tmp_path: Path) -> None:
    """The pool sends it only to a process whose instance has executed them; anything else is an error."""
    opened, turns = instances(), ()
    for action in ("1", "2", "3"):
        result = opened.act(request(1, action, turns=turns))
        turns += turns_of(action, result)
    short = request(1, "4", turns=turns).without_executed_turns()
    assert (len(short.log), short.turn) == (1, 4)
    found = opened.act(short)
    assert isinstance(found, Observation)
    assert (found.text, found.turn) == ("value 11", 4)
    assert opened.act(short) == found, "a repeated request"
    other = request(1, "4", turns=(*turns[:2], Turn("7", "digest"))).without_executed_turns()
    for missing in (opened.act(other), instances().act(short)):
        assert isinstance(missing, ActFailure)
        assert (missing.cause, missing.turn) == (FailureCause.RAISED, 4)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_episodes_are_the_same_when_processes_are_killed_at_random_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"BATON_TEST_KILLED_{os.getpid()}"
    monkeypatch.setenv(mark, "1")
    dice = random.Random(5)
    sokoban = EnvironmentSpec("sokoban", "baton.environments.sokoban:Sokoban", {"max_turns": 8})
    actions = {
        number: [f"<answer>{' || '.join(dice.choices(list(MOVES), k=3))}</answer>" for _ in range(8)]
        for number in range(60)
    }
    alone = EnvironmentInstances({"sokoban": load_environment(sokoban)}, 10_000)
    expected = {number: whole(alone, number, actions[number]) for number in actions}
    pool = pool_of(sokoban, processes=2, retries=20, env=(mark,))
    logs: dict[int, tuple[Turn, ...]] = dict.fromkeys(actions, ())
    texts: dict[int, list[str]] = {number: [] for number in actions}
    for number in actions:
        pool.submit(request(number, actions[number][0], environment="sokoban"))
    deadline_s, num_kills = time.monotonic() + WAIT_S, 0
    while any(len(texts[number]) < len(expected[number]) for number in actions):
        assert time.monotonic() < deadline_s
        for result in pool.collect(1.0):
            assert isinstance(result, Observation)
            number, turn = result.key.group_id, result.turn
            texts[number].append(result.text)
            logs[number] += turns_of(actions[number][turn - 1], result)
            if not result.is_terminated and not result.is_truncated:
                pool.submit(request(number, actions[number][turn], turns=logs[number], environment="sokoban"))
        if num_kills < 12 and dice.random() < 0.3 and (pids := running_with(mark)):
            num_kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(pids), signal.SIGKILL)
    assert texts == expected
    assert num_kills == 12
    assert pool.metrics()["env/replays"] > 0
    pool.close()


def whole(instances: EnvironmentInstances, number: int, actions: list[str]) -> list[str]:
    """The observations of an episode that nothing interrupts."""
    turns: tuple[Turn, ...] = ()
    found = []
    for action in actions:
        result = instances.act(request(number, action, turns=turns, environment="sokoban"))
        assert isinstance(result, Observation)
        found.append(result.text)
        turns += turns_of(action, result)
        if result.is_terminated or result.is_truncated:
            break
    return found
