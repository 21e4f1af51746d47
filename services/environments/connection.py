"""One WebSocket to an OpenEnv server: a message goes out, its reply comes back, within a time limit.

Messages are `{"type": "reset" | "step" | "state" | "close", "data": {...}}`; replies have the same form and the type
`observation`, `state` or `error`. They carry no id: a reply belongs to the oldest message without one. So a connection
is *in step* only while every message that it sent has had its reply; out of step, as after a time-out, it is not read
again.

The `openenv` package is not imported: that costs seconds of CPU in every process, for four messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

MAX_REPLY_BYTES = 64 * 2**20
CLOSE_LIMIT_S = 2.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CAPACITY_REACHED = "CAPACITY_REACHED"


class SessionLost(Exception):
    """This connection is of no more use, or could not be made; a new one may be better. Says what happened."""


class ErrorReply(Exception):
    """The server answered with an error of the environment. The connection is still in step."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class Connection:
    """See the module. `in_step`: whether the next reply will belong to the next message."""

    def __init__(self, socket: ClientConnection) -> None:
        self.in_step = True
        self._socket = socket

    @classmethod
    async def open(cls, url: str, limit_s: float) -> Connection:
        """Connect to the server at base URL `url`. SessionLost, with the reason, when that fails or takes too long."""
        address = socket_url(url)
        try:
            async with asyncio.timeout(limit_s):
                socket = await connect(
                    address,
                    proxy=None if urlsplit(address).hostname in LOOPBACK else True,
                    compression=None,
                    max_size=MAX_REPLY_BYTES,
                    ping_interval=None,  # every call has its own limit; a server that is busy stepping is not dead
                    open_timeout=None,
                )
        except TimeoutError as error:
            raise SessionLost(f"no connection within {limit_s:.3g} s") from error
        except OSError as error:
            raise SessionLost(f"cannot connect ({error})") from error
        except WebSocketException as error:
            raise SessionLost(f"{address} does not speak WebSocket ({error})") from error
        return cls(socket)

    async def ask(self, kind: str, data: dict[str, Any] | None, limit_s: float) -> dict[str, Any]:
        """Send one message and return the `data` of its reply.

        ErrorReply when the environment answers with an error; SessionLost after `limit_s` seconds, when the server has
        closed the connection or has no session to give, and for a reply that does not belong to the message.
        """
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        self.in_step = False  # until the reply is here: a time-out or a cancelled call leaves it on its way
        try:
            async with asyncio.timeout(limit_s):
                await self._socket.send(json.dumps(message))
                reply = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise SessionLost(f"no reply to {kind} within {limit_s:.3g} s") from error
        except ConnectionClosed as error:
            raise SessionLost(f"the server closed the connection before it answered {kind} ({error})") from error
        except ValueError as error:
            raise SessionLost(f"the reply to {kind} is no JSON ({error}): is it an OpenEnv server?") from error
        reply_kind, content = _kind_and_data(reply)
        if reply_kind == "error":
            error_reply = ErrorReply(str(content.get("message", content)), str(content.get("code", "no code")))
            if error_reply.code == CAPACITY_REACHED:  # the server closes the connection after this one
                raise SessionLost(str(error_reply))
            self.in_step = True
            raise error_reply
        if reply_kind != ("state" if kind == "state" else "observation"):
            raise SessionLost(f"the reply to {kind} is of type {reply_kind!r}: is it an OpenEnv server?")
        self.in_step = True
        return content

    def abort(self) -> None:
        """Cut the connection at once; the server sees it and frees the session."""
        self.in_step = False
        self._socket.transport.abort()

    async def close(self) -> None:
        """Leave, within `CLOSE_LIMIT_S`. A server that answers has freed the session when this returns."""
        in_step, self.in_step = self.in_step, False
        try:
            if in_step:
                # A server that is gone or hangs needs no goodbye: the connection is cut below in any case.
                with contextlib.suppress(ConnectionClosed, TimeoutError):
                    async with asyncio.timeout(CLOSE_LIMIT_S):
                        await self._socket.send(json.dumps({"type": "close"}))
                        await self._socket.wait_closed()
        finally:
            self.abort()


def socket_url(url: str) -> str:
    """The WebSocket address of the server at base URL `url`: `http://host:8000` gives `ws://host:8000/ws`."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return urlunsplit(
        (
            {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme),
            parts.netloc,
            path if path.endswith("/ws") else f"{path}/ws",
            parts.query,
            "",
        )
    )


def _kind_and_data(reply: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(reply, dict) and isinstance(reply.get("data"), dict):
        return str(reply.get("type")), reply["data"]
    return "unknown", {}
