"""Judges that hang, crash, raise or give nonsense leave a cause behind, never a reward, and never stall a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from judging_cases import (
    PROMPT,
    SomeTask,
    children,
    drain_past_deadlines,
    hand_clock,
    is_running,
    judge_with,
    running_with,
    trajectory,
    wait_until,
    write_functions,
)

from baton.errors import DeadlineExceeded, UserError
from baton.rewards import pool
from baton.rewards import scorer as rewards
from baton.rewards.functions import import_function
from baton.rewards.pool import GRACE_S
from baton.rewards.scorer import RewardScorer
from baton.rewards.scorer_protocol import ScorerSpec
from baton.rewards.settings import AnswerSettings, JudgeSettings, RewardSettings
from baton.tasks.gym import GymTask
from baton.types import FailureCause, Prompt, RewardResult

pytestmark = [
    pytest.mark.timing,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_functions(tmp_path_factory.mktemp("functions"))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = children()
    yield
    assert wait_until(lambda: children() <= before), f"worker processes are left: {children() - before}"


@contextmanager
def processor_time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what computes for too long; waiting for the processor does not count."""

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError(f"computes for {seconds} s")

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge_many(judge: RewardScorer, responses: list[str]) -> list[RewardResult]:
    """Judgements in the order of the responses, all in flight together."""
    with judge:
        for index, response in enumerate(responses):
            judge.submit([trajectory(0, index)], PROMPT, [response])
        found = {judged.trajectory.sample_index: judged.judgement for judged in judge.drain()}
    return [found[index] for index in range(len(responses))]


@pytest.mark.parametrize(
    ("name", "cause", "said"),
    [
        ("sleeps", FailureCause.TIMEOUT, "gave no answer within 1 s and was killed"),
        ("spins", FailureCause.TIMEOUT, "gave no answer within 1 s and was killed"),
        ("spins_in_c", FailureCause.TIMEOUT, "gave no answer within 1 s and was killed"),
        ("exits", FailureCause.CRASHED, "ended with exit code 3"),
        ("segfaults", FailureCause.CRASHED, "was killed by SIGSEGV"),
        ("eats", FailureCause.RAISED, "raised MemoryError"),
        ("raises", FailureCause.RAISED, "raised KeyError: 'no such key' (judging_functions.py, line "),
        (
            "raises_in_a_library",
            FailureCause.RAISED,
            "raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) (judg",
        ),
        ("raises_with_escapes", FailureCause.RAISED, "raised ValueError: \\x1b[2J gone (judging_functions.py, line "),
        ("leaves", FailureCause.RAISED, "raised SystemExit: enough"),
        ("not_a_number", FailureCause.MALFORMED, "returned nan (float), which is not finite"),
        ("infinite", FailureCause.MALFORMED, "returned -inf (float), which is not finite"),
        ("a_text", FailureCause.MALFORMED, "returned 'much' (str), which is not a number"),
        ("huge", FailureCause.MALFORMED, "returned 1e+308 (float), which is larger than 1e+06 in magnitude"),
        ("huge_int", FailureCause.MALFORMED, "returned 1000"),
        ("beyond", FailureCause.MALFORMED, "returned -1000100.0 (float), which is larger than 1e+06 in magnitude"),
        ("a_decimal", FailureCause.MALFORMED, "returned Decimal('0.5') (Decimal), which is not a number"),
        ("a_complex", FailureCause.MALFORMED, "returned 1j (complex), which is not a number"),
        ("verl_huge", FailureCause.MALFORMED, "returned inf (float), which is not finite"),
        ("a_dict", FailureCause.MALFORMED, "for the part 'length' returned 'much' (str), which is not a number"),
        ("too_many", FailureCause.MALFORMED, "returned [1.0, 2.0] (list), which has 2 values for 1 completion(s)"),
        ("no_list", FailureCause.MALFORMED, "returned 1.0 (float), which is not a list"),
        ("waits_forever", FailureCause.TIMEOUT, "gave no answer within 1 s"),
        ("never_lets_go", FailureCause.TIMEOUT, "gave no answer within 1 s and was killed"),
        ("exits_async", FailureCause.CRASHED, "ended with exit code 4"),
    ],
)
def test_every_way_to_fail_is_recorded_with_its_cause(
    functions: str, name: str, cause: FailureCause, said: str
) -> None:
    deadline_s = 1.0 if cause is FailureCause.TIMEOUT else 60.0
    (judgement,) = judge_many(judge_with(functions, name, workers=1, deadline_s=deadline_s), ["bad"])
    assert not judgement.is_judged
    assert judgement.cause is cause
    assert judgement.failure is not None
    assert judgement.failure.startswith(f"reward function '{functions}:{name}' {said}")
    assert "\n" not in judgement.failure
    assert judgement.parts == {}, "a failure is no zero"
    assert judgement.is_correct is False


