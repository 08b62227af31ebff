"""Nothing that is renamed in the code changes a byte that is written or sent.

`wire_names.toml` has the tag, the encoded field names in their order and the texts of the enumerations of every struct
that leaves the process. The bytes are what counts: whoever renames a field keeps its old name with
`msgspec.field(name="old")`, and whoever renames a class leaves its tag. `python tests/test_wire_names.py` writes the
table anew: after fields were added, or where a format itself is to change and old files and peers have a reader.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from msgspec import inspect
from pydantic import BaseModel

import baton
from baton import files, types
from baton.cluster import supervision
from baton.cost import efficiency, fit
from baton.environments import calls as environment_calls
from baton.errors import Fault
from baton.planner import what_if
from baton.profile import bench as bench_rollout
from baton.profile import measure
from baton.recipe import keys
from baton.recipe import presets as algorithms_shown
from baton.records import evaluation, journal, run_lock
from baton.records import run_directory as runs
from baton.records.trace import Span
from baton.rewards import scorer_protocol
from baton.rollout import events as rollout_events
from baton.rollout.engines.vllm import remote
from baton.rollout.processes import protocol
from baton.run import dry_run as footprint
from baton.run import loop, summary
from baton.run import sft as warmstart
from baton.run.trajectories import Sample
from baton.simulator import parameter_sweep as simulator_sweep
from baton.simulator import result as simulator_result
from baton.specs import plan
from baton.swarm import audit_log, auth, lease_events, messages
from baton.swarm import version_sync as have_want
from baton.swarm.hub import relay, status
from baton.swarm.verification import policy as verification_policy
from baton.swarm.verification import quarantine
from baton.tasks import gym
from baton.trainer import checkpoint
from baton.trainer.parallel import messages as ranks
from baton.weights import manifest

TABLE = Path(__file__).with_name("wire_names.toml")
PACKAGE = Path(baton.__file__).parent
ROOTS: dict[str, Any] = {
    # sent
    "controller to engine process": protocol.ToEngine,
    "engine process to controller": protocol.FromEngine,
    "controller to trainer rank": ranks.ToRank,
    "trainer rank to controller": ranks.FromRank,
    "controller to vLLM replica": remote.ToReplica,
    "vLLM replica to controller": remote.FromReplica,
    "hub to worker": messages.FromHub,
    "worker to hub": messages.FromWorker,
    "hub to relay": relay.RelayTicket,
    "controller to reward process": scorer_protocol.ScorerSetup | scorer_protocol.ScoreRequest,
    "reward process to controller": scorer_protocol.FromWorker,
    "run to environment process": environment_calls.ToEnvironment,
    "environment process to run": environment_calls.FromEnvironment,
    "error of another process": Fault,
    "within a process": types.WorkLost | types.WorkRevoked,
    # logs of events and commands
    "event of the scheduler": rollout_events.Event,
    "command of the scheduler": rollout_events.Command,
    "event of the lease table": lease_events.Event,
    "command of the lease table": lease_events.Command,
    "event of version synchronisation": have_want.Event,
    "command of version synchronisation": have_want.Command,
    "event of supervision": supervision.Event,
    "command of supervision": supervision.Command,
    # written
    "journal: group": journal.IssuedGroup,
    "journal: segments": tuple[types.Segment, ...],
    "journal: finished": types.Trajectory,
    "journal: judged": types.ScoredTrajectory,
    "journal: place": journal.StreamCursor,
    "trajectories/*.jsonl.gz": types.Group,
    "evaluations.jsonl": runs.RecordedEvaluation,
    "report.json": summary.RunReport,
    "report.json of a warm start": warmstart.WarmStartReport,
    "checkpoint: loop.json": loop.LoopState,
    "checkpoint: baton/state.json": checkpoint.CheckpointState,
    "holder.json": run_lock.LockHolder,
    "trace.jsonl": Span,
    "plan.json": plan.Plan,
    "calibration: efficiency": efficiency.Efficiency,
    "calibration: measured": fit.Measurement,
    "weights: manifest": manifest.Manifest,
    "tokens.json: token": auth.Token,
    "quarantine.jsonl": verification_policy.QuarantineRecord,
    "quarantine.jsonl: lifted": quarantine.LiftRecord,
    "audit.jsonl": audit_log.AuditLine,
    # printed as JSON
    "baton status --json": status.HubStatus,
    "baton token --json": auth.ShownToken,
    "baton eval --json": evaluation.Evaluation,
    "baton show --json": Sample,
    "baton keys --json": keys.RecipeKey,
    "baton tasks --json": gym.ListedTask,
    "baton algorithms --json": algorithms_shown.Algorithm,
    "baton bench --json": bench_rollout.BenchResult,
    "baton profile --json": measure.Profile,
    "baton simulate --json": simulator_result.Result,
    "baton simulate --sweep --json": simulator_sweep.ParameterSweep,
    "baton plan --json: one more": what_if.Marginal,
    "baton train --dry-run --json: needs": footprint.Footprint,
}


def names(root: Any) -> dict[str, str]:
    """What the bytes of a type hold beside its values: place within it → tag, encoded fields or texts."""
    found: dict[str, str] = {}
    _describe(inspect.type_info(root), "", found)
    return found


def _describe(kind: Any, place: str, found: dict[str, str]) -> None:
    if isinstance(kind, inspect.StructType):
        here = place if kind.tag is None else f"{place}<{kind.tag}>"
        shape = [*(["array"] if kind.array_like else []), *(["without defaults"] if omits_defaults(kind.cls) else [])]
        assert kind.tag_field in (None, "type")
        found[here or "."] = " ".join([*shape, *(field.encode_name for field in kind.fields)])
        for field in kind.fields:
            _describe(field.type, f"{here}.{field.encode_name}".lstrip("."), found)
    elif isinstance(kind, inspect.CustomType) and issubclass(kind.cls, BaseModel):
        found[place or "."] = " ".join(kind.cls.model_fields)
    elif isinstance(kind, inspect.DataclassType):
        raise AssertionError(f"{kind.cls} is sent or written: make it a Struct, whose fields keep their names")
    elif isinstance(kind, inspect.EnumType):
        found[place] = "one of: " + ", ".join(sorted(str(member.value) for member in kind.cls))
    elif isinstance(kind, inspect.LiteralType):
        found[place] = "one of: " + ", ".join(sorted(map(str, kind.values)))
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            _describe(each, place, found)
    elif isinstance(kind, inspect.DictType):
        _describe(kind.value_type, f"{place}{{}}", found)
    elif isinstance(kind, inspect.TupleType):
        for number, each in enumerate(kind.item_types):
            _describe(each, f"{place}[{number}]", found)
    elif hasattr(kind, "item_type"):
        _describe(kind.item_type, f"{place}[]", found)


def omits_defaults(kind: type) -> bool:
    return bool(kind.__struct_config__.omit_defaults)  # type: ignore[attr-defined]


def structs() -> Iterator[type[msgspec.Struct]]:
    for module in pkgutil.walk_packages([str(PACKAGE)], "baton."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    waiting: list[type[msgspec.Struct]] = [msgspec.Struct]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        yield from (kind for kind in below if kind.__module__.startswith("baton."))


def structs_in(root: Any) -> Iterator[type]:
    for kind in [root] if isinstance(root, inspect.Type) else [inspect.type_info(root)]:
        if isinstance(kind, inspect.StructType):
            yield kind.cls
            for field in kind.fields:
                yield from structs_in(field.type)
        for each in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
            yield from structs_in(each)
        for name in ("item_type", "value_type"):
            if hasattr(kind, name):
                yield from structs_in(getattr(kind, name))


@pytest.mark.parametrize("root", ROOTS)
def test_the_names_in_what_is_written_or_sent_never_change(root: str) -> None:
    known, found = tomllib.loads(TABLE.read_text(encoding="utf-8"))[root], names(ROOTS[root])
    lost = {place: text for place, text in known.items() if not keeps(found.get(place, ""), text)}
    assert not lost, (
        f"{root}: these names of {TABLE.name} are gone or in another order: keep a renamed field's with "
        "msgspec.field(name=…), and a renamed class's tag"
    )
    if found != known:
        warnings.warn(f"{root} has new names: python tests/test_wire_names.py adds them to the table", stacklevel=1)


def keeps(found: str, known: str) -> bool:
    """Whether names are all there in their order. A new one may stand anywhere, but in an array only at the end."""
    if found.split()[:1] == ["array"] or known.split()[:1] == ["array"]:
        return f"{found} ".startswith(f"{known} ")
    rest = iter(found.replace(",", "").split())
    return all(name in rest for name in known.replace(",", "").split())


@pytest.mark.parametrize(
    ("found", "known", "is_kept"),
    [
        ("a b c", "a b c", True),
        ("a new b c", "a b c", True),
        ("a renamed c", "a b c", False),
        ("b a c", "a b c", False),
        ("", "a", False),
        ("array a b new", "array a b", True),
        ("array a new b", "array a b", False),
        ("array a bc", "array a b", False),
        ("a b", "array a b", False),
        ("one of: new, old", "one of: old", True),
        ("one of: new", "one of: old", False),
    ],
)
def test_a_renamed_name_is_noticed_and_a_new_one_is_not(found: str, known: str, is_kept: bool) -> None:
    assert keeps(found, known) is is_kept


def test_the_table_has_nothing_else() -> None:
    assert tomllib.loads(TABLE.read_text(encoding="utf-8")).keys() == ROOTS.keys()


def test_every_message_with_a_tag_is_in_the_table() -> None:
    known = {kind for root in ROOTS.values() for kind in structs_in(root)}
    missing = {kind for kind in structs() if kind.__struct_config__.tag is not None} - known
    assert not missing, "say in ROOTS where these are sent or written"


def test_no_tag_is_taken_from_a_class_name() -> None:
    """A `tag=True` or a function would be the name of the class, and change with it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            for keyword in node.keywords:
                assert keyword.arg not in ("tag_field", "rename"), f"{path.name}: {node.name} has a {keyword.arg}"
                if keyword.arg == "tag":
                    is_text = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
                    assert is_text, f"{path.name}: the tag of {node.name} is {ast.unparse(keyword.value)}, not a text"


