import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from faulty_teacher import ROOT, local_server, wait_until

from services.environments.toolbox.grammar import oracle_action
from services.teachers.local_server import answer, build_app, main

CHAT = [{"role": "user", "content": "3+4*2"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_server("--teachers", "2", "--level", "hard", "--error-rate", "0.5") as (_, base_url):
        yield base_url


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json={"model": "oracle-0", "messages": CHAT} | body, timeout=20)


def test_an_answer_has_the_shape_of_a_chat_completion(url: str) -> None:
    reply = ask(url).json()
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"]["role"] == "assistant"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"] > 1


def test_answers_depend_on_the_model_and_the_messages_only(url: str) -> None:
    chats = [[{"role": "user", "content": f"{a}+{b}*2"}] for a in range(1, 5) for b in range(1, 5)]
    texts = [ask(url, messages=chat).json()["choices"][0]["message"]["content"] for chat in chats]
    assert texts == [answer("oracle-0", chat, "hard", 0.5) for chat in chats]
    assert texts != [answer("oracle-1", chat, "hard", 0.5) for chat in chats]


def test_an_answer_is_cut_at_max_tokens_and_says_so(url: str) -> None:
    reply = ask(url, max_tokens=1).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 1
    assert len(reply["choices"][0]["message"]["content"]) == 4


def test_models_are_listed(url: str) -> None:
    reply = httpx.get(f"{url}/models", timeout=20).json()
    assert [model["id"] for model in reply["data"]] == ["oracle-0", "oracle-1"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "oracle-9"}, 404, "there are oracle-0, oracle-1"),
        ({"messages": []}, 400, "non-empty list"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": "hello"}]}, 400, "no toolbox chat"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stream": True}, 400, "one whole answer"),
    ],
)
def test_a_malformed_request_gets_an_openai_style_error(url: str, body: dict[str, Any], status: int, says: str) -> None:
    reply = ask(url, **body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'"x"'])
def test_a_body_that_is_no_json_object_is_a_400(url: str, content: bytes) -> None:
    reply = httpx.post(f"{url}/chat/completions", content=content, timeout=20)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_the_error_rate_is_kept() -> None:
    chats = [
        [{"role": "user", "content": f"{a}+{b}*{c}"}] for a in range(1, 10) for b in range(1, 10) for c in (2, 3, 4)
    ]
    wrong = sum(answer("oracle-0", chat, "easy", 0.2) != oracle_action(chat, "easy") for chat in chats)
    assert 0.1 < wrong / len(chats) < 0.3
    assert all(answer("oracle-0", chat, "easy", 0.0) == oracle_action(chat, "easy") for chat in chats)


@pytest.mark.parametrize("options", [(0, "easy", 0.2, 0), (1, "none", 0.2, 0), (1, "easy", 2, 0), (1, "easy", 0.2, -1)])
def test_settings_out_of_range_are_refused(options: tuple[int, str, float, float]) -> None:
    with pytest.raises(ValueError, match=r"give|serve|use"):
        build_app(*options)


def test_a_taken_port_is_an_error_with_advice(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", url.split(":")[2].split("/")[0]]) == 1
    assert "choose another --port" in capsys.readouterr().err


def test_with_a_lifeline_the_server_ends_when_its_starter_does() -> None:
    starter = (
        "import subprocess, sys, os\n"
        "p = subprocess.Popen([sys.executable, '-m', 'services.teachers.local_server', '--lifeline'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", starter], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    wait_until(lambda: not alive(int(done.stdout)), "the end of the orphaned server")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_the_server_imports_neither_torch_nor_openenv() -> None:
    code = "import json, sys, services.teachers.local_server; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=True)
    assert not {"torch", "openenv", "openenv_core", "monarch", "transformers"} & set(json.loads(done.stdout))
