"""The sandbox part of Modal's server, on a port of this machine: the real package `modal` talks to it over gRPC.

A sandbox's command is run as a process, with the tests' own `python`. With `lost_answers` a sandbox is made and the
request for it ends by an error; with `outage` the state of a sandbox cannot be asked for.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from grpclib.server import Server, Stream
from modal_proto import api_grpc, api_pb2

TOKEN = ("ak-of-the-tests", "as-of-the-tests")
STATUS = api_pb2.GenericResult
SUCCESS = STATUS(status=STATUS.GENERIC_STATUS_SUCCESS)


class Sandbox:
    def __init__(self, name: str, request: Any, env: dict[str, str], folder: Path) -> None:
        self.id, self.request, self.env, self.terminated = name, request, env, False
        self.log = folder / f"{name}.log"
        self.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        command = [sys.executable if part == "python" else part for part in request.definition.entrypoint_args]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env})

    @property
    def result(self) -> api_pb2.GenericResult:
        code = self.process.poll()
        if code is None:
            return STATUS()
        if self.terminated:
            return STATUS(status=STATUS.GENERIC_STATUS_TERMINATED)
        return STATUS(status=STATUS.GENERIC_STATUS_FAILURE, exitcode=code % 256) if code else SUCCESS

    def items(self, start: int = 0) -> list[api_pb2.TaskLogs]:
        lines = self.log.read_text().splitlines(keepends=True)[start:]
        stamp = {"file_descriptor": api_pb2.FILE_DESCRIPTOR_STDOUT, "timestamp_ns": time.time_ns()}
        return [api_pb2.TaskLogs(data=line, **stamp) for line in lines]


class FakeModal:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sandboxes: dict[str, Sandbox] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.images: list[api_pb2.Image] = []
        self.lost_answers = self.outage = False
        self._numbers = itertools.count()
        self._over = threading.Event()

    def __enter__(self) -> FakeModal:
        ready = threading.Event()
        names = [name for name in vars(api_grpc.ModalClientBase) if name[0].isupper()]
        service = type("Service", (api_grpc.ModalClientBase,), {name: self._handler(name) for name in names})()

        async def serve() -> None:
            server = Server([service])
            await server.start("127.0.0.1", 0)
            assert server._server is not None
            self.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
            ready.set()
            await asyncio.to_thread(self._over.wait)
            server.close()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        assert ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)
        for sandbox in self.sandboxes.values():
            sandbox.process.kill()
            sandbox.process.wait(30)

    def _handler(self, name: str) -> Callable[[Any, Stream[Any, Any]], Any]:
        async def handle(_: Any, stream: Stream[Any, Any]) -> None:
            assert stream.metadata is not None
            if stream.metadata.get("x-modal-token-secret") != TOKEN[1]:
                raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")
            request = await stream.recv_message()
            if name == "SandboxGetLogs":
                return await self._stream_logs(request, stream)
            answer = getattr(self, name.removesuffix("V2"), None)
            if answer is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the tests' Modal does not know {name}")
            await stream.send_message(answer(request))

        return handle

    # ---- what is asked, by the names of Modal's API --------------------------------------------------------------

    def ClientHello(self, _: Any) -> Any:
        return api_pb2.ClientHelloResponse()

    def AuthTokenGet(self, _: Any) -> Any:
        claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3600}).encode()).decode().rstrip("=")
        return api_pb2.AuthTokenGetResponse(token=f"e30.{claims}.x")

    def AppGetOrCreate(self, request: Any) -> Any:
        return api_pb2.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}")

    def EnvironmentGetOrCreate(self, _: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2024.10")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-main", metadata=metadata)

    def ImageGetOrCreate(self, request: Any) -> Any:
        self.images.append(request.image)
        return api_pb2.ImageGetOrCreateResponse(image_id=f"im-{len(self.images)}", result=SUCCESS)

    def SecretGetOrCreate(self, request: Any) -> Any:
        name = f"st-{next(self._numbers)}"
        self.secrets[name] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=name)

    def SandboxCreate(self, request: Any) -> Any:
        env: dict[str, str] = {}
        for secret in request.definition.secret_ids:
            env.update(self.secrets[secret])
        second = isinstance(request, api_pb2.SandboxCreateV2Request)
        if second:
            for source in request.secret_sources:
                env.update(source.env.contents)
        # 22 letters and digits behind the dash: of the first version; fewer: of the second.
        name = f"sb-{next(self._numbers):0{12 if second else 22}d}"
        self.sandboxes[name] = Sandbox(name, request, env, self.folder)
        if self.lost_answers:
            raise GRPCError(Status.INTERNAL, "the answer is lost")
        metadata = api_pb2.SandboxHandleMetadata(app_id=request.app_id)
        if second:
            return api_pb2.SandboxCreateV2Response(sandbox_id=name, task_id=f"ta-{name}", metadata=metadata)
        return api_pb2.SandboxCreateResponse(sandbox_id=name, metadata=metadata)

    def SandboxGetTaskId(self, request: Any) -> Any:
        return api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{request.sandbox_id}")

    def SandboxWait(self, request: Any) -> Any:
        sandbox = self._sandbox(request)
        metadata = api_pb2.SandboxHandleMetadata(app_id=sandbox.request.app_id)
        return api_pb2.SandboxWaitResponse(result=sandbox.result, metadata=metadata)

    def SandboxTerminate(self, request: Any) -> Any:
        sandbox = self._sandbox(request)
        if sandbox.process.poll() is None:
            sandbox.terminated = True
            sandbox.process.terminate()
        return api_pb2.SandboxTerminateResponse()

    def SandboxList(self, request: Any) -> Any:
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        if request.before_timestamp:
            return api_pb2.SandboxListResponse()
        found = [s for s in self.sandboxes.values() if wanted.items() <= s.tags.items() and not s.result.status]
        infos = [api_pb2.SandboxInfo(id=s.id, created_at=1.0, app_id=s.request.app_id) for s in found]
        return api_pb2.SandboxListResponse(sandboxes=infos)

    def AppCountLogs(self, request: Any) -> Any:
        bucket = api_pb2.AppCountLogsResponse.LogBucket(bucket_start_at=request.since, stdout_logs=1)
        return api_pb2.AppCountLogsResponse(app_id=request.app_id, buckets=[bucket])

    def AppFetchLogs(self, request: Any) -> Any:
        items = self.sandboxes[request.task_id.removeprefix("ta-")].items()
        batch = api_pb2.TaskLogsBatch(task_id=request.task_id, items=items[-(request.limit or len(items)) :])
        return api_pb2.AppFetchLogsResponse(batches=[batch])

    async def _stream_logs(self, request: Any, stream: Stream[Any, Any]) -> None:
        sandbox, sent = self.sandboxes[request.sandbox_id], int(request.last_entry_id or 0)
        while True:
            over = sandbox.process.poll() is not None
            items = sandbox.items(sent) if request.file_descriptor == api_pb2.FILE_DESCRIPTOR_STDOUT else []
            sent += len(items)
            if items or over:
                await stream.send_message(api_pb2.TaskLogsBatch(items=items, entry_id=str(sent), eof=over))
            if over:
                return
            await asyncio.sleep(0.05)

    def _sandbox(self, request: Any) -> Sandbox:
        if self.outage:
            raise GRPCError(Status.INTERNAL, "out of order")
        sandbox = self.sandboxes.get(request.sandbox_id)
        if sandbox is None:
            raise GRPCError(Status.NOT_FOUND, f"there is no sandbox {request.sandbox_id}")
        return sandbox
