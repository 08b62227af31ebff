"""Move files and top-level definitions of the package as moves.toml says, and rewrite every import.

    python tools/restructure/move.py moves.toml

Each function and class keeps its syntax tree; only imports differ. `check_move.py` compares the trees of two commits.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path.cwd()
PACKAGE = ROOT / "baton"
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sbatch", ".html", ".sh", ".txt", ".tsv"}


def module_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str, *, is_package: bool = False) -> Path:
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if is_package else path.with_suffix(".py")


class Source:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.lines = self.text.splitlines(keepends=True)
        self.tree = ast.parse(self.text)
        self.chunks: list[tuple[tuple[str, ...], str, ast.stmt]] = []
        self.imports: list[ast.stmt] = []
        self.typing_imports: list[ast.stmt] = []
        self._cut()

    def _cut(self) -> None:
        body = list(self.tree.body)
        if ast.get_docstring(self.tree) is not None:
            body = body[1:]
        end = 0
        for node in self.tree.body[: len(self.tree.body) - len(body)]:
            end = node.end_lineno or 0
        for node in body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            last = node.end_lineno or first
            is_doc = (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            )
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imports.append(node)
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                self.typing_imports += node.body
            elif is_doc and self.chunks:
                names, text, owner = self.chunks[-1]
                self.chunks[-1] = (names, text + "".join(self.lines[end:last]), owner)
            else:
                self.chunks.append((defined(node), "".join(self.lines[end:last]), node))
            end = last
            # a comment at the end of the line belongs to it
        self.tail = "".join(self.lines[end:])

    @property
    def names(self) -> set[str]:
        return {name for names, _, _ in self.chunks for name in names}


def defined(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return (node.target.id,)
    return ()


def used(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def wrapped(text: str, width: int = 120) -> str:
    """The text with lines of prose that a longer path made too long, wrapped."""
    quoted = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    out = []
    carried = indent = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if carried:
            if number in quoted and line.strip() and not line.strip().startswith('"""'):
                line = f"{indent}{carried} {line.strip()}"
            else:
                out.append(f"{indent}{carried}")
            carried = ""
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) > width and number in quoted:
            cut = line.rfind(" ", 0, width + 1)
            line, carried = line[:cut], line[cut + 1 :]
        elif len(line) > width and "  # " in line and "# noqa" not in line and "# type" not in line:
            line, _, comment = line.partition("  # ")
            out.append(f"{indent}# {comment}")
        out.append(line)
    return "\n".join(out)


