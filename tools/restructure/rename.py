"""Rename identifiers of the package as renames.toml says, in code, tests, comments, docstrings and Markdown.

    python tools/restructure/rename.py                      # rename in the current tree
    python tools/restructure/rename.py --check PARENT COMMIT  # COMMIT is PARENT renamed by COMMIT's table

A name means what mypy resolves it to, so that two classes of one name, or methods of one name in several classes, can
be renamed apart. Entries of the table (`renames.toml`):

    [names]    "path.py:Name" = "New"            a class, function or constant, where it is defined
               "path.py:Class.member" = "new"    a method, attribute or field, also in subclasses and fakes of protocols
               "path.py:function(name)" = "new"  a parameter or local variable
               the path is below `baton/`; it may be left out (":Name") where only one file defines the name
    [sent]     as [names], for fields of structs that are written or sent: the encoded name stays the old one
    [words]    "old" = "new"                     every identifier of this name, wherever it is bound
    [keys]     "section.old" = "section.new"     in strings that are no docstrings, in recipes and in Markdown
    [text]     "path" = [["old", "new"], …]      what the tool cannot decide: exact text of one file, each found in it
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mypy import build, nodes, types
from mypy.modulefinder import BuildSource
from mypy.options import Options

TABLE = Path("tools/restructure/renames.toml")
CODE = ("baton", "tests", "benchmarks", "examples", "deploy")
SKIPPED = (
    "torch", "transformers", "numpy", "rich", "typer", "ray", "vllm", "aiohttp", "matplotlib", "datasets", "pyarrow",
    "peft", "fsspec", "highspy", "reasoning_gym", "prometheus_client", "hypothesis", "pytest", "_pytest", "safetensors",
    "tokenizers", "jinja2", "sympy", "math_verify", "scipy", "pandas", "psutil", "apsw", "zstandard", "blake3", "yarl",
)  # fmt: skip
"""Packages whose types decide nothing here: reading them would take minutes."""
Span = tuple[int, int, int, int]


class Table:
    def __init__(self, text: str) -> None:
        data = tomllib.loads(text)
        self.words: dict[str, str] = data.get("words", {})
        self.text: dict[str, list[list[str]]] = data.get("text", {})
        self.keys: dict[str, str] = data.get("keys", {})
        self.sent = set(data.get("sent", {}))
        self.entries: dict[str, str] = {**data.get("names", {}), **data.get("sent", {})}
        self.tops: dict[str, str] = {}  # full name → new name
        self.members: dict[str, dict[str, str]] = defaultdict(dict)  # member → full name of the class → new name
        self.parameters: dict[tuple[str, str], str] = {}  # (full name of the function, parameter) → new name
        self.kept: set[tuple[str, str]] = set()  # (full name of the class, field) whose encoded name stays
        self.stale: list[str] = []

    def resolve(self, trees: dict[str, ast.Module]) -> None:
        where: dict[str, set[str]] = defaultdict(set)
        for module, tree in trees.items():
            for name in top_level(tree):
                where[name].add(module)
        for entry, new in self.entries.items():
            path, _, name = entry.partition(":")
            name, _, parameter = name.rstrip(")").partition("(")
            top, _, member = name.partition(".")
            modules = {f"baton.{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")}
            modules = (modules if path else where[top]) & where[top]
            if len(modules) != 1:
                self.stale.append(f"{entry}: {'nobody defines it' if not modules else f'defined by {modules}'}")
                continue
            full = f"{modules.pop()}.{name}"
            if parameter:
                self.parameters[full, parameter] = new
            elif member:
                self.members[member][full.rpartition(".")[0]] = new
                if entry in self.sent:
                    self.kept.add((full.rpartition(".")[0], member))
            else:
                self.tops[full] = new


def top_level(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def files(root: Path) -> list[Path]:
    return [path for top in CODE if (root / top).is_dir() for path in sorted((root / top).rglob("*.py"))]


def module_of(path: Path, root: Path, seen: Counter[str]) -> str:
    relative = path.relative_to(root)
    if relative.parts[0] == "baton":
        parts = list(relative.with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    seen[path.stem] += 1
    return path.stem if seen[path.stem] == 1 else f"{path.stem}_{seen[path.stem]}"


class Collector:
    """What mypy knows of each name, attribute and call of a file, by its place in the file."""

    LINKS = frozenset(
        ("node", "info", "type", "unanalyzed_type", "analyzed", "names", "original_def", "type_annotation")
    )
    """Attributes that lead from the syntax tree to what its names stand for."""

    def __init__(self, tree: nodes.MypyFile) -> None:
        self.names: dict[tuple[Span, str], str] = {}
        self.attributes: dict[tuple[Span, str], nodes.MemberExpr] = {}
        self.calls: dict[Span, nodes.CallExpr] = {}
        waiting: list[Any] = [*tree.defs]
        seen: set[int] = set()
        while waiting:
            one = waiting.pop()
            if isinstance(one, list | tuple):
                waiting += one
            elif isinstance(one, nodes.Node) and not isinstance(one, nodes.TypeInfo | nodes.MypyFile | nodes.Var):
                if id(one) in seen:
                    continue
                seen.add(id(one))
                self.note(one)
                waiting += [getattr(one, name, None) for name in attributes_of(type(one)) if name not in self.LINKS]

    def note(self, one: nodes.Node) -> None:
        if isinstance(one, nodes.NameExpr):
            full = one.node.fullname if one.node is not None else one.fullname
            if full:
                self.names[span(one), one.name] = full
        elif isinstance(one, nodes.MemberExpr):
            self.attributes[span(one), one.name] = one
        elif isinstance(one, nodes.CallExpr):
            self.calls[span(one)] = one


@cache
def attributes_of(kind: type) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for base in kind.__mro__ for name in getattr(base, "__mypyc_attrs__", ())))


def span(node: nodes.Context) -> Span:
    return node.line, node.column, node.end_line or node.line, node.end_column or 0


def place(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def checked(root: Path, sources: dict[Path, str]) -> build.BuildResult:
    options = Options()
    options.export_types = options.preserve_asts = options.check_untyped_defs = options.ignore_missing_imports = True
    options.incremental = options.namespace_packages = False
    options.follow_imports = "silent"
    options.cache_dir = os.devnull
    options.python_version = (3, 11)
    options.per_module_options = {f"{name}.*": {"follow_imports": "skip"} for name in SKIPPED}
    options.build_per_module_cache()
    return build.build([BuildSource(str(p.relative_to(root)), m, None) for p, m in sources.items()], options)


class Renamer:
    def __init__(self, root: Path, table: Table) -> None:
        self.root, self.table = root, table
        seen: Counter[str] = Counter()
        self.sources = {path: module_of(path, root, seen) for path in files(root)}
        self.texts = {path: path.read_text() for path in self.sources}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        table.resolve({self.sources[p]: t for p, t in self.trees.items() if p.is_relative_to(root / "baton")})
        self.result = checked(root, self.sources)
        self.notes: list[str] = []
        self.infos = {
            node.fullname: node
            for module in self.result.files.values()
            for node in classes(module.names)
            if module.fullname in set(self.sources.values())
        }
        self.extend_to_fakes()
        self.defined = self.all_members()
        old = Counter(full.rpartition(".")[2] for full in table.tops)
        everywhere: dict[str, set[str]] = defaultdict(set)
        for path, tree in self.trees.items():
            for name in top_level(tree):
                everywhere[name].add(f"{self.sources[path]}.{name}")
        self.unique = {  # names that have one meaning in the whole code, so that text can only mean it
            name: {table.tops[full] for full in everywhere[name]}.pop()
            for name in old
            if all(full in table.tops for full in everywhere[name])
            and len({table.tops[full] for full in everywhere[name]}) == 1
        }

    def extend_to_fakes(self) -> None:
        """Classes that have all members of a protocol have its renamed members too, also without inheriting it."""
        for by_class in self.table.members.values():
            for full, new in list(by_class.items()):
                protocol = self.infos.get(full)
                if protocol is None or not protocol.is_protocol:
                    continue
                needed = set(protocol.protocol_members)
                for other, info in self.infos.items():
                    has = {name for base in info.mro for name in base.names}
                    if needed <= has and other not in by_class:
                        by_class[other] = new

    def all_members(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for full, info in self.infos.items():
            for name in info.names:
                found[name].add(full)
        return found

    def member(self, info: nodes.TypeInfo, name: str) -> str | None:
        by_class = self.table.members.get(name, {})
        return next((by_class[base.fullname] for base in info.mro if base.fullname in by_class), None)

    def member_of(self, kind: types.Type | None, name: str) -> tuple[bool, str | None]:
        """Whether the type decides what a member is, and its new name if it is renamed."""
        kind = types.get_proper_type(kind) if kind is not None else None
        match kind:
            case None | types.AnyType() | types.UninhabitedType():
                return False, None
            case types.Instance():
                if kind.type.fullname in ("builtins.type", "builtins.object"):
                    return False, None
                return name in {n for base in kind.type.mro for n in base.names}, self.member(kind.type, name)
            case types.UnionType():
                found = [self.member_of(item, name) for item in kind.items]
                news = {new for is_known, new in found if is_known}
                return (True, news.pop()) if len(news) == 1 else (bool(news - {None}), next(iter(news - {None}), None))
            case types.TypeVarType():
                return self.member_of(kind.upper_bound, name)
            case types.TypeType():
                return self.member_of(kind.item, name)
            case types.TupleType():
                return self.member_of(kind.partial_fallback, name)
            case types.CallableType() if kind.is_type_obj():
                return self.member_of(kind.ret_type, name)
            case types.Overloaded() if kind.is_type_obj():
                return self.member_of(kind.items[0].ret_type, name)
        return False, None

    def guess(self, path: Path, line: int, name: str) -> str | None:
        """The new name where no type is known: only where all classes that have this member rename it alike."""
        by_class = self.table.members.get(name)
        if not by_class:
            return None
        news = set(by_class.values())
        others = {full for full in self.defined.get(name, set()) if self.member(self.infos[full], name) is None}
        if len(news) == 1 and not others:
            return news.pop()
        self.notes.append(f"{path.relative_to(self.root)}:{line}: .{name} is of unknown type: {by_class}")
        return None

    def run(self) -> None:
        for path, text in self.texts.items():
            new = File(self, path, text).renamed()
            new = self.replaced(path, new)
            if new != text:
                path.write_text(new)
        for path in sorted([*self.root.glob("*.md"), *self.root.glob("docs/*.md"), *self.root.glob("*/**/*.md"),
                            *self.root.glob("**/*.toml"), *self.root.glob("Makefile"), *self.root.glob("deploy/**/*"),
                            *self.root.glob("baton/**/*.html")]):  # fmt: skip
            relative = path.relative_to(self.root)
            if not path.is_file() or relative.parts[0].startswith(".") or relative.parts[0] in ("tools", "runs"):
                continue
            text = path.read_text()
            is_old_run = "golden/run" in str(relative)
            new = self.prose(text, {}) if path.suffix == ".md" and not is_old_run else text
            if path.suffix == ".md" and not is_old_run:
                new = self.keys_in(new)
            if (
                path.suffix == ".toml"
                and not is_old_run
                and relative.name not in ("renames.toml", "waits_allowed.toml")
            ):
                new = self.recipe_keys(new)
            if relative == Path("tests/waits_allowed.toml"):
                new = self.waits(text)
            if relative == Path("tests/private_names.toml"):
                new = re.sub(r"^\w+(?= = )", lambda m: self.table.words.get(m[0], m[0]), text, flags=re.M)
            new = self.replaced(path, new)
            if new != text:
                path.write_text(new)
        for entry in self.table.stale:
            self.notes.append(f"no such definition: {entry}")

    def keys_in(self, text: str) -> str:
        for old, new in self.table.keys.items():
            text = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w]|\.\w)", new, text)
        return text

    def recipe_keys(self, text: str) -> str:
        section, lines = "", []
        for line in text.split("\n"):
            if match := re.fullmatch(r"\s*\[+([\w.]+)\]+.*", line):
                section = match[1]
            if match := re.match(r"(\w+)(?= *=)", line):
                new = self.table.keys.get(f"{section}.{match[1]}".strip("."))
                line = new.rpartition(".")[2] + line[match.end() :] if new else line
            lines.append(line)
        return "\n".join(lines)

    def waits(self, text: str) -> str:
        """The list of waits with its functions and calls renamed."""

        def renamed(match: re.Match[str]) -> str:
            file, function, call = match.groups()
            module = f"baton.{file.removesuffix('.py').replace('/', '.')}"
            owner, _, method = function.rpartition(".")
            info = self.infos.get(f"{module}.{owner}")
            method = (self.member(info, method) if info is not None else None) or method
            owner = self.table.tops.get(f"{module}.{owner}", owner)
            parts = call.split(".")
            if parts[0] == "self" and info is not None:
                parts[1] = self.member(info, parts[1]) or parts[1]
            parts = [self.table.words.get(part, part) for part in parts]
            function = f"{owner}.{method}" if owner else self.table.tops.get(f"{module}.{method}", method)
            return f'file = "{file}"\nfunction = "{function}"\ncall = "{".".join(parts)}"'

        return re.sub(r'file = "(.*)"\nfunction = "(.*)"\ncall = "(.*)"', renamed, text)

    def replaced(self, path: Path, text: str) -> str:
        for old, new in self.table.text.get(str(path.relative_to(self.root)), []):
            if old not in text:
                self.notes.append(f"{path.relative_to(self.root)}: no {old!r}")
            text = text.replace(old, new)
        return text

    def prose(self, text: str, bound: dict[str, str]) -> str:
        """Text for people with the identifiers in it renamed: in backticks, or as words that cannot be English."""
        known = {**self.unique, **bound}

        def word(name: str) -> str:
            if name in self.table.words:
                return self.table.words[name]
            if name in known:
                return known[name]
            news = set(self.table.members.get(name, {}).values())
            others = {full for full in self.defined.get(name, set()) if self.member(self.infos[full], name) is None}
            return news.pop() if len(news) == 1 and not others else name

        def quoted(match: re.Match[str]) -> str:
            return re.sub(r"(?<![\w./-])[A-Za-z_]\w*(?![\w/-]|\.(?:py|md|toml))", lambda m: word(m[0]), match[0])

        text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", quoted, text)
        camel = [name for name in known if re.search(r"[a-z0-9][A-Z]", name) or name in bound]
        snake = [n for n in self.table.words if "_" in n.strip("_")]
        for name in [*camel, *snake]:
            humps = name in snake or re.search(r"[a-z0-9][A-Z]", name)
            before = r"(?<![\w.`/-])" if humps else r"(?:(?<=[a-z,:(─▶│┴┤] )|(?<=─)|(?<=    ))"
            text = re.sub(rf"{before}{name}(?![\w`/-]|\.py)", word(name), text)
        return text


def classes(names: nodes.SymbolTable) -> Iterator[nodes.TypeInfo]:
    for symbol in names.values():
        if isinstance(symbol.node, nodes.TypeInfo) and not symbol.module_hidden:
            yield symbol.node


class File:
    def __init__(self, renamer: Renamer, path: Path, text: str) -> None:
        self.renamer, self.path, self.text = renamer, path, text
        self.table = renamer.table
        self.module = renamer.sources[path]
        self.tree = renamer.trees[path]
        self.mypy = renamer.result.files[self.module]
        self.facts = Collector(self.mypy)
        self.lines = text.splitlines(keepends=True)
        self.edits: dict[tuple[int, int], tuple[str, str]] = {}  # (line, column in characters) → (old, new)
        self.inserts: list[tuple[str, str]] = []
        self.tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self.starts = {token.start: index for index, token in enumerate(self.tokens)}
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.in_strings: dict[ast.AST, list[tuple[str, str | None]]] = defaultdict(list)

    # where things are

    def column(self, line: int, offset: int) -> int:
        return len(self.lines[line - 1].encode()[:offset].decode())

    def f_string(self, node: ast.AST | None) -> ast.AST | None:
        outer = None
        while node is not None:
            if isinstance(node, ast.JoinedStr):
                outer = node
            node = self.parents.get(node)
        return outer

    def edit(self, node: ast.AST, line: int, column: int, old: str, new: str | None) -> None:
        """Note that the name at a place becomes another; None says that it stays."""
        if (outer := self.f_string(node)) is not None:
            self.in_strings[outer].append((old, new))
        elif new is not None and new != old:
            assert self.lines[line - 1][column:].startswith(old), (self.path, line, column, old)
            self.edits[line, column] = (old, new)

    def at_end(self, node: Any, old: str, new: str | None) -> None:
        if self.f_string(node) is not None:
            return self.edit(node, 0, 0, old, new)
        column = self.column(node.end_lineno, node.end_col_offset) - len(old)
        return self.edit(node, node.end_lineno, column, old, new)

    def token_after(self, node: ast.AST, line: int, offset: int, name: str, new: str | None) -> None:
        """Edit the first token of this name at or after a place."""
        if self.f_string(node) is not None:
            return self.edit(node, 0, 0, name, new)
        start = (line, self.column(line, offset))
        token = next(t for t in self.tokens if t.start >= start and t.type == tokenize.NAME and t.string == name)
        return self.edit(node, *token.start, name, new)

    # what things are

    def full(self, name: str, node: ast.AST) -> str | None:
        """Full name of what a name in an annotation or pattern stands for."""
        here: ast.AST | None = node
        while here is not None:
            if isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef):
                for inner in ast.walk(here):
                    if isinstance(inner, ast.ImportFrom):
                        for alias in inner.names:
                            if (alias.asname or alias.name) == name:
                                return self.imported(inner.module or "", alias.name)
            here = self.parents.get(here)
        symbol = self.mypy.names.get(name)
        return symbol.node.fullname if symbol is not None and symbol.node is not None else None

    def imported(self, module: str, name: str) -> str:
        tree = self.renamer.result.files.get(module)
        symbol = tree.names.get(name) if tree is not None else None
        return symbol.node.fullname if symbol is not None and symbol.node is not None else f"{module}.{name}"

    def top(self, full: str | None, name: str) -> str | None:
        return self.table.tops.get(full) if full is not None and full.rpartition(".")[2] == name else None

    def class_full(self, node: ast.AST) -> str | None:
        names = []
        here: ast.AST | None = node
        while here is not None:
            if isinstance(here, ast.ClassDef):
                names.append(here.name)
            elif isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef) and names:
                return None
            here = self.parents.get(here)
        return ".".join([self.module, *reversed(names)])

    def own_member(self, node: ast.ClassDef, name: str) -> str | None:
        full = self.class_full(node)
        info = self.renamer.infos.get(full or "")
        if info is None and isinstance(self.parents.get(node), ast.Module) is False:
            bases = [self.full(b.id, node) for b in node.bases if isinstance(b, ast.Name)]
            infos = [self.renamer.infos[b] for b in bases if b in self.renamer.infos]
            return next((new for i in infos if (new := self.renamer.member(i, name))), None)
        return self.renamer.member(info, name) if info is not None else None

    # the passes

    def renamed(self) -> str:
        for node in ast.walk(self.tree):
            self.visit(node)
        bound = {
            name: new
            for name, symbol in self.mypy.names.items()
            if symbol.node is not None and (new := self.top(symbol.node.fullname, name))
        }
        out = self.rewritten(bound)
        return wrapped(out) if out != self.text else out

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.Name(id=name):
                full = self.facts.names.get((place(node), name)) or None
                parameter = self.local(node, name)
                if parameter is not None:
                    self.at_end(node, name, parameter)
                elif full is not None and "." in full:
                    self.at_end(node, name, self.top(full, name) or self.class_scope(node, name))
                elif full is None:
                    self.at_end(node, name, self.class_scope(node, name) or self.top(self.full(name, node), name))
                else:
                    self.at_end(node, name, self.class_scope(node, name))
            case ast.Attribute(attr=name):
                self.at_end(node, name, self.attribute(node, name))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                parent = self.parents[node]
                new = self.own_member(parent, name) if isinstance(parent, ast.ClassDef) else None
                if isinstance(parent, ast.Module):
                    new = self.table.tops.get(f"{self.module}.{name}")
                self.token_after(node, node.lineno, node.col_offset, name, new)
            case ast.ClassDef(name=name):
                if isinstance(self.parents[node], ast.Module):
                    self.token_after(
                        node, node.lineno, node.col_offset, name, self.table.tops.get(f"{self.module}.{name}")
                    )
            case ast.arg(arg=name):
                new = self.local(node, name)
                if new:
                    self.edit(node, node.lineno, self.column(node.lineno, node.col_offset), name, new)
            case ast.ImportFrom(module=module, names=aliases):
                for alias in aliases:
                    new = self.top(self.imported(module or "", alias.name), alias.name)
                    if new:
                        line = alias.lineno
                        column = self.column(line, alias.col_offset)
                        self.edit(node, line, column, alias.name, new)
                        if alias.asname in (new, alias.name):
                            self.inserts.append((alias.asname, new))
            case ast.Call():
                self.call(node)
            case ast.MatchClass(cls=cls, kwd_attrs=names, kwd_patterns=patterns):
                full = self.facts_of_class(cls)
                info = self.renamer.infos.get(full or "")
                for name, pattern in zip(names, patterns, strict=True):
                    new = self.renamer.member(info, name) if info is not None else None
                    start = (pattern.lineno, self.column(pattern.lineno, pattern.col_offset))
                    index = max(i for i, t in enumerate(self.tokens) if t.start < start and t.string == "=")
                    token = self.tokens[index - 1]
                    assert token.string == name, (self.path, token, name)
                    if new:
                        self.edits[token.start] = (name, new)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                pass

    def facts_of_class(self, cls: ast.expr) -> str | None:
        if isinstance(cls, ast.Name):
            return self.facts.names.get((place(cls), cls.id)) or self.full(cls.id, cls)
        if isinstance(cls, ast.Attribute) and isinstance(cls.value, ast.Name):
            symbol = self.mypy.names.get(cls.value.id)
            if symbol is not None and isinstance(symbol.node, nodes.MypyFile):
                return self.imported(symbol.node.fullname, cls.attr)
        return None

    def class_scope(self, node: ast.Name, name: str) -> str | None:
        """A field or a class variable, where it is declared or used in the body of its class."""
        here: ast.AST | None = self.parents.get(node)
        while here is not None and not isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if isinstance(here, ast.ClassDef):
                declared = {
                    t.id
                    for s in here.body
                    for t in (s.targets if isinstance(s, ast.Assign) else [getattr(s, "target", None)])
                    if isinstance(t, ast.Name)
                }
                return self.own_member(here, name) if name in declared else None
            here = self.parents.get(here)
        return None

    def local(self, node: ast.AST, name: str) -> str | None:
        """The new name of a parameter, within its function."""
        here: ast.AST | None = self.parents.get(node)
        while here is not None:
            if isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef):
                a = here.args
                own = {x.arg for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg] if x is not None}
                parent = self.parents[here]
                owner = self.class_full(parent) if isinstance(parent, ast.ClassDef) else self.module
                if name in own or (f"{owner}.{here.name}", name) in self.table.parameters:
                    outside = {n for d in [*here.decorator_list, *a.defaults, *a.kw_defaults] if d for n in ast.walk(d)}
                    if node in outside:
                        return None
                    if isinstance(parent, ast.Module):
                        return self.table.parameters.get((f"{self.module}.{here.name}", name))
                    if isinstance(parent, ast.ClassDef):
                        full = self.class_full(parent)
                        info = self.renamer.infos.get(full or "")
                        for base in info.mro if info is not None else ():
                            if new := self.table.parameters.get((f"{base.fullname}.{here.name}", name)):
                                return new
                    return None
            here = self.parents.get(here)
        return None

    def attribute(self, node: ast.Attribute, name: str) -> str | None:
        tops = [full for full in self.table.tops if full.endswith(f".{name}")]
        if name not in self.table.members and not tops:
            return None
        found = self.facts.attributes.get((place(node), name))
        if isinstance(node.value, ast.Name):
            symbol = self.mypy.names.get(node.value.id)
            if symbol is not None and isinstance(symbol.node, nodes.MypyFile):
                return self.top(self.imported(symbol.node.fullname, name), name)
        if found is not None:
            if isinstance(found.expr, nodes.RefExpr) and isinstance(found.expr.node, nodes.MypyFile):
                return self.top(self.imported(found.expr.node.fullname, name), name)
            if isinstance(found.expr, nodes.RefExpr) and isinstance(found.expr.node, nodes.TypeInfo):
                return self.renamer.member(found.expr.node, name)
            is_known, new = self.renamer.member_of(self.renamer.result.types.get(found.expr), name)
            if is_known or new:
                return new
        is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        if is_super or (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            here: ast.AST | None = node
            while here is not None and not isinstance(here, ast.ClassDef):
                here = self.parents.get(here)
            if isinstance(here, ast.ClassDef):
                info = self.renamer.infos.get(self.class_full(here) or "")
                if info is not None:
                    return self.renamer.member(info, name)
        full = self.facts_of_class(node.value) if isinstance(node.value, ast.Name) else None
        if full in self.renamer.infos:
            return self.renamer.member(self.renamer.infos[full], name)
        return self.renamer.guess(self.path, node.lineno, name)

    def call(self, node: ast.Call) -> None:
        self.string_names(node)
        if not node.keywords:
            return
        found = self.facts.calls.get(place(node))
        for keyword in node.keywords:
            if keyword.arg is not None:
                new = self.keyword(node, found, keyword.arg)
                if self.f_string(node) is not None:
                    self.edit(node, 0, 0, keyword.arg, new)
                elif new:
                    line = keyword.lineno
                    self.edit(node, line, self.column(line, keyword.col_offset), keyword.arg, new)

    def keyword(self, node: ast.Call, found: nodes.CallExpr | None, name: str) -> str | None:
        is_member = name in self.table.members
        if not is_member and not any(parameter == name for _, parameter in self.table.parameters):
            return None
        called = ast.unparse(node.func).rpartition(".")[2]
        known = self.renamer.result.types
        if found is not None and called in ("replace", "partial", "with_", "model_copy") and found.args:
            first = found.args[0]
            if called == "replace":
                return self.renamer.member_of(known.get(first), name)[1]
            return self.of_callable(first, known.get(first), name)
        full = self.facts_of_class(node.func)
        if full in self.renamer.infos:
            return self.of_class(self.renamer.infos[full], name)
        if found is not None:
            return self.of_callable(found.callee, known.get(found.callee), name)
        if full is not None:
            return self.table.parameters.get((full, name))
        return None

    def of_class(self, info: nodes.TypeInfo, name: str) -> str | None:
        for base in info.mro:
            if new := self.table.parameters.get((f"{base.fullname}.__init__", name)):
                return new
            if "__init__" in base.names and base.fullname != "builtins.object":
                if not base.names["__init__"].plugin_generated:
                    return None
                break
        return self.renamer.member(info, name)

    def of_callable(self, callee: nodes.Expression, kind: types.Type | None, name: str) -> str | None:
        if isinstance(callee, nodes.RefExpr):
            if isinstance(callee.node, nodes.TypeInfo):
                return self.of_class(callee.node, name)
            if callee.node is not None and (new := self.table.parameters.get((callee.node.fullname, name))):
                return new
        if isinstance(callee, nodes.MemberExpr):
            base = types.get_proper_type(self.renamer.result.types.get(callee.expr) or types.NoneType())
            if isinstance(base, types.Instance):
                for each in base.type.mro:
                    if new := self.table.parameters.get((f"{each.fullname}.{callee.name}", name)):
                        return new
        proper = types.get_proper_type(kind) if kind is not None else None
        if isinstance(proper, types.CallableType):
            if proper.is_type_obj():
                return self.of_class(proper.type_object(), name)
            if proper.definition is not None:
                return self.table.parameters.get((proper.definition.fullname, name))
        return None

    def string_names(self, node: ast.Call) -> None:
        """Names in strings, as setattr, getattr and monkeypatch take them."""
        called = ast.unparse(node.func).rpartition(".")[2]
        if called not in ("setattr", "getattr", "delattr", "hasattr") or not node.args:
            return
        place_of = 1 if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else 0
        text = node.args[place_of]
        if not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
            return
        name = text.value
        new: str | None = None
        if place_of == 1:
            first = node.args[0]
            fake = ast.copy_location(ast.Attribute(first, name, ast.Load()), first)
            if isinstance(first, ast.Name):
                symbol = self.mypy.names.get(first.id)
                if symbol is not None and isinstance(symbol.node, nodes.MypyFile):
                    new = self.top(self.imported(symbol.node.fullname, name), name)
                elif (full := self.facts_of_class(first)) in self.renamer.infos:
                    new = self.renamer.member(self.renamer.infos[full], name)
                elif name in self.table.members:
                    new = self.renamer.guess(self.path, node.lineno, name)
            elif name in self.table.members:
                new = self.attribute(fake, name)
        elif name.startswith("baton."):
            new = self.dotted(name)
        if new is None:
            new = self.table.words.get(name)
        if new and new != name:
            column = self.column(text.lineno, text.col_offset) + 1
            self.edits[text.lineno, column] = (name, new)

    def dotted(self, text: str) -> str:
        """`baton.module.Class.member` in a string."""
        parts = text.split(".")
        out = list(parts)
        for n in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:n])
            if module in self.renamer.result.files:
                full = self.imported(module, parts[n])
                out[n] = self.top(full, parts[n]) or parts[n]
                if len(parts) > n + 1 and full in self.renamer.infos:
                    out[n + 1] = self.renamer.member(self.renamer.infos[full], parts[n + 1]) or parts[n + 1]
                break
        return ".".join(out)

    # writing

    def rewritten(self, bound: dict[str, str]) -> str:
        docs = {
            (node.lineno, self.column(node.lineno, node.col_offset))
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        }
        fields = self.encoded()
        strings = {
            (outer.lineno, self.column(outer.lineno, outer.col_offset)): (outer, names)  # type: ignore[attr-defined]
            for outer, names in self.in_strings.items()
        }
        ends = {k: (o.end_lineno, self.column(o.end_lineno, o.end_col_offset)) for k, (o, _) in strings.items()}
        out: list[str] = []
        line, column = 1, 0
        for token in self.tokens:
            if token.type in (tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE, tokenize.NL):
                continue
            out.append(self.between((line, column), token.start))
            new = token.string
            if token.type == tokenize.NAME:
                if token.start in self.edits:
                    new = self.edits[token.start][1]
                elif new in self.table.words:
                    new = self.table.words[new]
            elif token.type == tokenize.COMMENT:
                new = self.renamer.prose(new, bound)
            elif token.type == tokenize.STRING:
                if token.start in docs:
                    new = self.renamer.prose(new, bound)
                else:
                    if (token.start[0], token.start[1] + 1) in self.edits:
                        old, changed = self.edits[token.start[0], token.start[1] + 1]
                        new = new.replace(old, changed)
                    elif re.fullmatch(r"""["']baton(\.\w+)+["']""", new):
                        new = new[0] + self.dotted(new[1:-1]) + new[-1]
                    if "f" in re.match(r"\w*", new)[0].lower():  # type: ignore[index]
                        names = [n for k, (_, ns) in strings.items() if k <= token.start < ends[k] for n in ns]
                        new = self.in_fields(new, names, token.start[0])
                    new = self.renamer.keys_in(new)
            out.append(new)
            line, column = token.end
        out.append(self.between((line, column), (len(self.lines), len(self.lines[-1]))) if self.lines else "")
        text = "".join(out)
        for old, changed in fields:
            assert text.count(old) == 1, (self.path, old)
            text = text.replace(old, changed)
        for again, new in self.inserts:
            text = re.sub(rf"\b{new} as {again}\b", f"{new} as {new}" if again != new else new, text)
        return text

    def between(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        if start[0] == end[0]:
            return self.lines[start[0] - 1][start[1] : end[1]]
        if not self.lines:
            return ""
        first = self.lines[start[0] - 1][start[1] :]
        middle = self.lines[start[0] : end[0] - 1]
        return "".join([first, *middle, self.lines[end[0] - 1][: end[1]]])

    def in_fields(self, text: str, names: list[tuple[str, str | None]], line: int) -> str:
        decided: dict[str, set[str | None]] = defaultdict(set)
        for name, new in names:
            decided[name].add(new if new != name else None)
        for name, new in self.table.words.items():
            if decided[name] <= {None}:
                decided[name] = {new}
        known = {name: next(iter(news)) for name, news in decided.items() if len(news) == 1}
        for name, news in decided.items():
            if len(news) > 1:
                self.renamer.notes.append(f"{self.path}:{line}: {name} has several meanings in one f-string: {news}")
        out, depth, in_spec, quote, i = [], 0, [False], "", len(re.match(r"\w*", text)[0])  # type: ignore[index]
        out.append(text[:i])
        mark = text[i : i + 3] if text[i : i + 3] in ('"""', "'''") else text[i]
        while i < len(text):
            c = text[i]
            if depth == 0 or in_spec[-1]:
                if depth == 0 and text[i : i + 2] in ("{{", "}}"):
                    out.append(text[i : i + 2])
                    i += 2
                    continue
                if c == "{":
                    depth, in_spec = depth + 1, [*in_spec, False]
                elif c == "}" and depth:
                    depth, in_spec = depth - 1, in_spec[:-1]
            elif quote:
                quote = "" if c == quote else quote
            elif c in "\"'" and not text.startswith(mark, i):
                quote = c
            elif c in "([{":
                depth, in_spec = depth + 1, [*in_spec, False]
            elif c in ")]}":
                depth, in_spec = depth - 1, in_spec[:-1]
            elif c == ":" and depth == 1:
                in_spec[-1] = True
            elif c.isalpha() or c == "_":
                name = re.match(r"\w+", text[i:])[0]  # type: ignore[index]
                before = text[i - 1]
                out.append(name if before == "!" and depth == 1 else known.get(name) or name)
                i += len(name)
                continue
            out.append(c)
            i += 1
        return "".join(out)

    def encoded(self) -> list[tuple[str, str]]:
        """Declarations of renamed fields that keep their encoded name: (as it is after renaming, as it becomes)."""
        found = []
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            full = self.class_full(node)
            for stmt in node.body:
                if not (isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name)):
                    continue
                name = stmt.target.id
                if (full, name) not in self.table.kept:
                    continue
                self.table_note(stmt, name, full or "", found)
        return found

    def table_note(self, stmt: ast.AnnAssign, name: str, full: str, found: list[tuple[str, str]]) -> None:
        assert isinstance(stmt.target, ast.Name)
        new = self.table.members[name][full]
        source = ast.get_source_segment(self.text, stmt) or ""
        kind = ast.get_source_segment(self.text, stmt.annotation)
        key = (stmt.target.lineno, self.column(stmt.target.lineno, stmt.target.col_offset))
        value = ast.get_source_segment(self.text, stmt.value) if stmt.value is not None else None
        if value is None:
            changed = f'{new}: {kind} = msgspec.field(name="{name}")'
        elif value.startswith("msgspec.field("):
            if re.search(r"\bname=", value):
                return
            changed = f'{new}: {kind} = msgspec.field(name="{name}", {value.removeprefix("msgspec.field(")}'
        else:
            changed = f'{new}: {kind} = msgspec.field(name="{name}", default={value})'
        # a mark that only this declaration has, as the same text may stand in several classes
        unique = f"{new}§{key[0]}"
        self.edits[key] = (name, unique)
        found.append((source.replace(name, unique, 1), changed))


def wrapped(text: str, width: int = 120) -> str:
    """The text with lines of prose that a longer name made too long, wrapped."""
    lines = text.split("\n")
    quoted = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if "# noqa: E501" not in lines[(node.end_lineno or node.lineno) - 1]
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    out: list[str] = []
    carried = indent = ""
    for number, line in enumerate(lines, start=1):
        if carried:
            if number in quoted and line.strip() and not line.strip().startswith('"""'):
                line = f"{indent}{carried} {line.strip()}"
            else:
                out.append(f"{indent}{carried}")
            carried = ""
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) > width and number in quoted and line.count('"""') < 2:
            cut = line.rfind(" ", 0, width + 1)
            line, carried = line[:cut], line[cut + 1 :]
        elif len(line) > width and number in quoted:
            cut = line.rfind(" ", 0, width + 1)
            out.append(line[:cut])
            line = indent + line[cut + 1 :].removesuffix('"""')
            out.append(line)
            line = f'{indent}"""'
        elif len(line) > width and line.strip().startswith("# "):
            cut = line.rfind(" ", 0, width + 1)
            out.append(line[:cut])
            line = f"{indent}# {line[cut + 1 :]}"
        elif len(line) > width and "  # " in line and "# noqa" not in line and "# type" not in line:
            line, _, comment = line.partition("  # ")
            out.append(f"{indent}# {comment}")
        out.append(line)
    return "\n".join(out)


