"""From a recipe to a running hub: tokens, store, publisher, desk, checks, and this machine's own workers."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from baton.errors import UserError
from baton.policy.load import end_ids, load_model, load_skeleton, save_skeleton, torch_device, torch_dtype
from baton.policy.tensors import policy_tensors, weights_digest
from baton.policy.tokenizer import Tokenizer
from baton.recipe.recipe import Recipe
from baton.records.trace import LeaseTrace, Tracer
from baton.rollout.engines.embedded.rescore import Rescorer
from baton.swarm.audit import Audit
from baton.swarm.auth import AccessGrant, Authenticator, Role, TokenFile, write_private
from baton.swarm.hub.hub import Hub, HubParts
from baton.swarm.hub.overview import overview
from baton.swarm.hub.peers import Peer
from baton.swarm.hub.status import HubStatus, prometheus
from baton.swarm.hub.traced import BrokerTrace, TracedLeaseBroker, TracedLogprobScorer
from baton.swarm.identity import WorkerKeys
from baton.swarm.lease_broker import BrokerCallbacks, Span
from baton.swarm.leases import LeaseTable
from baton.swarm.listen import ListenAddress
from baton.swarm.local_workers import LocalWorkers
from baton.swarm.messages import PROTOCOL, Hello, Welcome
from baton.swarm.scratch import Scratch
from baton.swarm.supervisor import HubAccess, LocalWorkerSupervisor, WorkerSupervisor
from baton.swarm.throughput import ThroughputTracker
from baton.swarm.transfer import model_digest, pack_model
from baton.swarm.transport import SwarmTransport, SwarmTransportParts
from baton.swarm.verification.checks import ReportLimits, check_report
from baton.swarm.verification.policy import Author, QuarantineRecord, VerificationPolicy
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.service import LogprobScorer, VerificationService
from baton.swarm.verification.verify import Calibration, unseen_draws
from baton.types import FromPort, Lease, PolicyVersion, Report, Trajectory
from baton.weights.publish import PublishedVersion, Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.shared import SharedMemory
from baton.weights.store import Store

LOCAL_TOKEN_LIFE_S = 10 * 365 * 86400
_SECRET_BYTES = 32
HEARTBEATS = 6
"""In the time after which a silent worker is taken for dead."""


def check_swarm(recipe: Recipe, worker_supervisor: WorkerSupervisor | None = None) -> ListenAddress:
    """Look at everything that can be seen to be wrong before a run begins. Raises UserError.

    With a crew others need not be able to join: the token file may be missing.
    """
    swarm = recipe.swarm
    address = swarm.serve or "127.0.0.1:0"
    certificate = Path(swarm.certificate) if swarm.certificate else None
    key = Path(swarm.key) if swarm.key else None
    listen = ListenAddress.parse(address, certificate, key, swarm.insecure)
    listen.ssl_context()
    if _lets_others_join(recipe, worker_supervisor):
        TokenFile(Path(swarm.token_file)).tokens()
    torch_device(recipe.inspection.device, "inspection.device")
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            why = "somebody listens there already" if error.errno == errno.EADDRINUSE else error.strerror
            raise UserError(f"--serve {address}: the hub cannot listen there: {why}") from error
    return listen


def _lets_others_join(recipe: Recipe, worker_supervisor: WorkerSupervisor | None) -> bool:
    return recipe.swarm.serve is not None and (worker_supervisor is None or Path(recipe.swarm.token_file).exists())


def open_swarm(
    recipe: Recipe,
    run: Path,
    tokenizer: Tokenizer,
    version: PolicyVersion,
    say: Callable[[str], None],
    tracer: Tracer,
    worker_supervisor: WorkerSupervisor | None = None,
) -> SwarmTransport:
    """Start a hub for a run whose directory is there, and the run's own workers. Raises UserError."""
    return _Host(recipe, run, tokenizer, version, say, tracer, worker_supervisor).open()


