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
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh.messages import TrainBatch
from services.losses.kl import kl_estimate, kl_in_reward
from services.losses.logprobs import token_logprobs
from services.losses.policy import ADVANTAGE_SCALING, PolicyConfig, policy_loss, policy_normalizer
from services.losses.preference import PreferenceConfig, Responses, preference_loss
from services.losses.sdpo import SDPOLossConfig, sdpo_loss
from services.losses.taid import TAIDConfig, TAIDScheduler
from services.rollouts.collate import collate, micro_batches
from services.rollouts.samples import TrainSample, pair_samples
from services.telemetry.spans import Spans
from services.training.channel import Channel
from services.training.hinted import HintedTeacherConfig
from services.training.plan import StepPlan, gather_sites, plan_step

Tensors = dict[str, torch.Tensor]  # as `services.rollouts.collate.collate` makes them
TeacherRows = Callable[[int], torch.Tensor]  # the next n rows (n, V) of the teacher's logits, in the plan's order


class OptimizerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lr: float = Field(5e-4, gt=0, description="Peak learning rate of AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decays.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
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
        "actor", description="Where the teacher's logits come from: its own actor over RDMA, or the trainer's process."
    )
    loss: SDPOLossConfig = Field(default_factory=lambda: SDPOLossConfig(), description="The divergence.")
    hinted: HintedTeacherConfig = Field(default_factory=lambda: HintedTeacherConfig(), description="The teacher.")
    max_sites: int = Field(64, ge=1, description="Failing turns distilled per step; more are left out evenly, counted.")
    min_hinted_accuracy: float = Field(
        0.3, ge=0, le=1, description="The channel is skipped while the teacher's hinted accuracy is below this."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="The channel's gradient is clipped to this norm on its own.")
    wait_s: float = Field(30.0, gt=0, description="Longest wait for the teacher's logits; then the step goes without.")

    @model_validator(mode="after")
    def _taid_needs_the_student(self) -> SDPOConfig:
        if self.loss.temperature != 1.0 and self.loss.kind == "taid":
            raise ValueError("taid interpolates at temperature 1: set sdpo.loss.temperature = 1")
        return self


class ReplayConfig(BaseModel):
    """Channel 3: preference pairs from outside teachers that agree where the student did something else."""

    model_config = ConfigDict(extra="forbid")

    beta: float = Field(0.1, ge=0, description="Weight of the channel; 0 turns it off.")
    loss: PreferenceConfig = Field(
        default_factory=lambda: PreferenceConfig(beta=0.3, nll_weight=0.3), description="The preference objective."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="The channel's gradient is clipped to this norm on its own.")


@dataclass(slots=True)
class Hinted:
    """The teacher's answer to a plan: rows per context, and a way to read them in order."""

    row_counts: list[int]
    read: TeacherRows
    accuracy: float | None = None
    version: int = 0


