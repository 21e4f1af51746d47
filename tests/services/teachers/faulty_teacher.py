"""A chat-completions server that misbehaves on demand, and helpers to ask it."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mesh.messages import TraceState
from services.teachers import TeacherConfig

ROOT = Path(__file__).parents[3]


class FaultyTeacher:
    """Answers `model` by its scripted replies in turn, the last one for ever; "ok" where nothing is scripted.

    A reply is a function of (handler, request) that sends something, or nothing and thereby closes the connection.
    """

    def __init__(self) -> None:
        self.script: dict[str, list[Callable[[Any, dict[str, Any]], None]]] = {}
        self.asked: Counter[str] = Counter()  # by model and messages
        self.by_model: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()  # most requests in flight, by model
        self.release = threading.Event()  # ends the hanging replies
        self._in_flight: Counter[str] = Counter()
        self._lock = threading.Lock()
        teacher = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                model = request["model"]
                with teacher._lock:
                    teacher.asked[json.dumps([model, request["messages"]])] += 1
                    n = teacher.by_model[model]
                    teacher.by_model[model] += 1
                    teacher._in_flight[model] += 1
                    teacher.peak[model] = max(teacher.peak[model], teacher._in_flight[model])
                replies = teacher.script.get(model, [ok("answer")])
                try:
                    replies[min(n, len(replies) - 1)](self, request)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client gave up first
                finally:
                    with teacher._lock:
                        teacher._in_flight[model] -= 1

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def config(self, name: str, **fields: Any) -> TeacherConfig:
        return TeacherConfig(**({"name": name, "base_url": self.url, "model": name, "timeout_s": 20.0} | fields))

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


def send(handler: Any, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def completion(text: str | None, usage: Any = (10, 5), finish: str = "stop") -> bytes:
    reply: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}
    if usage is not None:
        reply["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return json.dumps(reply).encode()


def ok(text: str, **fields: Any) -> Callable[[Any, dict[str, Any]], None]:
    return lambda handler, request: send(handler, 200, completion(text, **fields))


def raw(body: bytes) -> Callable[[Any, dict[str, Any]], None]:
    return lambda handler, request: send(handler, 200, body)


def status(
    code: int, headers: dict[str, str] | None = None, body: bytes = b""
) -> Callable[[Any, dict[str, Any]], None]:
    return lambda handler, request: send(handler, code, body, headers)


def drop(handler: Any, request: dict[str, Any]) -> None:
    handler.close_connection = True


def states(count: int) -> list[TraceState]:
    return [TraceState(f"task/0#{i}", [{"role": "user", "content": f"question {i}"}], "mine") for i in range(count)]


@contextmanager
def local_server(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The shipped server in a process of its own, and its base URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.teachers.local_server", "--lifeline", *options],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}/v1"
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, f"{what} did not happen within {limit_s} s"
        time.sleep(0.01)