class Mover:
    def __init__(self, table: dict) -> None:
        self.modules: dict[str, str] = table["modules"]
        self.splits: dict[str, dict] = table.get("split", {})
        self.docs: dict[str, str] = table.get("docs", {})
        self.dissolved: set[str] = set(table.get("dissolved", []))
        self.data: dict[str, str] = table.get("data", {})
        self.tests: dict[str, str] = table.get("tests", {})
        self.texts: dict[str, str] = table.get("texts", {})
        self.replace: list[dict] = table.get("replace", [])
        self.old_paths = {module_of(p): p for p in sorted(PACKAGE.rglob("*.py"))}
        self.packages = {m for m, p in self.old_paths.items() if p.name == "__init__.py"}
        self.target: dict[str, str] = {}
        for module in self.old_paths:
            self.target[module] = self._new(module)
        self.symbols: dict[tuple[str, str], str] = {}
        for module, rule in self.splits.items():
            self.target[module] = rule["default"]
            for target, names in rule.items():
                if target != "default":
                    for name in names:
                        self.symbols[module, name] = target
        self.reexported: dict[tuple[str, str], tuple[str, str]] = {}
        for module in self.dissolved:
            tree = ast.parse(self.old_paths[module].read_text())
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("baton."):
                    for alias in node.names:
                        self.reexported[module, alias.asname or alias.name] = (
                            node.module.removeprefix("baton."),
                            alias.name,
                        )

    def _new(self, module: str) -> str:
        if module in self.modules:
            return self.modules[module]
        parts = module.split(".")
        for n in range(len(parts) - 1, 0, -1):
            head = ".".join(parts[:n]) + ".*"
            if head in self.modules:
                return ".".join([self.modules[head], *parts[n:]])
        return module

    def place(self, module: str, name: str) -> str:
        """New module of a name that an old module defines."""
        while (module, name) in self.reexported:
            module, name = self.reexported[module, name]
        return self.symbols.get((module, name), self.target.get(module, module))

    def converted(self, node: ast.stmt, own: str | None = None) -> list[str] | None:
        """The statements that replace an import, or None where it stays. `own` is the new module it stands in."""
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and (node.module == "baton" or node.module.startswith("baton."))
        ):
            module = node.module.removeprefix("baton").removeprefix(".")
            by: dict[str, list[str]] = defaultdict(list)
            alone: list[str] = []
            for alias in node.names:
                full = f"{module}.{alias.name}".strip(".")
                tail = f" as {alias.asname}" if alias.asname else ""
                if full in self.old_paths:
                    if full in self.splits:
                        print(f"  CHECK {full} is imported as a module and is split")
                    new = self.target[full]
                    head, _, last = new.rpartition(".")
                    if last != alias.name and not alias.asname:
                        tail = f" as {alias.name}"
                    alone.append(f"from baton{'.' + head if head else ''} import {last}{tail}")
                elif not module:
                    by[""].append(alias.name + tail)
                else:
                    by[self.place(module, alias.name)].append(alias.name + tail)
            out = [
                f"from baton{'.' + new if new else ''} import {', '.join(names)}"
                for new, names in by.items()
                if new != own
            ]
            return out + alone
        if isinstance(node, ast.Import) and any(a.name.startswith("baton.") for a in node.names):
            out = []
            for alias in node.names:
                new = self.target.get(alias.name.removeprefix("baton."), alias.name.removeprefix("baton."))
                out.append(f"import baton.{new}" + (f" as {alias.asname}" if alias.asname else ""))
            return out
        return None

    def rewritten(self, text: str, own: str | None = None) -> str:
        """The text with every import of the package converted, those inside functions included."""
        tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        for node in sorted(nodes, key=lambda n: -n.lineno):
            new = self.converted(node, own)
            if new is None:
                continue
            indent = " " * node.col_offset
            last_line = lines[node.end_lineno - 1]
            comment = last_line[node.end_col_offset :].rstrip("\n") if node.end_lineno == node.lineno else ""
            new_lines = [f"{indent}{s}\n" for s in new]
            if comment.strip() and new_lines:
                new_lines[0] = new_lines[0].rstrip("\n") + comment + "\n"
            if not new_lines:
                new_lines = []
            lines[node.lineno - 1 : node.end_lineno] = new_lines
        return "".join(lines)

    def run(self) -> None:
        sources = {m: Source(p) for m, p in self.old_paths.items()}
        into: dict[str, list[str]] = defaultdict(list)  # new module -> old modules
        for module in sources:
            if module in self.dissolved:
                continue
            targets = {self.target[module]} | {t for (m, _), t in self.symbols.items() if m == module}
            for target in targets:
                into[target].append(module)
        contents: dict[Path, str] = {}
        composed: list[Path] = []
        for new, olds in into.items():
            is_plain = len(olds) == 1 and olds[0] not in self.splits
            is_package = any(o in self.packages for o in olds)
            path = path_of(new, is_package=is_package) if new else PACKAGE / "__init__.py"
            if is_plain:
                contents[path] = self.rewritten(sources[olds[0]].text, new)
                if new in self.docs:
                    end = contents[path].index('"""', 3) + 3
                    contents[path] = f'"""{self.docs[new]}"""' + contents[path][end:]
            else:
                contents[path] = self._composed(new, olds, sources)
                composed.append(path)
        for path in self.old_paths.values():
            if path not in contents:
                path.unlink()
        for path, text in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for folder in sorted({p for c in contents for p in c.parents if PACKAGE in p.parents}):
            init = folder / "__init__.py"
            if not init.exists():
                init.write_text(f'"""{self.docs.get(module_of(init), "TODO")}"""\n')
        for old, new in self.data.items():
            (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / old).rename(ROOT / new)
        self._texts()
        for old, new in self.tests.items():
            (ROOT / "tests" / new).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / "tests" / old).rename(ROOT / "tests" / new)
        for rule in self.replace:
            path = ROOT / rule["file"]
            text = path.read_text()
            assert rule["old"] in text, f"{rule['file']}: {rule['old']!r} is not there"
            path.write_text(text.replace(rule["old"], rule["new"]))
        ruff = [sys.executable, "-m", "ruff"]
        subprocess.run([*ruff, "check", "--quiet", "--select", "F401", "--fix", *map(str, composed)], check=False)
        subprocess.run([*ruff, "check", "--quiet", "--select", "I001", "--fix", "."], check=False)
        subprocess.run([*ruff, "format", "--quiet", "."], check=False)
        for folder in sorted(PACKAGE.rglob("*"), reverse=True):
            if folder.is_dir() and not any(
                f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts
            ):
                subprocess.run(["rm", "-r", str(folder)], check=True)

    def _composed(self, new: str, olds: list[str], sources: dict[str, Source]) -> str:
        olds = sorted(olds, key=lambda o: (o != new, o))  # what stands there already comes first
        imports: list[str] = []
        typing_imports: list[str] = []
        chunks: list[str] = []
        own: set[str] = set()
        needed: set[tuple[str, str]] = set()
        seen: set[str] = set()
        for old in olds:
            source = sources[old]
            mine = [c for c in source.chunks if self._goes_to(old, c, new)]
            own |= {n for names, _, _ in mine for n in names}
            others = {name: self.place(old, name) for name in source.names if self.place(old, name) != new}
            for _, text, node in mine:
                if text.strip() in seen and len(text) < 80:
                    continue
                seen.add(text.strip())
                chunks.append(text.strip("\n"))
                wanted = used(node) | {
                    n
                    for s in ast.walk(node)
                    if isinstance(s, ast.Constant) and isinstance(s.value, str)
                    for n in re.findall(r"^\w+$", s.value)
                }
                needed |= {(others[n], n) for n in wanted & others.keys()}
            for node in source.imports:
                imports += self.converted(node, new) if self.converted(node, new) is not None else [ast.unparse(node)]
            for node in source.typing_imports:
                typing_imports += (
                    self.converted(node, new) if self.converted(node, new) is not None else [ast.unparse(node)]
                )
        for module, name in sorted(needed):
            if name.startswith("_"):
                print(f"  CHECK {new} needs the private name {name} of {module}")
            imports.append(f"from baton.{module} import {name}")
        doc = self.docs.get(new)
        if doc is None:
            doc = ast.get_docstring(sources[olds[0]].tree, clean=False) or ""
        head = [f'"""{doc}"""', "", "from __future__ import annotations", ""]
        body = [i for i in dict.fromkeys(imports) if "__future__" not in i]
        if typing_imports:
            body.append("if TYPE_CHECKING:")
            body += [f"    {i}" for i in dict.fromkeys(typing_imports)]
        text = "\n".join([*head, *body, "", "\n\n\n".join(chunks)]) + "\n"
        return self._local_imports(text, new)

    def _local_imports(self, text: str, own: str) -> str:
        """Imports inside functions; those at the top are converted already."""
        tree = ast.parse(text)
        top = {id(n) for n in tree.body} | {id(n) for b in tree.body if isinstance(b, ast.If) for n in b.body}
        lines = text.splitlines(keepends=True)
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in top]
        for node in sorted(nodes, key=lambda n: -n.lineno):
            new = self.converted(node, own)
            if new is not None:
                tail = (
                    lines[node.end_lineno - 1][node.end_col_offset :].rstrip("\n")
                    if node.end_lineno == node.lineno
                    else ""
                )
                out = [f"{' ' * node.col_offset}{s}" for s in new]
                if out:
                    out[0] += tail
                lines[node.lineno - 1 : node.end_lineno] = [o + "\n" for o in out]
        return "".join(lines)

    def _goes_to(self, old: str, chunk: tuple[tuple[str, ...], str, ast.stmt], new: str) -> bool:
        names = chunk[0]
        if names:
            return self.place(old, names[0]) == new
        return self.target[old] == new

    def dotted(self) -> dict[str, str]:
        found = {f"baton.{o}": f"baton.{n}" for o, n in self.target.items() if o and o != n and o not in self.dissolved}
        return found | self.texts

    def paths(self) -> dict[str, str]:
        found = {}
        for old, new in self.target.items():
            if old and old != new:
                found[old.replace(".", "/") + ".py"] = new.replace(".", "/") + ".py"
                if old in self.packages:
                    found[old.replace(".", "/") + "/"] = new.replace(".", "/") + "/"
        return found

    def _texts(self) -> None:
        dotted, paths = self.dotted(), self.paths()
        dotted_pattern = re.compile(
            "|".join(rf"(?<![\w.]){re.escape(o)}(?!\w)" for o in sorted(dotted, key=len, reverse=True))
        )
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\n")
        for name in listed:
            path = ROOT / name
            is_data = name.startswith("tests/golden/") and path.suffix != ".py"
            if not name or not path.is_file() or name.startswith("tools/restructure/") or is_data:
                continue
            if path.suffix not in TEXT_SUFFIXES and path.name != "Makefile" and name != ".ci/run":
                continue
            if name.startswith("benchmarks/") and path.suffix not in {".py", ".md", ".sh"}:
                continue
            text = path.read_text()
            is_outside = path.suffix == ".py" and PACKAGE not in path.parents
            new = self.rewritten(text) if is_outside else text
            new = self._strings(path, new, dotted, dotted_pattern)
            for old, to in self.data.items():
                new = new.replace(old, to)
            # paths in prose: `swarm/leases.py`, baton/swarm/leases.py
            new = re.sub(r"\bbaton/([\w/]+(?:\.py|/)?)", lambda m: "baton/" + paths.get(m[1], m[1]), new)
            near = self._beside(path)
            new = re.sub(
                r"`([\w/]+(?:\.py|/))((?:: [\w.]+)?)`",
                lambda m, near=near: f"`{near.get(m[1]) or paths.get(m[1], m[1])}{m[2]}`",  # type: ignore[misc]
                new,
            )
            if path.suffix == ".py":
                new = wrapped(new)
            if name.startswith("tests/"):
                new = re.sub(r'"([\w/]+\.py)"', lambda m: f'"{paths.get(m[1], m[1])}"', new)
            if name.startswith("tests/mutants/"):
                bare = {old.removesuffix(".py"): new.removesuffix(".py") for old, new in paths.items()}
                for old, to in bare.items():
                    new = new.replace(f'"{old}"', f'"{to}"')
                    if path.suffix == ".tsv":
                        new = re.sub(rf"^{re.escape(old)}\t", f"{to}\t", new, flags=re.M)
            new = self._tests(name, new)
            if new != text:
                path.write_text(new)

    def _beside(self, path: Path) -> dict[str, str]:
        """Old names of the files that lay beside a file of the package, with their names as seen from it now."""
        if PACKAGE not in path.parents:
            return {}
        new = module_of(path)
        olds = [old for old, to in self.target.items() if to == new]
        found = {}
        for old in olds:
            folder = old.rpartition(".")[0]
            for other, to in self.target.items():
                if folder and other.rpartition(".")[0] == folder and other not in self.packages:
                    is_near = to.rpartition(".")[0] == new.rpartition(".")[0]
                    shown = to.rpartition(".")[2] if is_near else to.replace(".", "/")
                    found[other.rpartition(".")[2] + ".py"] = shown + ".py"
        return found

    def _tests(self, name: str, text: str) -> str:
        """The text with paths and modules of moved tests."""
        if name.startswith("tests/"):
            text = self._siblings(name.removeprefix("tests/"), text)
        for old, new in self.tests.items():
            text = re.sub(rf"tests/{re.escape(old)}(?!\w)", f"tests/{new}", text)
            dotted, to = (f"tests.{p.removesuffix('.py').replace('/', '.')}" for p in (old, new))
            text = re.sub(rf"(?<![\w.]){re.escape(dotted)}(?!\w)", to, text)
            head, _, last = dotted.rpartition(".")
            new_head, _, new_last = to.rpartition(".")
            text = re.sub(rf"from {re.escape(head)} import {last}\b", f"from {new_head} import {new_last}", text)
            if name.startswith("tests/") and old.rpartition("/")[2] != new.rpartition("/")[2]:  # a plain module name
                text = re.sub(rf"^from {last} import", f"from {new_last} import", text, flags=re.M)
        own = self.tests.get(name.removeprefix("tests/")) if name.startswith("tests/") else None
        deeper = own.count("/") - name.removeprefix("tests/").count("/") if own else 0
        if deeper:
            text = re.sub(
                r"Path\(__file__\)\.parents\[(\d)\]", lambda m: f"Path(__file__).parents[{int(m[1]) + deeper}]", text
            )
        return text

    def _siblings(self, name: str, text: str) -> str:
        """The text with plain imports of helper modules that no longer lie beside the test."""
        folder, new_folder = name.rpartition("/")[0], self.tests.get(name, name).rpartition("/")[0]
        found = re.findall(r"^from (\w+) import", text, flags=re.M)
        for module in set(found):
            old = f"{folder}/{module}.py".lstrip("/")
            if not (ROOT / "tests" / old).is_file():
                continue
            new = self.tests.get(old, old)
            if new.rpartition("/")[0] != new_folder:
                full = "tests." + new.removesuffix(".py").replace("/", ".")
                text = re.sub(rf"^from {module} import", f"from {full} import", text, flags=re.M)
        return text

    def _strings(self, path: Path, text: str, dotted: dict[str, str], pattern: re.Pattern[str]) -> str:
        if path.suffix != ".py":
            return pattern.sub(lambda m: dotted[m[0]], text)
        lines = text.splitlines(keepends=True)
        out = []
        for line in lines:
            if re.match(r"\s*(from|import) baton", line):
                out.append(line)
            else:
                out.append(pattern.sub(lambda m: dotted[m[0]], line))
        return "".join(out)


if __name__ == "__main__":
    Mover(tomllib.loads(Path(sys.argv[1]).read_text())).run()
