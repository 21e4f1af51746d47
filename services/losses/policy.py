"""Channel 1: the policy objectives, as one pure function over token log-probabilities.

Each objective is a per-token term plus one of three ways to sum. All of them are `sum / normalizer`, so a step may be
cut into micro-batches at will (`policy_normalizer` over the whole step, `policy_loss` per micro-batch). Advantages come
from outside, one per sequence; `ADVANTAGE_SCALING` names the scaling that each objective's paper uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from services.losses.corrections import CorrectionKind, CorrectionLevel, finite_tokens, importance_weights
from services.losses.kl import kl_estimate
from services.losses.reduction import LossResult, at_least_float32, masked_mean, normalized

Objective = Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "dppo"]

ADVANTAGE_SCALING: dict[str, str] = {
    "grpo": "group",  # divided by the group's standard deviation (Bessel) + 1e-4
    "dr_grpo": "none",  # group mean taken off, nothing divided
    "bnpo": "batch",
    "dapo": "none",
    "gspo": "group",
    "cispo": "none",
    "dppo": "none",
}


class PolicyConfig(BaseModel):
    """The policy objective and what goes with it. Limits that belong to another objective are ignored."""

    model_config = ConfigDict(extra="forbid")

    objective: Objective = Field(
        default="dr_grpo",
        description="grpo (2402.03300), dr_grpo (2503.20783), bnpo, dapo (2503.14476), gspo (2507.18071), cispo "
        "(2506.13585) or dppo (masked, not clipped, in probability space).",
    )
    eps_low: float = Field(
        default=0.2, gt=0, lt=1, description="The ratio's lower clip is 1 - eps_low. gspo wants ~3e-4."
    )
    eps_high: float | None = Field(
        default=None, gt=0, description="The ratio's upper clip is 1 + eps_high. None: 0.28 for dapo, else eps_low."
    )
    max_completion_length: int = Field(
        default=512, gt=0, description="dr_grpo: constant length that each sequence's token sum is divided by."
    )
    ratio_max: float = Field(default=5.0, gt=0, description="cispo: absolute cap on the ratio (not 1 + eps).")
    ratio_min: float = Field(default=0.0, ge=0, description="cispo: absolute floor of the ratio; 0 is no floor.")
    mask_high: float = Field(
        default=0.2, gt=0, description="dppo: with A > 0 a token whose probability rose by more is cut."
    )
    mask_low: float = Field(
        default=0.2, gt=0, description="dppo: with A <= 0 a token whose probability fell by more is cut."
    )
    adv_tau: float = Field(default=1.0, gt=0, description="dppo: factor on the advantages.")
    kl_tau: float = Field(default=1e-3, ge=0, description="dppo: weight of (log ratio)^2 over all mask tokens.")
    mask_truncated: bool | None = Field(
        default=None, description="Leave sequences cut at the length limit out of the loss. None: only dapo does."
    )
    kl_beta: float = Field(default=0.0, ge=0, description="Weight of the KL to the reference policy (k3 in the loss).")
    kl_in_reward: bool = Field(
        default=False,
        description="The KL is taken off the advantages (`kl.kl_in_reward`) instead of added to the loss.",
    )
    correction: CorrectionKind = Field(
        default="none",
        description="Weight between generator and trainer: tis truncates at the cap, mis zeroes above it.",
    )
    correction_level: CorrectionLevel = Field(
        default="token", description="One ratio per token, or their product per sequence."
    )
    correction_cap: float | None = Field(
        default=None, gt=0, description="The cap C. None: 2.0 per token, 3.0 per sequence."
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> PolicyConfig:
        if self.objective == "dapo" and self.kl_beta > 0:
            raise ValueError("dapo has no KL term: set kl_beta = 0, or objective = 'bnpo' to keep the KL")
        if self.kl_in_reward and self.kl_beta == 0:
            raise ValueError("kl_in_reward without kl_beta does nothing: set kl_beta > 0, or kl_in_reward = false")
        if self.ratio_min >= self.ratio_max:
            raise ValueError(f"ratio_min {self.ratio_min} is not below ratio_max {self.ratio_max}: lower ratio_min")
        if self.correction == "none" and self.correction_cap is not None:
            raise ValueError("correction_cap without a correction: set correction = 'tis' or 'mis', or drop the cap")
        return self

    @property
    def upper(self) -> float:
        """`eps_high` with the objective's own default filled in."""
        if self.eps_high is not None:
            return self.eps_high
        return 0.28 if self.objective == "dapo" else self.eps_low

    @property
    def drops_truncated(self) -> bool:
        return self.objective == "dapo" if self.mask_truncated is None else self.mask_truncated

    @property
    def kl_in_loss(self) -> bool:
        """Whether `policy_loss` adds `kl_beta * k3` and so needs `ref_logprobs`."""
        return self.kl_beta > 0 and not self.kl_in_reward


