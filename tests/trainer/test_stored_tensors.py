"""Parts of tensors come from files, and files are written tensor by tensor, as safetensors and transformers do it."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from trainer_cases import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from baton.errors import UserError
from baton.policy import stored_tensors
from baton.policy.digest import identity_digest
from baton.policy.load import check_weight_files, load_empty, load_model, open_weights
from baton.policy.stored_tensors import (
    ReadAtAccess,
    StoredTensors,
    TensorFile,
    file_layout,
    fill_model,
    model_files,
    stored_model,
    write_gathered,
)
from baton.policy.tensors import policy_tensors, weights_digest
from baton.weights.flat_buffer import flattened, tensors_of
from baton.weights.version_files import FlatFile
from tests.model_families import tiny_config

CPU = torch.device("cpu")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def test_a_file_written_tensor_by_tensor_in_any_order_is_safetensors(tmp_path: Path) -> None:
    tensors = {
        "small": numbers(3, dtype=torch.bfloat16),
        "odd": numbers(5, dtype=torch.uint8),
        "wide": numbers(2, 3, dtype=torch.float64),
        "scalar": torch.tensor(7.0),
        "transposed": numbers(2, 3).T,
    }
    with TensorFile(tmp_path / "file", {name: (t.dtype, t.shape) for name, t in tensors.items()}) as file:
        for name in reversed(tensors):
            file.put(name, tensors[name])
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in tensors.items()}


def test_any_part_is_read_from_the_pieces_that_contain_it(tmp_path: Path) -> None:
    """A tensor [5, 4] in two files of 3 and 2 rows, as two ranks write it; a part crosses the border."""
    whole = numbers(5, 4)
    for place, (rows, begin) in enumerate(((whole[:3], 0), (whole[3:], 3))):
        offsets = json.dumps({"a": {"saved_offsets": [begin, 0]}})
        save_file({"a": rows.contiguous()}, tmp_path / f"{place}.safetensors", {"DCP_SHARDING_INFO": offsets})
    stored = StoredTensors.in_files(sorted(tmp_path.iterdir()))
    assert stored.shapes == {"a": (5, 4)}
    assert torch.equal(stored.whole("a"), whole)
    part = torch.empty(3, 2)
    stored.fill("a", part, (slice(2, 5), slice(1, 3)))
    assert torch.equal(part, whole[2:5, 1:3])
    (tmp_path / "0.safetensors").unlink()
    with pytest.raises(ValueError, match="a is incomplete: the files have 8 of 20 numbers"):
        StoredTensors.in_files(sorted(tmp_path.iterdir())).whole("a")


def test_what_torch_wrote_for_ranks_of_earlier_versions_is_read(tmp_path: Path) -> None:
    tensors = {"exp_avg/a": numbers(4, 2), "step/a": torch.tensor(3.0)}
    save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True), no_dist=True)
    stored = StoredTensors.in_files(sorted(tmp_path.glob("*.safetensors")))
    assert stored.shapes == {"exp_avg/a": (4, 2), "step/a": ()}
    assert all(torch.equal(stored.whole(name), tensor) for name, tensor in tensors.items())


def test_tensors_that_are_read_at_each_access_are_those_of_the_files_and_none_is_kept(tmp_path: Path) -> None:
    """In the dtype of the specs; so a hub publishes the weights below adapters without a model in memory."""
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    model = load_empty(str(tmp_path), dtype=torch.float32)
    found = ReadAtAccess(open_weights(str(tmp_path), model), policy_tensors(model))
    expected = policy_tensors(load_model(str(tmp_path), dtype=torch.float32, device=CPU))
    assert found.keys() == expected.keys()
    assert weights_digest(found) == weights_digest(expected)
    entries, file = flattened(found, lambda entries: FlatFile(tmp_path, sum(entry.num_bytes for entry in entries)))
    own = tensors_of(entries, file.bytes)
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
    kept = [weakref.ref(tensor) for tensor in found.values()]
    assert all(each() is None for each in kept[:-1])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "gemma2", "deepseek_v3", "gpt_oss", "phi3"])
def test_an_empty_model_filled_from_its_files_is_the_loaded_model(family: str, tmp_path: Path) -> None:
    """With its buffers, its ties and, read in parts, the experts that are tensors of their own in the files."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    model = load_empty(str(tmp_path), dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert stored_model(tmp_path, model) is not None
    fill_model(model, open_weights(str(tmp_path), model), CPU)
    expected = loaded.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert len(list(model.parameters())) == len(list(loaded.parameters()))
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)


def test_files_in_another_arrangement_are_loaded_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A base model's names lack the prefix, which transformers adds."""
    whole = tiny_model()
    whole.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {n.removeprefix("model."): t for n, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    model = load_empty(str(tmp_path), dtype=torch.float32)
    fill_model(model, open_weights(str(tmp_path), model), CPU)
    assert "each process loads the whole model" in caplog.text
    assert weights_digest(policy_tensors(model)) == weights_digest(policy_tensors(whole))


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"{", b"\xff"])
def test_a_damaged_index_of_weight_files_is_refused(content: bytes, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(UserError, match=r"index\.json is not an index of weight files"):
        check_weight_files(str(tmp_path))
    with pytest.raises(UserError, match=r"index\.json is not an index of weight files"):
        open_weights(str(tmp_path), load_empty(str(tmp_path), dtype=torch.float32))


def test_the_index_of_an_earlier_model_in_the_same_directory_is_ignored(tmp_path: Path) -> None:
    """transformers deletes the earlier files, but not their index, and loads `model.safetensors`."""
    tiny_model(seed=0).save_pretrained(tmp_path, max_shard_size="10KB")
    whole = tiny_model(seed=1)
    whole.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"cut")
    check_weight_files(str(tmp_path))
    model = load_empty(str(tmp_path), dtype=torch.float32)
    fill_model(model, open_weights(str(tmp_path), model), CPU)
    assert weights_digest(policy_tensors(model)) == weights_digest(policy_tensors(whole))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_written_tensor_by_tensor_has_the_files_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    model.save_pretrained(tmp_path / "theirs")
    tensors, layout = policy_tensors(model), file_layout(model)
    assert layout is not None
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    for limit, name in ((10**9, "one"), (10_000, "many")):
        monkeypatch.setattr(stored_tensors, "MAX_FILE_BYTES", limit)
        (tmp_path / name).mkdir()
        model.config.save_pretrained(tmp_path / name)
        with model_files(tmp_path / name, layout, dtypes) as put:
            written = write_gathered(tensors, put, lambda _, tensor: tensor)
        assert identity_digest(written) == weights_digest(tensors)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in tensors.items())
    one, theirs = (load_file(tmp_path / where / "model.safetensors") for where in ("one", "theirs"))
    assert one.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.items())
    parts = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert len(parts) > 1
    assert not (tmp_path / "many" / "model.safetensors").exists()
    stored = stored_model(tmp_path / "many", model)
    assert stored is not None
    assert stored.digest() == weights_digest(tensors)