class _Host:
    """What the parts of a hub know of each other; its methods are their callbacks."""

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        tokenizer: Tokenizer,
        version: PolicyVersion,
        say: Callable[[str], None],
        tracer: Tracer,
        worker_supervisor: WorkerSupervisor | None,
    ) -> None:
        self.recipe, self.run, self.lineage, self.say = recipe, run, version.lineage, say
        self.tracer, self.worker_supervisor = tracer, worker_supervisor
        self.rules = recipe.rules()
        self.listen = check_swarm(recipe, worker_supervisor)
        self.passing = Scratch(run / "scratch.txt")
        self.scratch = self.passing.directory()
        memory = Path("/dev/shm")
        self.shared = self.passing.directory(memory) if memory.is_dir() else None
        self.inbox: SimpleQueue[FromPort] = SimpleQueue()
        self.pace = ThroughputTracker()
        self.authors: dict[int, Author] = {}
        """By worker number, also of workers that are gone."""
        model = load_model(recipe.model.path, dtype=torch.float32, device=torch.device("cpu"))
        self.model_files, self.base = self._model_files(model, tokenizer), None
        self.store = Store(recipe.weights.store or run / "weights")
        shared = SharedMemory(self.shared) if self.shared is not None else None
        self.publisher = _TracedPublisher(self.store, recipe.weights, shared=shared, tracer=tracer)
        if recipe.lora is not None:
            tensors = policy_tensors(model)
            digest = weights_digest(tensors)
            self.base = PolicyVersion(f"base-{digest[:16]}", 0, digest)
            Publisher(self.store, recipe.weights).publish(tensors, self.base)
        self.limits = ReportLimits(
            vocabulary=int(model.config.get_text_config().vocab_size),
            max_context_tokens=recipe.engine.max_context_tokens,
            end_ids=end_ids(model, tokenizer),
        )
        self.text = lambda ids: tokenizer.text(ids, keep_special=True)
        self.secret = _secret(run / "inspection.secret")
        self.broker = TracedLeaseBroker(
            LeaseTable(recipe.swarm.lease_rules(restarts=recipe.rollout.mode == "sync")),
            BrokerCallbacks(self._to_worker, self._to_runner, self._hang_up, self._violated, self._finished),
            self._check,
            time.monotonic,
            BrokerTrace(LeaseTrace(tracer), lambda worker: self.hub.peers[worker].name, self.pace.announced),
        )
        self.verifier = self._make_examiner()

    def open(self) -> SwarmTransport:
        """Listen, and start this machine's workers."""
        swarm = self.recipe.swarm
        own_token = self._make_token("local")
        authenticators = [Authenticator(self.scratch / "tokens.json", is_own=True)]
        if _lets_others_join(self.recipe, self.worker_supervisor):
            authenticators.append(Authenticator(Path(swarm.token_file)))
        self.hub = Hub(
            HubParts(
                self.broker,
                tuple(authenticators),
                Audit(self.run / "audit.jsonl"),
                self.store,
                self.model_files,
                self._welcome(),
                status=self._status,
                prometheus=lambda hub: prometheus(self._status(hub)),
                on_served=lambda hub: self.pace.serve(
                    time.monotonic(), (p.served for p in hub.peers.values() if p.is_connected)
                ),
                on_joined=self._joined,
                on_tick=self.verifier.tick,
                admits=self._admits,
                keys=WorkerKeys(self.secret),
                is_banned=self.verifier.quarantine.reason,
                weight=self._weight,
                on_malformed=lambda peer, sentence: self._violated(peer.number, f"malformed: {sentence}"),
                say=self.say,
            ),
            self.listen,
        )
        self.port = self._make_port(own_token)
        return self.port

    def _make_port(self, own_token: str) -> SwarmTransport:
        recipe, swarm, worker_supervisor = self.recipe, self.recipe.swarm, self.worker_supervisor
        port = self.hub.start()
        write_private(self.scratch / "token", own_token.encode())
        url = self.listen.url(port)
        if _lets_others_join(recipe, worker_supervisor):
            self.say(f"the hub listens at {url}; to join: {self.listen.join_command(port)}")
        local = LocalWorkers(
            swarm.workers,
            self.listen,
            port,
            self.scratch / "token",
            self.run / "workers",
            say=self.say,
            device=recipe.model.device,
        )
        if worker_supervisor is not None:
            worker_supervisor.begin(self._access(url))
        own = LocalWorkerSupervisor(local, worker_supervisor)
        return SwarmTransport(
            SwarmTransportParts(
                self.hub,
                self.publisher,
                self.store,
                str(self.shared or ""),
                own.look_after,
                own.close,
                self.passing.close,
                _TrainingChecks(self.verifier, recipe.run.seed) if self._examines else None,
                swarm.publish_every,
                recipe.rollout.batch_groups * recipe.rollout.group_size,
                self._keep_versions,
                recipe.weights.keep,
                () if self.base is None else (self.base,),
                self.inbox,
                self.pace,
                swarm.absence_s,
                self.say,
            )
        )

    # ---- what a crew asks --------------------------------------------------------------------------------------------

    def _access(self, url: str) -> HubAccess:
        certificate = self.listen.certificate
        return HubAccess(
            url, "" if certificate is None else certificate.read_text(), self._make_token, self._gone, self._weigh
        )

    def _make_token(self, name: str) -> str:
        """Of a worker of ours, in a file that is gone with this process."""
        own = TokenFile(self.scratch / "tokens.json")
        return own.create(Role.WORKER, LOCAL_TOKEN_LIFE_S, name=name, trusted=True)

    def _gone(self, name: str, cause: str) -> None:
        def part() -> None:
            for number in self._numbers(name):
                self.hub.hang_up(number, cause)
                self.broker.leave(number, cause)

        self.hub.call(part)

    def _weigh(self, name: str, weight: float) -> None:
        def all_of_them() -> None:
            for number in self._numbers(name):
                self.broker.weigh(number, weight)

        self.hub.call(all_of_them)

    def _weight(self, grant: AccessGrant) -> float:
        return self.worker_supervisor.weight(grant.name) if self.worker_supervisor is not None and grant.is_own else 1.0

    def _numbers(self, name: str) -> list[int]:
        """Of the run's own workers of a token: another's token of this name is none of theirs."""
        grants = ((peer.number, peer.grant) for peer in self.hub.peers.values())
        return [number for number, grant in grants if grant.is_own and grant.name == name]

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def _keep_versions(self) -> int:
        """Published versions that a token in flight may be of, and that are kept to score by."""
        return self.rules.max_staleness // self.recipe.swarm.publish_every + 2

    @property
    def _examines(self) -> bool:
        """Whether anything is scored again: what was generated while weights changed in flight cannot be."""
        inspection = self.recipe.inspection
        is_on = bool(inspection.share or inspection.trusted_share or inspection.first)
        has_any = inspection.own or _lets_others_join(self.recipe, self.worker_supervisor)
        return is_on and has_any and self.rules.on_new_version != "keep"

    def _model_files(self, model: Any, tokenizer: Tokenizer) -> bytes:
        directory = self.scratch / "model"
        directory.mkdir()
        save_skeleton(model, tokenizer, directory)
        return pack_model(directory)

    def _welcome(self) -> Welcome:
        recipe, swarm = self.recipe, self.recipe.swarm
        return Welcome(
            protocol=PROTOCOL,
            run=recipe.run.name,
            incarnation=secrets.token_hex(8),
            model_digest=model_digest(self.model_files),
            is_adapter=recipe.lora is not None,
            base=self.base,
            attention=recipe.model.attention,
            engine=recipe.engine.model_dump(),
            on_new_version=self.rules.on_new_version,
            relay_secret=secrets.token_urlsafe(32),
            heartbeat_s=swarm.silence_s / HEARTBEATS,
            report_every_s=swarm.report_every_s,
        )

    def _make_examiner(self) -> VerificationService:
        return VerificationService(
            self._make_scorer,
            VerificationPolicy(self.recipe.inspection, self.secret),
            Calibration(),
            Quarantine(self.run / "quarantine.jsonl"),
            keep_versions=self._keep_versions,
            to_hub=lambda action: self.hub.call(action),
            on_release=self.broker.release,
            on_remake=self.broker.remake,
            on_conviction=self._convicted,
            say=self.say,
        )

    def _make_scorer(self) -> LogprobScorer:
        return TracedLogprobScorer(self._make_rescorer(), self.tracer)

    def _make_rescorer(self) -> Rescorer:
        """In the engines' dtype: then honest tokens are mostly scored to the same bits, and small lies stand out."""
        dtype, attention = torch_dtype(self.recipe.engine.dtype), self.recipe.model.attention
        device = torch_device(self.recipe.inspection.device)
        if self.recipe.lora is not None:
            return Rescorer(load_model(self.recipe.model.path, dtype=dtype, device=device, attention=attention))
        return Rescorer(load_skeleton(self.scratch / "model", dtype=dtype, device=device, attention=attention))

    # ---- callbacks, in the hub's thread ------------------------------------------------------------------------------

    def _to_worker(self, worker: int, message: Any) -> None:
        self.hub.send(worker, message)

    def _to_runner(self, message: FromPort) -> None:
        if isinstance(message, Report) and message.finish_reason is not None:
            self.pace.finish(time.monotonic(), self.broker.busy_since_s)
        self.inbox.put(message)

    def _hang_up(self, worker: int, cause: str) -> None:
        self.hub.hang_up(worker, cause)

    def _check(self, lease: Lease, grown: Trajectory, report: Report) -> str | None:
        newest = max(self.hub.versions, default=-1)
        return check_report(lease, report, self.limits, grown=grown, newest_version=newest, text=self.text)

    def _violated(self, worker: int, sentence: str) -> None:
        if self.verifier.violated(self.authors[worker], sentence, f"a report of worker {worker}") is None:
            self.hub.hang_up(worker, sentence, is_final=True)
            self.broker.leave(worker, "in quarantine")

    def _finished(self, lease: Lease, trajectory: Trajectory, spans: tuple[Span, ...]) -> bool:
        if not self._examines:
            return False
        return self.verifier.finished(lease, trajectory, [(self.authors[w], first, end) for w, first, end in spans])

    def _convicted(self, quarantine_record: QuarantineRecord) -> None:
        """Hang up on a worker, or on all of its token's, and have everything made again that is not trained."""
        self.say(f"worker {quarantine_record.shown} is in quarantine: {quarantine_record.verdict.reason}")
        reasons = {n: self.verifier.quarantine.reason(a.grant, a.worker) for n, a in self.authors.items()}
        workers = [number for number, reason in reasons.items() if reason is not None]
        for number in workers:
            self.hub.hang_up(number, reasons[number] or "", is_final=True)
            self.broker.leave(number, "in quarantine")
        self.broker.revoke(frozenset(workers), "quarantine")

    def _admits(self, hello: Hello, grant: AccessGrant) -> str | None:
        if self.rules.on_new_version == "keep" and not grant.is_trusted:
            return 'on_new_version = "keep" is for trusted workers: baton token create --role worker --trusted'
        dtype = self.recipe.engine.dtype
        if hello.worker_class.dtype != dtype:
            return f"this run generates in {dtype}, not in {hello.worker_class.dtype}"
        if grant.is_trusted:
            return None
        unseen = unseen_draws(hello.worker_class, self.recipe.engine.kind)
        return unseen or self.verifier.calibration.refusal(hello.worker_class)

    def _status(self, hub: Hub) -> HubStatus:
        return overview(hub, self.port, self.verifier, lineage=self.lineage)

    def _joined(self, peer: Peer) -> None:
        self.authors[peer.number] = Author(peer.worker, peer.grant, peer.name, peer.worker_class)