@dataclass(slots=True)
class _Terms:
    """Per-token pieces (B, T). `policy` is weighted by the importance correction, `penalty` is not."""

    policy: Tensor
    clipped: Tensor  # bool: tokens that the objective's own limit holds back
    penalty: Tensor | None = None


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: PolicyConfig,
    *,
    normalizer: Tensor | float | None = None,
    ref_logprobs: Tensor | None = None,
    generator_logprobs: Tensor | None = None,
    truncated: Tensor | None = None,
) -> LossResult:
    """The policy objective over one micro-batch.

    Args:
        logprobs: (B, T) of the policy being trained, at the sampling temperature; the gradient flows into these.
        old_logprobs: (B, T), denominator of the ratio: the generator's, or the trainer's at the start of the step.
        advantages: (B,), one per sequence.
        mask: (B, T) bool or 0/1, True at tokens that the policy sampled, aligned with `logprobs`.
        normalizer: `policy_normalizer` of the whole step (over all replicas for dapo); None takes these tensors alone.
        ref_logprobs: (B, T) of the reference policy, needed when `config.kl_in_loss`.
        generator_logprobs: (B, T), needed when `config.correction` is not "none".
        truncated: (B,) bool, sequences cut at the length limit; left out where `config.drops_truncated`.

    Tokens whose old or generator logprob is not finite leave numerator and denominator and are counted. An empty mask
    gives 0 with a live graph. Raises ValueError on shapes that do not fit or inputs that the config needs.
    """
    _check_shapes(logprobs, old_logprobs, advantages, mask, ref_logprobs, generator_logprobs, truncated)
    kept = _loss_mask(mask, old_logprobs, generator_logprobs, truncated, config)
    logp = _only(kept, logprobs)
    log_ratio = logp - _only(kept, old_logprobs).detach()
    advantage = at_least_float32(advantages).detach()[:, None]
    terms = _terms(logp, log_ratio, advantage, kept, config)

    per_token, kept_weight = terms.policy, torch.ones_like(logp)
    metrics: dict[str, Tensor] = {}
    if config.correction != "none":
        if generator_logprobs is None:
            raise ValueError(f"correction {config.correction!r} needs generator_logprobs: pass them or set 'none'")
        kept_weight = importance_weights(
            old_logprobs,
            generator_logprobs,
            kept,
            kind=config.correction,
            level=config.correction_level,
            cap=config.correction_cap,
        )
        per_token = per_token * kept_weight
        metrics["correction_weight"] = masked_mean(kept_weight, kept)
    if terms.penalty is not None:
        per_token = per_token + terms.penalty
    if config.kl_in_loss:
        if ref_logprobs is None:
            raise ValueError("kl_beta > 0 needs ref_logprobs: pass the reference policy's, or set kl_beta = 0")
        kl = kl_estimate(logp, _only(kept, ref_logprobs), "k3")
        per_token = per_token + config.kl_beta * kl
        metrics["ref_kl"] = masked_mean(kl, kept)

    total = _summed(per_token, kept, config)
    loss = normalized(total, _denominator(kept, config) if normalizer is None else normalizer)
    cut = (kept_weight == 0) | terms.clipped if config.objective == "dppo" else kept_weight == 0
    metrics |= {
        "ratio": masked_mean(log_ratio.exp(), kept),
        "clip_fraction": masked_mean(terms.clipped.float(), kept),
        "kept_fraction": masked_mean((~cut).float(), kept),
        "old_kl": masked_mean(kl_estimate(logp, logp.detach() - log_ratio.detach(), "k3"), kept),
        "dropped_tokens": (mask.bool() & ~finite_tokens(mask, old_logprobs, generator_logprobs)).sum(),
    }
    return LossResult(loss=loss, count=kept.sum(), metrics=metrics)


