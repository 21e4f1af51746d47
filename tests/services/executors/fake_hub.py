"""The Jobs part of the Hugging Face Hub, on a port of this machine: the real `huggingface_hub` talks to it over HTTP.

A job's command is run as a process, with the tests' own `python`. Faults are set by a test: with `silent_starts` a job
is made and the request for it not answered, with `outage` everything is answered by 503.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Job:
    id: str
    spec: dict[str, Any]
    process: subprocess.Popen[bytes]
    log: Path
    cancelled: bool = False

    def stage(self) -> tuple[str, str | None]:
        code = self.process.poll()
        if code is None:
            return "RUNNING", None
        if self.cancelled:
            return "CANCELED", None
        return ("COMPLETED", None) if code == 0 else ("ERROR", f"Job failed with exit code: {code}")

    def info(self) -> dict[str, Any]:
        stage, message = self.stage()
        return {
            "id": self.id,
            "status": {"stage": stage, "message": message},
            "owner": {"id": "1", "name": "me", "type": "user"},
            "labels": self.spec.get("labels"),
        }


@dataclass
class FakeHub:
    folder: Path
    jobs: dict[str, Job] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    silent_starts: bool = False
    outage: bool = False

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                hub.answer(self, json.loads(self.rfile.read(length)) if length else None)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        for job in self.jobs.values():
            job.process.kill()
            job.process.wait(30)

    def answer(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        url = urlsplit(request.path)
        self.requests.append((request.command, url.path, body))
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return self.reply(request, 401, {"error": "Invalid username or password."})
        if self.outage:
            return self.reply(request, 503, {"error": "Service Unavailable"})
        if url.path == "/api/whoami-v2":
            return self.reply(request, 200, {"name": "me"})
        if url.path == "/api/jobs/me":
            if request.command == "POST":
                job = self.start(body)
                return None if self.silent_starts else self.reply(request, 200, job.info())
            wanted = dict(value.split("=") for key, value in parse_qsl(url.query) if key == "label")
            found = [j.info() for j in self.jobs.values() if wanted.items() <= j.spec["labels"].items()]
            return self.reply(request, 200, found)
        match = re.fullmatch(r"/api/jobs/me/([^/]+)(/logs|/cancel)?", url.path)
        job = self.jobs.get(match[1]) if match else None
        if match is None or job is None:
            return self.reply(request, 404, {"error": "not found"})
        if match[2] == "/logs":
            return self.stream(request, job, dict(parse_qsl(url.query)).get("tail"))
        if match[2] == "/cancel":
            if job.process.poll() is not None:
                return self.reply(request, 400, {"error": "it has ended"})
            job.cancelled = True
            job.process.terminate()
        return self.reply(request, 200, job.info())

    def start(self, spec: dict[str, Any]) -> Job:
        name = f"job{next(self.numbers)}"
        log = self.folder / f"{name}.log"
        command = [sys.executable if part == "python" else part for part in spec["command"]]
        with log.open("wb") as out:
            env = {**os.environ, **spec["environment"], **spec.get("secrets", {})}
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        return self.jobs.setdefault(name, Job(name, spec, process, log))

    @staticmethod
    def reply(request: BaseHTTPRequestHandler, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        request.send_response(status)
        request.send_header("content-type", "application/json")
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @staticmethod
    def stream(request: BaseHTTPRequestHandler, job: Job, tail: str | None) -> None:
        """Server-sent events of what is logged, until the job ends."""
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.end_headers()
        sent = 0
        while True:
            over = job.process.poll() is not None
            lines = job.log.read_text().splitlines()
            for line in lines[sent:][-int(tail) if tail and not sent else 0 :]:
                stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
                request.wfile.write(f"data: {json.dumps({'timestamp': stamp, 'data': line})}\n\n".encode())
            request.wfile.flush()
            sent = len(lines)
            if over:
                return
            time.sleep(0.05)
