"""From a response to a judgement: weighted reward parts, and accuracy beside them.

What surely returns at once is judged in place. Everything else is asked in the background while the run generates on,
with a deadline for each call; a call that hangs, crashes or gives nonsense leaves the trajectory without a judgement,
which is recorded with its cause and is neither a reward of zero nor a wrong answer.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from baton.errors import DeadlineExceeded, UserError
from baton.rewards.answer import AnswerFormat, extract_answer, meets_format
from baton.rewards.functions import MAX_REWARD, call_here, detect_signature, import_function, is_async, number, told
from baton.rewards.mathematics import check_installed
from baton.rewards.scorer_protocol import (
    Call,
    CallFailure,
    CallValue,
    FunctionSpec,
    MathSpec,
    Outcome,
    ScoredTask,
    ScorerSetup,
    Spec,
)
from baton.rewards.settings import JudgeSettings, RewardSettings
from baton.rewards.warnings import RewardWarnings
from baton.types import FailureCause, Group, Prompt, RewardResult, ScoredTrajectory, Trajectory

if TYPE_CHECKING:
    from baton.rewards.scoring_thread import ScoringThread

NEEDS_SCORER = ("correct", "score")
NEEDS_REFERENCE = (*NEEDS_SCORER, "exact", "math")
MAX_UNANSWERED = 32
"""Calls in a row that one judge may leave unanswered (hung, crashed, unreachable) before it is asked what it can surely
answer: responses may do this to a judge, and then the run goes on; a judge that is out of order ends it."""


Calls = tuple[Call, ...]
Outcomes = tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A judge that is asked in the background."""

    who: str
    ask: Callable[[Calls], Coroutine[Any, Any, Outcomes]]
    sees_groups: bool = False
    """Whether it is asked about all responses of a group in one call; else about each alone."""
    needs_answer: bool = False
    """Whether a response without an answer is worth 0, which nobody needs to be asked about."""


@dataclass(frozen=True, slots=True)
class _Here:
    """A judge that surely returns at once."""

    ask: Callable[[Calls], Outcomes]
    sees_groups: bool = False


