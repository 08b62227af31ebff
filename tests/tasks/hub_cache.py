"""Writes models and datasets in the layout of the Hugging Face cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

COMMIT, OLDER = "e53f048856ff4f594e959d75785d2c2d37b678ee", "0" * 39 + "1"
Splits = dict[str, list[dict[str, Any]]]


def use_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the libraries of this process use an empty cache without the network; return the folder of the hub."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(root / "datasets"))
    return root / "hub"


def snapshot(hub: Path, kind: str, name: str, commit: str) -> Path:
    """Return the new folder of a commit, which `main` names from now on."""
    repository = hub / f"{kind}s--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    return repository / "snapshots" / commit


def store_dataset(hub: Path, name: str, configs: dict[str, Splits], commit: str = COMMIT) -> None:
    """Store a dataset as `hf download --repo-type dataset` does, in the folders and with the card of openai/gsm8k."""
    folder, card = snapshot(hub, "dataset", name, commit), ["---", "configs:"]
    for config, splits in configs.items():
        (folder / config).mkdir()
        card += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            parquet.write_table(pa.Table.from_pylist(rows), folder / config / f"{split}-00000-of-00001.parquet")
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def store_prepared(root: Path, name: str, config: str, splits: Splits, commit: str = COMMIT) -> None:
    """Store a dataset as `datasets.load_dataset` leaves it in its own cache."""
    import datasets

    owner, _, short = name.partition("/")
    built = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})
    built.save_to_disk(root / "saved")
    folder = root / "datasets" / f"{owner}___{short}" / config / "0.0.0" / commit
    folder.mkdir(parents=True)
    info: dict[str, Any] = {"builder_name": "parquet", "dataset_name": short, "config_name": config, "splits": {}}
    for split, rows in splits.items():
        (file,) = (root / "saved" / split).glob("*.arrow")
        info["features"] = json.loads((root / "saved" / split / "dataset_info.json").read_text())["features"]
        info["splits"][split] = {"name": split, "num_examples": len(rows), "dataset_name": short}
        # the cache has streams of record batches, as save_to_disk writes them
        shutil.copy(file, folder / f"{short}-{split}.arrow")
    (folder / "dataset_info.json").write_text(json.dumps(info | {"version": {"version_str": "0.0.0"}}))


def store_model(hub: Path, name: str, model: Path, commit: str = COMMIT) -> None:
    """Store a model directory as `hf download` does."""
    shutil.copytree(model, snapshot(hub, "model", name, commit), dirs_exist_ok=True)
