"""Construct a swarm's hub from a recipe, and start this machine's own workers.

    model ─▶ model files for workers ─▶ LeaseBroker, VerificationService ─┐
    tokens, quarantine, requirements ─▶ AccessControl ────────────────────┴─▶ Hub
    Hub ─▶ BackgroundPublisher ─▶ hub_status ─▶ HttpRoutes ─▶ SwarmTransport

An arrow A ─▶ B means that the constructor of B takes A.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from baton.errors import UserError
from baton.policy.load import (
    end_ids,
    load_empty,
    load_model,
    load_skeleton,
    open_weights,
    save_skeleton,
    torch_device,
    torch_dtype,
)
from baton.policy.routing import num_bytes, routers_of
from baton.policy.stored_tensors import ReadAtAccess
from baton.policy.tensors import policy_tensors, weights_digest
from baton.policy.tokenizer import Tokenizer
from baton.recipe.recipe import Recipe
from baton.records.lease_trace import LeaseTrace
from baton.records.trace import Tracer
from baton.rollout.engines.embedded.rescore import Rescorer
from baton.run.devices import layout_of, visible
from baton.swarm.audit_log import AuditLog
from baton.swarm.auth import Authenticator, Role, TokenFile, write_private
from baton.swarm.background_publisher import BackgroundPublisher, VersionRetention
from baton.swarm.hub.access import AccessControl
from baton.swarm.hub.http_routes import HttpRoutes
from baton.swarm.hub.hub import Hub
from baton.swarm.hub.listener import HubListener
from baton.swarm.hub.membership import Membership
from baton.swarm.hub.overview import hub_status
from baton.swarm.hub.worker_access import WorkerRequirements
from baton.swarm.identity import WorkerKeys
from baton.swarm.lease_broker import LeaseBroker
from baton.swarm.leases import LeaseTable
from baton.swarm.listen import ListenAddress
from baton.swarm.local_workers import LocalWorkers
from baton.swarm.messages import PROTOCOL, Welcome, max_report_tokens
from baton.swarm.provisioning import TrainingProgress
from baton.swarm.supervisor import WorkerSupervisor
from baton.swarm.temporary_directories import TemporaryDirectories
from baton.swarm.transfer import model_digest, pack_model
from baton.swarm.transport import SwarmTransport
from baton.swarm.verification.checks import ReportLimits, check_report
from baton.swarm.verification.policy import VerificationPolicy
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.service import LogprobScorer, VerificationService
from baton.swarm.verification.verify import Calibration
from baton.types import PolicyVersion
from baton.weights.publisher import Publisher
from baton.weights.store import Store
from baton.weights.version_files import VersionFiles

LOCAL_TOKEN_LIFE_S = 10 * 365 * 86400  # longer than any run: a hub cannot renew the token of a running worker
_SECRET_BYTES = 32


def check_swarm(recipe: Recipe, supervisor: WorkerSupervisor | None = None) -> ListenAddress:
    """Check the swarm's settings before a run starts, and return the hub's address. Raises UserError for invalid
    settings. The token file may be missing if `supervisor` starts the workers, because these workers do not need the
    file."""
    swarm = recipe.swarm
    address = swarm.serve or "127.0.0.1:0"
    certificate = Path(swarm.certificate) if swarm.certificate else None
    key = Path(swarm.key) if swarm.key else None
    listen = ListenAddress.parse(address, certificate, key, swarm.insecure)
    if _lets_others_join(recipe, supervisor):
        TokenFile(Path(swarm.token_file)).tokens()
    if recipe.engine.report_routing:
        _check_report_size(recipe)
    torch_device(recipe.inspection.device, "inspection.device")
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:  # does not listen, so no worker can connect to it
        # the hub sets this option too: without it, the port of a run that has just ended (TIME_WAIT) would seem in use
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            why = "another process uses this port" if error.errno == errno.EADDRINUSE else error.strerror
            raise UserError(f"--serve {address}: the hub cannot listen on this address: {why}") from error
    return listen


def _check_report_size(recipe: Recipe) -> None:
    """Refuse settings with which a report with routing may exceed the size limit of a message. The hub would then end
    the connection of a correct worker."""
    model = load_empty(recipe.model.path, dtype=torch.float32, head_dtype=recipe.model.head_dtype)
    routing_bytes = num_bytes(routers_of(model))
    most = max_report_tokens(routing_bytes, recipe.rollout.max_kept)
    responses = {"rollout.max_new_tokens": recipe.rollout.max_new_tokens}
    if recipe.eval.enabled and recipe.eval.max_new_tokens is not None:
        responses["eval.max_new_tokens"] = recipe.eval.max_new_tokens
    key = max(responses, key=lambda name: responses[name])
    got = responses[key]
    if recipe.engine.kind != "vllm" and recipe.engine.report_every_tokens < got:  # vLLM reports whole responses
        key, got = "engine.report_every_tokens", recipe.engine.report_every_tokens
    if got > most:
        raise UserError(
            f"{key}: got {got}, but with {routing_bytes} bytes of routing per token (engine.report_routing), a report "
            f"of the swarm has room for {most} tokens; set {key} to at most {most}, or report_routing = false"
        )


def _lets_others_join(recipe: Recipe, supervisor: WorkerSupervisor | None) -> bool:
    return recipe.swarm.serve is not None and (supervisor is None or Path(recipe.swarm.token_file).exists())


def open_swarm(
    recipe: Recipe,
    run: Path,
    tokenizer: Tokenizer,
    version: PolicyVersion,
    say: Callable[[str], None],
    tracer: Tracer,
    supervisor: WorkerSupervisor | None = None,
) -> SwarmTransport:
    """Start a run's hub and the run's own workers. The run's directory must exist. Raises UserError."""
    listen = check_swarm(recipe, supervisor)
    with ExitStack() as undo:
        scratch = undo.enter_context(closing(TemporaryDirectories(run / "scratch.txt")))
        files = _Files(run, scratch.directory(), scratch.directory(recipe.weights.files_in(run)))
        store = Store(recipe.weights.store or run / "weights")
        model = _served_model(recipe, tokenizer, files, store)
        local_tokens = files.local_tokens(recipe.swarm.workers)
        has_strangers = _lets_others_join(recipe, supervisor)
        verifier = _verifier(recipe, files, tracer, has_strangers=has_strangers)
        access = _access(recipe, files, listen, verifier, has_strangers=has_strangers)
        members = Membership(
            access,
            _welcome(recipe, model),
            LeaseBroker(
                LeaseTable(recipe.swarm.lease_rules(restarts=recipe.rollout.mode == "sync")),
                partial(check_report, limits=model.limits, text=partial(tokenizer.text, keep_special=True)),
                time.monotonic,
                LeaseTrace(tracer),
            ),
            verifier,
            say,
            *(() if supervisor is None else (supervisor.weight,)),
        )
        hub = Hub(access, members)
        pinned = () if model.base is None else (model.base,)
        publication = BackgroundPublisher(
            hub,
            Publisher(store, recipe.weights, files=VersionFiles(files.versions)),
            store,
            VersionRetention(recipe.num_fetchable_versions, recipe.weights.keep, pinned),
            str(files.versions),
            tracer,
        )
        every, size = recipe.swarm.publish_every, recipe.rollout.batch_groups * recipe.rollout.group_size
        progress = TrainingProgress(every, size, is_broadcast_hidden=recipe.rules().max_lag >= every)
        status = partial(hub_status, hub, publication, progress, version.lineage)
        workers: list[LocalWorkers | WorkerSupervisor] = []
        port = SwarmTransport(hub, publication, progress, workers, scratch, recipe.swarm.no_worker_timeout_s)
        undo.callback(port.close)  # also closes the workers that are appended below
        hub_port = hub.start(HttpRoutes(hub, store, model.files, status).routes())
        url = listen.url(hub_port)
        if has_strangers:
            members.say(f"the hub listens at {url}; to join: {listen.join_command(hub_port)}")
        layout = layout_of(recipe) if local_tokens else None
        local = LocalWorkers(
            listen,
            hub_port,
            local_tokens,
            run / "workers",
            say=members.say,
            device=recipe.model.device.partition(":")[0],
            environments=[] if layout is None else [visible(gpus) for gpus in layout.engines],
        )
        workers.append(local)
        if supervisor is not None:
            workers.append(supervisor)
            certificate = "" if listen.certificate is None else listen.certificate.read_text()
            supervisor.begin(_SupervisorAccess(url, certificate, files, hub))
        undo.pop_all()
    return port


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Files:
    """The directories in which the hub's parts keep their files."""

    run: Path
    scratch: Path
    """Directory for temporary files, which is removed when this process exits."""
    versions: Path
    """Directory for the files of the last versions, which is removed when this process exits."""

    @property
    def skeleton(self) -> Path:
        return self.scratch / "model"

    @property
    def own_tokens(self) -> TokenFile:
        """Tokens of the workers that the run itself starts."""
        return TokenFile(self.scratch / "tokens.json")

    def token(self, name: str) -> str:
        return self.own_tokens.create(Role.WORKER, LOCAL_TOKEN_LIFE_S, name=name, trusted=True)

    def local_tokens(self, count: int) -> list[Path]:
        """Create a token for each worker of this machine; return the files that contain the tokens."""
        # create at least one token, because the hub refuses to start without a token file
        paths = [self.scratch / f"local-{index}" for index in range(max(1, count))]
        for path in paths:
            write_private(path, self.token(path.name).encode())
        return paths[:count]

    def secret(self) -> bytes:
        """Return the run's secret, which is generated at the first start of the run. With the same secret, a restarted
        hub recognises its workers and verifies the same reports."""
        path = self.run / "inspection.secret"
        if path.exists() and len(known := path.read_bytes()) == _SECRET_BYTES:
            return known
        made = secrets.token_bytes(_SECRET_BYTES)
        write_private(path, made)
        return made


