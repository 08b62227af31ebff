"""Measure the tests of the decisions and the mathematics: change one operator, constant or condition at a time.

    make mutants                                    # all modules
    make mutants MUTANTS="trainer/losses --show"    # one, with the tests' output for each survivor
    make mutants MUTANTS=--survivors                # after tests were added: the survivors of results.tsv again

cosmic-ray makes the mutants. They are run here and not by its own commands, because those start a process for each
and write the mutant into the working tree: a mutant takes seconds to import torch, its tests a fraction of one. Here
each mutant is a fork of a process that has imported torch, and lives in memory only.

A mutant that no test notices is a survivor. Survivors that cannot change what the module does are in equivalent.toml,
each with the reason; others are work to do. `results.tsv` has every mutant with its outcome.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.util
import math
import os
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TARGET = 0.95
"""Least share of the mutants that are not equivalent which the tests must notice, in each module."""

TESTS = {
    "rollout/buffer": ["tests/rollout/test_buffer.py", "tests/rollout/test_scheduler_laws.py"],
    "trainer/losses": ["tests/trainer/test_losses.py", "tests/trainer/test_objectives.py"],
    "trainer/advantages": ["tests/trainer/test_advantages.py"],
    "trainer/corrections": ["tests/trainer/test_corrections.py"],
    "swarm/leases": ["tests/swarm/test_leases.py"],
    "swarm/lease_credit": [
        "tests/swarm/test_lease_credit.py",
        "-k",
        "not 4096_slots and not nothing_bounds and not real_hub",
    ],
    "rollout/scheduler": ["tests/rollout/test_scheduler.py", "tests/rollout/test_scheduler_laws.py"],
}
"""By module: the tests that must notice, quick ones first."""

OPPOSITES = {
    "Lt": ("LtE", "GtE"),
    "LtE": ("Lt", "Gt"),
    "Gt": ("GtE", "LtE"),
    "GtE": ("Gt", "Lt"),
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}
ARITHMETIC = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Div",
    "Div": "Mul",
    "FloorDiv": "Mul",
    "Mod": "Mul",
    "Pow": "Mul",
    "BitAnd": "BitOr",
    "BitOr": "BitAnd",
}
OPERATORS = [
    *[f"ReplaceComparisonOperator_{a}_{b}" for a, others in OPPOSITES.items() for b in others],
    *[f"ReplaceBinaryOperator_{a}_{b}" for a, b in ARITHMETIC.items()],
    *[f"ReplaceUnaryOperator_Delete_{a}" for a in ("USub", "Invert", "Not")],
    *["AddNot", "NumberReplacer", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr"],
    *["ReplaceOrWithAnd", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"],
]
"""Of cosmic-ray's: where it has a dozen replacements of one operator, those that a slip of the pen would make."""


PAIRS = ((ast.Lt, ast.GtE), (ast.LtE, ast.Gt), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
INVERSES = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One changed module."""

    module: str
    line: int
    before: str
    """The line, without its indent."""
    after: str
    source: str


class Negated(ast.NodeTransformer):
    """Writes `not a < b` as `a >= b`."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(ops=[operator]) as compared):
                compared.ops = [INVERSES[type(operator)]()]
                return compared
        return node


def meaning(source: str) -> str:
    """What a module decides: its syntax tree without annotations, decorators of classes, and `*` among parameters."""
    tree = Negated().visit(ast.parse(source))
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign():
                node.annotation = ast.Constant(None)
            case ast.arg():
                node.annotation = None
            case ast.FunctionDef():
                node.returns = None
            case ast.ClassDef():
                node.decorator_list = []
            case ast.arguments():
                node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
                node.posonlyargs, node.kwonlyargs = [], []
                node.defaults = [*node.defaults, *(default for default in node.kw_defaults if default is not None)]
                node.kw_defaults = []
    return ast.dump(tree)


def mutants_of(module: str) -> Iterator[Mutant]:
    """Yield all mutants of a module that differ in what they do, each once."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / f"baton/{module}.py").read_text(encoding="utf-8")
    seen = {meaning(source)}
    for name in OPERATORS:
        for occurrence in range(1000):
            mutated = mutate_code(source, get_operator(f"core/{name}")(), occurrence)
            if mutated is None:
                break
            with contextlib.suppress(SyntaxError):
                if (what := meaning(mutated)) not in seen:
                    seen.add(what)
                    pairs = enumerate(zip(source.splitlines(), mutated.splitlines(), strict=False), 1)
                    line, (before, after) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
                    yield Mutant(module, line, before.strip(), after.strip(), mutated)


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source in memory."""

    def __init__(self, module: str, source: str) -> None:
        self.name, self.path = f"baton.{module.replace('/', '.')}", str(ROOT / f"baton/{module}.py")
        self.source = source

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.path, "exec"), module.__dict__)


