"""In a notebook, a run shows its progress, and Ctrl-C does not end the process (shell and display are stubs there); the
shipped notebook runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api_cases import CONFIG, QUESTIONS

pytestmark = pytest.mark.timing

ROOT = Path(__file__).parents[1]
CELLS = """
import builtins, os, signal, sys, types

class ZMQInteractiveShell:
    pass

shown = []
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython.display"] = display = types.ModuleType("IPython.display")
display.display = lambda one: shown.append(one._repr_mimebundle_(None, None)["text/plain"])
builtins.get_ipython = ZMQInteractiveShell

import baton

class CtrlC:
    def on_step(self, run, step, metrics):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

try:
    reward = lambda response: len(response) % 5
    baton.train({model!r}, {rows!r}, reward, steps=3, name="r", config={config!r}, callbacks=[CtrlC()])
except KeyboardInterrupt as stopped:
    print("stopped:", stopped)
run = baton.Run("runs/r").resume()
print(run.status, sum(text.startswith("step ") for text in shown))
"""


def test_a_notebook_shows_each_step_and_survives_ctrl_c(small: Any, tmp_path: Path) -> None:
    cells = CELLS.format(model=str(small.model), rows=QUESTIONS, config=CONFIG)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{cells}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    stopped, last = done.stdout.splitlines()[-2:]
    assert stopped == "stopped: stopped after step 1; baton.Run('runs/r').resume() continues"
    assert last == "finished 3"


@pytest.mark.slow
def test_the_shipped_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "nbclient and ipykernel are not installed: pip install 'baton-rl[dev]'"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    notebook = nbformat.read(ROOT / "notebooks" / "first_run.ipynb", as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "it is committed without outputs"
    monkeypatch.setenv("NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    client = nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "finished\n" in "".join(output.get("text", "") for output in outputs)
    shown = "".join(output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "rewards differ, so training can begin\n" in shown, "the preview has no advice: the model can learn it"
    assert (tmp_path / "exported" / "model.safetensors").is_file()
