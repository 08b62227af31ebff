"""Random but valid lives of the lease table, by a seed: workers and a hub by count alone.

Mode `sync` begins a lost lease's successor at the prompt and asks for exact versions; `partial` goes on from the last
token and aborts often; `async` asks for a least version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from neutral import LEASES, Draw, Log, Message

from baton.swarm.leases import LeaseRules, LeaseTable

STEPS = 60
LONGEST = 40


@dataclass
class Worker:
    slots: int
    speed: int
    """Tokens in a round."""
    version: int
    kind: str | None
    counter: int = 0
    is_mute: bool = False
    """Nothing is heard of it."""
    is_stuck: bool = False
    """It is heard of, and makes no token."""
    leases: list[int] = field(default_factory=list)


@dataclass
class Lease:
    worker: int
    task: int
    length: int
    end: int
    is_recalled: bool = False


class Story:
    """One run."""

    def __init__(self, mode: str, seed: int) -> None:
        self.draw, self.mode, self.seed = Draw(f"leases/{mode}/{seed}"), mode, seed
        rules = LeaseRules(
            restarts=mode == "sync",
            heartbeat_timeout_s=self.draw.pick([3.0, 6.0]),
            progress_timeout_s=self.draw.pick([3.0, 8.0]),
            starve_s=self.draw.pick([6.0, 20.0]),
            backup_lease_factor=self.draw.pick([0.0, 1.0, 2.0]),
            backup_lease_after_s=self.draw.pick([0.0, 1.0, 4.0]),
            prefetch=self.draw.pick([0.0, 0.25, 0.5, 1.0]),
        )
        self.is_mixed, self.is_owned = self.draw.chance(0.4), self.draw.chance(0.4)
        self.now_s = 0.0
        self.workers: dict[int, Worker] = {}
        self.tasks: dict[int, int] = {}
        """Task → version that it asks for."""
        self.leases: dict[int, Lease] = {}
        self.spare_workers: list[int] = []
        self.spare_tasks: list[int] = []
        self.num_workers = self.num_tasks = self.num_leases = self.version = 0
        self.log = Log(LEASES, LeaseTable(rules).handle)

    def run(self) -> None:
        for _ in range(STEPS):
            self.now_s += self.draw.below(5) / 4
            found = [self.tick] * 3 + [self.want] * 6 + [self.join] + [self.late]
            if self.workers:
                found += [self.round] * 8 + [self.fault] * 2 + [self.weigh, self.beat_one]
            if self.tasks:
                found += [self.revoke] + [self.abort] * (4 if self.mode == "partial" else 1)
            if self.leases:
                found += [self.grow_one] * 4 + [self.draw_level]
            self.draw.pick(found)()

    def tell(self, name: str, *values: object) -> None:
        self.obey(self.log.tell(name, self.now_s, *values))

    def obey(self, commands: list[Message]) -> None:
        for name, values in commands:
            match name, values:
                case "grant", (number, lease, task, base):
                    end = base + 1 + Draw(self._end_key(task, lease, self.workers[number].kind)).below(LONGEST - base)
                    self.leases[lease] = Lease(number, task, base, end)
                    self.workers[number].leases.append(lease)
                    self.num_leases = lease + 1
                case "recall", (_, lease):
                    self.leases[lease].is_recalled = True
                case "drop", (_, lease):
                    self.end(lease)
                case (("finish" | "replace"), (task, lease)):
                    self.end(lease)
                    self.close(task)
                case "release", (task,):
                    self.close(task)
                case "expel", (number, _):
                    self.gone(number)

    def _end_key(self, task: int, lease: int, kind: str | None) -> str:
        """Leases that make the same tokens end at the same one."""
        stem = f"{task}/{kind}" if self.mode == "sync" and kind is not None else f"{lease}"
        return f"{self.seed}/{stem}"

    def end(self, lease: int) -> None:
        ended = self.leases.pop(lease, None)
        if ended is not None and ended.worker in self.workers:
            self.workers[ended.worker].leases.remove(lease)

    def close(self, task: int) -> None:
        del self.tasks[task]
        self.spare_tasks.append(task)

    def gone(self, number: int) -> None:
        for lease in self.workers.pop(number).leases:
            del self.leases[lease]
        self.spare_workers.append(number)

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        delay_s = self.draw.pick([0.0, 0.0, 0.0, 0.25, 10.0])
        self.now_s += delay_s
        self.tell("tick", delay_s)

    def want(self) -> None:
        for _ in range(1 + self.draw.below(4)):
            if self.spare_tasks and self.draw.chance(0.3):
                task = self.spare_tasks.pop(0)
            else:
                task, self.num_tasks = self.num_tasks, self.num_tasks + 1
            self.tasks[task] = max(0, self.version - self.draw.below(2))
            is_exact = self.mode != "async" or self.draw.chance(0.1)
            num_tokens = self.draw.pick([0, 0, 3])
            self.tell("want", task, self.tasks[task], is_exact, num_tokens, LONGEST)

    def join(self) -> None:
        if len(self.workers) == 6:
            return
        if self.spare_workers and self.draw.chance(0.5):
            number = self.spare_workers.pop(0)
        else:
            number, self.num_workers = self.num_workers, self.num_workers + 1
        kind = self.draw.pick(["", "other", None]) if self.is_mixed else ""
        owner = self.draw.pick([None, "a", "b"]) if self.is_owned else None
        slots = 1 + self.draw.below(4) if owner is None else self.draw.pick([2, 12, 40])
        self.workers[number] = Worker(slots, self.draw.pick([1, 3, 8]), self.version, kind)
        self.tell("join", number, slots, self.draw.pick([1.0, 0.5, 2.0]), kind, owner)
        self.beat(number)

    def weigh(self) -> None:
        self.tell("weigh", self.draw.pick([*sorted(self.workers), 99]), self.draw.pick([0.5, 1.0, 3.0]))

    def beat_one(self) -> None:
        self.beat(self.draw.pick([*sorted(self.workers), 99]))

    def beat(self, number: int) -> None:
        worker = self.workers.get(number)
        if worker is None:
            self.tell("beat", number, self.version, 5)
        elif not worker.is_mute:
            self.tell("beat", number, None if self.draw.chance(0.03) else worker.version, worker.counter)

    def round(self) -> None:
        """Every worker decodes in its slots, reports, and beats."""
        self.now_s += 0.5
        for number in sorted(self.workers):
            worker = self.workers.get(number)
            if worker is None:
                continue
            for lease in worker.leases[: worker.slots]:
                if lease in self.leases:
                    self.grow(lease)
            if number in self.workers and self.draw.chance(0.7):
                self.beat(number)

    def grow_one(self) -> None:
        self.grow(self.draw.pick(sorted(self.leases)))

    def grow(self, number: int) -> None:
        """A lease reports; it ends with its last token, when it was recalled, or when its worker refuses."""
        lease = self.leases[number]
        worker = self.workers[lease.worker]
        if worker.is_mute or worker.is_stuck:
            return
        if (lease.is_recalled and self.draw.chance(0.6)) or self.draw.chance(0.02):
            self.end(number)
            self.tell("released", number)
            return
        new = min(lease.end - lease.length, worker.speed)
        if new:
            lease.length += new
            worker.counter += new
            self.tell("grow", number, new, worker.version if self.mode == "async" else 0)
        if number in self.leases and lease.length == lease.end:
            self.tell("finished", number)

    def draw_level(self) -> None:
        """Of two leases of one task the shorter catches up with the longer, and the task is aborted."""
        for number, lease in sorted(self.leases.items()):
            others = [one for one in self.leases.values() if one.task == lease.task and one.length > lease.length]
            if others and others[0].length <= lease.end:
                new, lease.length = others[0].length - lease.length, others[0].length
                self.workers[lease.worker].counter += new
                self.tell("grow", number, new, self.tasks[lease.task])
                self.tell("abort", lease.task)
                return

    def late(self) -> None:
        """Something comes for a lease that may have ended."""
        number = self.draw.below(self.num_leases + 1)
        if number not in self.leases:
            self.tell(self.draw.pick(["finished", "released"]), number)
            self.tell("grow", number, 2, 0)

    def abort(self) -> None:
        self.tell("abort", self.draw.pick([*sorted(self.tasks), 999]))

    def revoke(self) -> None:
        task = self.draw.pick([*sorted(self.tasks), 999])
        commands = self.log.tell("revoke", self.now_s, task)
        if task in self.tasks:
            self.close(task)
        self.obey(commands)

    def fault(self) -> None:
        number = self.draw.pick(sorted(self.workers))
        worker = self.workers[number]
        match self.draw.below(8):
            case 0:
                self.gone(number)
                self.tell("leave", number, "cut")
                self.tell("leave", number, "cut again")
            case 1:
                worker.is_mute = True
            case 2:
                worker.is_stuck = True
            case 3:
                worker.is_mute = worker.is_stuck = False
            case 4 | 5:
                self.version += 1
            case _:
                worker.version = self.version
                self.beat(number)


def write(mode: str, seed: int) -> Log:
    """Return the log of one life."""
    story = Story(mode, seed)
    story.run()
    return story.log
