"""Check that a vLLM has what Baton uses, from its source alone: nothing is imported or installed.

    pip download --no-deps vllm==0.32.0 -d wheels
    python benchmarks/vllm_contract/run.py wheels/vllm-0.32.0-*.whl [another wheel or source folder ...] [--write]

A wheel for CUDA can be checked on a machine without a GPU. The check finds renamed methods, arguments, fields and
messages. It does not find changed behaviour.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from zipfile import ZipFile

RESULTS = Path(__file__).parent / "results" / "raw.json"

_TRANSFER = "distributed/weight_transfer"
_PATCH = "model_executor/model_loader/checkpoint_weight_patch.py"
METHODS: dict[tuple[str, str], tuple[str, ...]] = {
    # client.py
    ("v1/engine/async_llm.py", "AsyncLLM.from_engine_args"): ("engine_args",),
    ("v1/engine/async_llm.py", "AsyncLLM.generate"): ("prompt", "sampling_params", "request_id"),
    ("v1/engine/async_llm.py", "AsyncLLM.abort"): ("request_id",),
    ("v1/engine/async_llm.py", "AsyncLLM.pause_generation"): ("mode", "clear_cache"),
    ("v1/engine/async_llm.py", "AsyncLLM.resume_generation"): (),
    ("v1/engine/async_llm.py", "AsyncLLM.collective_rpc"): ("method", "timeout", "args", "kwargs"),
    ("v1/engine/async_llm.py", "AsyncLLM.update_weight_version"): ("new_version",),
    ("v1/engine/async_llm.py", "AsyncLLM.shutdown"): ("timeout",),
    ("v1/engine/async_llm.py", "AsyncLLM.errored"): (),
    ("v1/engine/async_llm.py", "AsyncLLM.dead_error"): (),
    ("inputs/engine.py", "tokens_input"): ("prompt_token_ids", "cache_salt"),
    ("platforms/interface.py", "Platform.is_cpu"): (),
    ("platforms/interface.py", "Platform.is_cuda_alike"): (),
    ("engine/arg_utils.py", "EngineArgs.create_engine_config"): ("headless",),
    ("v1/executor/multiproc_executor.py", "MultiprocExecutor.__init__"): ("vllm_config",),
    # worker.py; both model runners
    ("v1/worker/gpu_worker.py", "Worker.reload_weights"): (),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights"): ("weights_iterator",),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner.get_model"): (),
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner.reload_weights"): ("weights_iterator",),
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner.get_model"): (),
    # sleep, wake and load in turns (colocated)
    ("v1/engine/async_llm.py", "AsyncLLM.sleep"): ("level",),
    ("v1/engine/async_llm.py", "AsyncLLM.wake_up"): ("tags",),
    ("v1/worker/gpu_worker.py", "Worker.sleep"): ("level",),
    ("v1/worker/gpu_worker.py", "Worker.wake_up"): ("tags",),
    ("device_allocator/__init__.py", "get_mem_allocator_instance"): (),
    # transfer.py, direct.py
    ("v1/worker/gpu_worker.py", "Worker.init_weight_transfer_engine"): ("init_info",),
    ("v1/worker/gpu_worker.py", "Worker.start_weight_update"): (),
    ("v1/worker/gpu_worker.py", "Worker.update_weights"): ("update_info",),
    ("v1/worker/gpu_worker.py", "Worker.finish_weight_update"): (),
    (f"{_TRANSFER}/factory.py", "WeightTransferEngineFactory.register_engine"): (
        "name",
        "module_path_or_cls",
        "class_name",
    ),
    (f"{_TRANSFER}/factory.py", "WeightTransferTrainerFactory.trainer_init"): ("init_info", "client", "source"),
    (f"{_TRANSFER}/base.py", "WeightTransferEngine.__init__"): ("config", "vllm_config", "device", "model"),
    (f"{_TRANSFER}/base.py", "WeightTransferEngine.parse_update_info"): ("update_dict",),
    (f"{_TRANSFER}/base.py", "WeightTransferEngine.init_transfer_engine"): ("init_info",),
    (f"{_TRANSFER}/base.py", "WeightTransferEngine.start_weight_update"): (),
    (f"{_TRANSFER}/base.py", "WeightTransferEngine.update_weights"): ("update_info",),
    (f"{_TRANSFER}/base.py", "WeightTransferEngine.receive_weights"): ("update_info",),
    (f"{_TRANSFER}/base.py", "WeightTransferEngine.finish_weight_update"): (),
    (f"{_TRANSFER}/base.py", "WeightTransferEngine.shutdown"): (),
    (f"{_TRANSFER}/base.py", "VLLMWeightSyncClient.init_weight_transfer_engine"): ("init_info",),
    (f"{_TRANSFER}/base.py", "VLLMWeightSyncClient.start_weight_update"): (),
    (f"{_TRANSFER}/base.py", "VLLMWeightSyncClient.update_weights"): ("update_info",),
    (f"{_TRANSFER}/base.py", "VLLMWeightSyncClient.finish_weight_update"): ("weight_version",),
    (f"{_TRANSFER}/base.py", "TrainerWeightTransferEngine.send_weights"): (),
    (f"{_TRANSFER}/base.py", "TrainerWeightTransferEngine.shutdown"): (),
    ("model_executor/model_loader/reload/layerwise.py", "initialize_layerwise_reload"): ("model",),
    ("model_executor/model_loader/reload/layerwise.py", "finalize_layerwise_reload"): (),
    ("distributed/device_communicators/pynccl.py", "PyNcclCommunicator.destroy"): (),
    (f"{_TRANSFER}/sparse_nccl_engine.py", "SparseNCCLTrainerWeightTransferEngine.__init__"): ("client",),
    (f"{_TRANSFER}/sparse_nccl_engine.py", "SparseNCCLTrainerWeightTransferEngine.send_weight_chunk"): ("patches",),
    (f"{_TRANSFER}/sparse_nccl_engine.py", "SparseNCCLWeightTransferEngine.receive_weights"): ("update_info",),
    (_PATCH, "load_checkpoint_weight_patches"): ("model", "patches"),
    ("model_executor/layers/utils.py", "dispatch_cpu_unquantized_gemm"): ("layer", "remove_weight"),
    ("v1/engine/output_processor.py", "RequestState.make_request_output"): (
        *("new_token_ids", "pooling_output", "finish_reason", "stop_reason"),
    ),
    ("v1/engine/detokenizer.py", "IncrementalDetokenizer.num_output_tokens"): (),
    ("v1/engine/detokenizer.py", "IncrementalDetokenizer.output_token_ids"): (),
}
"""(file, function) → names of arguments that Baton gives. An argument may also be taken by **kwargs."""
FIELDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("engine/arg_utils.py", "EngineArgs"): (
        *("model", "dtype", "max_model_len", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size"),
        *("gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "logprobs_mode", "skip_tokenizer_init"),
        *("generation_config", "worker_extension_cls", "disable_log_stats", "hf_overrides", "load_format"),
        *("kv_cache_memory_bytes", "weight_transfer_config", "enable_sleep_mode", "enable_return_routed_experts"),
        *("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"),
    ),
    ("v1/executor/multiproc_executor.py", "WorkerProcHandle"): ("proc",),
    ("sampling_params.py", "SamplingParams"): (
        *("max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "logprobs", "detokenize", "output_kind"),
        *("stream_interval", "routed_experts_prompt_start"),
    ),
    ("sampling_params.py", "RequestOutputKind"): ("DELTA",),
    ("outputs.py", "CompletionOutput"): (
        *("token_ids", "logprobs", "finish_reason", "weight_versions", "routed_experts"),
    ),
    (f"{_TRANSFER}/base.py", "ParamMeta"): ("name", "dtype", "shape"),
    (f"{_TRANSFER}/nccl_engine.py", "NCCLTrainerInitInfo"): ("master_address", "master_port", "world_size"),
    (f"{_TRANSFER}/nccl_engine.py", "NCCLWeightTransferUpdateInfo"): ("names", "dtype_names", "shapes"),
    (f"{_TRANSFER}/ipc_engine.py", "IPCTrainerInitInfo"): ("packed",),
    (f"{_TRANSFER}/sparse_nccl_engine.py", "SparseWeightPatch"): ("name", "indices", "values", "full_shape"),
    (f"{_TRANSFER}/sparse_nccl_engine.py", "SparseNCCLWeightTransferUpdateInfo"): (
        *("names", "dtype_names", "shapes", "num_updates_list"),
    ),
    (_PATCH, "CheckpointWeightPatch"): ("name", "shape", "dtype", "values", "indices"),
    ("device_allocator/__init__.py", "AllocationData"): ("handle", "is_asleep"),
}
"""(file, class) → fields that Baton gives or reads."""
TEXTS: dict[str, tuple[str, ...]] = {
    "model_executor/model_loader/reload/layerwise.py": ('": Failed to load weights"|%s: Failed to load weights',),
    f"{_TRANSFER}/nccl_engine.py": (r"self\.model\.load_weights",),
    f"{_TRANSFER}/ipc_engine.py": (r"self\.model\.load_weights", "VLLM_ALLOW_INSECURE_SERIALIZATION"),
    f"{_TRANSFER}/sparse_nccl_engine.py": (
        *(r"self\.model_update_group\.broadcast", r"load_checkpoint_weight_patches\(self\.model, patches\)"),
    ),
    _PATCH: (r"float\(\"nan\"\)", r"model\.load_weights"),
    f"{_TRANSFER}/factory.py": ('"nccl"', '"ipc"', '"sparse_nccl"', '"nccl_m2n"', '"sharded_rdt"'),
    "v1/worker/gpu_worker.py": (r"WeightTransferEngineFactory\.create_engine",),
    "v1/worker/worker_base.py": ("worker_extension_cls",),
    "v1/executor/multiproc_executor.py": (
        *(r"self\.is_failed = True", r"self\.workers = WorkerProc", r"node_rank_within_dp == 0"),
    ),
    "distributed/parallel_state.py": (r"port = parallel_config\.master_port",),
    "v1/engine/async_llm.py": (
        *(r"self\.output_handler", r"self\.output_processor = OutputProcessor", r"self\.engine_core = "),
    ),
    "v1/engine/core_client.py": ("engine_manager: CoreEngineProcManager", "self.resources = "),
    "v1/engine/utils.py": (r"self\.processes: list\[BaseProcess\]",),
    "v1/engine/output_processor.py": (
        *(r"self\.request_states: dict", r"self\.sent_tokens_offset = 0", r"self\.external_req_id = external_req_id"),
        r"if finished and self\.routed_experts_chunks",
    ),
    "distributed/aux_output_connector/connector.py": (
        *("sampling_params.routed_experts_prompt_start", r"token_end = request\.num_tokens - 1"),
    ),
    "model_executor/layers/fused_moe/routed_experts_capturer.py": (
        *(r"num_layers = model_config\.get_total_num_hidden_layers\(\)", '"uint8" if num_experts <= 256 else "uint16"'),
    ),
    "v1/engine/core.py": (r"fully_awake = not self\.model_executor\.is_sleeping\s+if fully_awake:\s+self\.resume_sch",),
    "v1/executor/abstract.py": (r'SLEEP_TAGS = .*"weights", "kv_cache"', "tag not in self.sleeping_tags"),
    "device_allocator/sleep_mode_backend.py": (r'if level == 1:\s+offload_tags = \("weights", \*offload_tags\)',),
    "device_allocator/cumem.py": (r"self\.pointer_to_data", "data.is_asleep = True"),
    "envs.py": ("VLLM_NO_USAGE_STATS", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_WORKER_MULTIPROC_METHOD"),
}
"""File → patterns of messages, registered names and attributes on which Baton relies."""


class VllmSource:
    """The files of the package `vllm` in a wheel, or in a folder that has it."""

    def __init__(self, path: Path) -> None:
        self._zip = ZipFile(path) if path.is_file() else None
        self._folder = path / "vllm" if (path / "vllm").is_dir() else path
        self.name = path.name if self._zip else str(path)

    @cache  # noqa: B019  # one per run
    def text(self, file: str) -> str | None:
        """Return a file's text; None if it does not exist."""
        try:
            if self._zip is not None:
                return self._zip.read(f"vllm/{file}").decode()
            return (self._folder / file).read_text()
        except (KeyError, FileNotFoundError):
            return None

    @cache  # noqa: B019
    def tree(self, file: str) -> ast.Module | None:
        """Return a file's syntax tree; None if the file does not exist."""
        text = self.text(file)
        return None if text is None else ast.parse(text)