class RewardScorer:
    """Judges responses of all tasks of a recipe. Nothing is started before a call needs it; `close` ends it all."""

    def __init__(
        self,
        tasks: Mapping[str, ScoredTask],
        rewards: Sequence[RewardSettings],
        answer_format: AnswerFormat,
        settings: JudgeSettings | None = None,
    ) -> None:
        """Import the reward functions. Raises UserError when one cannot be found or no part is given."""
        if not rewards:
            raise UserError('the recipe has no [[reward]]: give at least one, such as kind = "correct"')
        names = [r.name for r in rewards]
        if len(set(names)) < len(names):
            raise UserError(f"[[reward]]: two parts have the same name, got {names}; give each a name of its own")
        self._tasks, self._rewards, self._format = tasks, rewards, answer_format
        self._settings = settings or JudgeSettings()
        self._specs: list[Spec] = []
        self._thread: ScoringThread | None = None
        self._finished: queue.SimpleQueue[tuple[list[int], Future[list[RewardResult]] | list[RewardResult]]] = (
            queue.SimpleQueue()
        )
        self._waiting: dict[int, Trajectory] = {}
        self._next_id = 0
        self._unanswered: dict[str, int] = {}
        self.warnings = RewardWarnings()
        """Of all that was collected."""
        self._answered: dict[str, Calls] = {}
        """The last that each judge answered."""
        self._last_sign_s = 0.0
        self._scorers = {name: self._scorer(task) for name, task in tasks.items()}
        self._parts = {r.name: self._part(r) for r in rewards}
        self.patience_s = self._longest_call_s()
        """Without a judgement, after which a wait ends."""
        self.sees_groups = any(part is not None and part.sees_groups for part in self._parts.values())
        """Whether all trajectories of a group are to be submitted together: a reward function compares them."""

    def start(self) -> str:
        """Start a worker process where one will be needed; return in a line what those are kept from, else nothing.

        Raises UserError when it cannot load what it is to judge with.
        """
        if not self._specs:
            return ""
        return self._scoring_thread().run(self._scoring_thread().start_worker()).result(self.patience_s)

    def judge(self, prompt: Prompt, response: str, token_ids: Sequence[int] = ()) -> RewardResult:
        """Judge one finished response and wait for it. Accuracy means a full score, whatever the parts give besides."""
        begun = self._submit_calls(prompt, [response], [token_ids])
        try:
            return (begun if isinstance(begun, list) else begun.result(self.patience_s))[0]
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._judges()} gave no judgement within {self.patience_s:.0f} s") from error

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt, responses: Sequence[str]) -> None:
        """Have finished trajectories of one prompt judged: the whole group where `sees_groups`, else as they finish.

        `collect` or `drain` gives them back in any order, but those that were submitted together together.
        """
        if not self._waiting:
            self._last_sign_s = time.monotonic()
        places = list(range(self._next_id, self._next_id + len(trajectories)))
        self._next_id += len(trajectories)
        self._waiting.update(zip(places, trajectories, strict=True))
        begun = self._submit_calls(prompt, responses, [t.token_ids for t in trajectories])
        if isinstance(begun, list):
            self._finished.put((places, begun))
        else:
            begun.add_done_callback(lambda done: self._finished.put((places, done)))

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        """Return what has been judged, waiting at most `timeout_s` for the first.

        Raises UserError where a judge cannot work at all, and DeadlineExceeded naming who gave no sign for too long.
        """
        found: list[ScoredTrajectory] = []
        while self._waiting:
            try:
                finished = self._finished.get(timeout=0.0 if found else timeout_s)
            except queue.Empty:
                break
            self._last_sign_s = time.monotonic()
            found += self._collect_finished(finished)
        silent_for_s = time.monotonic() - self._last_sign_s
        if not found and self._waiting and silent_for_s > self.patience_s:
            some = ", ".join(t.name for t in list(self._waiting.values())[:4])
            raise DeadlineExceeded(
                f"{self._judges()} gave no judgement for {silent_for_s:.0f} s while {len(self._waiting)} trajectories "
                f"wait for it (first: {some})"
            )
        return found

    def drain(self, check: Callable[[], None] = lambda: None) -> Iterator[ScoredTrajectory]:
        """Yield all that was submitted and not yet collected, waiting for it as `collect` does.

        check: called about once a second; what it raises ends the wait.
        """
        while self._waiting:
            check()
            yield from self.collect(min(1.0, self.patience_s))

    def close(self) -> None:
        """Kill the worker processes and forget what is being judged. The next call starts them again."""
        background, self._thread = self._thread, None
        self._waiting.clear()
        if background is not None:
            background.close()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _submit_calls(
        self, prompt: Prompt, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> Future[list[RewardResult]] | list[RewardResult]:
        calls = tuple(
            Call(prompt, response, extract_answer(response, self._format), tuple(ids))
            for response, ids in zip(responses, token_ids, strict=True)
        )
        outcomes: dict[str, Outcomes] = {}
        asked: dict[str, _Asked] = {}
        for name, judge in (("", self._scorers[prompt.task]), *self._parts.items()):
            if isinstance(judge, _Asked):
                asked[name] = judge
            elif judge is not None:
                outcomes[name] = judge.ask(calls)
        if not asked:
            return self._judgements(calls, outcomes)
        return self._scoring_thread().run(self._ask_all(calls, outcomes, asked))

    async def _ask_all(
        self, calls: Calls, outcomes: dict[str, Outcomes], asked: dict[str, _Asked]
    ) -> list[RewardResult]:
        once = {judge.who: judge for judge in asked.values()}  # `math` may be both the scorer and a part
        said = dict(zip(once, await asyncio.gather(*(self._ask(j, calls) for j in once.values())), strict=True))
        return self._judgements(calls, outcomes | {name: said[judge.who] for name, judge in asked.items()})

    async def _ask(self, judge: _Asked, calls: Calls) -> Outcomes:
        if judge.sees_groups:
            return await self._watched(judge, calls)
        return tuple(chain.from_iterable(await asyncio.gather(*(self._watched(judge, (call,)) for call in calls))))

    async def _watched(self, judge: _Asked, calls: Calls) -> Outcomes:
        """Ask a judge; after too many calls without an answer see whether it is the judge or the responses."""
        if judge.needs_answer and calls[0].answer is None:
            return (CallValue(0.0),)
        outcomes = await judge.ask(calls)
        if _is_answered(outcomes):
            self._unanswered[judge.who], self._answered[judge.who] = 0, calls
            return outcomes
        count = self._unanswered[judge.who] = self._unanswered.get(judge.who, 0) + 1
        if count >= MAX_UNANSWERED:
            self._unanswered[judge.who] = 0
            known = self._answered.get(judge.who)
            prompt = calls[0].prompt
            probe = known or (Call(prompt, prompt.answer or "", prompt.answer),) * len(calls)
            said = await judge.ask(probe)
            if not _is_answered(said) and isinstance(refusal := said[0], CallFailure):
                what = "what it had answered before" if known else "the reference answer as a response"
                raise UserError(
                    f"{judge.who} left {count} calls in a row unanswered, and then {what}, which {refusal.detail}; "
                    "make it work alone, or raise judge.deadline_s, then go on with --resume"
                )
        return outcomes

    def _judgements(self, calls: Calls, outcomes: dict[str, Outcomes]) -> list[RewardResult]:
        return [
            self._judgement(call, {name: said[index] for name, said in outcomes.items()})
            for index, call in enumerate(calls)
        ]

    def _judgement(self, call: Call, outcomes: dict[str, Outcome]) -> RewardResult:
        """Put the outcomes together: those of the parts by name, the scorer's under the empty name."""
        score = outcomes.get("")
        failure = _first_failure(self._who("", call), score)
        parts: dict[str, float] = {}
        for reward in self._rewards:
            outcome = score if reward.kind in NEEDS_SCORER else outcomes[reward.name]
            failure = failure or _first_failure(self._who(reward.name, call), outcome)
            if isinstance(outcome, CallValue) and outcome.value is not None:
                parts[reward.name] = float(outcome.value >= 1.0) if reward.kind == "correct" else outcome.value
        if failure is None and not parts:
            failure = FailureCause.MALFORMED, "no reward part applies: every reward function returned None"
        total = sum(r.weight * parts.get(r.name, 0.0) for r in self._rewards)
        if failure is None and not abs(total) <= MAX_REWARD:
            said = f"the weighted sum of the reward parts is {total:g}, beyond {MAX_REWARD:g} in magnitude"
            failure = FailureCause.MALFORMED, f"{said}: lower the weights in [[reward]]"
        if failure is not None:
            return RewardResult(0.0, parts, False, call.answer, failure[1], failure[0])
        if isinstance(score, CallValue):
            is_correct = score.value is not None and score.value >= 1.0
        else:
            is_correct = all(parts.get(r.name, 1.0) >= 1.0 for r in self._rewards if r.weight > 0)
        return RewardResult(total, parts, is_correct, call.answer)

    def _who(self, name: str, call: Call) -> str:
        judge = self._parts.get(name) if name else self._scorers[call.prompt.task]
        if isinstance(judge, _Asked):
            return judge.who
        reward = next((r for r in self._rewards if r.name == name), None)
        if reward is None or reward.function is None:
            return f"the scorer of task {call.prompt.task!r}"
        return f"reward function {reward.function!r}"

    def _scorer(self, task: ScoredTask) -> _Asked | _Here | None:
        scorer = task.scorer
        if scorer is None:
            wanting = next((r for r in self._rewards if r.kind in NEEDS_REFERENCE), None)
            if wanting is not None:
                raise UserError(
                    f'[[reward]] kind = "{wanting.kind}" needs a reference answer, but task {task.name!r} has '
                    'scorer = "none": name its answer_column, or judge by functions only'
                )
            return None
        if scorer != "inline":
            return self._in_worker(scorer, str(scorer), needs_answer=True, portable=task.portable)

        def score_here(call: Call) -> Outcome:
            try:
                return number(task.score(call.answer, call.prompt.answer, call.prompt.metadata))
            except Exception as error:  # noqa: BLE001 - an answer may break a verifier in any way
                return CallFailure(FailureCause.RAISED, f"raised {told(error)}")

        return _each(score_here)

    def _part(self, reward: RewardSettings) -> _Asked | _Here | None:
        """Who says the value of a part; None where the scorer does."""
        match reward.kind:
            case "exact":
                return _each(
                    lambda call: CallValue(
                        float(call.answer is not None and call.answer == (call.prompt.answer or "").strip())
                    )
                )
            case "format":
                return _each(lambda call: CallValue(float(meets_format(call.response, self._format))))
            case "math":
                return self._in_worker(MathSpec(), str(MathSpec()), reward, needs_answer=True)
            case "http":
                return self._remote(reward)
            case "function":
                return self._function(reward)
            case "correct" | "score":
                return None

    def _function(self, reward: RewardSettings) -> _Asked | _Here:
        path = reward.function or ""
        function = import_function(path)
        signature = reward.signature or detect_signature(function)
        if reward.isolate:
            spec = FunctionSpec(path, signature)
            return self._in_worker(spec, str(spec), reward, concurrency=reward.concurrency if is_async(function) else 0)
        if is_async(function):
            raise UserError(f"reward function {path!r} is async, and isolate = false is for functions that are not")
        if signature == "trl":
            return _Here(lambda calls: call_here(function, signature, calls), sees_groups=True)
        return _each(lambda call: call_here(function, signature, (call,))[0])

    def _remote(self, reward: RewardSettings) -> _Asked:
        url, deadline_s = reward.url or "", reward.deadline_s or self._settings.deadline_s

        async def ask(calls: Calls) -> Outcomes:
            background = self._scoring_thread()
            return await background.call_remote(url, calls[0], deadline_s, concurrency=reward.concurrency)

        return _Asked(f"the judge at {url}", ask)

    def _in_worker(
        self,
        spec: Spec,
        who: str,
        reward: RewardSettings | None = None,
        *,
        needs_answer: bool = False,
        concurrency: int = 0,
        portable: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> _Asked:
        if isinstance(spec, MathSpec):
            check_installed()
        deadline_s = (reward and reward.deadline_s) or self._settings.deadline_s
        self._specs.append(spec)
        place = len(self._specs) - 1

        async def ask(calls: Calls) -> Outcomes:
            if portable is not None:
                prompt = calls[0].prompt
                prompt = msgspec.structs.replace(prompt, metadata=portable(prompt.metadata))
                calls = tuple(msgspec.structs.replace(call, prompt=prompt) for call in calls)
            return await self._scoring_thread().call_worker(place, calls, deadline_s, concurrency=concurrency)

        sees_groups = isinstance(spec, FunctionSpec) and spec.signature == "trl"
        return _Asked(who, ask, sees_groups, needs_answer)

    def _scoring_thread(self) -> ScoringThread:
        if self._thread is None:
            from baton.rewards.scoring_thread import ScoringThread  # brings aiohttp, which most recipes never need

            setup = ScorerSetup(tuple(self._specs), tuple(sys.path), int(self._settings.memory_gib * 2**30))
            self._thread = ScoringThread(setup, self._settings)
        return self._thread

    def _longest_call_s(self) -> float:
        """Longest that everything may go without one judgement, however long the queue: something is always running."""
        deadline_s = max([self._settings.deadline_s, *(r.deadline_s or 0.0 for r in self._rewards)])
        return self._settings.load_timeout_s + (1 + self._settings.retries) * (2 * deadline_s + 10.0) + 30.0

    def _judges(self) -> str:
        judges = [*self._scorers.values(), *self._parts.values()]
        return ", ".join(dict.fromkeys(j.who for j in judges if isinstance(j, _Asked)))

    def _collect_finished(
        self, finished: tuple[list[int], Future[list[RewardResult]] | list[RewardResult]]
    ) -> list[ScoredTrajectory]:
        places, said = finished
        trajectories = [self._waiting.pop(place) for place in places]
        judgements = said if isinstance(said, list) else said.result()
        for judgement in judgements:
            self.warnings.count(judgement)
        return [ScoredTrajectory(t, j) for t, j in zip(trajectories, judgements, strict=True)]


def require_judged(groups: Sequence[Group], what: str) -> None:
    """Raise UserError with the first cause when not one trajectory could be judged: something is wrong with a judge."""
    failures = [member.judgement.failure for group in groups for member in group.members]
    if failures and all(failure is not None for failure in failures):
        raise UserError(f"none of the {len(failures)} trajectories of {what} could be judged: {failures[0]}")


def failure_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return how many trajectories have no judgement, in all and by each cause that occurred."""
    causes = [m.judgement.cause for g in groups for m in g.members if not m.judgement.is_judged]
    counts = Counter(cause for cause in causes if cause is not None)
    return {"judge/failed": float(len(causes)), **{f"judge/{cause}": float(n) for cause, n in sorted(counts.items())}}


def _each(score: Callable[[Call], Outcome]) -> _Here:
    """A judge of each response alone."""
    return _Here(lambda calls: tuple(score(call) for call in calls))


def _is_answered(outcomes: Outcomes) -> bool:
    """Whether a judge has answered, be it that it raised, rather than hung, crashed or been away."""
    answered = (FailureCause.RAISED, FailureCause.MALFORMED)
    return any(isinstance(o, CallValue) or o.cause in answered for o in outcomes)


def _first_failure(who: str, outcome: Outcome | None) -> tuple[FailureCause, str] | None:
    return (outcome.cause, f"{who} {outcome.detail}") if isinstance(outcome, CallFailure) else None
