"""Publish two versions of a random model through a hub, fetch them over HTTP, and print how many bytes of anonymous
memory each process needed for it.

    python publication.py SCRATCH RANKS

One thread codes (`clock.CODERS`), so that the working memory does not depend on the number of cores.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path

import torch
from trainer_cases import random_batch, tiny_model, tiny_tokenizer

from baton import clock
from baton.policy.tensors import weights_digest
from baton.policy.threads import set_up_threads
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.recipe import Recipe
from baton.records.trace import TraceWriter
from baton.run.assemble import build_trainer
from baton.run.hosting import open_swarm
from baton.swarm.auth import Role, TokenFile
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.trainer import Trainer
from baton.types import PolicyVersion
from baton.weights.fetcher import Fetcher
from baton.weights.store import Store

DEADLINE_S = 300.0
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "num_attention_heads": 16}
SHAPE |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 64, "initializer_range": 0.02}


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Growth:
    """The growth of the anonymous memory of processes, sampled in a thread."""

    def __init__(self, pids: list[int]) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory would hide an allocation
        self._before = {pid: anonymous_bytes(pid) for pid in pids}
        self.peaks = dict.fromkeys(pids, 0)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._is_over.wait(0.002):
            for pid, before in self._before.items():
                self.peaks[pid] = max(self.peaks[pid], anonymous_bytes(pid) - before)

    def __enter__(self) -> Growth:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE_S)


class OverHttp:
    """A worker's view of the hub."""

    name, distance = "hub", 0

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    def manifest(self, version: PolicyVersion) -> bytes:
        return self._get(f"manifest/{version.lineage}/{version.number}")

    def chunk(self, digest: str, size: int) -> bytes:
        return self._get(f"chunk/{digest}")

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(
            f"{self._url}/weights/{path}", headers={"Authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())


def main(scratch: Path, ranks: int) -> None:
    clock.CODERS = 1  # type: ignore[misc]
    set_up_threads(1)
    model = scratch / "model"
    tiny_model(**SHAPE).save_pretrained(model)
    tiny_tokenizer().hf.save_pretrained(model)
    sizes = [tensor.nbytes for tensor in tiny_model(**SHAPE).state_dict().values()]
    tokens = TokenFile(scratch / "tokens.json")
    token = tokens.create(Role.WORKER, 3600, name="worker", trusted=True)
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r", "directory": str(scratch), "threads": 1, "steps": 2},
            "model": {"path": str(model), "device": "cpu"},
            "task": [{"name": "chain_sum"}],
            "engine": {"dtype": "float32"},
            "trainer": {
                "ranks": ranks,
                "dtype": "float32",
                "max_mismatch_kl": [1e9, 1e9],
                "max_logprob_diff": [1e9, 1e9],
            },
            "weights": {"chunk_mb": 1.0},
            "swarm": {"serve": "127.0.0.1:0", "token_file": str(scratch / "tokens.json")},
        }
    )
    run = recipe.run.path
    run.mkdir()
    trainer: Trainer = build_trainer(recipe, load_tokenizer(str(model)), publish_in=run / ".versions.unfinished")
    assert isinstance(trainer, LocalTrainer) == (ranks == 1)
    own = os.getpid()
    pids = [own, *map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())]  # and the ranks
    assert len(pids) == (1 if ranks == 1 else 1 + ranks)
    port = open_swarm(recipe, run, load_tokenizer(str(model)), trainer.version, print, TraceWriter(None))
    store, fetcher = Store(run / "weights"), Fetcher([OverHttp(port.hub.listen.url(port.hub.port), token)])
    found = []
    try:
        for step in (0, 1):
            if step:
                trainer.step(random_batch(1))
            with Growth(pids) as growth:
                published = trainer.publish()
                version, digest = published.version, weights_digest(published.tensors)
                port.load_weights(published.tensors, version)
                del published
                until_s = time.monotonic() + DEADLINE_S
                while store.find(version.lineage, version.number) is None:
                    assert time.monotonic() < until_s, "the version was not published"
                    time.sleep(0.01)
                assert weights_digest(fetcher.fetch(version, deadline_s=DEADLINE_S)) == digest == version.digest
            found.append([growth.peaks[pid] for pid in pids])
        delta = store.find(trainer.version.lineage, 1)
        assert delta is not None
        assert delta.delta is not None
    finally:
        port.close()
        trainer.close()
    print(json.dumps({"growth": found, "version": sum(sizes), "largest_tensor": max(sizes)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