def tried(module: str, source: str, limits_s: tuple[int, float], output: Path) -> str:
    """Run the module's tests on a source, in a fork: killed, survived or hung, by (seconds of CPU, seconds) at most."""
    child = os.fork()
    if not child:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (limits_s[0], limits_s[0]))
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.meta_path.insert(0, Loader(module, source))
            import pytest

            options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
            code = pytest.main([*options, "--hypothesis-profile=mutants", *TESTS[module]])
            output.with_suffix(".imported").write_text("\n".join(sys.modules))
            os._exit(int(code))
        finally:
            os._exit(70)
    until_s = time.monotonic() + limits_s[1]
    while time.monotonic() < until_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            is_hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
            return "hung" if is_hung else "killed" if status else "survived"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def children_s() -> float:
    """Seconds of CPU that forks have used which are over."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def import_libraries(names: list[str]) -> None:
    """Import here, before the forks, what the tests import and is not Baton's."""
    for name in names:
        spec = None
        with contextlib.suppress(Exception):
            spec = importlib.util.find_spec(name)
        if spec is not None and "site-packages" in str(spec.origin) and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def equivalents() -> dict[tuple[str, str, str], str]:
    """By module, line and mutated line: why nothing can notice."""
    rows = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8")).get("equivalent", [])
    return {(row["module"], row["line"], row["becomes"]): row["why"] for row in rows}


def gone_equivalents(modules: list[str]) -> list[str]:
    """A sentence for each entry of equivalent.toml whose line its module no longer has."""
    sources = {module: (ROOT / f"baton/{module}.py").read_text(encoding="utf-8").splitlines() for module in modules}
    lines = {module: {line.strip() for line in source} for module, source in sources.items()}
    return [
        f"tests/mutants/equivalent.toml: {module} has no line {line!r}; remove the entry, or give the line as it is now"
        for module, line, _ in equivalents()
        if module in lines and line not in lines[module]
    ]


def recorded(modules: list[str]) -> dict[tuple[str, str, str], str]:
    """By module, line and mutated line: the outcome in results.tsv."""
    path = HERE / "results.tsv"
    rows = [row.split("\t") for row in path.read_text(encoding="utf-8").splitlines()[1:]] if path.exists() else []
    return {(module, before, after): outcome for module, _, outcome, before, after in rows if module in modules}


def measure(module: str, *, show: bool, only_survivors: bool) -> Iterator[tuple[Mutant, str]]:
    """Try every mutant of a module. Raises SystemExit when its tests fail as it stands."""
    known, before = equivalents(), recorded([module]) if only_survivors else {}
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        begin_s, before_s = time.monotonic(), children_s()
        if tried(module, (ROOT / f"baton/{module}.py").read_text(encoding="utf-8"), (600, 600), output) != "survived":
            raise SystemExit(f"{module}: its tests fail without a mutant\n{output.read_text(errors='replace')[-3000:]}")
        limits_s = 5 + 3 * math.ceil(children_s() - before_s), 30 + 5 * (time.monotonic() - begin_s)
        import_libraries(output.with_suffix(".imported").read_text().splitlines())
        for mutant in mutants_of(module):
            outcome = before.get((module, mutant.before, mutant.after), "survived")
            if outcome in ("survived", "equivalent"):
                outcome = tried(module, mutant.source, limits_s, output)
            if outcome == "survived" and (module, mutant.before, mutant.after) in known:
                outcome = "equivalent"
            if outcome == "survived":
                print(f"{module}:{mutant.line}: survived\n  - {mutant.before}\n  + {mutant.after}", flush=True)
                if show:
                    print(output.read_text(errors="replace")[-1000:])
            yield mutant, outcome


def write_results(found: list[tuple[Mutant, str]], modules: list[str]) -> None:
    """Replace the rows of these modules in results.tsv."""
    path = HERE / "results.tsv"
    head, *rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else [""]
    kept = [row for row in rows if row.split("\t")[0] not in modules]
    new = ["\t".join((m.module, str(m.line), outcome, m.before, m.after)) for m, outcome in found]
    head = "\t".join(("module", "line", "outcome", "before", "after"))
    path.write_text("\n".join([head, *sorted(kept + new)]) + "\n", encoding="utf-8")


def main() -> int:
    """Measure; 1 where a module is below the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}; all when left out")
    parser.add_argument("--show", action="store_true", help="print the end of the tests' output for each survivor")
    parser.add_argument("--survivors", action="store_true", help="try those again that results.tsv has as survivors")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "BATON_SCHEDULES": "60"}
    sys.path.insert(0, str(ROOT))
    sys.dont_write_bytecode = True
    import hypothesis  # noqa: F401  # before the forks, as what import_libraries finds
    import torch

    torch.set_num_threads(1)
    modules = chosen.modules or list(TESTS)
    if gone := gone_equivalents(modules):
        raise SystemExit("\n".join(gone))
    is_enough, lines = True, list[str]()
    for module in modules:
        found = list(measure(module, show=chosen.show, only_survivors=chosen.survivors))
        write_results(found, [module])
        count = Counter(outcome for _, outcome in found)
        tried_count = len(found) - count["equivalent"]
        share = (tried_count - count["survived"]) / tried_count
        is_enough &= share >= TARGET
        lines.append(
            f"{module}: {len(found)} mutants, {count['killed']} killed, {count['hung']} hung, {count['equivalent']} "
            f"equivalent, {count['survived']} survived: {share:.1%} of those that are not equivalent are noticed"
        )
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    return 0 if is_enough else 1


if __name__ == "__main__":
    sys.exit(main())
