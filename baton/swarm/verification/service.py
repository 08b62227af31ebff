"""Scores workers' trajectories again in a separate thread, and executes the decisions of `policy.py`.

    hub's thread                          this thread          hub's thread
      finished ─▶ VerificationPolicy ─▶ queue ─▶ score, judge ─▶ VerificationPolicy ─▶ release, remake, quarantine

The service keeps the latest versions, and scores each segment under the policy version that generated it. With
`on_new_version = "keep"`, weights change while a trajectory runs and its KV cache is kept, so no single version
determines the tokens. With `keep`, only trusted workers are therefore admitted, and no trajectory is scored.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, Protocol

from baton.clock import Clock
from baton.records.trace import Tracer, TraceWriter
from baton.rollout.rescoring import Claim, Rescored
from baton.swarm.lease_broker import Key, key_of
from baton.swarm.serial_executor import SerialExecutor
from baton.swarm.verification import policy
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.verify import Calibration, judge
from baton.types import Lease, PolicyVersion, Trajectory

MAX_BATCH = 64
"""Maximum number of trajectories that are scored together."""


class LogprobScorer(Protocol):
    """Recomputes the logprobs and draw gaps (`Rescored`) of the tokens in workers' reports (`Claim`). One version is
    loaded at a time."""

    def load(self, tensors: Mapping[str, Any], version: int) -> None:
        """Load a version's weights."""

    def score(self, claims: Sequence[Claim]) -> list[Rescored]:
        """Return, for each claim, the scores of the tokens that were generated under the loaded version."""


class VerificationClient(Protocol):
    """The part of the hub that executes the policy's commands. All methods must be called in the hub's thread."""

    say: Callable[[str], None]

    def release(self, key: Key) -> None:
        """Make a trajectory that was held back available for training."""

    def remake(self, key: Key) -> None:
        """Discard a trajectory that was held back, so that it is generated again."""

    def quarantined(self, record: policy.QuarantineRecord) -> None:
        """Exclude a quarantined worker from the run."""