@pytest.mark.parametrize("name", ["exits", "raises", "exits_async"])
def test_one_bad_response_costs_the_others_nothing(functions: str, name: str) -> None:
    """Also of asynchronous calls that share one process: when it dies, the others are asked again alone."""
    responses = ["good"] * 5 + ["bad"] + ["good"] * 6
    found = judge_many(judge_with(functions, name, workers=2), responses)
    assert [j.is_judged for j in found] == [response == "good" for response in responses]
    assert {j.reward for j in found if j.is_judged} == {1.0}


@pytest.mark.parametrize("name", ["sleeps", "waits_forever", "never_lets_go"])
def test_a_response_that_hangs_its_judge_costs_the_others_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes for the one that hangs, and for all that wait in a process that never lets go."""
    clock = hand_clock(monkeypatch)
    with judge_with(write_functions(tmp_path), name, workers=2) as judge:
        for index in range(12):
            judge.submit([trajectory(0, index)], PROMPT, ["bad" if index == 5 else "good"])
        if name == "never_lets_go":
            assert wait_until((tmp_path / "spins").exists)
            clock.advance(60.0 + GRACE_S)
        found = drain_past_deadlines(judge, clock, 60.0 + GRACE_S, in_time=11, late=1)
    assert {j.trajectory.sample_index for j in found if not j.judgement.is_judged} == {5}
    assert found[-1].judgement.cause is FailureCause.TIMEOUT
    assert {j.judgement.reward for j in found[:-1]} == {1.0}


def test_functions_in_processes_give_what_they_give_at_once(functions: str) -> None:
    judge = judge_with(functions, "length")
    assert [j.reward for j in judge_many(judge, ["", "a", "ab", "abc"])] == [0.0, 1.0, 2.0, 3.0]
    assert judge_many(judge_with(functions, "length", isolate=False), ["abc"])[0].reward == 3.0
    assert judge_many(judge_with(functions, "raises", isolate=False), ["bad"])[0].cause is FailureCause.RAISED
    assert judge_many(judge_with(functions, "awaited"), ["x"])[0].reward == 0.25
    assert judge_many(judge_with(functions, "awaited", isolate=False), ["x", "y"])[1].reward == 0.25


def test_numbers_of_numpy_truth_values_and_the_bound_itself_are_rewards(functions: str) -> None:
    asked = ["bool", "float", "array", "true", "edge", "vector"]
    found = judge_many(judge_with(functions, "of_numpy"), asked)
    assert [j.reward for j in found[:5]] == [1.0, 0.5, 2.0, 1.0, 1e6]
    assert found[5].cause is FailureCause.MALFORMED


def test_a_verl_function_may_have_fewer_parameters(functions: str) -> None:
    """As verl's own scorer of GSM8K, `compute_score(solution_str, ground_truth)`."""
    assert [j.reward for j in judge_many(judge_with(functions, "compute_score"), ["2", "3"])] == [1.0, 0.0]


@pytest.mark.parametrize("weights", [(2.0,), (-1e300,), (1e308, -1e308)])
def test_a_weighted_sum_beyond_the_bound_is_a_failure(functions: str, weights: tuple[float, ...]) -> None:
    """1e6 · 2; and 1e6 · 1e308 − 1e6 · 1e308, which is infinity minus infinity."""
    own = {"kind": "function", "function": f"{functions}:of_numpy", "isolate": False}
    parts = [RewardSettings.model_validate({**own, "weight": w, "name": str(w)}) for w in weights]
    with RewardScorer({"some": SomeTask()}, parts, {"some": AnswerSettings(format="last_line")}) as judge:  # type: ignore[dict-item]
        judgement = judge.score(PROMPT, "edge")
    assert (judgement.cause, judgement.reward) == (FailureCause.MALFORMED, 0.0)
    assert "weighted sum of the reward parts" in str(judgement.failure)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_trl_function_is_called_once_with_the_whole_group(functions: str, isolate: bool) -> None:
    with judge_with(functions, "ranks", isolate=isolate) as judge:
        assert judge.sees_groups
        for group_id, responses in ((3, ["ccc", "a", "bb", "dddd"]), (4, ["x"])):
            judge.submit([trajectory(group_id, i) for i in range(len(responses))], PROMPT, responses)
        found = {j.trajectory.name: j.judgement.reward for j in judge.drain()}
    assert found == {"3/0": 0.5, "3/1": 0.0, "3/2": 0.25, "3/3": 0.75, "4/0": 0.0}


