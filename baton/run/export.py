"""Export a checkpoint of a run as a model directory for other software: merged weights in one dtype, with a model card.

DIRECTORY/
  config.json  model.safetensors  generation_config.json    AutoModelForCausalLM.from_pretrained, vLLM, SGLang
  tokenizer.json  tokenizer_config.json  chat_template.jinja
  README.md  learning_curve.svg  recipe.toml                model card, learning curve, recipe of the run
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from baton.errors import UserError
from baton.files import atomic_directory, writing
from baton.policy.load import EXPORT_DTYPES, dtype_of, save_merged
from baton.records.run_directory import RunDirectory
from baton.run.model_card import learning_curve, model_card
from baton.trainer.checkpoint import checkpoint_path, checkpoint_step, list_checkpoints, newest_intact_checkpoint

logger = logging.getLogger(__name__)


def export_run(run: Path, to: Path, *, step: int | None = None, dtype: str | None = None) -> Path:
    """Write the model of a run to the directory `to`, which must be empty or absent, and return `to`.

    `step`: train step of the checkpoint; by default, the newest intact checkpoint is exported. `dtype`: dtype of the
    weights; the default is the dtype of the model with which the run started. An adapter is merged into its base model.
    Raises UserError if the dtype is not allowed or the checkpoint does not exist.
    """
    opened = RunDirectory.open(run)
    checkpoint = _checkpoint(opened, step)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not an empty directory: export to another path, or remove it")
    chosen = dtype or dtype_of(str(opened.recipe()["model"]["path"]))
    if chosen not in EXPORT_DTYPES:
        raise UserError(f"dtype: got {dtype!r}, allowed are {', '.join(EXPORT_DTYPES)}")
    with atomic_directory(to) as directory, writing(directory):
        save_merged(str(checkpoint), directory, chosen)
        shutil.copyfile(run / "recipe.toml", directory / "recipe.toml")
        number = checkpoint_step(checkpoint)
        (directory / "learning_curve.svg").write_text(learning_curve(opened, number), encoding="utf-8")
        (directory / "README.md").write_text(model_card(opened, number, chosen), encoding="utf-8")
        permissions = (directory / "recipe.toml").stat().st_mode
        for file in filter(Path.is_file, directory.rglob("*")):
            file.chmod(permissions)  # safetensors lets only the owner read a file, but servers run as other users
    return to


def _checkpoint(run: RunDirectory, step: int | None) -> Path:
    if step is None:
        found = newest_intact_checkpoint(run.checkpoints, logger.warning)
        if found is None:
            raise UserError(f"{run.path} has no complete checkpoint to export")
        return found
    known = list_checkpoints(run.checkpoints)
    if (path := checkpoint_path(run.checkpoints, step)) not in known:
        steps = ", ".join(str(checkpoint_step(each)) for each in known) or "none"
        raise UserError(f"{run.path} has no checkpoint of step {step}; there are: {steps}")
    return path
