"""The lighthouse: where replicas say that they live, and learn who takes part in a sync.

It keeps no state that matters. Killed and started again on the same port it costs a sync that waits in it a new try.
Whoever reaches its port can read which replicas there are, and can have one killed (torchft has such an endpoint and no
authentication): it listens on `config.host` and nowhere else, which should be an address of the cluster's own network.
"""

from __future__ import annotations

import os

# Before torchft is imported: its servers would report every heartbeat that fails.
os.environ.setdefault("RUST_LOG", "error")

from torchft.coordination import LighthouseServer

from services.diloco.config import DilocoConfig

TICK_MS = 20  # between two looks at whether a quorum is complete


class Lighthouse:
    """Serves on `config.host:port` from construction to `close`. RuntimeError when the port is taken."""

    def __init__(self, config: DilocoConfig, port: int) -> None:
        self.address = f"http://{config.host}:{port}"
        try:
            self._server: LighthouseServer | None = LighthouseServer(
                bind=f"{config.host}:{port}",
                min_replicas=config.min_replicas,
                join_timeout_ms=int(config.join_s * 1000),
                quorum_tick_ms=TICK_MS,
                heartbeat_timeout_ms=int(config.heartbeat_timeout_s * 1000),
            )
        except Exception as error:
            raise RuntimeError(
                f"the lighthouse cannot listen on {config.host}:{port} ({error}): set diloco.host to an address of "
                "this host, and diloco.lighthouse_port to a free port or 0"
            ) from error

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
        self._server = None