def test_of_a_group_single_members_may_fail_or_not_apply_and_a_wrong_length_fails_all(functions: str) -> None:
    group = [trajectory(0, i) for i in range(4)]
    with judge_with(functions, "scores_some") as judge:
        judge.submit(group, PROMPT, ["a", "none", "nan", "huge"])
        found = [j.judgement for j in judge.drain()]
    assert [(j.is_judged, j.cause) for j in found] == [(True, None), *[(False, FailureCause.MALFORMED)] * 3]
    assert [str(j.failure).partition(", which ")[2] for j in found[2:]] == [
        "is not finite",
        "is larger than 1e+06 in magnitude; scale it down",
    ]
    with judge_with(functions, "too_many") as judge:
        judge.submit(group, PROMPT, ["a"] * 4)
        said = {j.judgement.failure for j in judge.drain()}
    assert [str(text).partition(", which ")[2] for text in said] == ["has 2 values for 4 completion(s)"]


def test_functions_that_see_one_response_are_not_kept_waiting_for_their_group(functions: str) -> None:
    with judge_with(functions, "length") as judge:
        assert not judge.sees_groups
        judge.submit([trajectory(0, 0), trajectory(0, 1)], PROMPT, ["a", "abc"])
        assert sorted(j.judgement.reward for j in judge.drain()) == [1.0, 3.0]


def test_async_calls_wait_together(functions: str) -> None:
    """Each of 40 calls waits until it is one of 20, and returns how many there were at most."""
    judge = judge_with(functions, "waits_for_twenty", concurrency=20, workers=1)
    assert [j.reward for j in judge_many(judge, ["x"] * 40)] == [20.0] * 40


def test_judging_goes_on_while_the_run_does_something_else(functions: str) -> None:
    with judge_with(functions, "length") as judge:
        judge.submit([trajectory(0, 0)], PROMPT, ["abc"])
        assert wait_until(lambda: not judge._finished.empty())
        (judged,) = judge.collect()
        assert (judged.trajectory, judged.judgement.reward) == (trajectory(0, 0), 3.0)
        assert judge.collect() == []
        assert list(judge.drain()) == []


def test_a_crash_is_tried_again_and_a_raise_is_not(functions: str, tmp_path: Path) -> None:
    (judgement,) = judge_many(judge_with(functions, "crashes_once", retries=1), [str(tmp_path / "mark")])
    assert judgement.reward == 1.0
    (judgement,) = judge_many(judge_with(functions, "crashes_once", retries=0), [str(tmp_path / "other")])
    assert judgement.cause is FailureCause.CRASHED
    (judgement,) = judge_many(judge_with(functions, "notes_and_raises", retries=50), [str(tmp_path / "calls")])
    assert judgement.cause is FailureCause.RAISED
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_worker_that_dies_between_two_calls_is_replaced(functions: str) -> None:
    before = children()
    with judge_with(functions, "length", workers=1) as judge:
        assert judge.score(PROMPT, "abc").reward == 3.0
        (first,) = children() - before
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: not is_running(first))
        assert wait_until(lambda: judge.score(PROMPT, "ab").is_judged)  # the run notices soon after
        assert children() - before != {first}


def test_workers_are_few_lazy_of_one_thread_and_print_to_stderr(
    functions: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = children()
    judge = judge_with(functions, "threads", workers=2)
    assert children() == before, "nothing is started before it is needed"
    with judge:
        for index in range(30):
            judge.submit([trajectory(0, index)], PROMPT, ["x"])
        assert {judged.judgement.reward for judged in judge.drain()} == {1.0}
        assert len(children() - before) <= 2
    judge_many(judge_with(functions, "prints"), ["x"])
    out, err = capfd.readouterr()
    assert "hello" not in out
    assert "hello from a judge" in err


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_run_however_it_ends(functions: str, tmp_path: Path, end: signal.Signals) -> None:
    """The run is killed while its judge and the judge's own child hang."""
    mark = tmp_path / "mark"
    script = tmp_path / "run.py"
    script.write_text(
        f"import signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs begin with it ignored
        "from judging_cases import *\n"
        f"judge_with({functions!r}, 'starts_escapees_and_spins', deadline_s=500).score(PROMPT, {str(mark)!r})\n"
    )
    root = str(Path(rewards.__file__).parents[2])
    run = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE
    )
    assert wait_until(lambda: mark.exists() and len(running_with(str(mark))) == 2)
    run.send_signal(end)  # Ctrl-C reaches the run alone: its workers have sessions of their own
    run.communicate(timeout=60)
    assert wait_until(lambda: not running_with(str(mark)))


