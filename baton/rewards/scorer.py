"""Scores responses. The reward is the weighted sum of the reward parts.

Scorers that always return quickly are called inline. All other scorers are called in a background thread while the run
generates, and each call has a deadline. If a call hangs, crashes or returns an invalid value, the trajectory has no
reward, and the cause is recorded. A trajectory without a reward does not count as reward 0 or as a wrong answer.

A multi-turn episode already has the reward of its environment when it is submitted. The values of the reward parts in
`OF_EPISODES` are added to this reward.
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
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import msgspec

from baton.errors import DeadlineExceeded, UserError
from baton.rewards.answer import extract_answer, meets_format
from baton.rewards.chat import ChatFormat
from baton.rewards.functions import (
    MAX_REWARD,
    check_arguments,
    describe_error,
    detect_signature,
    import_function,
    is_async,
    number,
)
from baton.rewards.mathematics import check_installed
from baton.rewards.scorer_protocol import (
    Call,
    CallFailure,
    Calls,
    CallValue,
    FunctionSpec,
    GenerativeModelSpec,
    MathSpec,
    ModelSpecs,
    Outcome,
    Outcomes,
    RewardModelSpec,
    ScoredTask,
    ScorerSetup,
    Spec,
)
from baton.rewards.settings import LOAD_TIMEOUT_S, SERVER_START_S, AnswerSettings, JudgeSettings, RewardSettings
from baton.rewards.warnings import RewardWarnings
from baton.types import FailureCause, Group, Message, Prompt, RewardResult, ScoredTrajectory, Trajectory

if TYPE_CHECKING:
    from baton.rewards.pool import Launch
    from baton.rewards.scoring_thread import ScoringThread

NEEDS_SCORER = ("correct", "score")
NEEDS_REFERENCE = (*NEEDS_SCORER, "exact", "math")
OF_EPISODES = ("function", "http", "model")
"""Values of `kind` in a section `[[reward]]` that can score multi-turn episodes."""
OF_ANSWERS = ("exact", "math", "format")
"""Values of `kind` that only score single-turn tasks. In multi-turn tasks, the environment's reward replaces them."""
MODEL_DEADLINE_S = 120.0
"""Default timeout of a call of a reward model, in seconds. The time starts when the call is sent to a process of the
model. It includes the wait for earlier calls in that process. It excludes the wait that the limit `concurrency` causes,
and the time in which the model loads."""
MAX_UNANSWERED = 32
"""If this number of consecutive calls of a scorer get no answer (timeout, crash, unreachable), the scorer is tested.
The test repeats a call that the scorer has answered before. If there is no such call, the test sends the reference
answer. If the test succeeds, the failures are attributed to the responses and the run continues. Otherwise the run
stops with an error."""

Finished = Trajectory | ScoredTrajectory
"""A finished trajectory, or a multi-turn episode with the reward of its environment."""
Response = str | Sequence[Message]
"""The text of a trajectory, or the turns and observations of an episode."""


@dataclass(frozen=True, slots=True)
class _BackgroundScorer:
    name: str
    call: Callable[[ScoringThread, Calls], Coroutine[Any, Any, Outcomes]]
    sees_groups: bool = False
    """True if each call contains all responses of a group, False if each call contains one response."""
    needs_answer: bool = False
    """True if a response without an answer scores 0 without a call."""


@dataclass(frozen=True, slots=True)
class _InlineScorer:
    """A scorer that always returns quickly, so it needs no deadline."""

    name: str
    score: Callable[[Call], Outcome]


_Scorer = _BackgroundScorer | _InlineScorer


