"""Random but valid lives of the scheduler, by a seed: workers, reward scorers and a trainer by count alone."""

from __future__ import annotations

import math
from collections import deque

from neutral import SCHEDULER, Draw, Log, Message, Stopped, canonical

from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.scheduler_state import TrackedGroup, TrajectoryState
from baton.rollout.settings import Rules

EVENTS = 90
Key = tuple[int, int]


def draw_rules(draw: Draw, mode: str) -> tuple[Rules, int]:
    """Return rules that a recipe may have, and how many versions come to one that is published."""
    of_sync = {"max_staleness": 0, "on_new_version": "drain", "consume": "submission"}
    staleness, every = draw.below(4), 1
    of_others = {
        "max_staleness": staleness,
        "stale": draw.pick(["mask", "drop"]),
        "on_new_version": "resume" if mode == "partial" else draw.pick(["resume", "keep"]),
        "consume": draw.pick(["completion", "submission", "stalest"]),
        "max_requeues": draw.below(3),
    }
    more: dict[str, object] = {}
    if mode == "partial":
        is_adaptive = draw.chance(0.4)
        most = min(4.0, staleness + 1.0) if of_others["stale"] == "drop" else 4.0
        wide = 2.0 if is_adaptive else draw.pick([1.0, 1.25, 2.0, 3.0, math.inf])
        more = {"overprovision": min(wide, most), "is_adaptive": is_adaptive, "most_overprovision": most}
    elif mode == "async" and draw.chance(0.5):
        every = 1 + draw.below(staleness + 1)
        more = {"is_swarm": True, "max_lag": every if staleness >= 2 * every - 1 else 0}
    rules = Rules(
        mode=mode,  # type: ignore[arg-type]
        batch_groups=1 + draw.below(3),
        group_size=1 + draw.below(3),
        max_concurrency=draw.pick([None, None, 2, 5]),
        dynamic_sampling=draw.chance(0.4),
        **(of_sync if mode == "sync" else of_others),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )
    return rules, every


