"""The three channels as one loss: total = policy + alpha_sdpo * sdpo + beta_replay * replay.

`compose` is the whole rule. `compose_loss` runs it on any Hugging Face causal LM from a batch of plain tensors, and
`build_batch(tokenizer)` makes a small batch that exercises every channel: a check of the losses against a real model
without actors, environments or teachers.

    batch = attach_reference(model, build_batch(tokenizer))
    compose_loss(model, batch, alpha_sdpo=0.5, beta_replay=0.1).total.backward()

A channel whose weight is 0 or whose inputs are absent contributes exactly 0 and costs no forward pass: with both
weights 0 the total is the policy loss, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from services.losses.alignment import PADDING, gather_aligned
from services.losses.logprobs import shift_mask, span_mask, token_logprobs
from services.losses.policy import PolicyConfig, policy_loss
from services.losses.preference import PreferenceConfig, Responses, preference_loss
from services.losses.reduction import LossResult
from services.losses.sdpo import SDPOLossConfig, sdpo_loss


@dataclass(slots=True)
class LossComponents:
    """The composed loss and its channels, scalars; a channel that is off is exactly 0. `total` is for backward."""

    total: Tensor
    policy: Tensor
    sdpo: Tensor
    replay: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)  # "policy/…", "sdpo/…", "replay/…", detached


@dataclass(slots=True)
class Tokens:
    """Right-padded sequences. `mask` is the loss mask over tokens (not shifted), made from spans."""

    ids: Tensor  # (B, T) int64
    attention: Tensor  # (B, T) int64, 1 at real tokens
    mask: Tensor  # (B, T) bool, True at tokens that the policy sampled


@dataclass(slots=True)
class HintInputs:
    """The hinted contexts of the same B sequences, and which positions predict the same token on both sides."""

    tokens: Tokens
    student_idx: Tensor  # (B, K) int64, -1 is padding
    teacher_idx: Tensor  # (B, K)


@dataclass(slots=True)
class PairInputs:
    """P preference pairs; the mask is True on the response. Reference logprobs (P, T - 1) come from a real forward."""

    chosen: Tokens
    rejected: Tokens
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None


@dataclass(slots=True)
class LossBatch:
    """What `compose_loss` trains on. `old_logprobs` (B, T - 1); None is on-policy: the ratio is 1."""

    tokens: Tokens
    advantages: Tensor  # (B,)
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    generator_logprobs: Tensor | None = None
    hint: HintInputs | None = None
    pairs: PairInputs | None = None


def compose(
    policy: LossResult,
    sdpo: LossResult | None = None,
    replay: LossResult | None = None,
    *,
    alpha_sdpo: float,
    beta_replay: float,
) -> LossComponents:
    """`total = policy + alpha_sdpo * sdpo + beta_replay * replay`, without the terms that are None or weigh 0.

    Raises ValueError for a weight that is negative or not finite.
    """
    total = policy.loss
    metrics = {f"policy/{name}": value for name, value in policy.metrics.items()}
    values = {}
    for name, result, weight in (("sdpo", sdpo, alpha_sdpo), ("replay", replay, beta_replay)):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"the weight of channel {name} is {weight}: it must be 0 (off) or positive")
        values[name] = torch.zeros_like(policy.loss.detach())
        if result is not None and weight > 0:
            total = total + weight * result.loss
            values[name] = result.loss
            metrics |= {f"{name}/{key}": value for key, value in result.metrics.items()}
    return LossComponents(total=total, policy=policy.loss, metrics=metrics, **values)


def compose_loss(
    model: nn.Module,
    batch: LossBatch,
    *,
    alpha_sdpo: float = 1.0,
    beta_replay: float = 1.0,
    policy: PolicyConfig | None = None,
    sdpo: SDPOLossConfig | None = None,
    preference: PreferenceConfig | None = None,
    temperature: float = 1.0,
    teacher: nn.Module | None = None,
    taid_t: float | None = None,
) -> LossComponents:
    """All channels on one batch. `model(input_ids=, attention_mask=, use_cache=)` returns an object with `.logits`.

    `temperature` is the one that the tokens were sampled at. `teacher` None is the model itself: shown the hint,
    without dropout, without grad. The student's logits serve channels 1 and 2 from one forward pass. dpo needs the
    pairs' reference logprobs (`attach_reference` with the initial policy).
    """
    logits = _logits(model, batch.tokens)
    logprobs = token_logprobs(logits, batch.tokens.ids, temperature=temperature)
    channel_1 = policy_loss(
        logprobs,
        logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
        batch.advantages,
        shift_mask(batch.tokens.mask),
        policy or PolicyConfig(),
        ref_logprobs=batch.ref_logprobs,
        generator_logprobs=batch.generator_logprobs,
    )
    channel_2 = channel_3 = None
    if alpha_sdpo > 0 and batch.hint is not None:
        with _frozen(teacher or model):
            teacher_logits = _logits(teacher or model, batch.hint.tokens)
        rows = gather_aligned(logits, teacher_logits, batch.hint.student_idx, batch.hint.teacher_idx)
        channel_2 = sdpo_loss(rows.student, rows.teacher, config=sdpo or SDPOLossConfig(), t=taid_t)
    if beta_replay > 0 and batch.pairs is not None:
        pairs = batch.pairs
        chosen = _responses(model, pairs.chosen, pairs.ref_chosen)
        rejected = _responses(model, pairs.rejected, pairs.ref_rejected)
        channel_3 = preference_loss(chosen, rejected, preference or PreferenceConfig())
    return compose(channel_1, channel_2, channel_3, alpha_sdpo=alpha_sdpo, beta_replay=beta_replay)


def attach_reference(reference: nn.Module, batch: LossBatch) -> LossBatch:
    """The batch with the pairs' reference logprobs filled in by a forward pass of `reference`, the initial policy.

    Call it before training changes the model, or with a copy of the initial one. ValueError for a batch without pairs.
    """
    if batch.pairs is None:
        raise ValueError("attach_reference: the batch has no preference pairs to find reference logprobs for")
    with _frozen(reference):
        chosen = _responses(reference, batch.pairs.chosen, None).logprobs
        rejected = _responses(reference, batch.pairs.rejected, None).logprobs
    return replace(batch, pairs=replace(batch.pairs, ref_chosen=chosen, ref_rejected=rejected))


def build_batch(tokenizer: Any, *, device: torch.device | str = "cpu") -> LossBatch:
    """Two tasks with a good and a bad action each: advantages +-0.5, a hint before each bad action, a pair per task.

    `tokenizer.encode(text, add_special_tokens=False)` must return a list of ids. Parts are encoded one by one and their
    ids joined, so every span is exact. Prompts and responses differ in length on purpose.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    prompts = [ids("List the files. Action:"), ids("What is the sum of two and three? Action:")]
    hints = [ids(" Hint: the tool is called list_files."), ids(" Hint: the tool add takes numbers.")]
    good = [ids(" list_files path=."), ids(" add a=2 b=3")]
    bad = [ids(" show_dir path=."), ids(" add a=two b=three now")]

    rollouts = [
        (prompt, action) for prompt, pair in zip(prompts, zip(good, bad, strict=True), strict=True) for action in pair
    ]
    hinted = [(prompts[i // 2] + (hints[i // 2] if i % 2 else []), action) for i, (_, action) in enumerate(rollouts)]
    # Token j of an action is predicted one position before it stands; good actions have no hint and only padding.
    longest = max(len(action) for _, action in rollouts)
    student_idx = torch.full((len(rollouts), longest), PADDING)
    teacher_idx = torch.full((len(rollouts), longest), PADDING)
    for i in range(1, len(rollouts), 2):
        count = len(rollouts[i][1])
        student_idx[i, :count] = torch.arange(count) + len(rollouts[i][0]) - 1
        teacher_idx[i, :count] = torch.arange(count) + len(hinted[i][0]) - 1
    return LossBatch(
        tokens=_tokens(rollouts, device),
        advantages=torch.tensor([0.5, -0.5] * len(prompts), device=device),
        hint=HintInputs(_tokens(hinted, device), student_idx.to(device), teacher_idx.to(device)),
        pairs=PairInputs(
            chosen=_tokens(list(zip(prompts, good, strict=True)), device),
            rejected=_tokens(list(zip(prompts, bad, strict=True)), device),
        ),
    )


def _tokens(sequences: list[tuple[list[int], list[int]]], device: torch.device | str) -> Tokens:
    """(prompt, response) id lists as right-padded tensors. Masks come from lengths, so the pad id may be any id."""
    length = max(len(prompt) + len(response) for prompt, response in sequences)
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(sequences):
        joined = prompt + response
        ids[row, : len(joined)] = torch.tensor(joined)
        attention[row, : len(joined)] = 1
    mask = span_mask([[(len(prompt), len(prompt) + len(response))] for prompt, response in sequences], length)
    return Tokens(ids.to(device), attention.to(device), mask.to(device))


def _logits(model: nn.Module, tokens: Tokens) -> Tensor:
    return model(input_ids=tokens.ids, attention_mask=tokens.attention, use_cache=False).logits


def _responses(model: nn.Module, tokens: Tokens, ref_logprobs: Tensor | None) -> Responses:
    """Responses that the policy did not sample have no sampling temperature: preferences compare at temperature 1."""
    logprobs = token_logprobs(_logits(model, tokens), tokens.ids)
    return Responses(logprobs, shift_mask(tokens.mask), ref_logprobs)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Without dropout and without grad; afterwards every submodule is back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