def apply(root: Path, table: str) -> list[str]:
    renamer = Renamer(root, Table(table))
    renamer.run()
    for command in (["check", "--select", "I,RUF022", "--fix-only", "-q"], ["format", "-q"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=root, check=False)
    return renamer.notes


def check(parent: str, commit: str) -> int:
    """Print how COMMIT differs from PARENT renamed by COMMIT's table; the table and this tool may differ."""
    table = subprocess.run(["git", "show", f"{commit}:{TABLE}"], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", parent], capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--table", "-"]
        subprocess.run(command, input=table, cwd=folder, text=True, check=True, stdout=subprocess.DEVNULL)
        wanted = Path(folder, ".wanted")
        wanted.mkdir()
        archive = subprocess.run(["git", "archive", commit], capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", wanted], input=archive, check=True)
        command = ["diff", "-r", "-u", "-x", ".wanted", "-x", "restructure", "-x", "__pycache__", "-x", ".ruff_cache"]
        done = subprocess.run([*command, ".", ".wanted"], cwd=folder, check=False)
    print("the same" if done.returncode == 0 else "they differ")
    return done.returncode


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--check"]:
        return check(*arguments[1:])
    table = sys.stdin.read() if arguments == ["--table", "-"] else TABLE.read_text()
    for note in apply(Path.cwd(), table):
        print(note)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
