"""The shape of the code: imports point down, torch stays where it belongs, rooms stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "baton"
DOC = Path(__file__).parents[1] / "docs" / "architecture.md"


def layers_of(page: str) -> tuple[tuple[str, ...], ...]:
    """Rows of the layer table, from the bottom up, each with its files and folders."""
    rows = page.split("| layer | modules | what |")[1].split("\n\n")[0].splitlines()[2:]
    return tuple(tuple(name.strip("/") for name in re.findall(r"`([\w/]+)`", row.split("|")[2])) for row in rows)


LAYERS = (("baton",), *layers_of(DOC.read_text(encoding="utf-8")))
"""A module imports only from rows before its own, and from its own file or folder."""
TORCH_UNITS = {"policy", "trainer", "weights", "profile"}
TORCH_FILES = {f"run/{name}.py" for name in ("assemble", "dry_run", "hosting", "sft")}
"""Units that may import torch and what stands on it, at import time. Of rollout, only the engines."""
TORCH_PACKAGES = {"torch", "transformers", "tokenizers"}
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
MODULES = sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "baton" if first == "__init__.py" else first.removesuffix(".py")


def imported(tree: ast.Module) -> list[tuple[str, bool]]:
    """(module, whether it is only for type checking) of every import, those inside functions included."""
    only_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""]
            if node.module == "baton":
                names = [f"baton.{alias.name}" for alias in node.names]
        found += [(name, id(node) in only_types) for name in names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_and_siblings_never_meet(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LEVEL, f"{unit} has no layer: give it a row in docs/architecture.md"
    for name, only_for_types in imported(ast.parse(path.read_text())):
        if only_for_types or name.split(".")[0] != "baton":
            continue
        target = name.split(".")[1] if "." in name else "baton"
        target = target if target in LEVEL else "baton"  # baton.__version__
        assert target == unit or LEVEL[target] < LEVEL[unit], f"{unit} imports {name}, which is not below it"


def imports_of_files() -> dict[str, set[str]]:
    """Module → modules of the package that it imports, inside functions and for type checking included."""
    files = {".".join(("baton", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in MODULES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        wanted = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= {one if one in files else node.module or "" for one in members}
        found[name] = wanted & files.keys() - {name}
    return found


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The names along one circle, the first again at the end; empty where there is none."""
    is_done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in is_done:
            for target in sorted(graph[name]):
                if circle := walk(target, [*way, name]):
                    return circle
            is_done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := walk(name, []))), [])


def test_no_two_files_import_each_other_directly_or_over_others() -> None:
    circle = circle_in(imports_of_files())
    assert not circle, f"a circle of imports: {' → '.join(circle)}"