def policy_normalizer(
    mask: Tensor,
    config: PolicyConfig,
    *,
    old_logprobs: Tensor | None = None,
    generator_logprobs: Tensor | None = None,
    truncated: Tensor | None = None,
) -> float:
    """The denominator of `policy_loss` for these sequences; add it up over micro-batches (and replicas, for dapo).

    Give the same mask and logprobs as to `policy_loss`, so that numerator and denominator leave out the same tokens.
    grpo, gspo: sequences with a token in the mask; dr_grpo: those times `max_completion_length`; others: tokens.
    """
    kept = _loss_mask(mask, old_logprobs, generator_logprobs, truncated, config)
    return float(_denominator(kept, config))


def _terms(logp: Tensor, log_ratio: Tensor, advantage: Tensor, mask: Tensor, config: PolicyConfig) -> _Terms:
    if config.objective == "cispo":
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(config.ratio_min, config.ratio_max)
        return _Terms(policy=-weight * advantage * logp, clipped=weight != ratio)
    if config.objective == "dppo":
        return _dppo_terms(logp, log_ratio, advantage, config)
    if config.objective == "gspo":
        # One ratio per sequence, the geometric mean of its tokens': every token of the sequence then has the same term.
        length = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(1, keepdim=True) / length).expand_as(log_ratio)
    ratio = log_ratio.exp()
    low, high = 1 - config.eps_low, 1 + config.upper
    policy = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
    return _Terms(policy=policy, clipped=clipped)


def _dppo_terms(logp: Tensor, log_ratio: Tensor, advantage: Tensor, config: PolicyConfig) -> _Terms:
    """Cut, not clip: a token whose *probability* moved too far the way its advantage pushes loses its policy term."""
    moved = logp.detach().exp() - (logp - log_ratio).detach().exp()
    cut = torch.where(advantage > 0, moved > config.mask_high, moved < -config.mask_low)
    policy = torch.where(cut, torch.zeros_like(logp), -config.adv_tau * advantage * log_ratio.exp())
    return _Terms(policy=policy, clipped=cut, penalty=config.kl_tau * log_ratio.square())


def _summed(per_token: Tensor, mask: Tensor, config: PolicyConfig) -> Tensor:
    kept = torch.where(mask, per_token, torch.zeros_like(per_token))
    if config.objective in ("grpo", "gspo"):
        return (kept.sum(1) / mask.sum(1).clamp(min=1)).sum()
    return kept.sum()


def _denominator(mask: Tensor, config: PolicyConfig) -> Tensor:
    if config.objective in ("grpo", "gspo"):
        return mask.any(1).sum()
    if config.objective == "dr_grpo":
        return mask.any(1).sum() * config.max_completion_length
    return mask.sum()


def _loss_mask(
    mask: Tensor, old: Tensor | None, generator: Tensor | None, truncated: Tensor | None, config: PolicyConfig
) -> Tensor:
    kept = finite_tokens(mask, old, generator)
    if truncated is not None and config.drops_truncated:
        kept = kept & ~truncated.bool()[:, None]
    return kept


def _only(mask: Tensor, values: Tensor) -> Tensor:
    """`values` in full precision where `mask`, else 0: what stands at masked tokens can then be anything, even NaN."""
    wide = at_least_float32(values)
    return torch.where(mask, wide, torch.zeros_like(wide))


def _check_shapes(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *optional: Tensor | None) -> None:
    ref, generator, truncated = optional
    named = {"old_logprobs": old, "mask": mask, "ref_logprobs": ref, "generator_logprobs": generator}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(
                f"policy_loss: {name} is {tuple(tensor.shape)} but logprobs is {tuple(logprobs.shape)}; all are (B, T)"
            )
    for name, tensor in {"advantages": advantages, "truncated": truncated}.items():
        if tensor is not None and tensor.shape != logprobs.shape[:1]:
            raise ValueError(
                f"policy_loss: {name} is {tuple(tensor.shape)} but logprobs has {logprobs.shape[0]} sequences"
            )