@dataclass(frozen=True, slots=True)
class _SupervisorAccess:
    """The parts of the hub that a worker supervisor uses."""

    url: str
    certificate: str
    files: _Files
    hub: Hub

    def token(self, name: str) -> str:
        return self.files.token(name)

    def remove_token(self, name: str) -> None:
        self.files.own_tokens.remove(name)

    def gone(self, name: str, cause: str) -> None:
        self.hub.call(partial(self.hub.members.remove_own, name, cause))

    def weigh(self, name: str, weight: float) -> None:
        self.hub.call(partial(self.hub.members.weigh_own, name, weight))


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ServedModel:
    """The model as the hub sends it to workers, without weights."""

    files: bytes
    """Archive of configuration and tokenizer."""
    base: PolicyVersion | None
    """Policy version of the base weights under the adapters; None without LoRA."""
    limits: ReportLimits


def _served_model(recipe: Recipe, tokenizer: Tokenizer, files: _Files, store: Store) -> _ServedModel:
    model = load_empty(recipe.model.path, dtype=torch.float32, head_dtype=recipe.model.head_dtype)
    directory, base = files.skeleton, None
    directory.mkdir()
    save_skeleton(model, tokenizer, directory)
    if recipe.lora is not None:
        tensors = ReadAtAccess(open_weights(recipe.model.path, model), policy_tensors(model))
        digest = weights_digest(tensors)
        base = PolicyVersion(f"base-{digest[:16]}", 0, digest)
        Publisher(store, recipe.weights, files=VersionFiles(files.versions)).publish(tensors, base)
    routers = routers_of(model) if recipe.engine.report_routing else {}
    limits = ReportLimits(
        vocabulary=int(model.config.get_text_config().vocab_size),
        max_context_tokens=recipe.engine.max_context_tokens,
        end_ids=end_ids(model, tokenizer),
        routing_bytes=num_bytes(routers),
        num_experts=min((router.num_experts for router in routers.values()), default=0),
    )
    return _ServedModel(pack_model(directory), base, limits)