def test_a_circle_is_found_and_printed_in_order() -> None:
    assert circle_in({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_class_name_exists_once_and_a_private_method_name_in_at_most_three_classes() -> None:
    classes: dict[str, list[str]] = {}
    methods: dict[str, set[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
                for one in node.body:
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and is_private(one.name):
                        methods.setdefault(one.name, set()).add(node.name)
    assert not {name: files for name, files in classes.items() if len(files) > 1}
    assert not {name: owners for name, owners in methods.items() if len(owners) > 3}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_is_imported_only_where_tensors_are(path: Path) -> None:
    place = path.relative_to(PACKAGE)
    if unit_of(path) in TORCH_UNITS or place.parts[:2] == ("rollout", "engines") or str(place) in TORCH_FILES:
        return
    tree = ast.parse(path.read_text())
    at_import = ast.Module([n for n in tree.body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))], [])
    found = {name.split(".")[0] for name, only_for_types in imported(at_import) if not only_for_types}
    assert not found & TORCH_PACKAGES, f"{place} imports {found & TORCH_PACKAGES}"


@pytest.mark.parametrize(
    "module",
    [
        "baton.types",
        "baton.recipe.load",
        "baton.cli.main",
        "baton.recipe.keys",
        "baton.recipe.presets",
        "baton.records.evaluation",
        "baton.run.loop",
        "baton.run.device_sharing",
        "baton.tasks.stream",
        "baton.rollout.controller",
        "baton.rollout.transport",
        "baton.rollout.engines.fake",
        "baton.trainer.settings",
        "baton.trainer.trainer",
        "baton.planner.solve",
        "baton.weights.settings",
        "baton.weights.store",
        "baton.weights.sources",
        "baton.weights.delta",
        "baton.swarm.verification.checks",
        "baton.swarm.verification.policy",
        "baton.simulate",
        "baton.plan",
        "baton.cluster.placement",
        "baton.cluster.supervision",
        "baton.cluster.ray.connection",
    ],
)
def test_planning_and_simulating_need_no_torch(module: str) -> None:
    code = f"import {module}, sys; print([m for m in ('torch', 'transformers', 'reasoning_gym') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_are_documented_and_named_for_what_they_hold(path: Path) -> None:
    text = path.read_text()
    if (length := len(text.splitlines())) > 400:
        warnings.warn(f"{path.name} has {length} lines: is a concept missing?", stacklevel=1)
    assert not {"utils", "util", "common", "core", "manager", "helper", "helpers", "misc"} & {
        part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts
    }
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is for"
    public = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    for node in public:
        assert node.name.startswith("_") or ast.get_docstring(node), f"{node.name} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = (node.end_lineno or 0) - node.lineno + 1
            if size > 60:
                warnings.warn(f"{path.name}: {node.name} has {size} lines: is a concept missing?", stacklevel=1)


def test_nothing_unpickles() -> None:
    """No pickle crosses a boundary: neither the module nor torch.load, whose files are pickles."""
    for path in MODULES:
        tree = ast.parse(path.read_text())
        assert "pickle" not in {name.split(".")[0] for name, _ in imported(tree)}, path
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"torch.load", "torch.save"}, path


PRIVATE_NAMES_IN_TESTS = tomllib.loads((Path(__file__).parent / "private_names.toml").read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names() -> set[str]:
    """Names with an underscore that the package defines: functions, classes, attributes and variables."""
    found = set()
    for node in (node for path in MODULES for node in ast.walk(ast.parse(path.read_text()))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


def private_uses(tree: ast.Module, known: set[str]) -> set[str]:
    """What a test takes of the package's private names: accesses, overrides, imports, and strings for monkeypatch."""
    from_package = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("baton")
        for alias in node.names
    }
    own: set[str] = set()
    found: set[str] = set()
    for node in ast.walk(tree):  # classes come before what is in them
        match node:
            case ast.ClassDef(name=name, bases=bases):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
                attributes = {
                    one.attr
                    for one in ast.walk(node)
                    if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and is_own(one)
                }
                if any(base.id in from_package for base in bases if isinstance(base, ast.Name)):
                    found |= methods & known
                    from_package.add(name)
                else:
                    own |= methods
                own |= attributes
            case ast.ImportFrom(module=module, names=names) if (module or "").startswith("baton"):
                found |= {alias.name for alias in names if is_private(alias.name)}
            case ast.Attribute(attr=name) if name in known and not (is_own(node) and name in own):
                found.add(name)
            case ast.Constant(value=str(text)) if text.rpartition(".")[2] in known:
                found.add(text.rpartition(".")[2])
    return found


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_tests_keep_to_public_names() -> None:
    """Faults come as events, commands, messages or through a public protocol. What is left may only become less."""
    known, found = private_names(), {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for name in private_uses(ast.parse(path.read_text()), known):
            found.setdefault(name, []).append(path.name)
    new = {name: files for name, files in found.items() if name not in PRIVATE_NAMES_IN_TESTS}
    assert not new, "tests reach into the package: take a public seam"
    assert found.keys() == PRIVATE_NAMES_IN_TESTS.keys(), "the list holds names that no test needs any more"


def test_only_the_console_prints() -> None:
    """What is printed otherwise may hold escape sequences, and markup that rich takes for its own: baton/console.py."""
    to_parent = {"profile/engine.py": {"sys.stdout.write"}}  # a word of our own, through a pipe
    for path in MODULES:
        place = str(path.relative_to(PACKAGE))
        if place == "console.py":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        named = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)}
        writes = {"print", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write", "Text.from_markup"}
        assert not named & writes - to_parent.get(place, set()), place
        from_rich = {
            alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module in ("rich", "rich.console", "rich.markup")
            for alias in node.names
        }
        assert from_rich <= {"Group"}, f"{place} imports {from_rich} of rich: take baton.console.Console"
        marked = {ast.unparse(node) for node in nodes if isinstance(node, ast.keyword) and node.arg == "markup"}
        assert marked <= {"markup=False"}, place


# ---- the way of a token's data from the engine to the loss -----------------------------------------------------------

WAY = (
    "rollout/engines/sampling.py",  # draws a token
    "rollout/engines/embedded/engine.py",  # runs the model, one token per slot
    "rollout/engines/slot_table.py",  # → Segment, Report
    "types.py",  # Segment, Trajectory, Group, Batch
    "trainer/samples.py",  # Batch → TrainingSample
    "trainer/microbatches.py",  # TrainingSample → MicroBatch → LossInputs
    "trainer/losses.py",  # LossInputs, the objective
    "trainer/corrections.py",  # behavior → proximal: the anchor and weights of the objective
)
"""Files that name the behavior logprobs of a token that the embedded engine samples, in the order of a run.

Every other file on the way (transport, controller, loop, `LocalTrainer`, update) passes on the object that
holds them, of one type per stage, and reads none. Not on the way: files that only verify or only show."""
OTHER_ENGINES = {
    "rollout/engines/client.py",
    "rollout/engines/external.py",
    "rollout/engines/sglang/wire.py",
    "rollout/engines/vllm/client.py",
}
"""Where vLLM and SGLang are asked, instead of the first two files: three of these in a run."""
VERIFY_OR_SHOW = (
    "swarm/verification/",
    "rollout/rescoring.py",
    "rollout/engines/embedded/rescore.py",
    "run/trajectories.py",
)
ALL_LOGPROBS_ARE_BEHAVIORS = ("rollout/", "swarm/", "run/", "records/")
"""Elsewhere a name that says only `logprob` may be of another policy."""


def names_of(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
    return found


def test_behavior_logprobs_pass_eight_files_from_the_engine_to_the_loss() -> None:
    assert len(WAY) <= 8
    found = set()
    for path in MODULES:
        place = str(path.relative_to(PACKAGE))
        word = "logprob" if place.startswith(ALL_LOGPROBS_ARE_BEHAVIORS) else "behavior_logprobs"
        if not place.startswith(VERIFY_OR_SHOW) and any(word in name for name in names_of(ast.parse(path.read_text()))):
            found.add(place)
    assert found == {*WAY, *OTHER_ENGINES}


def test_each_file_on_the_way_imports_only_its_neighbours_on_it() -> None:
    """It takes the type of the stage before it and makes that of the stage after it: no value goes back and forth.

    types.py is below all and imported by most, for other types."""
    for place, file in enumerate(WAY):
        names = {name for name, _ in imported(ast.parse((PACKAGE / file).read_text()))} - {"baton.types"}
        for other, target in enumerate(WAY):
            if "baton." + target.removesuffix(".py").replace("/", ".") in names:
                assert abs(place - other) == 1, f"{file} imports {target}"


def test_a_batch_enters_the_trainer_once() -> None:
    """One module reads groups and trajectories; `Trainer`s and their ranks only hand the batch over to it."""
    readers, carriers = {"trainer/samples.py"}, set()
    for path in (PACKAGE / "trainer").rglob("*.py"):
        place = str(path.relative_to(PACKAGE))
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module == "baton.types"
            for alias in node.names
        }
        if names & {"Group", "Judged", "Judgement", "Trajectory", "Segment"}:
            assert place in readers, f"{place} reads what is in a batch"
        elif "Batch" in names:
            carriers.add(place)
    ranks = {f"trainer/parallel/{name}.py" for name in ("messages", "ranked_trainer")}
    assert carriers == {"trainer/trainer.py", "trainer/local_trainer.py", *ranks}