class VerificationService:
    """Executes the checks of one hub. Methods except `published`, `consumed` and `close` run in the hub's thread."""

    def __init__(
        self,
        make_scorer: Callable[[], LogprobScorer],
        verification_policy: policy.VerificationPolicy,
        calibration: Calibration,
        quarantine: Quarantine,
        *,
        keep_versions: int,
        noise_seed: int,
        clock: Clock = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        """`make_scorer`: creates the scorer, in the service's thread, before the first check. `keep_versions`: number
        of versions kept for scoring; 0 disables scoring. `noise_seed`: the seed of training batches. `tracer`: receives
        a span for each computation."""
        self.verification_policy, self.calibration, self.quarantine = verification_policy, calibration, quarantine
        self.num_checked: Counter[str] = Counter()
        """Worker id → number of its trajectories that were checked since the service started."""
        self._make_scorer, self._keep, self.noise_seed, self._clock = make_scorer, keep_versions, noise_seed, clock
        self._tracer = tracer or TraceWriter()
        self._client: VerificationClient
        self._call: Callable[[Callable[[], object]], object]
        self._tensors: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        self._cases: deque[policy.Case] = deque()
        self._cases_lock = Lock()
        self._executor = SerialExecutor("examiner")
        self._scorer: LogprobScorer | None = None
        verification_policy.restore(record.worker for record in quarantine.records)

    def attach(self, client: VerificationClient, call: Callable[[Callable[[], object]], object]) -> None:
        """Set the client that executes commands; must be called first. `call`: runs an action in the hub's thread."""
        self._client, self._call = client, call

    # ---- from the controller and the publisher -----------------------------------------------------------------------

    def published(self, version: PolicyVersion, tensors: Mapping[str, Any]) -> None:
        """Keep a version for scoring. If more than `keep_versions` versions are kept, drop the oldest."""
        if not self._keep:
            return
        self._tensors[version.number] = tensors
        while len(self._tensors) > self._keep:
            self._tensors.popitem(last=False)

    def consumed(self, step: int, keys: Iterable[Key]) -> None:
        """Record the trajectories that a train step has consumed."""
        if self._keep:
            self._tell_from_thread(policy.BatchConsumed(tuple(map(policy.name_of, keys)), step))

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._executor.close()

    # ---- in the hub's thread -----------------------------------------------------------------------------------------

    def finished(self, lease: Lease, trajectory: Trajectory, parts: Sequence[policy.Part]) -> bool:
        """Handle a finished trajectory. Return whether the trajectory is held back for a check."""
        if not self._keep:
            return False
        key = key_of(lease)
        claim = Claim(trajectory, lease.sampling, lease.noise_seed)
        banned = frozenset(a.worker for a, _, _ in parts if self.quarantine.reason(a.grant, a.worker))
        found = self._handle_event(policy.TrajectoryFinished(self._clock(), key, claim, tuple(parts), banned))
        return any(isinstance(command, policy.CheckTrajectory) for command in found)

    def violated(self, author: policy.SegmentAuthor, sentence: str, name: str) -> policy.QuarantineRecord | None:
        """Handle a report that no correct worker sends. Return the record if the worker is newly quarantined."""
        found = self._handle_event(policy.ReportViolated(author, name, sentence))
        return next((command.record for command in found if isinstance(command, policy.QuarantineWorker)), None)

    def tick(self, delay_s: float = 0.0) -> None:
        """Apply the deadlines of checks, and readmit workers whose quarantine a user has lifted since the last tick.
        `delay_s`: number of seconds by which this tick of the hub is late."""
        if lifted := self.quarantine.follow():
            self._handle_event(policy.QuarantineLifted(lifted))
        self._handle_event(policy.VerificationTick(self._clock(), delay_s))

    def _handle_event(self, event: policy.VerificationEvent) -> list[policy.VerificationCommand]:
        commands = self.verification_policy.handle(event)
        for command in commands:
            match command:
                case policy.CheckTrajectory(case=case):
                    with self._cases_lock:
                        self._cases.append(case)
                        if len(self._cases) > policy.MAX_HELD:  # drop the checks that are too late
                            self._cases = deque(filter(self.verification_policy.is_held, self._cases))
                    self._executor.submit(self._check_waiting)
                case policy.ReleaseTrajectory(key=key):
                    self._client.release(key)
                case policy.RemakeTrajectory(key=key):
                    self._client.remake(key)
                case policy.QuarantineWorker(record=record):
                    self.quarantine.add(record)
                    self._client.quarantined(record)
                case policy.WarnUser(text=text):
                    self._client.say(text)
        return commands

    def _tell_from_thread(self, event: policy.VerificationEvent) -> None:
        self._call(partial(self._handle_event, event))

    # ---- in the service's thread -------------------------------------------------------------------------------------

    def _check_waiting(self) -> None:
        while cases := self._next_cases():
            try:
                self._scorer = self._scorer or self._make_scorer()
                self._examine(self._scorer, cases)
            except Exception as error:  # noqa: BLE001  # an error such as a device out of memory need not end the run
                cause = f"scoring them again failed: {type(error).__name__}: {error}"[:500]
                self._tell_from_thread(policy.CheckFailed(tuple(cases), cause))

    def _next_cases(self) -> list[policy.Case]:
        with self._cases_lock:
            return [self._cases.popleft() for _ in range(min(MAX_BATCH, len(self._cases)))]

    def _examine(self, scorer: LogprobScorer, cases: Sequence[policy.Case]) -> None:
        scores: list[list[Rescored]] = [[] for _ in cases]
        numbers = [set(case.claim.trajectory.policy_versions) for case in cases]
        for number in sorted(set().union(*numbers)):
            tensors = self._tensors.get(number)
            if tensors is None:
                continue
            concerned = [index for index, known in enumerate(numbers) if number in known]
            scorer.load(tensors, number)
            begin_s = time.monotonic()
            rescored = scorer.score([cases[index].claim for index in concerned])
            end_s = time.monotonic()
            self._tracer.span("check", "examiner", 0, begin_s, end_s, trajectories=len(concerned), version=number)
            for index, one in zip(concerned, rescored, strict=True):
                scores[index].append(one)
        for case, found in zip(cases, scores, strict=True):
            known = len({rescored.version for rescored in found})
            if not known:
                self._tell_from_thread(policy.CheckFailed((case,), "none of its versions is kept any more"))
                continue
            is_whole = known == len(set(case.claim.trajectory.policy_versions))
            self._tell_from_thread(self._judged(case, found, is_whole=is_whole))

    def _judged(self, case: policy.Case, scores: Sequence[Rescored], *, is_whole: bool) -> policy.TrajectoryJudged:
        verdicts = []
        for author, first, end in case.parts:
            if case.is_trusted:
                self.calibration.observe(author.worker_class, scores, first=first, end=end)
            tolerance = self.calibration.tolerance(author.worker_class)
            verdicts.append((author, judge(scores, tolerance, first=first, end=end), tolerance))
            self.num_checked[author.worker] += 1
        return policy.TrajectoryJudged(case, tuple(verdicts), is_whole)