class Learner:
    """Owns the model being trained and its optimizer. `reference`: the initial policy, None where nothing needs it."""

    def __init__(
        self,
        model: Any,
        reference: Any | None,
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
    ) -> None:
        self.model, self.reference, self.encode, self.eos_id = model, reference, encode, eos_id
        self.steps, self.optimizer_config, self.policy, self.sdpo, self.replay = steps, optimizer, policy, sdpo, replay
        self.temperature, self.max_tokens = temperature, max_tokens
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
        model.eval()  # no dropout: the ratio to the behaviour policy must be the weights' doing alone

    @property
    def needs_reference(self) -> bool:
        return needs_reference(self.policy, self.replay)

    def plan(self, batch: TrainBatch) -> StepPlan:
        """Lay out the step: which samples run together, which failing turns are distilled, which pairs are compared."""
        pairs = pair_samples(batch.pairs, self.encode, self.eos_id) if self.replay.beta else ([], [])
        max_sites = self.sdpo.max_sites if self.sdpo.alpha else 0
        return plan_step(batch, max_tokens=self.max_tokens, max_sites=max_sites, pairs=pairs)

    # ---- the step ------------------------------------------------------------------------------------------------

    def step(self, plan: StepPlan, hinted: Hinted | None) -> dict[str, float]:
        """Train one batch; returns its metrics. `hinted` None: this step goes without the SDPO channel."""
        step = plan.batch.id
        collated = [self._collate(micro.samples) for micro in plan.micro_batches]
        gated = hinted is not None and hinted.accuracy is not None and hinted.accuracy < self.sdpo.min_hinted_accuracy
        channels = self._rollout_channels(plan, collated, None if gated else hinted)
        if plan.chosen:
            with self.spans("trainer/replay"):
                channels["replay"] = self._replay_channel(plan)
        with self.spans("trainer/optimizer"):
            rate = self._apply(channels, step)
        metrics: dict[str, float] = {"optimizer/lr": rate, "sdpo/gated": float(gated)}
        metrics |= {"sdpo/sites": float(len(plan.contexts)), "sdpo/sites_left_out": float(plan.sites_left_out)}
        metrics |= {"replay/pairs": float(len(plan.chosen))}
        if hinted is not None:
            metrics["sdpo/teacher_version"] = float(hinted.version)
            if hinted.accuracy is not None:
                metrics["sdpo/hinted_accuracy"] = hinted.accuracy
        for name, channel in channels.items():
            metrics |= channel.figures(name)
        return metrics

    def _rollout_channels(self, plan: StepPlan, collated: list[Tensors], hinted: Hinted | None) -> dict[str, Channel]:
        """The policy and SDPO channels, which share each micro-batch's forward pass."""
        policy, sdpo, mismatch = Channel(), Channel(), Channel()
        references = self._reference_logprobs(collated)
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
                logits = self.model(input_ids=c["token_ids"], attention_mask=c["attention_mask"]).logits
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
            rows = [next(counts) for _ in micro.sites] if hinted else []
            with self.spans("trainer/backward"):
                policy.add(found.loss, self.parameters, keep_graph=sum(rows) > 0)
            policy.count(found.metrics, found.count)
            kl = kl_estimate(logprobs.detach(), c["behaviour_logprobs"], "k3")
            mismatch.count(
                {"kl": (kl * c["loss_mask"]).sum() / c["loss_mask"].sum().clamp(min=1)}, c["loss_mask"].sum()
            )
            if hinted and sum(rows):
                student = gather_sites(logits, micro.sites, rows)
                with self.spans("trainer/wait_logits", waiting=True):
                    teacher = hinted.read(sum(rows)).to(student.device)
                distilled = sdpo_loss(student, teacher, config=self.sdpo.loss, normalizer=sdpo_sum, t=t)
                with self.spans("trainer/backward"):
                    sdpo.add(distilled.loss, self.parameters, keep_graph=False)
                sdpo.count(distilled.metrics, distilled.count)
        if t is not None and sdpo.gradient is not None:
            self.taid.update(sdpo.loss, plan.batch.id + 1)
        channels = {"policy": policy, "sdpo": sdpo} if sdpo.gradient is not None else {"policy": policy}
        channels["mismatch"] = mismatch
        return channels

    def _replay_channel(self, plan: StepPlan) -> Channel:
        channel = Channel()
        lengths = [max(c.length, r.length) * 2 for c, r in zip(plan.chosen, plan.rejected, strict=True)]
        for indices in micro_batches(lengths, self.max_tokens):
            chosen = self._responses([plan.chosen[i] for i in indices])
            rejected = self._responses([plan.rejected[i] for i in indices])
            found = preference_loss(chosen, rejected, self.replay.loss, normalizer=float(len(plan.chosen)))
            channel.add(found.loss, self.parameters, keep_graph=False)
            channel.count(found.metrics, found.count)
        return channel

    def _responses(self, samples: list[TrainSample]) -> Responses:
        c = self._collate(samples)
        ids, mask = c["token_ids"], c["attention_mask"]
        logprobs = token_logprobs(self.model(input_ids=ids, attention_mask=mask).logits, ids)
        reference = None
        if self.replay.loss.objective == "dpo":
            reference = self._reference(c, temperature=1.0)
        return Responses(logprobs, c["loss_mask"], reference)

    def _collate(self, samples: list[TrainSample]) -> Tensors:
        device = self.parameters[0].device
        return {name: tensor.to(device) for name, tensor in collate(samples, pad_id=self.eos_id).items()}

    # ---- the reference policy ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reference(self, c: Tensors, temperature: float) -> torch.Tensor:
        if self.reference is None:
            raise ValueError("this loss compares with the initial policy: give the learner a reference model")
        logits = self.reference(input_ids=c["token_ids"], attention_mask=c["attention_mask"]).logits
        return token_logprobs(logits, c["token_ids"], temperature=temperature)

    def _reference_logprobs(self, collated: list[Tensors]) -> list[torch.Tensor | None]:
        if not self.policy.kl_beta:
            return [None] * len(collated)
        return [self._reference(c, self.temperature) for c in collated]

    def _advantages(
        self, plan: StepPlan, collated: list[Tensors], references: list[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Each micro-batch's advantages (B,), with the KL taken off where it belongs to the reward."""
        if not self.policy.kl_in_reward:
            return [c["advantages"] for c in collated]
        samples = [s for micro in plan.micro_batches for s in micro.samples]
        task_of = {task: n for n, task in enumerate(dict.fromkeys(s.rollout_id.rpartition("/")[0] for s in samples))}
        groups = torch.tensor([task_of[s.rollout_id.rpartition("/")[0]] for s in samples])
        # A group may be spread over micro-batches, so all are brought to one width before the group means are taken.
        width = max(c["loss_mask"].shape[1] for c in collated)
        with torch.no_grad():
            current = [
                token_logprobs(
                    self.model(input_ids=c["token_ids"], attention_mask=c["attention_mask"]).logits, c["token_ids"],
                    temperature=self.temperature,
                )
                for c in collated
            ]  # fmt: skip
        adjusted = kl_in_reward(
            torch.cat([c["advantages"] for c in collated]),
            torch.cat([_widened(x, width) for x in current]),
            torch.cat([_widened(x, width) for x in references if x is not None]),
            torch.cat([_widened(c["loss_mask"], width) for c in collated]),
            groups,
            beta=self.policy.kl_beta,
            scaling=ADVANTAGE_SCALING[self.policy.objective],
        )
        return list(adjusted.split([len(c["advantages"]) for c in collated]))

    # ---- the optimizer -------------------------------------------------------------------------------------------

    def _apply(self, channels: dict[str, Channel], step: int) -> float:
        """Clip each channel on its own, weigh, sum, and let AdamW step; returns the learning rate."""
        terms = {"policy": (1.0, 1.0), "sdpo": (self.sdpo.alpha, self.sdpo.max_grad_norm),
                 "replay": (self.replay.beta, self.replay.max_grad_norm)}  # fmt: skip
        for parameter in self.parameters:
            parameter.grad = None
        for name, (weight, limit) in terms.items():
            channel = channels.get(name)
            if channel is None or channel.gradient is None:
                continue
            norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in channel.gradient])))
            channel.sums["grad_norm"] = norm * max(channel.weight, 1.0)
            scale = weight * min(1.0, limit / (norm + 1e-6))
            for parameter, g in zip(self.parameters, channel.gradient, strict=True):
                parameter.grad = g * scale if parameter.grad is None else parameter.grad.add_(g, alpha=scale)
        rate = self.optimizer_config.rate(step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return rate


def needs_reference(policy: PolicyConfig, replay: ReplayConfig) -> bool:
    """Whether these settings compare with the initial policy."""
    return policy.kl_beta > 0 or (replay.beta > 0 and replay.loss.objective == "dpo")


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """(B, T) padded on the right with zeros (False) to (B, width)."""
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))
