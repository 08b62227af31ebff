"""Environment processes: turns are executed once, in order of submission, and results belong to their episodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from environment_cases import WAIT_S, Turn, play, pool_of, request, results, spec

from baton.environments.calls import ActFailure, ActRequest, EpisodeKey, Observation, ToEnvironment
from baton.environments.pool import EnvironmentPool
from baton.errors import UserError
from baton.frames import FrameSocket, ready

pytestmark = [pytest.mark.timeout(300), pytest.mark.timing]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    pool = pool_of(max_observation_chars=1000)
    yield pool
    pool.close()


def test_episodes_keep_their_state_on_two_processes(pool: EnvironmentPool) -> None:
    for number in range(20):
        pool.submit(request(number, None))
    first = results(pool, 20)
    assert {number: (one.turn, one.text) for number, one in first.items() if isinstance(one, Observation)} == {
        number: (0, f"value {number}") for number in range(20)
    }
    for number in range(20):
        pool.submit(request(number, "100"))
    second = results(pool, 20)
    assert [second[number].text for number in range(20)] == [f"value {number + 100}" for number in range(20)]
    assert {one.turn for one in second.values()} == {1}
    assert pool.num_waiting == 0
    for number in range(20):
        pool.discard(EpisodeKey(0, number, 0))


def test_a_turn_without_a_reset_before_it_resets_with_seed_and_row(pool: EnvironmentPool) -> None:
    pool.submit(request(5, "1", row={"start": 1000}))
    (found,) = results(pool, 1).values()
    assert isinstance(found, Observation)
    assert (found.text, found.reward, found.turn) == ("value 1006", 1.0, 1)
    pool.discard(found.key)


def test_what_an_observation_holds(pool: EnvironmentPool) -> None:
    ended, after = play(pool, 6, ["end", "1"])
    assert isinstance(ended, Observation)
    assert (ended.is_terminated, ended.is_truncated, ended.is_success, ended.tool) == (True, False, True, "door")
    assert ended.metrics == {"steps": 3.0}, "what is not finite or huge is no metric"
    assert isinstance(after, ActFailure)
    assert after.message == "the episode ended in turn 1 and accepts no more actions"
    long, strange = play(pool, 7, ["long", "surrogate"])
    assert isinstance(long, Observation)
    assert long.text == "x" * 1000 + "\n[99000 more characters]"
    assert isinstance(strange, Observation)
    assert (strange.text, strange.tool, strange.metrics) == ("?", "?", {"?": 1.0})
    for number in (6, 7):
        pool.discard(EpisodeKey(0, number, 0))


def test_a_repeated_request_returns_the_stored_observation(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pool = pool_of(spec(mark=str(mark)), processes=1)
    first, second = play(pool, 1, ["10", "20"])
    assert isinstance(first, Observation)
    for turns, action, wanted in (((), "10", first), ((Turn("10", first.digest),), "20", second)):
        pool.submit(request(1, action, turns=turns))
        assert results(pool, 1) == {1: wanted}
    assert mark.read_text().split() == ["10", "20"]
    pool.close()


def test_the_size_of_a_request_does_not_depend_on_the_turns_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    send = FrameSocket.send

    def counted(self: FrameSocket, frame: bytes) -> None:
        if isinstance(sent := msgspec.msgpack.decode(frame, type=ToEnvironment), ActRequest):
            sizes.append(len(frame))
            assert sent.turn == len(sizes)
        send(self, frame)

    monkeypatch.setattr(FrameSocket, "send", counted)
    pool = pool_of(processes=1)
    actions = [f"{number:0200d}" for number in range(20)]
    found = play(pool, 1, actions)
    assert isinstance(found[-1], Observation)
    assert (found[-1].text, found[-1].turn) == (f"value {1 + sum(range(20))}", 20)
    assert max(sizes[1:]) - min(sizes[1:]) < 20
    pool.close()


def test_a_discarded_episode_has_no_result(tmp_path: Path) -> None:
    pool = pool_of(spec(mark=str(tmp_path)), processes=1, max_concurrent=1)
    blocked = EpisodeKey(0, 1, 0)
    pool.submit(request(1, "wait for the file"))
    pool.submit(request(2, "7"))
    assert pool.num_waiting == 1, "calls beyond max_concurrent wait in the pool"
    pool.discard(blocked)
    pool.submit(request(3, "7"))
    (tmp_path / "go").touch()
    assert {number: one.text for number, one in results(pool, 2).items()} == {2: "value 9", 3: "value 10"}
    metrics = pool.metrics()
    assert metrics["env/latency_max"] >= metrics["env/latency_p95"] >= 0
    assert (metrics["env/running"], metrics["env/waiting"]) == (0, 0)
    assert "env/latency_mean" not in pool.metrics(), "counted since the last call"
    pool.close()


def test_a_result_can_be_waited_for_on_the_sockets(pool: EnvironmentPool) -> None:
    pool.submit(request(8, "pause"))
    found: list[object] = []
    while not found:
        assert ready(pool.sockets, WAIT_S), "the process says that it lives while the call runs"
        found = [*pool.collect(0.0)]
    pool.discard(EpisodeKey(0, 8, 0))


def test_no_call_times_out_in_the_queue_whose_time_is_not_latency() -> None:
    """Calls of 0.4 s, one at a time, with a deadline of 2 s: the last one waits for 3.6 s."""
    pool = pool_of(spec(), processes=1, max_concurrent=1, timeout_s=2.0)
    for number in range(10):
        pool.submit(request(number, "pause"))
    assert pool.num_waiting == 9
    found = results(pool, 10)
    assert not [one for one in found.values() if isinstance(one, ActFailure)]
    metrics = pool.metrics()
    assert metrics["env/queue_max"] > 2.0 > metrics["env/latency_max"]
    assert metrics["env/queue_max"] >= metrics["env/queue_p95"] >= metrics["env/queue_mean"] > 0
    assert not [name for name in pool.metrics() if "queue" in name], "counted since the last call"
    pool.close()


def test_a_class_that_does_not_load_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"environment 'counter': '.*:Missing' cannot be imported: .*no attribute"):
        pool_of(spec(cls="Missing"))
    (tmp_path / "exits.py").write_text("import os\nos._exit(3)\n")
    broken = spec()
    with pytest.raises(UserError, match="an environment process cannot be started: ended"):
        pool_of(type(broken)("counter", f"{tmp_path}/exits.py:Any"), retries=0)


def test_the_description_names_the_isolation(pool: EnvironmentPool) -> None:
    assert pool.description.startswith("environments run ")
    with pytest.raises(UserError, match="environment 'other' is not one of this run's: counter"):
        pool.submit(request(1, None, environment="other"))
