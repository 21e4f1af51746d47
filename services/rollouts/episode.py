"""One episode: generate, act, read, again, until the environment is done or a limit is reached.

A limit of the agent's (turns, tokens) truncates the rollout, and it is scored as it stands. A failure of anything else
(environment, engine, time) makes it `failed`: it has no reward, and the buffer gives the task out again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mesh.messages import ErrorSite, Lease, Rollout, RolloutStatus, Task, Turn
from services.engines.engine import Generation, GenerationRequest
from services.environments.client import EnvironmentClient, EnvironmentFailure, Observation
from services.environments.hints import HintLayers
from services.rollouts.chat import ChatText
from services.rollouts.samples import SequenceRecorder

Generate = Callable[[GenerationRequest], Awaitable[Generation]]


class EpisodeConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_turns: int = Field(16, ge=1, description="Actions of the agent before the rollout is truncated.")
    max_new_tokens: int = Field(14, ge=1, description="Tokens sampled per turn.")
    max_tokens: int = Field(400, ge=2, description="Tokens of a rollout, prompt and observations included.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the trainer divides logits by it too.")
    time_limit_s: float = Field(120.0, gt=0, description="Seconds an episode may take before it is failed.")
    system_prompt: str = Field("", description="A system message before the environment's first observation.")
    hint_role: str = Field("hint", description="Role of the message that holds a hint; the chat template must know it.")
    hint_layers: list[str] = Field(
        ["template", "raw_error"], description="Where hints come from, in order: template, raw_error."
    )
    max_hint_chars: int = Field(2000, ge=1, description="A longer hint is cut to this many characters.")


@dataclass(slots=True)
class _Record:
    """What an episode has so far; becomes the rollout however it ends."""

    recorder: SequenceRecorder | None = None
    turns: list[Turn] = field(default_factory=list)
    env_reward: float | None = None


class EpisodeRunner:
    """Runs episodes, many at once, on one engine and one environment."""

    def __init__(
        self, tokenizer: Any, generate: Generate, environment: EnvironmentClient, config: EpisodeConfig, name: str = ""
    ) -> None:
        self.tokenizer, self.generate, self.environment = tokenizer, generate, environment
        self.config, self.name = config, name
        self.hints = HintLayers(config.hint_layers)

    async def run(self, lease: Lease, *, greedy: bool = False) -> Rollout:
        """The rollout of a lease; never raises for what the environment, the engine or the clock did."""
        began, record, chat = time.monotonic(), _Record(), ChatText(self.tokenizer, self.config.hint_role)
        try:
            async with asyncio.timeout(self.config.time_limit_s):
                status, reason = await self._play(lease, chat, record, greedy)
        except TimeoutError:
            status, reason = "failed", f"not done after {self.config.time_limit_s:g} s"
        except EnvironmentFailure as error:
            status, reason = "failed", str(error)
        sequences = record.recorder.sequences if record.recorder else []
        return Rollout(
            id=lease.rollout_id,
            task=lease.task,
            member=lease.member,
            lease_id=lease.id,
            sequences=sequences,
            turns=record.turns,
            messages=chat.messages,
            status=status,
            env_reward=record.env_reward if status != "failed" else None,
            reason=reason,
            generator=self.name,
            seconds=time.monotonic() - began,
        )

    async def _play(
        self, lease: Lease, chat: ChatText, record: _Record, greedy: bool
    ) -> tuple[RolloutStatus, str]:
        async with self.environment.session() as session:
            observation = await session.reset(lease.task.seed)
            system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
            record.recorder = SequenceRecorder(chat.open([*system, {"role": "user", "content": observation.content}]))
            repeats = _Repeats()
            while True:
                room = self.config.max_tokens - len(chat.ids)
                if room < 1 or len(record.turns) >= self.config.max_turns:
                    what = f"max_tokens {self.config.max_tokens}" if room < 1 else f"max_turns {self.config.max_turns}"
                    return "truncated", f"reached {what}"
                generation = await self.generate(self._request(lease, chat, len(record.turns), room, greedy))
                if generation.finish_reason in ("abort", "error"):
                    return "failed", f"the engine ended the turn: {generation.error or generation.finish_reason}"
                before = _before(chat)
                sequence, start, stop = record.recorder.append_sampled(
                    generation.token_ids, generation.logprobs, generation.versions
                )
                text = chat.sampled(generation.token_ids)
                observation = await session.step(text)
                turn = Turn(sequence, start, stop, text, observation.content, observation.reward)
                if observation.error_kind:
                    turn.error = self._site(observation, before, repeats.count(observation.error_kind))
                else:
                    repeats.count(None)
                record.turns.append(turn)
                ids, forked = chat.extend([{"role": "tool", "content": observation.content}])
                if observation.done:
                    record.env_reward = observation.reward
                    return "finished", ""
                if forked:
                    record.recorder.fork(ids)
                else:
                    record.recorder.append_context(ids)

    def _request(self, lease: Lease, chat: ChatText, turn: int, room: int, greedy: bool) -> GenerationRequest:
        return GenerationRequest(
            id=f"{lease.id}#{turn}",
            prompt_ids=list(chat.ids),
            max_tokens=min(self.config.max_new_tokens, room),
            temperature=self.config.temperature,
            stop_ids=(self.tokenizer.eos_token_id,),
            greedy=greedy,
        )

    def _site(self, observation: Observation, before: ChatText, repeats: int) -> ErrorSite:
        """The failing turn with its hint, and the hint's tokens as they would have stood before the turn."""
        assert observation.error_kind
        site = ErrorSite(observation.error_kind, observation.content)
        found = self.hints.hint_for(
            observation.error_kind,
            observation.hint_template_key,
            observation.hint_context,
            observation.content,
            repeats,
        )
        if found:
            hint, site.hint_layer = found
            site.hint = hint[: self.config.max_hint_chars]
            prompt = before.hinted(site.hint)
            site.cut, site.hint_ids = prompt.cut, prompt.hint_ids
        return site


class _Repeats:
    """How many turns in a row failed with the same kind."""

    def __init__(self) -> None:
        self._kind: str | None = None
        self._times = 0

    def count(self, kind: str | None) -> int:
        self._times = self._times + 1 if kind is not None and kind == self._kind else 1
        self._kind = kind
        return self._times


def _before(chat: ChatText) -> ChatText:
    """The chat as it stands before a turn: what a hint for that turn is put into."""
    copy = ChatText(chat.tokenizer, chat.hint_role)
    copy.messages, copy.ids, copy._text = list(chat.messages), list(chat.ids), chat._text
    return copy


def evaluation_lease(task: Task, member: int = 0) -> Lease:
    """A lease that no buffer knows, for episodes whose rollouts are looked at and not trained."""
    return Lease(f"eval-{task.id}-{member}", task, member, expires_in_s=float("inf"))
