"""A model in an engine of this process as a teacher: it answers the requests that an HTTP server would get.

It takes the place of `protocol.post_chat` in the client, so ledger, slots, limits and consensus are the same. Several
votes come from one model as independent samples: what most of them say is more often right than any one of them
(self-consistency, Wang et al. 2022, arXiv 2203.11171).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.engines.engine import EngineConfig, Generation, GenerationRequest
from services.engines.loop import EngineLoop
from services.teachers.config import TeacherConfig
from services.teachers.protocol import Attempt

NOWHERE = "http://in-process"  # a teacher needs an address; this one is never connected to


class VLLMTeacherConfig(BaseModel):
    """A model of one's own that teaches, in a vLLM engine on the pool's own proc."""

    model_config = ConfigDict(extra="forbid")

    path: str | None = Field(None, description='Folder of the teacher\'s Hugging Face model; backend "vllm" needs it.')
    name: str = Field("local", description="The teacher's name in results and ledger; its votes are name-0, name-1, …")
    samples: int = Field(3, ge=1, description="Independent answers per state, each of them one vote.")
    threads: int = Field(1, ge=1, description="CPU threads of the pool's process.")
    engine: EngineConfig = Field(
        default_factory=lambda: EngineConfig(engine="vllm"), description="The engine; it is vllm unless said otherwise."
    )

    @model_validator(mode="after")
    def _is_vllm(self) -> VLLMTeacherConfig:
        if "engine" not in self.engine.model_fields_set:
            self.engine = EngineConfig.model_validate({**self.engine.model_dump(exclude_unset=True), "engine": "vllm"})
        return self

    def voices(self) -> list[TeacherConfig]:
        """One teacher per sample, all free of charge."""
        return [
            TeacherConfig(name=f"{self.name}-{i}", base_url=NOWHERE, model=self.path or self.name,
                          max_concurrency=self.engine.max_batch)
            for i in range(self.samples)
        ]  # fmt: skip


class EngineTeacher:
    """Answers chat requests with `loop`; `tokenizer` has the model's chat template, `stop_ids` end an answer."""

    def __init__(self, loop: EngineLoop, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self._loop, self._tokenizer, self._stop_ids = loop, tokenizer, tuple(stop_ids)
        self._numbers = count()

    async def __call__(self, teacher: TeacherConfig, body: bytes, key: str | None, limit_s: float) -> Attempt:
        """One answer to the request `body` of `protocol.chat_body`. EngineError when the engine is dead.

        Nobody is charged, so whatever else goes wrong is a refusal. The sample is a function of teacher and request:
        another vote is another sample, the same question asked again is the same answer.
        """
        asked = json.loads(body)
        try:
            request = self._request(teacher, asked, body)
            generation = await asyncio.wait_for(self._loop.generate(request), limit_s)
        except TemplateError as error:
            return Attempt("refused", error=f"the chat template of {teacher.name} refuses these messages ({error})")
        except TimeoutError as error:
            return Attempt("refused", error=str(error) or f"{teacher.name} had no answer within {limit_s:.1f} s")
        except ValueError as error:  # of this request: too long for the model, say
            return Attempt("refused", error=str(error))
        return self._read(generation, len(request.prompt_ids))

    def _read(self, generation: Generation, prompt_tokens: int) -> Attempt:
        """The answer in what was sampled, or why there is none."""
        outcome: Literal["answered", "unusable"] = "unusable"
        text = error = None
        if generation.finish_reason == "length":
            error = "the answer was cut off at the token limit: raise max_tokens"
        elif generation.finish_reason != "stop":
            error = generation.error or f"the engine ended it ({generation.finish_reason})"
        else:
            said = str(self._tokenizer.decode(generation.token_ids, skip_special_tokens=True))
            outcome, text = ("answered", said) if said.strip() else ("unusable", None)
            error = None if text is not None else "the answer holds no text"
        return Attempt(outcome, text, error, prompt_tokens, len(generation.token_ids))

    def _request(self, teacher: TeacherConfig, asked: dict[str, Any], body: bytes) -> GenerationRequest:
        text = self._tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
        temperature = asked.get("temperature", 1.0)
        seed = hashlib.blake2b(teacher.name.encode() + body, digest_size=7).digest()
        return GenerationRequest(
            id=f"{teacher.name}#{next(self._numbers)}",
            prompt_ids=list(self._tokenizer.encode(text, add_special_tokens=False)),
            max_tokens=asked[teacher.max_tokens_field],
            temperature=temperature or 1.0,
            greedy=temperature == 0,
            stop_ids=self._stop_ids,
            seed=int.from_bytes(seed),
        )