def _welcome(recipe: Recipe, model: _ServedModel) -> Welcome:
    return Welcome(
        protocol=PROTOCOL,
        run=recipe.run.name,
        incarnation=secrets.token_hex(8),
        model_digest=model_digest(model.files),
        is_adapter=recipe.lora is not None,
        base=model.base,
        attention=recipe.model.attention,
        engine=recipe.engine.model_dump(),
        on_new_version=recipe.rules().on_new_version,
        relay_secret=secrets.token_urlsafe(32),
        heartbeat_s=recipe.swarm.heartbeat_s,
        report_every_s=recipe.swarm.report_every_s,
    )


# ---- access and verification -----------------------------------------------------------------------------------------


def _access(
    recipe: Recipe, files: _Files, listen: ListenAddress, verifier: VerificationService, *, has_strangers: bool
) -> AccessControl:
    authenticators = [Authenticator(files.scratch / "tokens.json", is_own=True)]
    if has_strangers:
        authenticators.append(Authenticator(Path(recipe.swarm.token_file)))
    return AccessControl(
        HubListener(listen),
        tuple(authenticators),
        AuditLog(files.run / "audit.jsonl"),
        verifier.quarantine,
        WorkerKeys(files.secret()),
        WorkerRequirements(
            recipe.engine.dtype, recipe.engine.kind, recipe.rules().on_new_version, verifier.calibration
        ),
    )


def _verifier(recipe: Recipe, files: _Files, tracer: Tracer, *, has_strangers: bool) -> VerificationService:
    return VerificationService(
        partial(_scorer, recipe, files),
        VerificationPolicy(recipe.inspection, files.secret()),
        Calibration(),
        Quarantine(files.run / "quarantine.jsonl"),
        keep_versions=recipe.num_fetchable_versions if recipe.checks_reports(others_join=has_strangers) else 0,
        noise_seed=recipe.run.seed,
        tracer=tracer,
    )


def _scorer(recipe: Recipe, files: _Files) -> LogprobScorer:
    """Return a scorer that computes in the engines' dtype. Most logprobs of a correct engine are then bit-identical to
    the scorer's logprobs."""
    device, attention = torch_device(recipe.inspection.device), recipe.model.attention
    dtype = torch_dtype(recipe.engine.dtype, device)
    if recipe.lora is not None:
        model = load_model(
            recipe.model.path, dtype=dtype, device=device, attention=attention, head_dtype=recipe.model.head_dtype
        )
    else:
        model = load_skeleton(files.skeleton, dtype=dtype, device=device, attention=attention)
    return Rescorer(model)
