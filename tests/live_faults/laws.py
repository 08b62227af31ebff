"""The laws of a live run, checked from its files and from the notes of its processes, whatever fault was injected.

* reached: a process came to the point of the fault.
* honest: no worker is quarantined, and no report is called malformed.
* waits: the run, its workers and its child processes have ended by themselves, within the deadlines of `Case.finish`.
* resumed: the last process of the run ended well, each step is recorded once, the last checkpoint is intact.
* finished: a trajectory that a journal had committed is in a batch or still in the journal, token by token.
* once: along the checkpoints from which the run went on, each group is trained once, in the batch that is recorded,
  and has the prompt that the stream gives to its number.
* staleness: no token is from the future, versions only grow, and no gradient comes from a token that is too old.
* leases, conservation, append only: the invariants of the simulator on the lease table and the ledger of the live run.
* bits: in `sync`, weights, trajectories and rewards are those of a run without a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.files import verify
from baton.records.metrics import read_metrics
from baton.trainer.checkpoint import checkpoint_step, list_checkpoints
from tests.live_faults.driver import GROUP_SIZE, GROUPS, MODES, STEPS, Case, case_of
from tests.live_faults.faults import Fault
from tests.live_faults.points import digest_of
from tests.swarm.swarm_processes import Outcome, assert_same, outcome


class LawBroken(Exception):
    """A law does not hold."""

    def __init__(self, law: str, what: object) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law


def must(holds: object, law: str, what: object = "") -> None:
    if not holds:
        raise LawBroken(law, what)


def survive(
    fault: Fault, model: Path, directory: Path, undisturbed: Outcome, bugs: tuple[Callable[[], None], ...] = ()
) -> None:
    """Start a run, inject a fault, wait for its end, and check the laws. bugs: functions that restore fixed defects."""
    with case_of(fault, model, directory, bugs) as case:
        fault.inject(case)
        case.finish()
        check(case, undisturbed)


def check(case: Case, undisturbed: Outcome) -> None:
    """Check all laws of a run that has ended. Raises LawBroken."""
    must(case.is_reached, "reached", f"no process came to {case.fault.point}")
    notes = case.read_notes()
    check_honest(case)
    _resumed(case)
    batches = {step: case.swarm.run.groups(step) for step in range(1, STEPS + 1)}
    _once(notes, batches, undisturbed)
    _finished(case, notes, batches)
    _staleness(case, batches)
    for note in notes:
        must(note["kind"] != "violation", note.get("law", ""), note)
    if case.fault.mode == "sync":
        try:
            assert_same(outcome(case.swarm.run), undisturbed)
        except AssertionError as error:
            raise LawBroken("bits", str(error)[:500]) from error


def check_honest(case: Case) -> None:
    """At any time of a run: workers that are quarantined do not come back, so a run may wait for them."""
    run = case.swarm.directory / "r"
    quarantine, audit = run / "quarantine.jsonl", run / "audit.jsonl"
    said = "".join(log.read_text(errors="replace") for log in case.swarm.directory.glob("*.log"))
    must(not quarantine.exists(), "honest", quarantine.exists() and quarantine.read_text())
    must("in quarantine" not in said, "honest", re.findall(".*in quarantine.*", said))
    rows = [json.loads(line) for line in audit.read_text().splitlines()] if audit.exists() else []
    malformed = [row for row in rows if row["event"] == "malformed"]
    must(not malformed, "honest", malformed)


def _resumed(case: Case) -> None:
    run = case.swarm.run
    must(case.exit_codes[-1] == 0, "resumed", case.exit_codes)
    must(run.recorded_steps() == list(range(1, STEPS + 1)), "resumed", run.recorded_steps())
    rows = [row["step"] for row in read_metrics(run.path) if "reward/mean" in row]
    must(rows == list(range(1, STEPS + 1)), "resumed", f"metrics of steps {rows}")
    saved = list_checkpoints(run.checkpoints)
    must([checkpoint_step(path) for path in saved[-1:]] == [STEPS], "resumed", saved)
    verify(saved[-1])
    must(not list(run.path.rglob("*.unfinished")), "resumed", "a file is unfinished")
    left = [path for path in (*case.scratch, run.path / "scratch.txt") if path.exists()]
    must(not left, "resumed", f"temporary directories of a process are left: {left}")


def _finished(case: Case, notes: list[dict[str, Any]], batches: dict[int, Any]) -> None:
    """Nothing is lost that was committed before a kill, or flushed before a power cut."""
    found = {
        (m.trajectory.group_id, m.trajectory.sample_index): tuple(m.trajectory.token_ids)
        for groups in batches.values()
        for group in groups
        for m in group.members
    }
    found = {**case.journals[-1].members, **found}
    promised: dict[tuple[int, int], str] = {}
    pending: dict[tuple[int, int], str | None] = {}
    cut = {journal.life for journal in case.journals if journal.is_flushed_only}
    for note in notes:
        match note["kind"]:
            case "finished" | "revoked":
                pending[tuple(note["key"])] = note.get("tokens")
            case "discarded":
                promised = {key: tokens for key, tokens in promised.items() if key[0] != note["group"]}
            case "commit" | "settle" if note["kind"] == "settle" or note["life"] not in cut:
                promised |= pending  # type: ignore[arg-type]
                pending = {}
            case "began":
                pending = {}
    must(promised, "finished", "nothing was finished")
    for key, tokens in promised.items():
        if tokens is not None:
            must(key in found, "finished", f"trajectory {key} was finished and is lost")
            must(
                digest_of(found[key]) == tokens, "finished", f"trajectory {key} has other tokens than it finished with"
            )
    for journal in case.journals[:-1]:
        for key, ids in journal.members.items():
            must(key in found, "finished", f"{key} was open in the journal of process {journal.life} and is lost")
            is_kept = found[key][: len(ids)] == ids
            must(is_kept, "finished", f"{key} has lost tokens of the journal of process {journal.life}")


def _once(notes: list[dict[str, Any]], batches: dict[int, Any], undisturbed: Outcome) -> None:
    """Follow the steps that the last checkpoint contains."""
    history: dict[int, list[int]] = {}
    for note in notes:
        if note["kind"] == "began":
            history = {step: groups for step, groups in history.items() if step <= note["step"]}
        elif note["kind"] == "trained":
            history[note["step"]] = note["groups"]
    must(sorted(history) == list(range(1, STEPS + 1)), "once", f"trained steps {sorted(history)}")
    for step, groups in batches.items():
        ids = [group.group_id for group in groups]
        must(len(ids) == GROUPS, "once", f"the batch of step {step} has groups {ids}")
        must(history[step] == ids, "once", f"step {step} trained {history[step]}, and recorded are {ids}")
        sizes = {len(group.members) for group in groups}
        must(sizes == {GROUP_SIZE}, "once", f"groups of step {step} have {sizes} members")
    trained = [group for step in sorted(history) for group in history[step]]
    twice = sorted({group for group in trained if trained.count(group) > 1})
    must(not twice, "once", f"groups {twice} are trained twice")
    prompts = {group.group_id: group.prompt.prompt_id for groups in batches.values() for group in groups}
    drawn = {group["group_id"]: group["prompt"]["prompt_id"] for step in undisturbed.groups for group in step}
    others = [group for group, prompt in prompts.items() if drawn.get(group, prompt) != prompt]
    must(not others, "once", f"groups {others} have other prompts than in the run without a fault")


def _staleness(case: Case, batches: dict[int, Any]) -> None:
    most = MODES[case.fault.mode].get("rollout__max_staleness", 0)
    for step, groups in batches.items():
        for member in (member for group in groups for member in group.members):
            versions = list(member.trajectory.policy_versions)
            must(versions == sorted(versions), "append only", f"{member.trajectory.name} has versions {versions}")
            must(max(versions, default=0) < step, "staleness", f"{member.trajectory.name} of step {step}: {versions}")
    stale = [row["staleness/max"] for row in read_metrics(case.swarm.run.path) if "staleness/max" in row]
    must(max(stale) <= most, "staleness", stale)
