"""A small teacher server for runs without the network: oracles of the toolbox behind the chat-completions protocol.

```
python -m services.teachers.local_server --port 0 --teachers 3 --level hard --error-rate 0.2
{"port": 40123}                     one line on stdout as soon as requests are answered
```

It serves the models `oracle-0` … `oracle-(N-1)`, each wrong in a share `--error-rate` of its answers. An answer depends
on nothing but the model and the messages, so runs can be repeated and calls may come in any order. With `--lifeline`
the server ends when its stdin is closed, so it cannot outlive the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import socket
import sys
import threading
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.environments.toolbox.grammar import level_ops, teacher_action

CHARS_PER_TOKEN = 4  # of the token counts in `usage`
STARTUP_LIMIT_S = 20.0
SHUTDOWN_LIMIT_S = 1
DEFAULT_MAX_TOKENS = 256


class BadRequest(Exception):
    """What the client sent cannot be answered; becomes an OpenAI-style error reply."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def read_chat(data: Any, models: list[str]) -> tuple[str, list[dict[str, str]], int]:
    """(model, messages, max_tokens) of a request's JSON. Raises BadRequest that names the wrong field."""
    if not isinstance(data, dict):
        raise BadRequest("the request body must be a JSON object")
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a non-empty list")
    for i, message in enumerate(messages):
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise BadRequest(f"'messages[{i}]' must be an object with the strings 'role' and 'content'")
    max_tokens = data.get("max_tokens", data.get("max_completion_tokens", DEFAULT_MAX_TOKENS))
    if type(max_tokens) is not int or max_tokens < 1:
        raise BadRequest("'max_tokens' must be an integer of at least 1")
    if data.get("stream") or data.get("n", 1) != 1:
        raise BadRequest("'stream' and 'n' are not supported: ask for one whole answer")
    model = data.get("model")
    if model not in models:
        raise BadRequest(f"the model {model!r} does not exist; there are {', '.join(models)}", 404, "model_not_found")
    return model, messages, max_tokens


def answer(model: str, messages: list[dict[str, str]], level: str, error_rate: float) -> str:
    """The oracle's answer: the same for the same model and messages, at any time and in any order."""
    asked = json.dumps([model, [[message["role"], message["content"]] for message in messages]])
    rng = random.Random(int.from_bytes(hashlib.sha256(asked.encode("ascii")).digest(), "big"))
    try:
        return teacher_action(messages, level, error_rate, rng)
    except ValueError as error:
        raise BadRequest(f"these messages are no toolbox chat of level {level!r}: {error}") from error


def build_app(teachers: int, level: str, error_rate: float, delay_s: float) -> Starlette:
    """The ASGI application. `delay_s` seconds pass before each answer. ValueError for settings out of range."""
    if teachers < 1:
        raise ValueError(f"--teachers is {teachers}: serve at least one")
    if not 0 <= error_rate <= 1:
        raise ValueError(f"--error-rate is {error_rate}: give a share between 0 and 1")
    if not 0 <= delay_s < float("inf"):
        raise ValueError(f"--delay-s is {delay_s}: give seconds, 0 or more")
    level_ops(level)
    models = [f"oracle-{i}" for i in range(teachers)]

    async def completions(request: Request) -> JSONResponse:
        try:
            data = json.loads(await request.body())
        except ValueError as error:
            raise BadRequest("the request body is no JSON") from error
        model, messages, max_tokens = read_chat(data, models)
        whole = answer(model, messages, level, error_rate)
        await asyncio.sleep(delay_s)
        text = whole[: max_tokens * CHARS_PER_TOKEN]
        prompt_tokens = sum(_tokens(message["content"]) for message in messages)
        return JSONResponse(
            {
                "id": f"chatcmpl-{hashlib.sha256(json.dumps([model, messages]).encode()).hexdigest()[:24]}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": model,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text},
                        "finish_reason": "stop" if text == whole else "length",
                    }
                ],
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": _tokens(text),
                    "total_tokens": prompt_tokens + _tokens(text),
                },
            }
        )

    async def list_models(request: Request) -> JSONResponse:
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "milkweed"} for name in models]}
        )

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, BadRequest)
        body = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
        return JSONResponse({"error": body}, status_code=error.status)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", completions, methods=["POST"]),
            Route("/v1/models", list_models, methods=["GET"]),
        ],
        exception_handlers={BadRequest: refuse},
    )


def _tokens(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)


async def serve(app: Starlette, host: str, port: int, lifeline: bool) -> None:
    """Answer requests until SIGTERM or SIGINT, or with `lifeline` until stdin ends. OSError when the port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_LIMIT_S)
    )
    if lifeline:
        threading.Thread(target=_exit_at_end_of_stdin, args=(server,), daemon=True).start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    give_up = time.monotonic() + STARTUP_LIMIT_S
    while not server.started and not serving.done():
        if time.monotonic() > give_up:
            raise TimeoutError(
                f"the teacher server did not start within {STARTUP_LIMIT_S:g} s; is the host overloaded?"
            )
        await asyncio.sleep(0.01)
    if server.started:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    await serving


def _exit_at_end_of_stdin(server: uvicorn.Server) -> None:
    # Plain reads of the descriptor: a thread blocked inside sys.stdin would hold its lock while the interpreter ends.
    while os.read(0, 4096):
        pass
    server.should_exit = True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.teachers.local_server", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this host only)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one")
    parser.add_argument("--teachers", type=int, default=3, help="how many oracles to serve")
    parser.add_argument("--level", default="easy", help="level of the toolbox whose names they know")
    parser.add_argument("--error-rate", type=float, default=0.2, help="share of wrong answers, 0 to 1")
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--lifeline", action="store_true", help="exit when stdin reaches its end")
    options = parser.parse_args(arguments)
    try:
        app = build_app(options.teachers, options.level, options.error_rate, options.delay_s)
    except ValueError as error:
        parser.error(str(error))
    try:
        asyncio.run(serve(app, options.host, options.port, options.lifeline))
    except OSError as error:
        print(f"cannot listen on {options.host}:{options.port}: {error}; choose another --port", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
