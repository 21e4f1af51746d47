"""Channel 2: SDPO, distillation of the hinted policy into the unhinted one, over rows that are already aligned.

The trainer's only entry to the distillation losses. Teacher rows may arrive in pieces: a call per piece with the step's
row count as `normalizer` adds up to one call over all rows. They may also be cut to the teacher's k likeliest tokens
(`topk.TopKRows`); the loss is then the one that whole rows have on that support.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from services.losses.chunked import RowFunction, chunked_jsd, chunked_rows
from services.losses.entropy import entropy_gated_rows, eopd_rows
from services.losses.reduction import LossResult, masked_mean, normalized
from services.losses.taid import taid_rows
from services.losses.topk import TopKRows, check_support, topk_jsd_rows, topk_rows_jsd


class SDPOLossConfig(BaseModel):
    """Which divergence pulls the student toward the hinted teacher, and in what portions it is computed."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["jsd", "taid", "entropy_gated", "eopd"] = Field(default="jsd", description="The distillation loss.")
    beta: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="jsd: 0 is KL(T||S), 1 is KL(S||T). The forward KL is the default: the others have next to no "
        "gradient where the student gives the right token a probability of about 1e-3.",
    )
    temperature: float = Field(default=1.0, gt=0, description="Divides both sides' logits; there is no tau^2 factor.")
    token_clip: float | None = Field(default=None, gt=0, description="Upper clamp on each token's divergence.")
    support: Literal["full", "teacher", "student"] = Field(
        default="full", description="jsd: the whole vocabulary, or the named side's top_k tokens."
    )
    top_k: int | None = Field(default=None, gt=0, description="Size of a support that is not full.")
    tail: bool | None = Field(
        default=None,
        description="A bucket for all other tokens (true), or the support renormalised (false). Unset: the student's "
        "support has the bucket, the teacher's has not.",
    )
    h_max: float | None = Field(
        default=None, gt=0, description="entropy_gated: entropy of a full gate, nats. None: log V."
    )
    entropy_threshold: float | None = Field(
        default=None, ge=0, description="eopd: teacher entropy above which the forward KL joins, nats."
    )
    token_chunk: int = Field(default=128, gt=0, description="Rows in work at a time.")
    vocab_chunk: int = Field(default=8192, gt=0, description="jsd, full support: vocabulary columns in work at a time.")
    reuse_rows: bool = Field(
        default=False,
        description="Backward writes the gradient over the student's gathered rows, which saves their size.",
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> SDPOLossConfig:
        if self.support == "full":
            if self.top_k is not None or self.tail is not None:
                raise ValueError(
                    "top_k and tail need a cut support: set support = 'teacher' or 'student', or drop them"
                )
        else:
            check_support(self.support, self.top_k)
            if self.kind != "jsd":
                raise ValueError(
                    f"kind {self.kind!r} needs the whole vocabulary: set support = 'full', or kind = 'jsd'"
                )
        if self.kind == "eopd" and self.entropy_threshold is None:
            raise ValueError(
                "eopd needs entropy_threshold: set the teacher entropy (nats) above which forward KL joins"
            )
        return self

    def check_rows(self, top_k: int) -> None:
        """ValueError, with the fix, unless rows of the teacher's `top_k` likeliest tokens (0: whole rows) will do."""
        if not top_k:
            return
        whole = "or sdpo.hinted.logits.top_k = 0 for whole rows"
        if self.support != "teacher" or self.kind != "jsd":
            raise ValueError(
                f"sdpo.hinted.logits.top_k = {top_k} sends the teacher's {top_k} likeliest tokens only, and kind "
                f'{self.kind!r} with support {self.support!r} needs others: set sdpo.loss.kind = "jsd", '
                f'sdpo.loss.support = "teacher" and sdpo.loss.top_k = {top_k}, {whole}'
            )
        if self.top_k != top_k:
            raise ValueError(
                f"sdpo.hinted.logits.top_k = {top_k} and sdpo.loss.top_k = {self.top_k} name two supports: set both to "
                f"the same number, {whole}"
            )
        if self.tail and self.temperature != 1:
            raise ValueError(
                f"the tail that the teacher sends is summed at temperature 1, not {self.temperature}: set "
                f"sdpo.loss.temperature = 1, or sdpo.loss.tail = false, {whole}"
            )


def sdpo_loss(
    student_logits: Tensor,
    teacher: Tensor | TopKRows,
    *,
    config: SDPOLossConfig,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    t: float | None = None,
) -> LossResult:
    """Weighted sum of the rows' divergences / normalizer.

    Args:
        student_logits: (N, V), gathered; the gradient flows into these.
        teacher: logits (N, V) of any float dtype, from a teacher without dropout, or its k likeliest tokens as N
            `TopKRows` made at temperature 1; no gradient. Not used any more once backward has run.
        weights: (N,) factors on the rows, 0 to leave one out. None is all ones.
        normalizer: the whole step's sum of weights; None takes this call's.
        t: the TAID scheduler's current t, for kind "taid".

    N = 0 gives 0 with a live graph. Metrics: mean "divergence" before the clip, "clip_fraction". Raises ValueError for
    shapes that differ, "taid" without t, or top-k rows that the config has no use for.
    """
    rows = _divergences(student_logits, teacher, config, t)
    weights = torch.ones_like(rows) if weights is None else weights.to(rows).detach()
    if weights.shape != rows.shape:
        raise ValueError(f"sdpo_loss: weights {tuple(weights.shape)} must be {tuple(rows.shape)}, one per row")
    counted = weights != 0
    clipped = rows if config.token_clip is None else rows.clamp(max=config.token_clip)
    total = (torch.where(counted, clipped, torch.zeros_like(clipped)) * weights).sum()
    metrics = {
        "divergence": masked_mean(rows, counted),
        "clip_fraction": masked_mean((rows != clipped).float(), counted),
    }
    loss = normalized(total, weights.sum() if normalizer is None else normalizer)
    return LossResult(loss, count=counted.sum(), metrics=metrics)


def _divergences(student: Tensor, teacher: Tensor | TopKRows, config: SDPOLossConfig, t: float | None) -> Tensor:
    if isinstance(teacher, TopKRows):
        return _cut_divergences(student, teacher, config)
    if student.shape != teacher.shape or student.dim() != 2:
        raise ValueError(
            f"sdpo_loss: student {tuple(student.shape)} and teacher {tuple(teacher.shape)} must be rows (N, V) of the "
            "same positions and vocabulary: gather them first (alignment.gather_aligned)"
        )
    if config.kind == "jsd" and config.support == "full":
        return chunked_jsd(
            student,
            teacher,
            beta=config.beta,
            temperature=config.temperature,
            token_chunk=config.token_chunk,
            vocab_chunk=config.vocab_chunk,
            reuse_rows=config.reuse_rows,
        )
    function = _row_function(config, t)
    return chunked_rows(function, student, teacher, config.token_chunk, reuse_rows=config.reuse_rows)


def _cut_divergences(student: Tensor, teacher: TopKRows, config: SDPOLossConfig) -> Tensor:
    wanted = min(config.top_k or 0, student.shape[-1])  # a vocabulary of fewer tokens than top_k is its own support
    config.check_rows(config.top_k or 0 if teacher.k == wanted else teacher.k)

    def function(student: Tensor, values: Tensor, indices: Tensor, tail: Tensor) -> Tensor:
        rows = TopKRows(values, indices, tail)
        return topk_rows_jsd(student, rows, beta=config.beta, tail=bool(config.tail), temperature=config.temperature)

    parts = (teacher.values, teacher.indices, teacher.tail)
    return chunked_rows(function, student, parts, config.token_chunk, reuse_rows=config.reuse_rows)


def _row_function(config: SDPOLossConfig, t: float | None) -> RowFunction:
    """The losses whose vocabulary is not cut into chunks, as a function of a chunk of rows."""
    tau = config.temperature
    if config.support != "full":
        support, top_k = config.support, config.top_k or 0
        return lambda s, q: topk_jsd_rows(
            s, q, beta=config.beta, top_k=top_k, support=support, tail=config.tail, temperature=tau
        )
    if config.kind == "taid":
        if t is None:
            raise ValueError("kind 'taid' needs t: pass the scheduler's current t (taid.TAIDScheduler)")
        return lambda s, q: taid_rows(s, q, t, temperature=tau)
    if config.kind == "entropy_gated":
        return lambda s, q: entropy_gated_rows(s, q, temperature=tau, h_max=config.h_max)
    threshold = config.entropy_threshold or 0.0
    return lambda s, q: eopd_rows(s, q, threshold=threshold, temperature=tau)
