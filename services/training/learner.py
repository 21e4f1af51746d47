"""One optimizer step: plan the micro-batches, run three channels, put their gradients together.

    plan(batch) ─▶ samples in micro-batches, error sites and pairs beside them
    step(plan, teacher rows):
        for each micro-batch   forward ─┬─▶ policy loss ─▶ gradient of channel "policy"
                                        └─▶ rows of its error sites + teacher rows ─▶ gradient of channel "sdpo"
        for each pair batch    forward ───▶ preference loss ─▶ gradient of channel "replay"
        each channel: its own norm, its own clip, then its weight ─▶ sum ─▶ AdamW

Channels are clipped one by one because their raw norms differ by two orders of magnitude: one clip over the sum would
leave nothing of the smallest. Every loss is normalized over the whole step, so the micro-batch size changes no result.
A channel without weight or input costs no forward pass and leaves no trace in the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from mesh.messages import TrainBatch
from services.losses.corrections import finite_tokens
from services.losses.kl import check_kl_in_reward, kl_estimate, kl_in_reward
from services.losses.logprobs import token_logprobs
from services.losses.policy import ADVANTAGE_SCALING, PolicyConfig, policy_loss, policy_normalizer
from services.losses.preference import PreferenceConfig, Responses, preference_loss
from services.losses.reduction import masked_mean
from services.losses.sdpo import SDPOLossConfig, sdpo_loss
from services.losses.taid import TAIDConfig, TAIDScheduler
from services.rollouts.advantages import scorable
from services.rollouts.collate import collate, micro_batches
from services.rollouts.samples import TrainSample, pair_samples
from services.telemetry.spans import Spans
from services.training.channel import Averages, Channel
from services.training.hinted import HintedTeacherConfig
from services.training.plan import Hinted, StepPlan, gather_sites, plan_step
from services.weights.logits import LogitsGone
from services.weights.region import RegionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]  # as `services.rollouts.collate.collate` makes them


class OptimizerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lr: float = Field(5e-4, gt=0, allow_inf_nan=False, description="Peak learning rate of AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decays.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="The policy channel's gradient is clipped to this norm.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises to lr.")
    schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="How the rate falls to its end.")
    final_lr: float = Field(0.2, ge=0, le=1, description="The rate at the last step, as a fraction of lr.")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of `step` (from 0) in a run of `steps`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        fall = {"constant": 0.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}[self.schedule]
        return self.lr * (1 - (1 - self.final_lr) * fall)


class SDPOConfig(BaseModel):
    """Channel 2: distillation of the hinted policy into the unhinted one, at the turns that failed."""

    model_config = ConfigDict(extra="forbid")

    alpha: float = Field(0.2, ge=0, description="Weight of the channel; 0 turns it off.")
    teacher: Literal["actor", "inline"] = Field(
        "actor",
        description="Where the teacher's logits come from: its own actor over RDMA, or the trainer's process (inline). "
        "An inline teacher has the initial weights until the first step after a start or resume, and measures no "
        "hinted accuracy, so that min_hinted_accuracy never skips its channel.",
    )
    loss: SDPOLossConfig = Field(default_factory=lambda: SDPOLossConfig(), description="The divergence.")
    hinted: HintedTeacherConfig = Field(default_factory=lambda: HintedTeacherConfig(), description="The teacher.")
    max_sites: int = Field(64, ge=1, description="Failing turns distilled per step; more are left out evenly, counted.")
    min_hinted_accuracy: float = Field(
        0.3, ge=0, le=1, description="The channel is skipped while the teacher's hinted accuracy is below this."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="The channel's gradient is clipped to this norm on its own.")
    wait_s: float = Field(30.0, gt=0, description="Longest wait for the teacher's logits; then the step goes without.")


class ReplayConfig(BaseModel):
    """Channel 3: preference pairs from outside teachers that agree where the student did something else."""

    model_config = ConfigDict(extra="forbid")

    beta: float = Field(0.1, ge=0, description="Weight of the channel; 0 turns it off.")
    loss: PreferenceConfig = Field(
        default_factory=lambda: PreferenceConfig(beta=0.3, nll_weight=0.3), description="The preference objective."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="The channel's gradient is clipped to this norm on its own.")


class Learner:
    """Owns the model being trained and its optimizer.

    `reference` is the initial policy, None where nothing compares with it. `encode` turns a text into ids without
    special tokens, `eos_id` ends a turn. `steps` is the length of the run for the schedules, `temperature` the one that
    rollouts are sampled at, `max_tokens` the padded tokens of one forward pass. ValueError for settings that need a
    reference and have none, or for a KL in the reward of advantages that are divided by a standard deviation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reference: PreTrainedModel | None,
        encode: Callable[[str], list[int]],
        eos_id: int,
        *,
        steps: int,
        optimizer: OptimizerConfig,
        policy: PolicyConfig,
        sdpo: SDPOConfig,
        replay: ReplayConfig,
        temperature: float = 1.0,
        max_tokens: int = 16384,
        spans: Spans | None = None,
        advantage_scaling: str | None = None,
    ) -> None:
        """`advantage_scaling`: how the batch's advantages were scaled; None is as the objective's paper does."""
        self.model, self.reference, self.encode, self.eos_id = model, reference, encode, eos_id
        self.steps, self.optimizer_config, self.policy, self.sdpo, self.replay = steps, optimizer, policy, sdpo, replay
        self.temperature, self.max_tokens = temperature, max_tokens
        self.advantage_scaling = advantage_scaling or ADVANTAGE_SCALING[policy.objective]
        if policy.kl_in_reward:
            check_kl_in_reward(policy.kl_beta, self.advantage_scaling)
        if needs_reference(policy, replay) and reference is None:
            raise ValueError("policy.kl_beta and the dpo objective compare with the initial policy: pass a reference")
        self.spans = spans or Spans()
        self.taid = TAIDScheduler(TAIDConfig(total_steps=steps))
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        # No dropout: ratio to the behaviour policy and distance to the reference are the weights' doing alone.
        for each in (model, reference):
            if each is not None:
                each.eval()

    def plan(self, batch: TrainBatch) -> StepPlan:
        """Lay out the step: which samples run together, which failing turns are distilled, which pairs are compared."""
        pairs = pair_samples(batch.pairs, self.encode, self.eos_id) if self.replay.beta else ([], [])
        max_sites = self.sdpo.max_sites if self.sdpo.alpha else 0
        return plan_step(batch, max_tokens=self.max_tokens, max_sites=max_sites, pairs=pairs)

    # ---- the step ------------------------------------------------------------------------------------------------

    def step(self, plan: StepPlan, hinted: Hinted | None) -> dict[str, float]:
        """Train one batch; returns its metrics. `hinted` None: this step goes without the SDPO channel.

        It also does when the teacher's hinted accuracy is too low ("sdpo/gated"), or when its rows cannot be read
        ("sdpo/unread"; `hinted.failure` says why). ValueError for an answer that does not fit the plan.
        """
        if hinted is not None:
            hinted.check(plan)
        metrics = _sdpo_figures(plan, hinted)
        gated = hinted is not None and hinted.accuracy is not None and hinted.accuracy < self.sdpo.min_hinted_accuracy
        mismatch = Averages()
        channels = self._rollout_channels(plan, None if gated else hinted, mismatch)
        if plan.chosen:
            with self.spans("trainer/replay"):
                channels["replay"] = self._replay_channel(plan)
        with self.spans("trainer/optimizer"):
            metrics |= self._apply(channels, plan.batch.id)
        for name, channel in channels.items():
            metrics |= channel.figures(name)
        metrics |= mismatch.figures("mismatch")
        metrics["sdpo/gated"] = float(gated)
        metrics["sdpo/unread"] = float(hinted is not None and bool(hinted.failure))
        metrics["replay/pairs"] = float(len(plan.chosen))
        return metrics

    def _rollout_channels(self, plan: StepPlan, hinted: Hinted | None, mismatch: Averages) -> dict[str, Channel]:
        """The policy and SDPO channels, which share each micro-batch's forward pass."""
        policy = Channel(1.0, self.optimizer_config.max_grad_norm)
        sdpo = Channel(self.sdpo.alpha, self.sdpo.max_grad_norm)
        with self.spans("trainer/inputs"):
            collated = [self._collate(micro.samples) for micro in plan.micro_batches]
            references = [self._reference(c, self.temperature) if self.policy.kl_beta else None for c in collated]
            advantages = self._advantages(plan, collated, references)
            policy_sum = sum(
                policy_normalizer(
                    c["loss_mask"], self.policy, old_logprobs=c["behaviour_logprobs"], truncated=c["truncated"]
                )
                for c in collated
            )
        counts = iter(hinted.row_counts if hinted else [])
        sdpo_sum = float(sum(hinted.row_counts)) if hinted else 0.0
        t = self.taid.t if self.sdpo.loss.kind == "taid" else None
        for micro, c, ref, advantage in zip(plan.micro_batches, collated, references, advantages, strict=True):
            with self.spans("trainer/forward"):
                logits = self._logits(c)
                logprobs = token_logprobs(logits, c["token_ids"], temperature=self.temperature)
                old, generator = (
                    (logprobs.detach(), c["behaviour_logprobs"])
                    if self.policy.correction != "none"
                    else (c["behaviour_logprobs"], None)
                )
                found = policy_loss(
                    logprobs, old, advantage, c["loss_mask"], self.policy, normalizer=policy_sum,
                    ref_logprobs=ref, generator_logprobs=generator, truncated=c["truncated"],
                )  # fmt: skip
            rows = [next(counts) for _ in micro.sites] if hinted and not hinted.failure else []
            with self.spans("trainer/backward"):
                policy.add(found, self.parameters, keep_graph=sum(rows) > 0)
            mismatch.add(*_mismatch(logprobs, c))
            teacher = self._teacher_rows(hinted, sum(rows)) if hinted and sum(rows) else None
            if teacher is not None:
                with self.spans("trainer/forward"):
                    student = gather_sites(logits, micro.sites, rows)
                    teacher = teacher.to(student.device)
                    distilled = sdpo_loss(student, teacher, config=self.sdpo.loss, normalizer=sdpo_sum, t=t)
                with self.spans("trainer/backward"):
                    sdpo.add(distilled, self.parameters, keep_graph=False)
        if sdpo.gradient is None or (hinted is not None and hinted.failure):
            return {"policy": policy}
        if t is not None:
            self.taid.update(sdpo.loss, plan.batch.id + 1)
        return {"policy": policy, "sdpo": sdpo}

    def _teacher_rows(self, hinted: Hinted, count: int) -> torch.Tensor | None:
        """The next `count` rows (count, V); None, and `hinted.failure`, when they cannot be read."""
        with self.spans("trainer/wait_logits", waiting=True):
            try:
                return hinted.read(count)
            except (LogitsGone, RegionError, TimeoutError) as error:
                # A teacher that dies while it is read costs the step this channel, whole: half of it would be biased.
                hinted.failure = f"{type(error).__name__}: {error}"
                return None

    def _replay_channel(self, plan: StepPlan) -> Channel:
        channel = Channel(self.replay.beta, self.replay.max_grad_norm)
        lengths = [max(c.length, r.length) * 2 for c, r in zip(plan.chosen, plan.rejected, strict=True)]
        for indices in micro_batches(lengths, self.max_tokens):
            chosen = self._responses([plan.chosen[i] for i in indices])
            rejected = self._responses([plan.rejected[i] for i in indices])
            found = preference_loss(chosen, rejected, self.replay.loss, normalizer=float(len(plan.chosen)))
            channel.add(found, self.parameters, keep_graph=False)
        return channel

    def _responses(self, samples: list[TrainSample]) -> Responses:
        c = self._collate(samples)
        reference = self._reference(c, temperature=1.0) if self.replay.loss.objective == "dpo" else None
        return Responses(token_logprobs(self._logits(c), c["token_ids"]), c["loss_mask"], reference)

    def _collate(self, samples: list[TrainSample]) -> Tensors:
        device = self.parameters[0].device
        return {name: tensor.to(device) for name, tensor in collate(samples, pad_id=self.eos_id).items()}

    def _logits(self, c: Tensors) -> torch.Tensor:
        """Of the policy, (B, T, V)."""
        logits: torch.Tensor = self.model(input_ids=c["token_ids"], attention_mask=c["attention_mask"]).logits
        return logits

    # ---- the reference policy ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reference(self, c: Tensors, temperature: float) -> torch.Tensor:
        """Logprobs (B, T - 1) of the tokens under the initial policy."""
        assert self.reference is not None
        logits = self.reference(input_ids=c["token_ids"], attention_mask=c["attention_mask"]).logits
        return token_logprobs(logits, c["token_ids"], temperature=temperature)

    @torch.no_grad()
    def _advantages(
        self, plan: StepPlan, collated: list[Tensors], references: list[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Each micro-batch's advantages (B,), with the KL taken off where it belongs to the reward.

        The KL is a rollout's, over all of its sequences, and so is the mean over its group. Both may be spread over
        micro-batches, so they are taken before the advantages are dealt out to sequences again.
        """
        if not self.policy.kl_in_reward:
            return [c["advantages"] for c in collated]
        groups = plan.batch.groups
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        row_of = {rollout.id: row for row, rollout in enumerate(rollouts)}
        kl = torch.zeros(len(rollouts), 1)
        rows = [torch.tensor([row_of[sample.rollout_id] for sample in micro.samples]) for micro in plan.micro_batches]
        for c, reference, row in zip(collated, references, rows, strict=True):
            assert reference is not None
            current = token_logprobs(self._logits(c), c["token_ids"], temperature=self.temperature)
            per_token = kl_estimate(current, reference, "k1").masked_fill(~c["loss_mask"], 0.0)
            kl.index_add_(0, row, per_token.sum(1, keepdim=True).cpu())
        adjusted = kl_in_reward(
            torch.tensor([advantage for group in groups for advantage in group.advantages]),
            kl,  # k1 is a difference of logprobs, so a rollout's KL stands for its logprob against a reference of 0
            torch.zeros_like(kl),
            torch.ones_like(kl),
            torch.tensor([number for number, group in enumerate(groups) for _ in group.rollouts]),
            beta=self.policy.kl_beta,
            scaling=self.advantage_scaling,
            scorable=torch.tensor([bool(scorable([rollout.reward])) for rollout in rollouts]),
        )
        return [adjusted[row].to(c["advantages"]) for c, row in zip(collated, rows, strict=True)]

    # ---- the optimizer -------------------------------------------------------------------------------------------

    def _apply(self, channels: dict[str, Channel], step: int) -> dict[str, float]:
        """Clip each channel on its own, weigh, sum, and let AdamW step; returns the norms and the learning rate."""
        for parameter in self.parameters:
            parameter.grad = None
        metrics: dict[str, float] = {}
        for name, channel in channels.items():
            metrics |= {f"{name}/{figure}": value for figure, value in channel.pour(self.parameters).items()}
        metrics["optimizer/lr"] = self.optimizer_config.rate(step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = metrics["optimizer/lr"]
        self.optimizer.step()
        return metrics


def needs_reference(policy: PolicyConfig, replay: ReplayConfig) -> bool:
    """Whether these settings compare with the initial policy."""
    return policy.kl_beta > 0 or (replay.beta > 0 and replay.loss.objective == "dpo")


def _mismatch(logprobs: torch.Tensor, c: Tensors) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """KL (k3) between the policy at the start of the step and whoever sampled the tokens, and the tokens it is over."""
    mask = finite_tokens(c["loss_mask"], c["behaviour_logprobs"])
    return {"kl": masked_mean(kl_estimate(logprobs.detach(), c["behaviour_logprobs"]), mask)}, mask.sum()


def _sdpo_figures(plan: StepPlan, hinted: Hinted | None) -> dict[str, float]:
    """What became of the plan's failing turns, and what the teacher said of itself."""
    figures = {
        "sdpo/sites": float(len(plan.contexts)),
        "sdpo/sites_left_out": float(plan.sites_left_out),
        "sdpo/missing": float(bool(plan.contexts) and hinted is None),
    }
    if hinted is not None:
        figures["sdpo/rows"] = float(sum(hinted.row_counts))
        figures["sdpo/contexts_left_out"] = float(sum(count == 0 for count in hinted.row_counts))
        figures["sdpo/teacher_version"] = float(hinted.version)
        if hinted.accuracy is not None:
            figures["sdpo/hinted_accuracy"] = hinted.accuracy
    return figures