def problems(source: VllmSource) -> list[str]:
    """Return what Baton uses and this vLLM does not have."""
    found: list[str] = []
    for (file, name), arguments in METHODS.items():
        node = _defined(source, file, name)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(f"{file}: {name} is missing")
        elif node.args.kwarg is None:
            given = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            found += [f"{file}: {name} has no argument {each}" for each in arguments if each not in given]
    for (file, name), fields in FIELDS.items():
        node = _defined(source, file, name)
        if not isinstance(node, ast.ClassDef):
            found.append(f"{file}: {name} is missing")
            continue
        known = {target.id for one in node.body for target in _targets(one) if isinstance(target, ast.Name)}
        found += [f"{file}: {name} has no field {each}" for each in fields if each not in known]
    for file, patterns in TEXTS.items():
        text = source.text(file)
        found += [f"{file}: does not contain {each}" for each in patterns if text is None or not re.search(each, text)]
    return found


def _defined(source: VllmSource, file: str, name: str) -> ast.AST | None:
    """Return the definition of a class, a function or `Class.method`."""
    node: ast.AST | None = source.tree(file)
    for part in name.split("."):
        body = getattr(node, "body", [])
        node = next((one for one in reversed(body) if getattr(one, "name", None) == part), None)
    return node


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


def main() -> int:
    """Check each source and print what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    checked = {}
    for path in given.sources:
        source = VllmSource(path)
        name = next((part for part in Path(source.name).parts if part.startswith("vllm-")), source.name)
        checked[name] = problems(source)
        print(f"{name}: {len(checked[name])} problem(s)", *checked[name], sep="\n  ")
    if given.write:
        sizes = {"methods": len(METHODS), "fields": sum(map(len, FIELDS.values()))}
        sizes["texts"] = sum(map(len, TEXTS.values()))
        RESULTS.write_text(json.dumps({"checked": sizes, "problems": checked}, indent=1) + "\n")
    return int(any(checked.values()))


if __name__ == "__main__":
    sys.exit(main())
