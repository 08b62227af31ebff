"""`DirectSender`: executes the commands of `DirectSync` in the trainer's process.

| thread           | consumes          | produces            | waits for                       | unblocked by        |
|------------------|-------------------|---------------------|---------------------------------|---------------------|
| caller           |                   | `Offered`, `Joined` | `wait`: a replica's version     | events, a deadline  |
| one per phase    | a `RunPhase`      | `PhaseDone`         | the replica and its communicator | its deadlines       |
| timer            |                   | `DeadlinePassed`    | the next deadline               | time                |

If the thread of a phase hangs, for example in a driver, the phase ends at its deadline, and the thread and its
communicator are abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Condition, Timer
from typing import Any, Protocol

import torch

from baton.clock import Clock, begin
from baton.errors import WeightsFault, first_line
from baton.types import PolicyVersion
from baton.weights.direct import protocol as direct
from baton.weights.direct.remote import RemoteTensors, RemoteVersion
from baton.weights.direct.stream import BUCKET_BYTES, Bucket, OutgoingVersion


class ReplicaLink(Protocol):
    """Calls the methods of vLLM's weight transfer on one replica."""

    @property
    def world_size(self) -> int:
        """Number of devices of the replica."""

    def call(self, method: str, info: Any, timeout_s: float) -> None:
        """Call a method on all devices of the replica and wait until it returns. Raises BatonError. Methods:
        `init_weight_transfer_engine`, `start_weight_update`, `update_weights`, `finish_weight_update` of vLLM, and
        Baton's `abort_transfer`, which ends an unfinished transfer."""


class Communicator(Protocol):
    """A connection to one replica, over which tensors are sent; unusable after an error."""

    def send(self, buckets: Sequence[Bucket], progressed: Callable[[], None]) -> None:
        """Send a version's buckets; return when the replica has loaded and checked them."""

    def close(self) -> None:
        """Abort all operations."""


Connect = Callable[[ReplicaLink, str, direct.DirectRules], Communicator]
"""Function (replica, name, rules) that creates a communicator with the replica and returns it."""