def test_the_names_in_a_seal_never_change(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    files.seal(tmp_path)
    seal = msgspec.json.decode((tmp_path / "baton" / "manifest.json").read_bytes())
    assert list(seal) == ["files", "blake3"]
    assert list(seal["files"]["model.safetensors"]) == ["size", "blake3"]


def test_the_names_in_a_file_of_tokens_never_change(tmp_path: Path) -> None:
    auth.TokenFile(tmp_path / "tokens.json").create(auth.Role.WORKER, 3600)
    written = msgspec.json.decode((tmp_path / "tokens.json").read_bytes())
    assert list(written) == ["tokens", "format"]
    assert list(written["tokens"][0]) == names(auth.Token)["."].split()


def test_the_names_in_a_trace_never_change() -> None:
    """Facts of a span are keyword arguments, so that renaming a parameter would rename what is written."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            given = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if node.func.attr == "span" and isinstance(node.args[0], ast.Constant):
                found.setdefault(given[0], set()).update(keyword.arg for keyword in node.keywords if keyword.arg)
            elif node.func.attr == "stage" and given:  # a stage of a train step: the last constant is the span's name
                found.setdefault(given[-1], set()).add("step")
    assert found == {
        "check": {"trajectories", "version"},
        "checkpoint": {"step"},
        "eval": {"step"},
        "fetch": {"version"},
        "generate": {"group", "sample", "tokens", "version", "ended"},
        "judge": {"trajectories"},
        "prefill": set(),
        "publish": {"step", "version", "bytes"},
        "train": {"step"},
        "turns": {"step"},
        "wait_for_batch": {"step"},
    }


if __name__ == "__main__":
    table = {root: names(kind) for root, kind in ROOTS.items()}
    TABLE.write_text(tomli_w.dumps(table), encoding="utf-8")