def _secret(path: Path) -> bytes:
    """Return the run's secret, made at its first start: with the same one a restarted hub checks the same draw."""
    if path.exists() and len(known := path.read_bytes()) == _SECRET_BYTES:
        return known
    made = secrets.token_bytes(_SECRET_BYTES)
    write_private(path, made)
    return made


class _TracedPublisher(Publisher):
    """A publisher whose time is in the trace."""

    def __init__(self, store: Store, settings: WeightsSettings, *, shared: SharedMemory | None, tracer: Tracer) -> None:
        super().__init__(store, settings, shared=shared)
        self._tracer = tracer

    def publish(self, tensors: Mapping[str, torch.Tensor], version: PolicyVersion) -> PublishedVersion:
        begin_s = time.monotonic()
        made = super().publish(tensors, version)
        self._tracer.span("publish", "hub", 0, begin_s, time.monotonic(), version=version.number, bytes=made.bytes)
        return made


class _TrainingChecks:
    """The examiner as the port knows it: batches are of the run's own noise."""

    def __init__(self, verifier: VerificationService, noise_seed: int) -> None:
        self._verifier, self._noise_seed = verifier, noise_seed

    def published(self, version: PolicyVersion, tensors: Mapping[str, Any]) -> None:
        self._verifier.published(version, tensors)

    def consumed(self, step: int, trajectories: Sequence[tuple[int, int]]) -> None:
        self._verifier.consumed(step, trajectories, self._noise_seed)

    def close(self) -> None:
        self._verifier.close()
