"""One episode: generate, act, read, again, until the environment is done or a limit is reached.

    reset ─▶ prompt ─▶ sample a turn ─▶ step ─▶ done? ─▶ finished
                 ▲                         │
                 └──── observation ◀───────┴─▶ max_turns or max_tokens ─▶ truncated

A limit of the agent's (turns, tokens) truncates the rollout, and it is scored as it stands. A failure of anything else
(environment, this one request of the engine, time) makes it `failed`: it has no reward, and the buffer gives the task
out again. An engine that serves nobody any more is not one episode's failure: that EngineError goes through.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh.messages import ErrorSite, Lease, Rollout, RolloutStatus, Task, Turn
from services.engines.engine import Generation, GenerationRequest
from services.environments.client import EnvironmentClient, EnvironmentFailure, Observation
from services.environments.hints import HintLayers
from services.rollouts.chat import ChatText, Message, check_template, find_hint_role, turn_ends
from services.rollouts.samples import SequenceRecorder

Generate = Callable[[GenerationRequest], Awaitable[Generation]]


class EpisodeConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_turns: int = Field(16, ge=1, description="Actions of the agent before the rollout is truncated.")
    max_new_tokens: int = Field(14, ge=1, description="Tokens sampled per turn.")
    max_tokens: int = Field(400, ge=2, description="Tokens of a rollout, prompt and observations included.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the trainer divides logits by it too.")
    time_limit_s: float = Field(120.0, gt=0, description="Seconds an episode may take before it is failed.")
    truncated_reward: float | None = Field(
        0.0,
        description="Environment's reward of a truncated rollout for which it has named none so far. None leaves such "
        "rollouts unscorable, and then nothing discourages an agent from running into its limits.",
    )
    system_prompt: str = Field("", description="A system message at the very beginning.")
    examples: list[Message] = Field(
        [], description="Messages {role, content} before the environment's first observation: what was said in other "
        "episodes, as few-shot examples."
    )  # fmt: skip
    observation_role: str = Field(
        "tool", description="Role of the message after a turn, which holds what the environment answered."
    )
    hint_role: str | None = Field(
        None,
        description="Role of the message that holds a hint. Unset: hint, if the model has a special token for it; else "
        "the first of user and system that its chat template writes there.",
    )
    hint_layers: list[str] = Field(
        ["template", "raw_error"], description="Where hints come from, in order: template, raw_error."
    )
    max_hint_chars: int = Field(2000, ge=1, description="A longer hint is cut to this many characters.")

    @model_validator(mode="after")
    def _known_layers(self) -> EpisodeConfig:
        HintLayers(self.hint_layers)
        return self

    @model_validator(mode="after")
    def _whole_examples(self) -> EpisodeConfig:
        for number, message in enumerate(self.examples):
            if set(message) != {"role", "content"} or not message["role"]:
                raise ValueError(f"examples[{number}] must have exactly a role and a content, not {message}")
        if self.examples and self.examples[-1]["role"] == "user":
            raise ValueError("the last example has no answer: end with the assistant's message, or what came after it")
        return self

    def opening(self) -> list[Message]:
        """The messages before the environment's first observation."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, *self.examples]

    def hint_role_for(self, tokenizer: Any) -> str:
        """The role of hints with this model. ValueError when there is none for it, or no chat that could be written."""
        roles = [*(message["role"] for message in self.opening()), "user"]
        shape: dict[str, Any] = {"opening": roles, "observation_role": self.observation_role}
        check_template(tokenizer, **shape)
        if not self.hint_layers:
            return self.hint_role or "hint"
        hint_role = self.hint_role or find_hint_role(tokenizer, **shape)
        check_template(tokenizer, hint_role=hint_role, **shape)
        return hint_role


class _Failed(Exception):
    """The episode cannot go on, for a reason that says nothing about the agent."""


@dataclass(slots=True)
class _Record:
    """What an episode has so far; becomes the rollout however it ends."""

    recorder: SequenceRecorder | None = None
    turns: list[Turn] = field(default_factory=list)
    env_reward: float | None = None
    waits_for: str = ""  # named when the time is up


