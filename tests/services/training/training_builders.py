"""Tiny random decoders, hand-made batches with error sites and pairs, and learners that start from equal weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mesh.messages import ErrorSite, Group, PreferencePair, Rollout, Task, TrainBatch, Turn, VersionSpan
from mesh.messages import Sequence as TokenSequence
from services.losses.policy import PolicyConfig
from services.losses.preference import PreferenceConfig
from services.losses.sdpo import SDPOLossConfig
from services.rollouts.advantages import group_advantages, is_dead
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.training.hinted import HintedTeacher, HintedTeacherConfig
from services.training.learner import Hinted, Learner, StepPlan
from services.training.policy_model import PolicyModel

VOCAB, EOS, OPENER = 40, 1, 2  # OPENER is the last token before every turn, as a chat template writes it


def tiny_model(seed: int = 0, architecture: str = "qwen3", **settings: Any) -> Any:
    """A float32 decoder whose distributions are far from uniform."""
    torch.set_num_threads(1)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "attention_dropout": 0.5,  # a learner or teacher that forgot to turn dropout off gives itself away
        **settings,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**shape))
        return LlamaForCausalLM(LlamaConfig(**shape))


def rollout(
    rng: random.Random,
    task: Task,
    member: int,
    reward: float | None,
    *,
    version: int = 0,
    turns: int = 2,
    failing: Sequence[int] = (0,),
    hinted: bool = True,
) -> Rollout:
    """A prompt, then `turns` times: OPENER, some sampled tokens, an observation.

    Turns in `failing` have a hint of three tokens in front of their OPENER; none at all if not `hinted`: the teacher
    then sees exactly what the student saw.
    """
    ids = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(3, 7))]
    spans, made = [], []
    for number in range(turns):
        ids.append(OPENER)
        start, stop = len(ids), len(ids) + rng.randrange(3, 6)
        ids += [rng.randrange(3, VOCAB) for _ in range(stop - start - 1)] + [EOS]
        spans.append((start, stop))
        site = None
        if number in failing:
            own = random.Random(f"hint {task.id} {member} {number}")  # so that hints change no other token
            hint = [own.randrange(3, VOCAB) for _ in range(3)] if hinted else []
            site = ErrorSite("tool_not_found", "no", "h", "template", cut=start - 1, hint_ids=[*hint, OPENER])
        made.append(Turn(0, start, stop, f"action {number}", "seen", None, site))
        ids += [rng.randrange(3, VOCAB) for _ in range(2)]
    sequence = TokenSequence(ids, [0.0] * len(ids), spans, [VersionSpan(version, *span) for span in spans])
    return Rollout(
        f"{task.id}/{member}", task, member, "", [sequence], made, [], "finished", env_reward=reward, reward=reward
    )


def group(rng: random.Random, index: int, rewards: Sequence[float | None], **settings: Any) -> Group:
    task = Task(f"t{index}", index, index)
    rollouts = [rollout(rng, task, member, reward, **settings) for member, reward in enumerate(rewards)]
    return Group(task, rollouts, group_advantages(rewards), is_dead(rewards), staleness=0)


def pair(rng: random.Random, number: int) -> PreferencePair:
    """`chosen` is read by `encode`; the prompt and the rejected ids are exact."""
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(3, 8))]
    rejected = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 5))] + [EOS]
    chosen = " ".join(str(rng.randrange(3, VOCAB)) for _ in range(rng.randrange(2, 5)))
    return PreferencePair(f"t0/0#{number}", "t0/0", [], chosen, "rejected", ["a", "b"], prompt, rejected)


def batch(
    behaviour: Any | None = None,
    *,
    seed: int = 0,
    step: int = 0,
    pairs: int = 3,
    temperature: float = 1.0,
    **settings: Any,
) -> TrainBatch:
    """Two groups of three rollouts with a failing turn each, and pairs; logprobs are those of `behaviour`, if any."""
    rng = random.Random(seed)
    groups = [group(rng, 0, [1.0, 0.0, 0.0], **settings), group(rng, 1, [0.0, 1.0, 0.5], **settings)]
    made = TrainBatch(step, groups, [pair(rng, n) for n in range(pairs)])
    if behaviour is not None:
        record_logprobs(made, behaviour, temperature)
    return made


@torch.no_grad()
def record_logprobs(made: TrainBatch, model: Any, temperature: float = 1.0) -> None:
    """Fill in the behaviour logprobs, computed here without any of the code under test."""
    model.eval()
    for found in (q for g in made.groups for r in g.rollouts for q in r.sequences):
        logprobs = (model(torch.tensor([found.token_ids])).logits[0] / temperature).log_softmax(-1)
        for start, stop in found.sampled:
            for t in range(start, stop):
                found.logprobs[t] = float(logprobs[t - 1, found.token_ids[t]])


def without_advantages(made: TrainBatch) -> TrainBatch:
    """The same batch, from which the policy channel learns nothing."""
    made = copy.deepcopy(made)
    for found in made.groups:
        found.advantages = [0.0] * len(found.advantages)
    return made


def encode(text: str) -> list[int]:
    return [int(token) for token in text.split()]


def learner(
    model: Any,
    reference: Any | None = None,
    *,
    objective: str = "dr_grpo",
    alpha: float = 0.0,
    beta: float = 0.0,
    replay_loss: dict[str, Any] | None = None,
    sdpo_loss: dict[str, Any] | None = None,
    sdpo: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    model_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> Learner:
    """A learner on a copy of `model`; `alpha` and `beta` are the channels' weights."""
    return Learner(
        PolicyModel(copy.deepcopy(model), **(model_settings or {})),
        None if reference is None else PolicyModel(reference, **(model_settings or {})),
        encode,
        EOS,
        steps=100,
        optimizer=OptimizerConfig(**{"lr": 1e-2, "schedule": "constant", **(optimizer or {})}),
        policy=PolicyConfig(objective=objective, max_completion_length=10, **(policy or {})),
        sdpo=SDPOConfig(alpha=alpha, loss=SDPOLossConfig(**(sdpo_loss or {})), **(sdpo or {})),
        replay=ReplayConfig(beta=beta, loss=PreferenceConfig(**{"objective": "simpo", **(replay_loss or {})})),
        **settings,
    )


