"""One attempt at an OpenAI-compatible chat completion, and what its outcome means for the bill.

The wire format is that of https://platform.openai.com/docs/api-reference/chat. Whatever happens on the wire becomes an
`Attempt`; nothing is raised, so one teacher's bad reply cannot end a replay. The distinction that matters is whether
the server may have done the work:

- no connection, or an error status: it did not (`refused`); most of these are worth a retry;
- a reply that makes no sense, or was cut off: it did and charged (`unusable`);
- sent, and then no reply: nobody knows (`unknown`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

from services.teachers.config import TeacherConfig

# 408 request time-out, 425 too early, 429 rate limit; statuses of 500 and above are retried too.
RETRIED_STATUSES = frozenset({408, 425, 429})
EXCERPT_CHARS = 300

# Other roles have no place on the wire: `tool` would need the id of a call in the vendor's own format, `hint` is ours.
WIRE_ROLES = frozenset({"system", "user", "assistant"})


class MissingKey(Exception):
    """A teacher's key cannot be read or used. The message names the variable, never its value."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one request came to. Token counts are None where the server reported none."""

    outcome: Literal["answered", "unusable", "refused", "unknown"]
    text: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    retry: bool = False
    retry_after_s: float | None = None


def chat_body(
    teacher: TeacherConfig, messages: list[dict[str, str]], max_tokens: int, temperature: float | None
) -> bytes:
    """The request's JSON. Escaped to ASCII, so that any text can be sent, a lone surrogate included.

    What tools and the environment said is sent with the role `user`.
    """
    on_the_wire = [m if m["role"] in WIRE_ROLES else {"role": "user", "content": m["content"]} for m in messages]
    body: dict[str, Any] = {"model": teacher.model, "messages": on_the_wire, teacher.max_tokens_field: max_tokens}
    if temperature is not None:
        body["temperature"] = temperature
    return json.dumps(body | teacher.extra_body).encode("ascii")


def read_api_key(teacher: TeacherConfig) -> str | None:
    """The key from the teacher's environment variable, None if the teacher needs none. Raises MissingKey."""
    if teacher.api_key_env is None:
        return None
    key = os.environ.get(teacher.api_key_env, "").strip()
    if not key:
        raise MissingKey(f"teacher {teacher.name}: set the environment variable {teacher.api_key_env} to its API key")
    # Checked here because the HTTP library quotes a header that it cannot send in its error.
    if not all(33 <= ord(character) <= 126 for character in key):
        raise MissingKey(
            f"teacher {teacher.name}: the value of {teacher.api_key_env} holds blanks or characters that no header can "
            "carry; set it to the API key alone"
        )
    return key


async def post_chat(
    http: httpx.AsyncClient, teacher: TeacherConfig, body: bytes, key: str | None, limit_s: float
) -> Attempt:
    """Send one request and wait at most `limit_s` seconds for all of the reply."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    # Half the time for the connection, so that a dead host is known as "not sent" before the whole limit runs out.
    connect_s = min(teacher.connect_timeout_s, limit_s / 2)
    try:
        # The library's own limits count from byte to byte; a server that drips bytes must not outlive the deadline.
        async with asyncio.timeout(limit_s):
            response = await http.post(
                f"{teacher.base_url}/chat/completions",
                content=body,
                headers=headers,
                timeout=httpx.Timeout(limit_s, connect=connect_s),
            )
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError) as error:
        what = f"no connection to {teacher.base_url} ({_say(error, key)})"
        return Attempt("refused", error=what, retry=True)
    except (TimeoutError, httpx.TimeoutException):
        return Attempt(
            "unknown", error=f"no reply from {teacher.base_url} within {limit_s:.1f} s; it may have been charged"
        )
    except httpx.DecodingError as error:
        return Attempt("unusable", error=f"the reply's encoding is damaged ({_say(error, key)})")
    except httpx.RequestError as error:
        what = f"the connection to {teacher.base_url} was lost before the reply ({_say(error, key)})"
        return Attempt("unknown", error=f"{what}; it may have been charged")
    return read_reply(response.status_code, response.headers, response.content, key)


def read_reply(status: int, headers: Mapping[str, str], content: bytes, key: str | None) -> Attempt:
    """What a whole HTTP reply means."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):  # not JSON, not text at all, or nested without end
        data = None
    if not 200 <= status < 300:
        return Attempt(
            "refused",
            error=f"HTTP {status}: {_excerpt(data, content, key)}",
            retry=status in RETRIED_STATUSES or status >= 500,
            retry_after_s=retry_after_seconds(headers.get("retry-after")),
        )
    if not isinstance(data, dict):
        return Attempt("unusable", error=f"the reply is no JSON object: {_excerpt(None, content, key)}")
    # Routers report a failed upstream as status 200 with an error object and no choices.
    if data.get("error") and not data.get("choices"):
        code = data["error"].get("code") if isinstance(data["error"], dict) else None
        retry = isinstance(code, int) and (code in RETRIED_STATUSES or code >= 500)
        return Attempt("refused", error=f"error in the reply: {_excerpt(data, content, key)}", retry=retry)

    prompt_tokens, completion_tokens = _usage(data.get("usage"))

    def unusable(error: str) -> Attempt:
        return Attempt("unusable", error=error, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)

    try:
        choice = data["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        return unusable(f"the reply has no choices[0].message.content: {_excerpt(None, content, key)}")
    if finish == "length":
        return unusable("the answer was cut off at the token limit: raise max_tokens")
    if finish in ("error", "content_filter"):
        return unusable(f"the server ended the answer early (finish_reason {finish})")
    if not isinstance(text, str) or not text.strip():
        return unusable(f"the reply holds no text (finish_reason {_redact(str(finish), key)})")
    return Attempt(
        "answered", text=_redact(text, key), prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
    )


def retry_after_seconds(value: str | None, now: datetime | None = None) -> float | None:
    """Seconds to wait by a Retry-After header (RFC 9110, 10.2.3), a number or an HTTP date; None if it is neither."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - (now or datetime.now(UTC))).total_seconds())


def _usage(usage: Any) -> tuple[int | None, int | None]:
    """(prompt, completion) tokens; (None, None) unless both are sensible."""
    if not isinstance(usage, dict):
        return None, None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if type(prompt) is int and type(completion) is int and prompt >= 0 and completion >= 0:
        return prompt, completion
    return None, None


def _excerpt(data: Any, content: bytes, key: str | None) -> str:
    """The server's own words: its error message if it sent one, else the beginning of the body."""
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        said = error["message"]
    elif isinstance(error, str):
        said = error
    else:
        said = content.decode("utf-8", errors="replace")
    # Redacted before it is cut, since half a key would not be recognized.
    return " ".join(_redact(said, key).split())[:EXCERPT_CHARS] or "(empty)"


def _say(error: Exception, key: str | None) -> str:
    return _redact(f"{type(error).__name__}: {error}", key)


def _redact(text: str, key: str | None) -> str:
    """Some servers repeat the key in what they say; it must not get into a log or the ledger."""
    return text.replace(key, "[api key]") if key else text