def test_closing_while_calls_hang_leaves_nothing_and_a_closed_judge_can_begin_again(
    functions: str, tmp_path: Path
) -> None:
    before = children()
    judge = judge_with(functions, "notes_and_sleeps", deadline_s=1e6, workers=2)
    for index in range(6):
        judge.submit([trajectory(0, index)], PROMPT, [str(tmp_path / str(index))])
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    judge.close()  # whose own deadline is long before that of the calls
    assert children() <= before
    assert judge.score(PROMPT, "good").reward == 1.0
    assert list(judge.drain()) == []
    judge.submit([trajectory(1, 0)], PROMPT, ["good"])
    assert [one.trajectory for one in judge.drain()] == [trajectory(1, 0)], "the closed calls are forgotten"
    judge.close()


def test_a_drain_without_a_sign_of_life_names_who_was_waited_for(functions: str) -> None:
    with judge_with(functions, "sleeps", deadline_s=100) as judge:
        judge.timeout_s = 1.0
        judge.submit([trajectory(7, 3)], PROMPT, ["bad"])
        with pytest.raises(DeadlineExceeded, match=r"'.*:sleeps' returned no reward for \d+ s while 1 .*first: 7/3"):
            list(judge.drain())
        with pytest.raises(DeadlineExceeded, match="returned no reward within 1 s"):
            judge.score(PROMPT, "bad")


def test_responses_that_kill_their_judge_in_a_row_are_failures_and_never_end_the_run(
    functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "MAX_UNANSWERED", 3)
    found = judge_many(judge_with(functions, "exits", workers=1), ["bad"] * 8 + ["good"])
    assert [j.cause for j in found] == [FailureCause.CRASHED] * 8 + [None]


def test_a_judge_that_answers_nobody_stops_the_run_before_the_step_is_over(
    functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "MAX_UNANSWERED", 3)
    with pytest.raises(
        UserError,
        match=r":always_exits' did not answer 3 consecutive calls, then failed for the reference answer as a response: "
        r"it ended with exit code 3; test it separately",
    ):
        judge_many(judge_with(functions, "always_exits", workers=1), ["bad"] * 50)
    with pytest.raises(
        UserError, match=r"did not answer 3 consecutive calls, then failed for a call that it had answered before"
    ):
        judge_many(judge_with(functions, "exits_after_two", workers=1), [str(tmp_path / "asked")] * 50)
    found = judge_many(judge_with(functions, "exits", workers=1), ["bad", "bad", "good"] * 4)
    assert [j.is_judged for j in found] == [False, False, True] * 4
    found = judge_many(judge_with(functions, "raises", workers=1), ["bad"] * 9)
    assert {j.cause for j in found} == {FailureCause.RAISED}, "raising is cheap, and may be the response's fault"


def test_files_of_the_same_name_are_different_modules(tmp_path: Path) -> None:
    """Otherwise, classes of the first file would be looked up in the module of the second."""
    functions = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "reward.py"
        file.write_text(f"import sys\nNAME = '{name}'\ndef own(): return sys.modules[__name__].NAME\n")
        functions.append(import_function(f"{file}:own"))
    assert [function() for function in functions] == ["a", "b"]


def test_what_cannot_be_loaded_in_a_worker_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "only_here.py"
    file.write_text(
        "import sys\nif 'pytest' not in sys.modules:\n    raise OSError('no GPU')\ndef f(response): return 1\n"
    )
    judge = judge_with(str(file), "f")
    with pytest.raises(UserError, match=r"only_here.py:f' cannot be loaded in a worker process: .*no GPU"), judge:
        judge.score(PROMPT, "x")
    slow = tmp_path / "slow.py"
    slow.write_text("import sys, time\n'pytest' in sys.modules or time.sleep(100)\ndef f(response): return 1\n")
    monkeypatch.setattr(pool, "LOAD_TIMEOUT_S", 1.0)
    judge = judge_with(str(slow), "f")
    with (
        pytest.raises(UserError, match=r"did not load reward function '.*slow.py:f' within 1 s"),
        judge,
    ):
        judge.score(PROMPT, "x")