class EpisodeRunner:
    """Runs episodes, many at once, on one engine and one environment."""

    def __init__(
        self,
        tokenizer: Any,
        generate: Generate,
        environment: EnvironmentClient,
        config: EpisodeConfig,
        name: str = "",
        seed: int | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """`seed` makes what is sampled reproducible (`turn_seed`); None leaves it to the engine's own stream.

        `stop_ids` end a turn besides those that the tokenizer tells of. ValueError when the tokenizer's chat template
        cannot write the episodes of this configuration.
        """
        self.tokenizer, self.generate, self.environment = tokenizer, generate, environment
        self.config, self.name, self.seed = config, name, seed
        self.hints, self.hint_role = HintLayers(config.hint_layers), config.hint_role_for(tokenizer)
        self.opening, self.stop_ids = config.opening(), turn_ends(tokenizer, stop_ids)

    async def run(self, lease: Lease, *, greedy: bool = False) -> Rollout:
        """The rollout of a lease, failed or not. Raises EngineError when the engine serves nobody any more."""
        began, record = time.monotonic(), _Record()
        chat = ChatText(self.tokenizer, self.hint_role, self.stop_ids)
        status: RolloutStatus = "failed"
        try:
            async with asyncio.timeout(self.config.time_limit_s):
                status, reason = await self._play(lease, chat, record, greedy)
        except TimeoutError:
            reason = f"not done after {self.config.time_limit_s:g} s, when it waited for {record.waits_for}"
        except (EnvironmentFailure, _Failed) as error:
            reason = str(error)
        return Rollout(
            id=lease.rollout_id,
            task=lease.task,
            member=lease.member,
            lease_id=lease.id,
            sequences=record.recorder.sequences if record.recorder else [],
            turns=record.turns,
            messages=chat.messages,
            status=status,
            env_reward=record.env_reward if status != "failed" else None,
            reason=reason,
            generator=self.name,
            seconds=time.monotonic() - began,
        )

    async def _play(self, lease: Lease, chat: ChatText, record: _Record, greedy: bool) -> tuple[RolloutStatus, str]:
        record.waits_for = "a session of the environment"
        async with self.environment.session() as session:
            record.waits_for = "the environment's reset"
            observation = await session.reset(lease.task.seed)
            recorder = SequenceRecorder(chat.open([*self.opening, {"role": "user", "content": observation.content}]))
            record.recorder, repeats = recorder, _Repeats()
            new_ids, rewritten = list[int](), False
            while not (limit := self._reached(chat, record.turns)):
                # Recorded only now: behind the last turn it would be computed in training for nothing.
                if rewritten:
                    recorder.fork(new_ids)
                else:
                    recorder.append_context(new_ids)
                before, number = chat.copy(), len(record.turns)
                record.waits_for = f"the engine at turn {number}"
                generation = await self._sample(self._request(lease, chat, number, greedy))
                place = recorder.append_sampled(generation.token_ids, generation.logprobs, generation.versions)
                text = chat.sampled(generation.token_ids)
                record.waits_for = f"the environment at turn {number}"
                observation = await session.step(text)
                turn = Turn(*place, text, observation.content, observation.reward)
                times = repeats.count(observation.error_kind)
                if observation.error_kind:
                    turn.error = self._site(observation.error_kind, observation, before, times)
                record.turns.append(turn)
                record.env_reward = observation.reward
                answer = {"role": self.config.observation_role, "content": observation.content}
                new_ids, rewritten = chat.extend([answer])
                if observation.done:
                    return "finished", ""
            if record.env_reward is None:
                record.env_reward = self.config.truncated_reward
            return "truncated", f"reached {limit}"

    def _reached(self, chat: ChatText, turns: list[Turn]) -> str:
        """The limit that allows no other turn, or nothing."""
        if len(turns) >= self.config.max_turns:
            return f"max_turns {self.config.max_turns}"
        return f"max_tokens {self.config.max_tokens}" if len(chat.ids) >= self.config.max_tokens else ""

    def _request(self, lease: Lease, chat: ChatText, turn: int, greedy: bool) -> GenerationRequest:
        return GenerationRequest(
            id=f"{lease.id}#{turn}",
            prompt_ids=list(chat.ids),
            max_tokens=min(self.config.max_new_tokens, self.config.max_tokens - len(chat.ids)),
            temperature=self.config.temperature,
            stop_ids=self.stop_ids,
            greedy=greedy,
            seed=None if self.seed is None else turn_seed(self.seed, lease.sampled_as, turn),
        )

    async def _sample(self, request: GenerationRequest) -> Generation:
        """What the engine samples for a request that it can serve."""
        try:
            generation = await self.generate(request)
        except (ValueError, TimeoutError) as error:  # of this request; the engine goes on
            raise _Failed(f"the engine: {error}") from error
        if generation.finish_reason in ("abort", "error"):
            raise _Failed(f"the engine ended the turn: {generation.error or generation.finish_reason}")
        if not generation.token_ids:
            raise _Failed(f"the engine sampled no token for request {request.id}")
        return generation

    def _site(self, kind: str, observation: Observation, before: ChatText, repeats: int) -> ErrorSite:
        """The failing turn with its hint, and the hint's tokens as they would have stood before the turn."""
        site = ErrorSite(kind, observation.content)
        found = self.hints.hint_for(
            kind, observation.hint_template_key, observation.hint_context, observation.content, repeats
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
        self._times = self._times + 1 if kind == self._kind else 1
        self._kind = kind
        return self._times


def turn_seed(seed: int, sampled_as: str, turn: int) -> int:
    """The sampling seed of one turn: a hash of the run's seed, its lease's `sampled_as` and the turn.

    It depends on neither the generator nor what else that engine does. Members of a group and repeated attempts sample
    anew; what a killed generator or a stopped run had begun is sampled again as it would have been.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {sampled_as} {turn}".encode(), digest_size=8).digest())


def evaluation_lease(task: Task, member: int = 0) -> Lease:
    """A lease that no buffer knows, for episodes whose rollouts are looked at and not trained."""
    return Lease(f"eval-{task.id}-{member}", task, member, expires_in_s=float("inf"))
