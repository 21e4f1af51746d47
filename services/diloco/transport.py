"""How a replica that fell behind fetches the state of one that did not.

torchft's own transport listens on every interface, tells its address to whoever asks, and unpickles what it gets. This
one listens on one address, under a path that cannot be guessed, and loads tensors and plain values only.

    source   send_checkpoint: the state is written down at once, because training goes on while it is fetched
             GET /<token>/<step>  ◀── waits until that step's state is there
             disallow_checkpoint: the bytes are dropped
    reader   recv_checkpoint
"""

from __future__ import annotations

import io
import secrets
import socketserver
import threading
import time
import urllib.request
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch
from torchft.checkpointing.transport import CheckpointTransport

_BLOCK = 1 << 20
# No proxy: the address is a peer's, whatever the environment says about the way to the internet.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StateTransport(CheckpointTransport[dict[str, Any]]):
    """One replica's end of it, serving on `host` only. `limit_s` bounds every wait of a reader and for a reader."""

    def __init__(self, host: str, limit_s: float) -> None:
        self._host, self._limit_s = host, limit_s
        self._token = secrets.token_urlsafe(32)
        self._changed = threading.Condition()
        self._step = -1
        self._state: memoryview | None = None  # of `_step`, as torch.save writes it
        self._server = _Server((host, 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        """Where peers find the state; the step's number is appended. It goes to them through the quorum."""
        return f"http://{self._host}:{self._server.server_address[1]}/{self._token}/"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        """Offer `state_dict` as the state of `step`, until `disallow_checkpoint`."""
        file = io.BytesIO()
        torch.save(state_dict, file)
        with self._changed:
            self._step, self._state = step, file.getbuffer()
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        with self._changed:
            self._state = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Fetch the state of `step`. OSError when it is not to be had in time, pickle's errors when it is no state."""
        deadline = time.monotonic() + timeout.total_seconds()
        file = io.BytesIO()
        with _opener.open(f"{metadata}{step}", timeout=timeout.total_seconds()) as answer:
            while block := answer.read(_BLOCK):
                file.write(block)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{file.tell()} bytes of a peer's state came in {timeout.total_seconds():g} s, and not all of "
                        "them: raise diloco.collective_s"
                    )
            if file.tell() != int(answer.headers["Content-Length"]):
                raise ConnectionError(f"a peer's state broke off after {file.tell()} bytes")
        file.seek(0)
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return state

    def shutdown(self, wait: bool = True) -> None:
        self.disallow_checkpoint()
        self._server.shutdown()
        self._server.server_close()
        if wait:
            self._thread.join(self._limit_s)

    def state_of(self, path: str) -> memoryview | None:
        """What a request for `path` is answered with; waits for a state that a quorum has promised."""
        token, _, step = path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self._token.encode()) or not step.isdecimal():
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._state is not None and self._step == int(step), self._limit_s)
            return self._state if self._step == int(step) else None


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that left is the reader's affair: it reports it, and is here asked for nothing."""


def _handler(transport: StateTransport) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = transport._limit_s

        def do_GET(self) -> None:
            state = transport.state_of(self.path)
            if state is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(state.nbytes))
            self.end_headers()
            for start in range(0, state.nbytes, _BLOCK):
                self.wfile.write(state[start : start + _BLOCK])

        def log_message(self, *_: Any) -> None:
            """Nothing: the path is a secret."""

    return Handler