class Story:
    """One run."""

    def __init__(self, mode: str, seed: int) -> None:
        self.draw = Draw(f"scheduler/{mode}/{seed}")
        self.rules, self.every = draw_rules(self.draw, mode)
        self.now_s = 0.0
        self.tokens: dict[Key, tuple[int, int]] = {}
        """Open trajectory → (tokens, version of the last)."""
        self.running: dict[Key, tuple[int, bool]] = {}
        """Key → (version, whether exactly that one)."""
        self.judging: list[Key] = []
        self.judged: set[Key] = set()
        self.loading: deque[int] = deque()
        self.slots = 0
        self.is_wanted = self.is_training = self.is_paused = False
        self.version = self.served = self.draw.pick([0, 0, 0, 2])
        self.scheduler = scheduler = RolloutScheduler(
            self.rules,
            version=self.version,
            next_group_id=3 * self.version,
            num_batches=self.version + 4 if self.draw.chance(0.2) else math.inf,
        )
        self.log = Log(SCHEDULER, scheduler.handle)
        if self.version:
            carried = [self.carried(group_id) for group_id in range(5, 5 + self.draw.below(2))]
            self.obey(self.log.commands(scheduler.restore(carried)))
        self.tell("version", self.version, True)

    def run(self) -> None:
        try:
            for _ in range(EVENTS):
                self.now_s += self.draw.below(5) / 4
                self.step()
        except Stopped:
            pass
        self.settle()

    def carried(self, group_id: int) -> TrackedGroup:
        """A group of the run before this one, in any state that it may have been recorded in."""
        group = TrackedGroup.new(group_id, self.rules.group_size, opened_at=self.version - 1, attempts=0)
        for member in group.members:
            key = (group_id, member.sample_index)
            self.tokens[key] = (0, -1)
            if self.draw.chance(0.7):
                member.grow(self.version - 1, 1 + self.draw.below(9))
                self.tokens[key] = (member.num_tokens, self.version - 1)
                member.state = self.draw.pick(
                    [TrajectoryState.PENDING, TrajectoryState.SCORING, TrajectoryState.SCORED]
                )
            if member.state is TrajectoryState.SCORING:
                self.judging.append(key)
            elif member.state is TrajectoryState.SCORED:
                self.judged.add(key)
                member.reward = self.draw.pick([0.0, 1.0])
                group.num_unscored -= 1
        return group

    def tell(self, name: str, *values: object) -> None:
        self.obey(self.log.tell(name, self.now_s, *values))

    def obey(self, commands: list[Message]) -> None:
        for name, values in commands:
            match name, values:
                case "open", (group, _):
                    for sample in range(self.rules.group_size):
                        self.tokens[group, sample] = (0, -1)
                case "issue", (group, sample, version, is_exact):
                    self.running[group, sample] = (version, is_exact)
                case "restart", (group, sample):
                    self.tokens[group, sample] = (0, -1)
                case "discard", (group, _):
                    self.forget(group)
                case "deliver", (_, groups):
                    self.is_wanted, self.is_training = False, True
                    self.count()
                    for group in groups:
                        self.forget(group)
                case "load", (version,):
                    self.loading.append(version)

    def count(self) -> None:
        """What the step's metrics are made of, taken once for each batch as the live run does."""
        step = self.scheduler.take_step_counts()
        trajectories = (step.resumed, step.finished)
        groups = (step.carried_groups, step.filtered_groups, step.requeued_groups, step.dropped_groups)
        tokens = (step.generated_tokens, step.reprefilled_tokens, step.consumed_tokens, step.masked_tokens)
        time_s = (step.busy_slot_s, step.slot_s)
        found = (trajectories, groups, tokens, step.lost_tokens, time_s, tuple(step.ages), tuple(step.spans))
        self.log.lines.append(f"= step {canonical(found)}")

    def settle(self) -> None:
        """Where every token went."""
        ledger = self.scheduler.ledger
        settled = (ledger.trained, ledger.masked, ledger.filtered, ledger.dropped)
        found = (ledger.generated, settled, dict(ledger.lost), self.scheduler.num_carried_tokens)
        self.log.lines.append(f"= tokens {canonical(found)}")

    def forget(self, group: int) -> None:
        for sample in range(self.rules.group_size):
            del self.tokens[group, sample]
            self.judged.discard((group, sample))

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        found = [self.capacity, self.lose]
        if self.slots < 3:
            found += [self.capacity] * 4
        if self.running:
            found += [self.grow] * 30
        if self.judging:
            found += [self.reward] * 16
        if self.loading:
            found += [self.serve] * 16
        if self.tokens:
            found.append(self.revoke)
        if not self.is_wanted and not self.is_training and not self.is_paused:
            found += [self.want] * 10 + [self.pause]
        if self.is_training:
            found += [self.train] * 5
        if self.is_paused and not self.running:
            found += [self.unpause] * 12
        self.draw.pick(found)()

    def capacity(self) -> None:
        self.slots = self.draw.below(9)
        self.tell("capacity", self.slots, self.draw.pick([0, 0, 2]))

    def lose(self) -> None:
        self.tell("tokens-lost", "branch", 1 + self.draw.below(9))

    def revoke(self) -> None:
        key = self.draw.pick(sorted(self.tokens))
        self.running.pop(key, None)
        self.judged.discard(key)
        self.judging = [one for one in self.judging if one != key]
        self.tell("revoke", *key, "fraud")

    def grow(self) -> None:
        """Tokens, an end, or a lease put down; often several of these at once."""
        key = self.draw.pick(sorted(self.running))
        least, is_exact = self.running[key]
        num_tokens, last = self.tokens[key]
        what = self.draw.below(8)
        if what < 6:
            most = max(least, last, self.served)
            version = least if is_exact else max(least, last) + self.draw.below(most - max(least, last) + 1)
            num_new = 1 + self.draw.below(4)
            self.tokens[key] = (num_tokens + num_new, version)
            self.tell("grow", *key, version, num_new)
        if what in (4, 5, 6) and self.tokens[key][0]:
            del self.running[key]
            self.judging.append(key)
            self.tell("finish", *key)
        elif what == 7:
            del self.running[key]
            self.tell("release", *key)

    def reward(self) -> None:
        key = self.judging.pop(self.draw.below(len(self.judging)))
        self.judged.add(key)
        self.tell("reward", *key, self.draw.pick([0.0, 1.0, 0.5, None]))
        again = sorted(one for one in self.judged if one[0] == key[0])
        if again and self.draw.chance(0.1):
            self.tell("reward", *again[0], 0.25)

    def serve(self) -> None:
        self.served = self.loading.popleft()
        self.tell("serving", self.served)

    def want(self) -> None:
        self.is_wanted = True
        self.tell("want-batch")

    def train(self) -> None:
        self.is_training = False
        self.version += 1
        self.tell("version", self.version, self.version % self.every == 0)

    def pause(self) -> None:
        self.is_paused = True
        self.tell("pause")

    def unpause(self) -> None:
        self.is_paused = False
        self.tell("unpause")


def write(mode: str, seed: int) -> Log:
    """Return the log of one life."""
    story = Story(mode, seed)
    story.run()
    return story.log
