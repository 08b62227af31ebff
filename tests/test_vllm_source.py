"""The vLLM that is installed has all that Baton uses, and what is renamed in another one is found in its source."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks.vllm_contract.run import FIELDS, METHODS, TEXTS, VllmSource, problems


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm")
def test_the_installed_vllm_has_all_methods_arguments_fields_and_messages():
    assert problems(VllmSource(Path(importlib.util.find_spec("vllm").origin).parent)) == []


def small(folder: Path) -> Path:
    """A package of three files, each with one mistake, in place of vLLM."""
    files = {
        "platforms/interface.py": "class Platform:\n    def is_cpu(self): ...\n    def is_cuda_like(self): ...\n",
        "v1/engine/async_llm.py": (
            "class AsyncLLM:\n"
            "    async def abort(self, request): ...\n"
            "    async def sleep(self, **kwargs): ...\n"
            "    def x(self): self.output_handler = 1\n"
        ),
        "sampling_params.py": "class RequestOutputKind:\n    DELTAS = 1\nclass SamplingParams:\n    seed: int = 0\n",
    }
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


EXPECTED = {
    "platforms/interface.py: Platform.is_cuda_alike is missing",
    "v1/engine/async_llm.py: AsyncLLM.abort has no argument request_id",
    "sampling_params.py: RequestOutputKind has no field DELTA",
    "sampling_params.py: SamplingParams has no field temperature",
    "v1/worker/worker_base.py: does not contain worker_extension_cls",
}


def test_what_is_missing_in_a_folder_or_a_wheel_is_named(tmp_path):
    folder = small(tmp_path / "source")
    wheel = tmp_path / "vllm-0.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder))
    found = set(problems(VllmSource(folder)))
    assert found == set(problems(VllmSource(wheel)))
    assert found >= EXPECTED
    present = ("AsyncLLM.sleep has", "no field seed", "output_handler", "Platform.is_cpu ")
    assert not [one for one in found if any(text in one for text in present)]
    assert len(found) > 0.9 * (len(METHODS) + len(FIELDS) + len(TEXTS)) - 5
