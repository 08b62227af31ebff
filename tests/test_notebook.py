"""In a notebook, a run shows its progress, and Ctrl-C does not end the process. Shell and display are stubs here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.api_cases import CONFIG, QUESTIONS

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