class DirectSender:
    """Sends the versions of a run to its replicas, each over a communicator of its own."""

    def __init__(
        self,
        connect: Connect,
        clock: Clock,
        rules: direct.DirectRules | None = None,
        *,
        is_sparse: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`is_sparse`: keep each version until the next one is offered, and send only the difference to replicas that
        hold the kept version."""
        self._clock, self._is_sparse = clock, is_sparse
        self._connect, self._sync, self._bucket_bytes = connect, direct.DirectSync(rules), bucket_bytes
        self._changed = Condition()
        """Guards all attributes, and is notified after each event."""
        self._links: dict[str, ReplicaLink] = {}
        self._groups: dict[tuple[str, int], Communicator] = {}
        self._versions: dict[PolicyVersion, OutgoingVersion | RemoteVersion] = {}
        """The last offered version, and older versions that are still being sent."""
        self._previous: OutgoingVersion | None = None
        """The version that was offered last: the base of the next version's difference. None without `is_sparse`."""
        self.sent_bytes = 0
        """Bytes of all complete streams."""
        self._timer: Timer | None = None
        self._is_closed = False

    def join(self, replica: str, link: ReplicaLink) -> None:
        """Add a new or restarted replica, which receives the last offered version."""
        with self._changed:
            self._links[replica] = link
            self._handle(direct.Joined(self._clock(), replica))

    def leave(self, replica: str) -> None:
        self._handle(direct.Left(self._clock(), replica))

    def offer(self, tensors: Mapping[str, torch.Tensor], version: PolicyVersion) -> None:
        """Send a version to all replicas, in the background. The tensors must not change until the next offer."""
        outgoing: OutgoingVersion | RemoteVersion
        if isinstance(tensors, RemoteTensors):
            outgoing = RemoteVersion(tensors, version)
        else:
            outgoing = OutgoingVersion(tensors, version, self._previous, bucket_bytes=self._bucket_bytes)
            self._previous = outgoing.without_difference() if self._is_sparse else None
        with self._changed:
            used = {state.sending for state in self._sync.replicas.values()}
            self._versions = {v: sent for v, sent in self._versions.items() if v in used} | {version: outgoing}
            self._handle(direct.Offered(self._clock(), version))

    def withdraw(self) -> None:
        """End the offer of the last version. Replicas that are receiving this version continue; other replicas wait for
        the next version."""
        with self._changed:
            used = {state.sending for state in self._sync.replicas.values()}
            self._versions = {version: sent for version, sent in self._versions.items() if version in used}
            self._handle(direct.Withdrawn(self._clock()))

    def wait(
        self, replica: str, version: PolicyVersion, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until a replica serves a version. Raises WeightsFault if the version is neither offered nor being sent
        to the replica. Raises WeightsFault after `timeout_s`, with the cause of the replica's last failure. `check`:
        called about every second; raises an error if the replica cannot answer any more."""

        def is_served() -> bool:
            state = self._sync.replicas.get(replica)
            return state is not None and state.has == version

        until_s = self._clock() + timeout_s
        while True:
            with self._changed:
                if self._changed.wait_for(is_served, 1.0):
                    return
                state = self._sync.replicas.get(replica)
                is_due = version in (self._sync.want, None if state is None else state.sending)
            if self._is_closed or not is_due:
                raise WeightsFault(
                    f"{replica} did not load version {version.number} directly before it was withdrawn"
                    + (f" ({state.last_cause})" if state is not None and state.last_cause else "")
                )
            check()
            if self._clock() > until_s:
                cause = "it has left" if state is None else state.last_cause or f"phase {state.phase}"
                raise WeightsFault(
                    f"{replica} did not load version {version.number} directly within {timeout_s:.0f} s: {cause}; it "
                    "serves nothing until it has loaded a whole version"
                )

    def served(self, replica: str) -> PolicyVersion | None:
        """Return the version that a replica serves; None for an unknown replica, or if the replica's weights are
        incomplete."""
        with self._changed:
            state = self._sync.replicas.get(replica)
            return None if state is None else state.has

    def close(self) -> None:
        """Close all communicators, and free the versions. Idempotent."""
        with self._changed:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            for group in self._groups.values():
                begin(group.close)
            self._groups.clear()
            # a link may refer to this object, so the memory of a version would be freed only by the cycle collector
            self._versions.clear()
            self._previous = None

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _handle(self, event: direct.Event) -> None:
        with self._changed:
            if not self._is_closed:
                for command in self._sync.handle(event):
                    self._execute_command(command)
                self._changed.notify_all()

    def _execute_command(self, command: direct.Command) -> None:
        match command:
            case direct.RunPhase():
                begin(partial(self._run_phase, command))
            case direct.CloseGroup(replica=replica, generation=generation):
                group = self._groups.pop((replica, generation), None)
                if group is not None:
                    begin(group.close)
            case direct.WaitUntil(at_s=at_s):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0.0, at_s - self._clock())
                self._timer = Timer(delay_s, lambda: self._handle(direct.DeadlinePassed(self._clock())))
                self._timer.daemon = True
                self._timer.start()

    def _run_phase(self, command: direct.RunPhase) -> None:
        """Run a phase and report its end (in a thread of its own)."""
        replica, generation, phase = command.replica, command.generation, command.phase
        try:
            self._do(command)
        except Exception as error:  # noqa: BLE001  # any error ends the phase
            cause = f"{phase}: {first_line(error)}"
            self._handle(direct.Failed(self._clock(), replica, generation, cause))
        else:
            self._handle(direct.PhaseDone(self._clock(), replica, generation, phase))

    def _do(self, command: direct.RunPhase) -> None:
        replica, generation, rules = command.replica, command.generation, self._sync.rules
        with self._changed:
            link, group = self._links[replica], self._groups.get((replica, generation))
            sent = None if command.version is None else self._versions.get(command.version)
        match command.phase:
            case "connect":
                link.call("abort_transfer", None, rules.connect_s)
                built = self._connect(link, f"{replica}-{generation}", rules)
                with self._changed:
                    state = self._sync.replicas.get(replica)
                    if self._is_closed or state is None or state.generation != generation:
                        begin(built.close)
                    else:
                        self._groups[replica, generation] = built
            case "announce":
                link.call("start_weight_update", None, rules.announce_s)
            case "stream":
                assert group is not None, "phases run in order"
                assert sent is not None, "a version is kept while it is sent"
                buckets = sent.buckets(command.base)
                group.send(buckets, lambda: self._handle(direct.Progressed(self._clock(), replica, generation)))
                with self._changed:
                    self.sent_bytes += sum(bucket.num_bytes for bucket in buckets)
            case "commit":
                link.call("finish_weight_update", None, rules.commit_s)
