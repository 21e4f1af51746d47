"""Replicas as Hugging Face Jobs, by the package `huggingface_hub` (extra `hf-jobs`).

A job is labelled with its launch and rank before it exists, so that one whose creation was not answered is found and
cancelled all the same: no job that costs money is lost from sight.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from services.executors.base import TAIL_LINES, Executor, Unreachable, bounded, entrypoint_command
from services.executors.protocol import ALIVE, ExecutorUnavailable, ReplicaSpec, ReplicaStatus, State

T = TypeVar("T")

_CALL_S = 60.0
_END_S = 120.0
_STATES: dict[str, State] = {
    "SCHEDULING": "pending",
    "COMPLETED": "succeeded",
    "CANCELED": "cancelled",
    "ERROR": "failed",
    "DELETED": "failed",
}


class HFJobsExecutor(Executor):
    """ExecutorUnavailable without the package, without a token, or with one that the Hub refuses.

    image       Docker image, or a Space's address, that holds Milkweed and the target
    flavor      hardware of each replica, e.g. "a10g-small"
    namespace   user or organization that pays; unset: the token's
    secrets     environment variables that nobody can read back: what the store needs, {"HF_TOKEN": …} for hf://
    token       unset: HF_TOKEN, or what `hf auth login` saved
    """

    poll_s = 5.0

    def __init__(
        self,
        image: str,
        *,
        flavor: str = "cpu-basic",
        namespace: str | None = None,
        secrets: Mapping[str, str] | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("huggingface_hub") is None:
            raise ExecutorUnavailable("HFJobsExecutor needs huggingface_hub: pip install 'milkweed[hf-jobs]'")
        from huggingface_hub import HfApi, errors, get_token

        token = token or get_token()
        if token is None:
            raise ExecutorUnavailable(
                "HFJobsExecutor needs a Hugging Face token: run `hf auth login`, set HF_TOKEN, or pass token"
            )
        self.image, self.flavor, self.secrets = image, flavor, dict(secrets or {})
        self._api, self._errors = HfApi(endpoint=endpoint, token=token), errors
        self._jobs: dict[int, str] = {}
        try:
            self.namespace = namespace or self._ask("who the token belongs to", self._api.whoami)["name"]
        except (Unreachable, RuntimeError) as error:
            raise ExecutorUnavailable(f"HFJobsExecutor cannot be used: {error}; or pass namespace") from error

    def _start(self, rank: int, spec: ReplicaSpec, launch: str) -> None:
        self._jobs.pop(rank, None)
        job = self._ask(
            "the start of a job",
            lambda: self._api.run_job(
                image=self.image,
                command=entrypoint_command(spec, rank, launch),
                env=spec.env,
                secrets=self.secrets,
                flavor=self.flavor,
                timeout=spec.limit_s,
                labels=self._labels(rank, launch),
                namespace=self.namespace,
            ),
        )
        self._jobs[rank] = job.id

    def _look(self, rank: int) -> ReplicaStatus:
        return self._status(rank, self._jobs[rank])

    def _end(self, rank: int) -> None:
        if rank in self._jobs:
            return self._cancel(rank, self._jobs[rank])
        wanted = self._labels(rank, self._launch)
        found = self._ask(
            "the list of jobs", lambda: list(self._api.list_jobs(labels=wanted, namespace=self.namespace))
        )
        for job in found:
            self._cancel(rank, job.id)

    def _tail(self, rank: int) -> str:
        return "\n".join(self._log(rank, TAIL_LINES))

    def stream_logs(self, rank: int, follow: bool = True) -> Iterator[str]:
        if not follow:
            return iter(self._log(rank))
        # The SDK's own loop: it connects again while the job lives, which the job's time limit bounds.
        return iter(self._api.fetch_job_logs(job_id=self._jobs[rank], follow=True, namespace=self.namespace))

    def _log(self, rank: int, tail: int | None = None) -> list[str]:
        job, fetch = self._jobs[rank], self._api.fetch_job_logs
        return self._ask("a log", lambda: list(fetch(job_id=job, follow=False, tail=tail, namespace=self.namespace)))

    def _status(self, rank: int, job: str) -> ReplicaStatus:
        try:
            info = self._ask("a job", lambda: self._api.inspect_job(job_id=job, namespace=self.namespace))
        except LookupError as error:
            return ReplicaStatus(rank, "failed", None, f"its job is gone: {error}")
        stage = str(getattr(info.status.stage, "value", info.status.stage))
        state = _STATES.get(stage, "running")  # of a stage that is not known, only that it is no end
        said = info.status.message or ("its job was deleted" if stage == "DELETED" else "")
        return ReplicaStatus(rank, state, 0 if state == "succeeded" else None, f"{said} ({info.url})" if said else "")

    def _cancel(self, rank: int, job: str) -> None:
        """Cancel a job and wait for its end. RuntimeError names one that may still run."""
        refused = ""
        try:
            self._ask("a cancellation", lambda: self._api.cancel_job(job_id=job, namespace=self.namespace))
        except (LookupError, RuntimeError) as error:  # it may have ended just now
            refused = f": {error}"
        until = time.monotonic() + _END_S
        while self._status(rank, job).state in ALIVE:
            if time.monotonic() > until or refused:
                raise RuntimeError(f"job {job} of {self.namespace} may still run and cost{refused}; cancel it by hand")
            time.sleep(self.poll_s)

    def _labels(self, rank: int, launch: str) -> dict[str, str]:
        return {"milkweed-launch": launch, "milkweed-rank": str(rank)}

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """LookupError for what is not there, RuntimeError for what is refused, Unreachable for what is not answered."""
        what = f"Hugging Face, asked for {what}"
        try:
            return bounded(_CALL_S, what, call)
        except self._errors.HfHubHTTPError as error:
            status = error.response.status_code
            kind: type[Exception] = LookupError if status == 404 else RuntimeError
            if status == 429 or status >= 500:
                kind = Unreachable
            raise kind(f"{what}, answered {status}: {error}") from error
        except self._errors.HTTPError as error:  # of the HTTP client that the package uses
            raise Unreachable(f"{what}: {type(error).__name__}: {error}") from error
