"""Baton trains language models with reinforcement learning on the hardware that its users have.

The public names are imported when they are first used, so that `import baton` imports neither torch nor transformers.
`__init__.pyi` declares the public names for type checkers.
"""

import sys
from importlib import import_module
from typing import Any

if sys.platform == "win32":
    raise ImportError(
        "Baton runs on Linux (not tested on macOS); on Windows, install it in WSL 2. It needs file locks of POSIX "
        "(fcntl), fork, process groups and socket pairs, which Windows does not have."
    )

__version__ = "0.1.0"
_PLACES = {
    "train": "api",
    "preview": "api",
    "evaluate": "api",
    "Recipe": "api:TrainableRecipe",
    "Run": "api",
    "Callback": "api",
    "Sample": "run.trajectories",
    "Evaluation": "records.evaluation",
    "UserError": "errors",
    "sft": "sft",
    "plan": "plan",
    "simulate": "simulate",
}
"""Public name → `module` or `module:name in the module`. A public name that equals the name of its module stands for
the module itself."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    module, _, own_name = _PLACES[name].partition(":")
    found = import_module(f"baton.{module}")
    return found if module == name else getattr(found, own_name or name)


def __dir__() -> list[str]:
    return [*_PLACES, "__version__"]
