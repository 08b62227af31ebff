"""Random but valid lives of the two smaller machines: a worker's version sync, and the supervision of a placed run."""

from __future__ import annotations

from neutral import SUPERVISION, VERSIONS, Draw, Log, Message, Record

from baton.cluster.placement import Placement, ProcessSpec
from baton.cluster.supervision import Supervision, SupervisionRules
from baton.swarm.version_sync import VersionSync

EVENTS = 50
MACHINES = "abcde"
"""The first one trains."""


def versions(seed: int) -> Log:
    """Return the log of one worker's version sync: announcements that repeat or come late, failures, a new lineage."""
    draw, now_s, newest, lineage = Draw(f"versions/{seed}"), 0.0, 0, "first"
    sync = VersionSync(first_wait_s=draw.pick([0.25, 0.5]), longest_wait_s=draw.pick([1.0, 30.0]))
    log = Log(VERSIONS, sync.handle)
    open_: list[Message] = []
    wakes: list[float] = []

    def tell(name: str, *values: object) -> None:
        for command in log.tell(name, now_s, *values):
            if command.name == "wake-at":
                wakes.append(command.values[0])
            else:
                open_.append(command)

    for _ in range(EVENTS):
        now_s += draw.below(5) / 4
        newest += draw.chance(0.2)
        if draw.chance(0.03):
            lineage, newest = "second", draw.below(3)
        stale = max(0, newest - draw.pick([0, 0, 1, 5]))
        announced = Record((lineage, stale, f"{lineage}-{stale}"))
        if open_ and draw.chance(0.6):
            command = open_.pop()
            version = Record((command.values[0].lineage, command.values[0].number, command.values[0].digest))
            if command.name == "activate":
                tell("activated", version)
            elif draw.chance(0.6):
                tell("failed", version, "gone")
            else:
                tell("fetched", version)
        elif wakes and draw.chance(0.6):
            now_s = max(now_s, wakes.pop(0) - draw.pick([0.0, 0.0, 0.125]))
            tell("woken")
        elif draw.chance(0.15):
            tell(*draw.pick([("fetched", announced), ("failed", announced, "late"), ("activated", announced)]))
        else:
            tell("want", announced)
    return log


def post(name: str, machine: str, gpu: int, weight: float) -> tuple[object, ...]:
    return name, "worker", machine, "L20", (f"{machine}:{gpu}",), {"GPU": 1.0}, 1, 16, 0.25, weight, 1, 1


def supervision(seed: int) -> Log:
    """Return the log of one placed run: processes end, machines come and go, plans are made."""
    draw, now_s, number = Draw(f"supervision/{seed}"), 0.0, 4
    rules = SupervisionRules(
        max_failures=1 + draw.below(3),
        first_wait_s=draw.pick([0.5, 1.0]),
        longest_wait_s=3.0,
        long_life_s=draw.pick([5.0, 60.0]),
        settle_s=draw.pick([1.0, 2.0]),
    )
    workers = [ProcessSpec(*post(f"worker-{i}", MACHINES[1 + i], 0, 1.0)) for i in range(draw.below(4))]  # type: ignore[arg-type]
    ranks = (ProcessSpec("rank-0", "rank", "a", "H100", ("a:0",), {}, 1),)
    machine = Supervision(Placement(ranks, tuple(workers), {}), rules)
    log = Log(SUPERVISION, machine.handle)
    running: set[str] = set()
    gone: set[str] = set()
    num_asked = 0

    def obey(commands: list[Message]) -> None:
        nonlocal num_asked
        for name, values in commands:
            if name == "begin":
                running.add(values[0].name)
            elif name == "end":
                running.discard(values[0])
            num_asked += name == "replan"

    obey(log.commands(machine.start()))
    for _ in range(EVENTS):
        now_s += draw.below(7) / 4
        kind = draw.pick(["began", "ended", "ended", "lost", "joined", "planned", "planned", "tick", "tick", "tick"])
        name = draw.pick([*sorted(running), "worker-99"])
        where = MACHINES[draw.below(len(MACHINES))] if draw.chance(0.3) else MACHINES[1 + draw.below(4)]
        if kind == "began":
            obey(log.tell("began", now_s, name))
        elif kind == "ended":
            running.discard(name)
            obey(log.tell("ended", now_s, name, "ended"))
        elif kind == "lost" and where not in gone:
            gone.add(where)
            obey(log.tell("machine-lost", now_s, where))
        elif kind == "joined" and where in gone:
            gone.discard(where)
            obey(log.tell("machine-joined", now_s, where))
        elif kind == "planned" and num_asked:
            num_asked -= 1
            there = [one for one in MACHINES[1:] if draw.chance(0.6)]
            wanted: tuple[Record, ...] | None = tuple(
                Record(post(f"worker-{number + i}", one, draw.below(2), draw.pick([0.5, 1.0])))
                for i, one in enumerate(there)
            )
            number += len(there)
            if draw.chance(0.2):
                wanted = None
            obey(log.tell("planned", now_s, wanted, "planned"))
        else:
            obey(log.tell("tick", now_s))
    return log
