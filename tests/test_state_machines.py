"""State machines speak one dialect: frozen events in, frozen commands out, no clock and no I/O of their own.

mypy proves that every match is exhaustive (`exhaustive-match` in pyproject.toml).
"""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

from baton.cluster import supervision
from baton.rollout import scheduler
from baton.swarm import leases, version_sync
from baton.swarm.verification import policy
from baton.weights.direct import protocol

MACHINES = [scheduler, leases, version_sync, supervision, policy, protocol]
OUTSIDE = {"asyncio", "os", "pathlib", "queue", "random", "socket", "subprocess", "threading", "time"}


def nodes(module: ModuleType) -> list[ast.AST]:
    return list(ast.walk(ast.parse(inspect.getsource(module))))


@pytest.mark.parametrize("module", MACHINES, ids=lambda module: module.__name__)
def test_one_method_takes_frozen_events_and_returns_frozen_commands(module: ModuleType) -> None:
    owns = (one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__)
    (machine,) = (one for one in owns if inspect.isclass(one) and hasattr(one, "handle"))
    hints = get_type_hints(machine.handle)
    kinds: tuple[Any, ...] = get_args(hints["event"]) + get_args(get_args(hints["return"])[0])
    assert len(kinds) >= 8
    assert all(kind.__struct_config__.frozen for kind in kinds)


@pytest.mark.parametrize("module", MACHINES, ids=lambda module: module.__name__)
def test_it_imports_neither_clock_nor_io(module: ModuleType) -> None:
    imports = [node for node in nodes(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}
    assert not names & OUTSIDE


@pytest.mark.parametrize("module", MACHINES, ids=lambda module: module.__name__)
def test_no_commands_are_made_and_forgotten(module: ModuleType) -> None:
    """A generator that is called as a statement would do nothing at all."""
    functions = [node for node in nodes(module) if isinstance(node, ast.FunctionDef)]
    makers = {f.name for f in functions if f.returns is not None and "Command]" in ast.unparse(f.returns)}
    calls = [node.value for node in nodes(module) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    assert makers
    assert not makers & {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