def test_a_part_that_does_not_apply_is_left_out_and_not_zero(functions: str) -> None:
    none = RewardSettings(kind="function", function=f"{functions}:not_applicable", weight=3)
    with RewardScorer(
        {"some": SomeTask()}, [RewardSettings(kind="correct"), none], {"some": AnswerSettings(format="last_line")}
    ) as judge:  # type: ignore[dict-item]
        judgement = judge.score(PROMPT, "2")
    assert (judgement.parts, judgement.reward, judgement.is_judged) == ({"correct": 1.0}, 1.0, True)
    (judgement,) = judge_many(judge_with(functions, "not_applicable"), ["2"])
    assert judgement.cause is FailureCause.MALFORMED
    assert judgement.failure == "no reward part applies: every reward function returned None"


def test_answers_that_would_stall_sympy_are_judged_without_it() -> None:
    """Countdown's answers are evaluated by sympy, in a process with a deadline; the guard keeps these from it."""
    task = GymTask("countdown", "countdown", {}, is_compact=False)
    assert isinstance(task.scorer, ScorerSpec)
    settings = JudgeSettings(deadline_s=60.0, retries=0)
    with RewardScorer(
        {"countdown": task}, [RewardSettings(kind="score")], {"countdown": AnswerSettings(format="last_line")}, settings
    ) as judge:
        problems = [task.draw(0, index) for index in range(3)]
        prompts = [Prompt(p.problem_id, "countdown", (), p.answer, p.metadata) for p in problems]
        hostile = ["9**9**9**9", "(" * 3000, "9" * 1999, "*".join(["99999999"] * 200), "-" * 1900 + "1"]
        for index, answer in enumerate([*hostile, problems[0].answer or ""]):
            judge.submit([trajectory(0, index)], prompts[0], [answer])
        found = {j.trajectory.sample_index: j.judgement for j in judge.drain()}
    assert found[len(hostile)].reward == 1.0
    assert all(j.reward < 1 for index, j in found.items() if index < len(hostile))
    assert all(j.is_judged for j in found.values()), "wrong answers, not failures at the deadline"


def test_only_scorers_known_to_be_quick_are_called_in_place() -> None:
    quick = {
        name
        for name in ("chain_sum", "basic_arithmetic", "knights_knaves", "countdown", "simple_integration")
        if GymTask(name, name, {}, is_compact=False).scorer == "inline"
    }
    assert quick == {"chain_sum", "basic_arithmetic", "knights_knaves"}
    hostile = ["9" * 100_000, "1e999999999", "9**9**9", "," * 100_000, "a" * 100_000, "1/" * 50_000, "\\frac" * 9999]
    for name in sorted(quick):
        task = GymTask(name, name, {}, is_compact=False)
        problem = task.draw(0, 0)
        for answer in hostile:
            with processor_time_limit(10):
                assert task.score(answer, problem.answer, problem.metadata) < 1


def test_settings_that_do_not_fit_their_kind_are_refused() -> None:
    for keys, complaint in (
        ({"kind": "http"}, "belongs to kind"),
        ({"kind": "correct", "url": "http://x"}, "belongs to kind"),
        ({"kind": "http", "url": "x:1"}, "allowed is http://"),
        ({"kind": "math", "isolate": False}, "signature and isolate belong"),
        ({"kind": "function", "function": "m:f", "signature": "other"}, "signature"),
    ):
        with pytest.raises(ValueError, match=complaint):
            RewardSettings(**keys)  # type: ignore[arg-type]
    assert RewardSettings(kind="http", url="http://x").name == "http"
    assert RewardSettings(kind="function", function="m.n:brevity").name == "brevity"
    assert RewardSettings(kind="function", function="m.n:brevity", name="short").name == "short"


def test_a_worker_need_not_generate_a_problem_again() -> None:
    """The metadata for another process holds the entry itself: a task that never drew it scores it all the same."""
    for name in ("countdown", "sudoku", "n_queens"):
        task, fresh = (GymTask(name, name, {}, is_compact=False) for _ in range(2))
        problem = task.draw(5, 3)
        portable = task.portable(problem.metadata)
        drawn = fresh._entry.cache_info().currsize
        assert fresh.score(problem.answer, problem.answer, portable) == 1.0
        assert fresh._entry.cache_info().currsize == drawn
