"""Serverless executors: replicas that are launched somewhere, meet in an object store, and leave their results in it.

    launch_replicas(spec) ──▶ W processes ──▶ replica_entrypoint ──▶ target(Replica) ──▶ results/rank-R.json
    collect() ◀── exit code and log, each back end its own way ◀─┘                         │ in the store
              ◀────────────────────────────────────────────────────────────────────────────┘

`MonarchExecutor`, whose replicas run in the procs of a Monarch job, is in `launch`, because it places actors.
"""

from services.executors.hf_jobs import HFJobsExecutor
from services.executors.local import LocalProcessExecutor
from services.executors.modal import ModalExecutor
from services.executors.protocol import (
    ExecutorUnavailable,
    Replica,
    ReplicaFailed,
    ReplicaResult,
    ReplicaSpec,
    ReplicaStatus,
    ServerlessExecutor,
)

__all__ = [
    "ExecutorUnavailable",
    "HFJobsExecutor",
    "LocalProcessExecutor",
    "ModalExecutor",
    "Replica",
    "ReplicaFailed",
    "ReplicaResult",
    "ReplicaSpec",
    "ReplicaStatus",
    "ServerlessExecutor",
]