class RewardScorer:
    """Scores the responses to all tasks of a recipe. Thread and processes start in `start`, or when a call first needs
    them."""

    def __init__(
        self,
        tasks: Mapping[str, ScoredTask],
        rewards: Sequence[RewardSettings],
        answers: Mapping[str, AnswerSettings],
        settings: JudgeSettings | None = None,
        places: Sequence[tuple[str, Launch]] = (),
    ) -> None:
        """Import the reward functions. Raises UserError if an import fails, there is no reward part, or a part applies
        to no task. `tasks`: the single-turn tasks. `answers`: answer format by task name. `places`: for a reward model
        without `devices`, the device of each process and the function that starts the process; by default, one process
        on this machine."""
        if not rewards:
            raise UserError('the recipe has no [[reward]]: give at least one, such as kind = "correct"')
        names = [r.name for r in rewards]
        if len(set(names)) < len(names):
            raise UserError(f"[[reward]]: two parts have the same name, got {names}; give each a different name")
        useless = next((r.name for r in rewards if r.kind in OF_ANSWERS), None)
        if not tasks and useless is not None:
            raise UserError(
                f"[[reward]] {useless!r} scores answers of single-turn tasks, but all tasks of the recipe are "
                'multi-turn; remove it, or use kind = "function", which scores episodes in addition to the environment'
            )
        self._tasks, self._rewards, self._answers = tasks, rewards, answers
        self.scores_episodes = any(r.kind in OF_EPISODES for r in rewards)
        """Whether multi-turn episodes must be submitted. Otherwise, the environment gives the whole reward."""
        self._settings, self._places = settings or JudgeSettings(), places
        self._specs: list[Spec] = []
        self._models: dict[str, list[tuple[ModelSpecs, Launch | None]]] = {}
        self._thread: ScoringThread | None = None
        self._finished: queue.SimpleQueue[tuple[int, Future[list[RewardResult]]]] = queue.SimpleQueue()
        self._waiting: dict[int, Sequence[Finished]] = {}
        """Submission number → the trajectories that were submitted together and have no rewards yet."""
        self._submissions = count()
        self._unanswered: dict[str, int] = {}
        self.warnings = RewardWarnings()
        """Counts all collected rewards and formulates warnings about them."""
        self._answered: dict[str, Calls] = {}
        """The last answered call of each scorer, by the name of the scorer."""
        self._last_result_s = 0.0
        self._scorers = {name: self._scorer(task) for name, task in tasks.items()}
        self._parts = {r.name: self._part(r) for r in rewards}
        self.timeout_s = self._longest_call_s()
        """`collect` and `drain` raise DeadlineExceeded after this number of seconds without a new reward."""
        self.sees_groups = any(isinstance(p, _BackgroundScorer) and p.sees_groups for p in self._parts.values())
        """True if the trajectories of a group must be submitted together, because a reward function compares them."""

    def start(self) -> str:
        """Start the processes of reward models, and a worker process if a scorer needs one. Return a line for the user
        about the isolation of the processes; empty without processes. Raises UserError if a process cannot load a
        scorer."""
        if not self._specs and not self._models:
            return ""
        return self._scoring_thread().run(self._scoring_thread().start_workers()).result(self.timeout_s)

    def score(self, prompt: Prompt, response: str) -> RewardResult:
        try:
            return self._score((Call(prompt, response, self._parsed(prompt, response)),)).result(self.timeout_s)[0]
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._names()} returned no reward within {self.timeout_s:.0f} s") from error

    def submit(self, finished: Sequence[Finished], prompt: Prompt, responses: Sequence[Response]) -> None:
        """Submit finished trajectories of one prompt: a whole group if `sees_groups` is True. `responses`: the text of
        each trajectory, or the turns and observations of each episode. `collect` and `drain` return trajectories in any
        order, but those that were submitted together are returned together."""
        if not finished:
            return
        if not self._waiting:
            self._last_result_s = time.monotonic()
        number = next(self._submissions)
        self._waiting[number] = tuple(finished)
        calls = (self._call_of(one, prompt, response) for one, response in zip(finished, responses, strict=True))
        self._score(tuple(calls)).add_done_callback(lambda done: self._finished.put((number, done)))

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        """Return the trajectories that have been scored. Wait at most `timeout_s` seconds for the first trajectory.
        Raises UserError if a worker process cannot load its scorers, or if a scorer fails the test of `MAX_UNANSWERED`.
        Raises DeadlineExceeded, which names the scorers, if no result arrives for `self.timeout_s` seconds."""
        found: list[ScoredTrajectory] = []
        while self._waiting:
            try:
                number, done = self._finished.get(timeout=0.0 if found else timeout_s)
            except queue.Empty:
                break
            self._last_result_s = time.monotonic()
            members = self._waiting.pop(number, None)
            if members is None:  # `close` has dropped this submission
                continue
            results = done.result()
            for result in results:
                self.warnings.count(result)
            found += [_scored(member, result) for member, result in zip(members, results, strict=True)]
        waited_s = time.monotonic() - self._last_result_s
        if not found and self._waiting and waited_s > self.timeout_s:
            waiting = [trajectory_of(one).name for one in chain(*self._waiting.values())]
            raise DeadlineExceeded(
                f"{self._names()} returned no reward for {waited_s:.0f} s while {len(waiting)} trajectories wait for a "
                f"reward (first: {', '.join(waiting[:4])})"
            )
        return found

    def drain(self, check: Callable[[], None] = lambda: None) -> Iterator[ScoredTrajectory]:
        """Yield all submitted trajectories that have not been collected, waiting for their rewards. Raises the errors
        of `collect`. `check`: called about once a second; an exception that it raises ends the wait."""
        while self._waiting:
            check()
            yield from self.collect(min(1.0, self.timeout_s))

    def metrics(self) -> dict[str, float]:
        """Return the metric of how long reward models scored since the last call; empty without a reward model."""
        busy_s = None if self._thread is None else self._thread.take_busy_s()
        return {} if busy_s is None else {"time/reward_model_busy": busy_s}

    def close(self) -> None:
        """Kill the worker processes and drop all pending calls. The next call starts the processes again."""
        background, self._thread = self._thread, None
        self._waiting.clear()
        if background is not None:
            background.close()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _parsed(self, prompt: Prompt, text: str) -> str | None:
        own = self._answers.get(prompt.task, AnswerSettings())
        return extract_answer(text, own.format, own.pattern)

    def _call_of(self, finished: Finished, prompt: Prompt, response: Response) -> Call:
        if isinstance(finished, Trajectory):
            assert isinstance(response, str)
            return Call(prompt, response, self._parsed(prompt, response), tuple(finished.token_ids))
        assert finished.episode is not None
        assert not isinstance(response, str)
        last = next((m.content for m in reversed(response) if m.role == "assistant"), "")
        return Call(
            prompt,
            "\n".join(message.content for message in response),
            self._parsed(prompt, last),
            tuple(chain.from_iterable(path.token_ids for path in finished.paths)),
            msgspec.structs.replace(finished.episode, earlier=()),
            tuple(response),
        )

    def _rewards_of(self, call: Call) -> Sequence[RewardSettings]:
        return self._rewards if call.episode is None else [r for r in self._rewards if r.kind in OF_EPISODES]

    def _score(self, calls: Calls) -> Future[list[RewardResult]]:
        outcomes: dict[str, Outcomes] = {}
        background: dict[str, _BackgroundScorer] = {}
        parts = {r.name: self._parts[r.name] for r in self._rewards_of(calls[0])}
        for name, scorer in (("", self._scorers.get(calls[0].prompt.task)), *parts.items()):
            if isinstance(scorer, _BackgroundScorer):
                background[name] = scorer
            elif scorer is not None:
                outcomes[name] = tuple(map(scorer.score, calls))
        if not background:
            done: Future[list[RewardResult]] = Future()
            done.set_result(self._results(calls, outcomes))
            return done
        return self._scoring_thread().run(self._call_all(calls, outcomes, background))

    async def _call_all(
        self, calls: Calls, outcomes: dict[str, Outcomes], background: dict[str, _BackgroundScorer]
    ) -> list[RewardResult]:
        # scorers with the same name are the same scorer, such as the task's scorer and a part with kind = "math"
        once = {scorer.name: scorer for scorer in background.values()}
        found = dict(zip(once, await asyncio.gather(*(self._call(s, calls) for s in once.values())), strict=True))
        return self._results(calls, outcomes | {name: found[scorer.name] for name, scorer in background.items()})

    async def _call(self, scorer: _BackgroundScorer, calls: Calls) -> Outcomes:
        together: list[Calls] = [calls] if scorer.sees_groups else [(call,) for call in calls]
        return tuple(chain(*await asyncio.gather(*(self._checked_call(scorer, each) for each in together))))

    async def _checked_call(self, scorer: _BackgroundScorer, calls: Calls) -> Outcomes:
        """Call a scorer. After `MAX_UNANSWERED` calls without an answer, test the scorer with a call that it should
        answer. Raises UserError if the scorer does not answer the test."""
        if scorer.needs_answer and calls[0].answer is None:
            return (CallValue(0.0),)
        outcomes = await scorer.call(self._scoring_thread(), calls)
        if _is_answered(outcomes):
            self._unanswered[scorer.name], self._answered[scorer.name] = 0, calls
            return outcomes
        num_failed = self._unanswered[scorer.name] = self._unanswered.get(scorer.name, 0) + 1
        if num_failed >= MAX_UNANSWERED:
            self._unanswered[scorer.name] = 0
            known = self._answered.get(scorer.name)
            prompt = calls[0].prompt
            probe = known or (Call(prompt, prompt.answer or "", prompt.answer),) * len(calls)
            tested = await scorer.call(self._scoring_thread(), probe)
            if not _is_answered(tested) and isinstance(failure := tested[0], CallFailure):
                test = "a call that it had answered before" if known else "the reference answer as a response"
                raise UserError(
                    f"{scorer.name} did not answer {num_failed} consecutive calls, then failed for {test}: it "
                    f"{failure.detail}; test it separately, or raise judge.deadline_s, then continue with --resume"
                )
        return outcomes

    def _results(self, calls: Calls, outcomes: dict[str, Outcomes]) -> list[RewardResult]:
        return [
            self._result(call, {name: values[index] for name, values in outcomes.items()})
            for index, call in enumerate(calls)
        ]

    def _result(self, call: Call, outcomes: dict[str, Outcome]) -> RewardResult:
        """Combine the outcomes for one response. `outcomes` maps the name of each reward part to its outcome; its key
        "" has the outcome of the task's scorer."""
        task_scorer, score = self._scorers.get(call.prompt.task), outcomes.get("")
        rewards = self._rewards_of(call)
        failure = _failure(task_scorer, score)
        parts: dict[str, float] = {}
        values: dict[str, float] = {}
        for reward in rewards:
            outcome = score if reward.kind in NEEDS_SCORER else outcomes[reward.name]
            failure = failure or _failure(self._parts[reward.name] or task_scorer, outcome)
            if isinstance(outcome, CallValue) and outcome.value is not None:
                value = values[reward.name] = float(outcome.value >= 1.0) if reward.kind == "correct" else outcome.value
                prefix = "" if len(rewards) == 1 else f"{reward.name}."
                parts |= {prefix + name: part for name, part in outcome.parts.items()} or {reward.name: value}
        if failure is None and not parts and call.episode is None:
            text = "no reward part applies: every reward function returned None"
            failure = CallFailure(FailureCause.MALFORMED, text)
        total = sum(r.weight * values.get(r.name, 0.0) for r in rewards)
        if isinstance(score, CallValue):
            is_correct = score.value is not None and score.value >= 1.0
        else:
            is_correct = bool(values) and all(values.get(r.name, 1.0) >= 1.0 for r in rewards if r.weight > 0)
        return _judged(total, parts, is_correct, call.answer, failure)

    def _scorer(self, task: ScoredTask) -> _Scorer | None:
        scorer = task.scorer
        if scorer is None:
            part = next((r for r in self._rewards if r.kind in NEEDS_REFERENCE), None)
            if part is not None:
                raise UserError(
                    f'[[reward]] kind = "{part.kind}" needs a reference answer, but task {task.name!r} has '
                    'scorer = "none": name its answer_column, or use reward functions only'
                )
            return None
        if scorer != "inline":
            return self._in_worker(scorer, needs_answer=True, portable=task.portable)

        def score_here(call: Call) -> Outcome:
            try:
                return number(task.score(call.answer, call.prompt.answer, call.prompt.metadata))
            except Exception as error:  # noqa: BLE001 - a verifier may raise anything for some answers
                return CallFailure(FailureCause.RAISED, f"raised {describe_error(error)}")

        return _InlineScorer(f"the scorer of task {task.name!r}", score_here)

    def _part(self, reward: RewardSettings) -> _Scorer | None:
        """Return the scorer of a reward part, or None if the part takes its value from the task's scorer."""
        match reward.kind:
            case "exact":
                return _InlineScorer(reward.name, _is_reference)
            case "format":
                return _InlineScorer(reward.name, lambda call: CallValue(float(self._meets_format(call))))
            case "math":
                return self._in_worker(MathSpec(), reward, needs_answer=True)
            case "http":
                return self._remote(reward)
            case "model":
                return self._model(reward)
            case "function":
                return self._function(reward)
            case "correct" | "score":
                return None

    def _meets_format(self, call: Call) -> bool:
        own = self._answers.get(call.prompt.task, AnswerSettings())
        return meets_format(call.response, own.format, own.pattern)

    def _function(self, reward: RewardSettings) -> _Scorer:
        path = reward.function or ""
        function = import_function(path)
        signature = detect_signature(function) if reward.signature == "auto" else reward.signature
        check_arguments(path, function, signature, self._tasks.values())
        spec, concurrency = FunctionSpec(path, signature), reward.concurrency if is_async(function) else 0
        if reward.isolate:
            return self._in_worker(spec, reward, concurrency=concurrency)
        deadline_s = reward.deadline_s or self._settings.deadline_s
        return _BackgroundScorer(
            str(spec),
            lambda thread, calls: thread.call_here(function, spec, calls, deadline_s, concurrency=concurrency or 1),
            signature == "trl",
        )

    def _remote(self, reward: RewardSettings) -> _BackgroundScorer:
        url, deadline_s = reward.url or "", reward.deadline_s or self._settings.deadline_s
        chat = None
        if reward.template:
            chat = ChatFormat(reward.model or "", reward.template, reward.pattern, reward.max_new_tokens)
        most = reward.concurrency
        return _BackgroundScorer(
            f"the reward scorer at {url}{_purpose(reward)}",
            lambda thread, calls: thread.call_remote(url, calls[0], deadline_s, concurrency=most, chat=chat),
        )

    def _model(self, reward: RewardSettings) -> _BackgroundScorer:
        path, deadline_s = reward.model or "", reward.deadline_s or MODEL_DEADLINE_S
        here: list[tuple[str, Launch | None]] = [(device, None) for device in reward.devices]

        def spec_on(device: str) -> ModelSpecs:
            if not reward.template:
                return RewardModelSpec(path, device, reward.dtype, reward.batch_tokens)
            chat = (reward.template, reward.pattern, reward.max_new_tokens)
            sizes = (reward.context_tokens, reward.concurrency)
            return GenerativeModelSpec(path, device, reward.dtype, *chat, *sizes, reward.arguments)

        places = here or self._places or [("auto", None)]
        self._models[reward.name] = [(spec_on(device), launch) for device, launch in places]
        return _BackgroundScorer(
            f"reward model {path!r}{_purpose(reward)}",
            lambda thread, calls: thread.call_model(reward.name, calls, deadline_s, concurrency=reward.concurrency),
        )

    def _in_worker(
        self,
        spec: Spec,
        reward: RewardSettings | None = None,
        *,
        needs_answer: bool = False,
        concurrency: int = 0,
        portable: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> _BackgroundScorer:
        if isinstance(spec, MathSpec):
            check_installed()
        deadline_s = (reward and reward.deadline_s) or self._settings.deadline_s
        index = len(self._specs)
        self._specs.append(spec)

        async def call_process(thread: ScoringThread, calls: Calls) -> Outcomes:
            if portable is not None:
                prompt = calls[0].prompt
                prompt = msgspec.structs.replace(prompt, metadata=portable(prompt.metadata))
                calls = tuple(msgspec.structs.replace(call, prompt=prompt) for call in calls)
            return await thread.call_worker(index, calls, deadline_s, concurrency=concurrency)

        sees_groups = isinstance(spec, FunctionSpec) and spec.signature == "trl"
        return _BackgroundScorer(str(spec), call_process, sees_groups, needs_answer)

    def _scoring_thread(self) -> ScoringThread:
        if self._thread is None:
            # imported here because it imports aiohttp, which most recipes do not need
            from baton.rewards.scoring_thread import ScoringThread

            setup = ScorerSetup(tuple(self._specs), tuple(sys.path), int(self._settings.memory_gib * 2**30))
            self._thread = ScoringThread(setup, self._settings, self._models)
        return self._thread

    def _longest_call_s(self) -> float:
        """Return the maximum time from one scoring result to the next, in seconds. Queued calls do not increase this
        time, because at least one call is always running."""
        own = (r.deadline_s or (MODEL_DEADLINE_S if r.kind == "model" else 0.0) for r in self._rewards)
        deadline_s = max(self._settings.deadline_s, *own)
        load_s = SERVER_START_S if any(r.starts_server for r in self._rewards) else LOAD_TIMEOUT_S
        return load_s + (1 + self._settings.retries) * (2 * deadline_s + 10.0) + 30.0

    def _names(self) -> str:
        scorers = [*self._scorers.values(), *self._parts.values()]
        return ", ".join(dict.fromkeys(s.name for s in scorers if isinstance(s, _BackgroundScorer)))


def trajectory_of(finished: Finished) -> Trajectory:
    """Return the trajectory; for an episode, its last path."""
    return finished if isinstance(finished, Trajectory) else finished.trajectory


def _scored(finished: Finished, result: RewardResult) -> ScoredTrajectory:
    """Return a trajectory with its result. For an episode, the environment's reward is added."""
    if isinstance(finished, Trajectory):
        return ScoredTrajectory(finished, result)
    base, episode = finished.judgement, finished.episode
    assert episode is not None
    is_correct = result.is_correct if episode.is_success is None else episode.is_success
    failure = None if result.cause is None else CallFailure(result.cause, result.failure or "")
    judged = _judged(base.reward + result.reward, {**result.parts, **base.parts}, is_correct, base.answer, failure)
    return msgspec.structs.replace(finished, judgement=judged)


def _is_reference(call: Call) -> Outcome:
    reference = call.prompt.answer
    if reference is None:  # as of some tasks of reasoning-gym, which have many correct answers
        return CallFailure(FailureCause.MALFORMED, "has no reference answer to compare with")
    return CallValue(float(call.answer == reference.strip()))


def _judged(
    total: float, parts: dict[str, float], is_correct: bool, answer: str | None, failure: CallFailure | None
) -> RewardResult:
    """Return a result with the reward `total`, or with a failure: `failure`, if given, or a too large total."""
    if failure is None and not abs(total) <= MAX_REWARD:  # also NaN, the sum of opposite infinities
        text = f"the weighted sum of the reward parts is {total:g}, above {MAX_REWARD:g} in magnitude"
        failure = CallFailure(FailureCause.MALFORMED, f"{text}: lower the weights in [[reward]]")
    if failure is not None:
        return RewardResult(0.0, parts, False, answer, failure.detail, failure.cause)
    return RewardResult(total, parts, is_correct, answer)


def require_judged(groups: Sequence[Group], what: str) -> None:
    """Raise UserError, with the cause of the first failure, if no trajectory has a reward."""
    failures = [member.judgement.failure for group in groups for member in group.members]
    if failures and all(failure is not None for failure in failures):
        raise UserError(f"none of the {len(failures)} trajectories of {what} could be scored: {failures[0]}")


def failure_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics: the number of trajectories without a reward, in total and by cause."""
    causes = [m.judgement.cause for g in groups for m in g.members if not m.judgement.is_judged]
    counts = Counter(cause for cause in causes if cause is not None)
    return {"judge/failed": float(len(causes)), **{f"judge/{cause}": float(n) for cause, n in sorted(counts.items())}}


def _purpose(reward: RewardSettings) -> str:
    """Return a text that names a part with a template, because several parts may use one model with other templates."""
    return f" for {reward.name!r}" if reward.template else ""


def _is_answered(outcomes: Outcomes) -> bool:
    """Return whether a scorer answered. A value, even an invalid one, and an exception are answers; a timeout and a
    crash are not."""
    answered = (FailureCause.RAISED, FailureCause.MALFORMED)
    return any(isinstance(o, CallValue) or o.cause in answered for o in outcomes)


def _failure(scorer: _Scorer | None, outcome: Outcome | None) -> CallFailure | None:
    if scorer is None or not isinstance(outcome, CallFailure):
        return None
    return CallFailure(outcome.cause, f"{scorer.name} {outcome.detail}")