def answer(teacher: HintedTeacher, plan: StepPlan, **settings: Any) -> Hinted:
    """The teacher's rows for a plan, as a trainer with an inline teacher gets them: made when they are read."""
    rows = teacher.align(plan.contexts)
    return Hinted.from_reader(rows.in_order(), rows.row_offsets, **settings)


def whole_turn_teacher(model: Any, **settings: Any) -> HintedTeacher:
    """A teacher with the weights of `model` that answers for every token of a turn."""
    return HintedTeacher(copy.deepcopy(model), None, HintedTeacherConfig(align="turn", **settings))


def step(of: Learner, made: TrainBatch, teacher: HintedTeacher | None = None, **settings: Any) -> dict[str, float]:
    plan = of.plan(made)
    return of.step(plan, answer(teacher, plan, **settings) if teacher is not None else None)


def gradients(of: Learner) -> torch.Tensor:
    """What the last step gave the optimizer, flat."""
    return torch.cat([p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in of.parameters])


def weights(of: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in of.parameters])


@contextmanager
def forward_calls(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the ids of every forward pass of `model`'s trunk inside the block."""
    calls: list[tuple[int, ...]] = []
    handle = model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def row_gradients(of: Learner) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    """`(ids, position)` of every prediction that a backward pass goes through inside the block.

    A prediction's logits are its last hidden state times the head, so a gradient in the one is a gradient in the other.
    """
    found: list[tuple[tuple[int, ...], int]] = []

    def watch(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        ids, lengths = kwargs["input_ids"][0], kwargs["sequences"].lengths

        def record(gradient: torch.Tensor) -> None:
            for sequence, rows in zip(ids.split(lengths), gradient[0].split(lengths), strict=True):
                found.extend((tuple(sequence.tolist()), t) for t in rows.abs().sum(-1).nonzero().flatten().tolist())

        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(record)

    handle = of.model.base_model.register_forward_hook(watch, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
