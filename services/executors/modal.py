"""Replicas as Modal sandboxes, by the package `modal` (extra `modal`).

A sandbox is tagged with its launch and rank when it is made, so that one whose creation was not answered is found and
ended all the same: no sandbox that costs money is lost from sight.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from services.executors.base import TAIL_LINES, Executor, Unreachable, bounded, entrypoint_command
from services.executors.protocol import ALIVE, ExecutorUnavailable, ReplicaSpec, ReplicaStatus

T = TypeVar("T")

_CALL_S = 60.0
_END_S = 120.0
_CREATE_S = 25 * 60.0  # Modal itself waits for 21 minutes until there is a free machine


class ModalExecutor(Executor):
    """ExecutorUnavailable without the package, or without a token (`modal token new`, or MODAL_TOKEN_ID and _SECRET).

    image     a `modal.Image`, or the name of a Docker image, that holds Milkweed and the target
    app       the Modal app under which the sandboxes are listed; made if need be
    gpu, cpu, memory, region, secrets, volumes: as `modal.Sandbox.create` takes them, for each replica
    """

    poll_s = 5.0

    def __init__(
        self,
        image: Any,
        *,
        app: str = "milkweed",
        gpu: str | None = None,
        cpu: float | tuple[float, float] | None = None,
        memory: int | tuple[int, int] | None = None,
        region: str | Sequence[str] | None = None,
        secrets: Sequence[Any] = (),
        volumes: dict[str, Any] | None = None,
        client: Any = None,
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("modal") is None:
            raise ExecutorUnavailable("ModalExecutor needs the package modal: pip install 'milkweed[modal]'")
        import modal

        self._modal: Any = modal
        try:
            self._client = client or bounded(_CALL_S, "Modal, asked for a connection", modal.Client.from_env)
        except (modal.exception.Error, Unreachable) as error:
            raise ExecutorUnavailable(
                "ModalExecutor cannot be used: run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET "
                f"({' '.join(str(error).split())})"
            ) from error
        self.image = modal.Image.from_registry(image) if isinstance(image, str) else image
        self.app_name = app
        self._resources = {
            "gpu": gpu,
            "cpu": cpu,
            "memory": memory,
            "region": region,
            "secrets": list(secrets),
            "volumes": volumes or {},
        }
        self._app: Any = None
        self._sandboxes: dict[int, Any] = {}
        self._launched = datetime.now(UTC)

    def launch_replicas(self, spec: ReplicaSpec) -> None:
        if self._app is None:
            find = self._modal.App.lookup
            self._app = self._ask("an app", lambda: find(self.app_name, client=self._client, create_if_missing=True))
        super().launch_replicas(spec)

    def _forget(self) -> None:
        super()._forget()
        self._sandboxes, self._launched = {}, datetime.now(UTC)

    def _start(self, rank: int, spec: ReplicaSpec, launch: str) -> None:
        def create() -> Any:
            return self._modal.Sandbox.create(
                *entrypoint_command(spec, rank, launch),
                app=self._app,
                image=self.image,
                env=dict(spec.env),
                timeout=math.ceil(spec.limit_s),
                tags=self._tags(rank, launch),
                client=self._client,
                **self._resources,
            )

        self._sandboxes[rank] = self._ask("a sandbox", create, _CREATE_S)

    def _look(self, rank: int) -> ReplicaStatus:
        try:
            code = self._ask("the state of a sandbox", self._sandboxes[rank].poll)
        except LookupError as error:
            return ReplicaStatus(rank, "failed", None, f"its sandbox is gone: {error}")
        return ReplicaStatus(rank, "running" if code is None else "failed" if code else "succeeded", code)

    def _end(self, rank: int) -> None:
        if rank in self._sandboxes:
            found = [self._sandboxes[rank]]
        else:
            wanted, listed = self._tags(rank, self._launch), self._modal.Sandbox.list
            app = self._app.app_id
            found = self._ask("its sandboxes", lambda: list(listed(app_id=app, tags=wanted, client=self._client)))
        for sandbox in found:
            self._ask("the end of a sandbox", lambda sandbox=sandbox: sandbox.terminate(wait=True), _END_S)  # type: ignore[misc]

    def _tail(self, rank: int) -> str:
        logs = self._sandboxes[rank].logs
        return "".join(self._ask("a log", lambda: [entry.message for entry in logs.tail(TAIL_LINES)]))

    def stream_logs(self, rank: int, follow: bool = True) -> Iterator[str]:
        sandbox = self._sandboxes[rank]
        if follow and self.poll()[rank].state in ALIVE:
            # A handle of its own, whose stream begins at the beginning. It ends with the sandbox.
            again = self._ask("a sandbox", lambda: self._modal.Sandbox.from_id(sandbox.object_id, client=self._client))
            return (line.rstrip("\n") for line in again.stdout)
        since = self._launched - timedelta(minutes=1)  # clocks differ
        entries = self._ask("a log", lambda: [entry.message for entry in sandbox.logs.fetch(since=since)])
        return iter("".join(entries).splitlines())

    def _tags(self, rank: int, launch: str) -> dict[str, str]:
        return {"milkweed-launch": launch, "milkweed-rank": str(rank)}

    def _ask(self, what: str, call: Callable[[], T], limit_s: float = _CALL_S) -> T:
        """LookupError for what is not there, RuntimeError for what is refused, Unreachable for what is not answered."""
        what, kinds = f"Modal, asked for {what}", self._modal.exception
        try:
            return bounded(limit_s, what, call)
        except kinds.NotFoundError as error:
            raise LookupError(f"{what}: {error}") from error
        except (kinds.ConnectionError, kinds.ServiceError, kinds.InternalError, kinds.TimeoutError) as error:
            raise Unreachable(f"{what}: {type(error).__name__}: {error}") from error
        except kinds.Error as error:
            raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
