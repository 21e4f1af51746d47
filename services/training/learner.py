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

A trainer of several procs runs one learner in each, on its share of the plan. What the step divides by or decides on is
then added up over the procs first (`total`), and gradients must be *summed* over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mesh.messages import TrainBatch
from services.losses.corrections import finite_tokens
from services.losses.kl import check_kl_in_reward, kl_estimate, kl_in_reward
from services.losses.policy import ADVANTAGE_SCALING, PolicyConfig, policy_loss, policy_normalizer
from services.losses.preference import Responses, preference_loss
from services.losses.reduction import masked_mean
from services.losses.sdpo import sdpo_loss
from services.losses.taid import TAIDConfig, TAIDScheduler
from services.losses.topk import TopKRows
from services.rollouts.advantages import scorable
from services.rollouts.collate import collate
from services.rollouts.samples import TrainSample, pair_samples
from services.telemetry.spans import Spans
from services.training.channel import Averages, Channel, Total
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.training.packing import Packed, pack
from services.training.plan import Hinted, MicroBatch, PairBatch, StepPlan, plan_step, site_rows
from services.training.policy_model import Distillation, PolicyModel
from services.weights.logits import LogitsGone
from services.weights.region import RegionError

if TYPE_CHECKING:
    from services.diloco.replicas import Outer


@dataclass(slots=True)
class Inputs:
    """One forward pass: its samples packed, and what the losses need to know of them."""

    packed: Packed
    loss_mask: torch.Tensor  # (B, T - 1)
    behaviour_logprobs: torch.Tensor  # (B, T - 1)
    advantages: torch.Tensor  # (B,)
    truncated: torch.Tensor  # (B,)
    reference: torch.Tensor | None = None  # (B, T - 1) log-probabilities under the initial policy, where compared with


class Learner:
    """Owns the model being trained and its optimizer. Parameters that require no gradient stay as they are.

    `reference` is the initial policy, None where nothing compares with it. `encode` turns a text into ids without
    special tokens, `eos_id` ends a turn. `steps` is the length of the run for the schedules, `temperature` the one that
    rollouts are sampled at, `max_tokens` those of one forward pass (with their padding, if the model runs padded).
    `watch_kl`: measure the KL to the initial policy in every step, whether or not it is part of a loss.
    `total` adds figures up over the trainer's procs. ValueError for settings that need a reference and have none, or
    for a KL in the reward of advantages that are divided by a standard deviation.
    """

    def __init__(
        self,
        policy_model: PolicyModel,
        reference: PolicyModel | None,
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
        total: Total = dict,
        watch_kl: bool = False,
    ) -> None:
        """`advantage_scaling`: how the batch's advantages were scaled; None is as the objective's paper does."""
        self.policy_model, self.reference, self.encode, self.eos_id = policy_model, reference, encode, eos_id
        self.steps, self.optimizer_config, self.policy, self.sdpo, self.replay = steps, optimizer, policy, sdpo, replay
        self.temperature, self.max_tokens, self.total = temperature, max_tokens, total
        self.watch_kl = watch_kl and not policy.kl_in_loss  # which measures it
        self.advantage_scaling = advantage_scaling or ADVANTAGE_SCALING[policy.objective]
        if policy.kl_in_reward:
            check_kl_in_reward(policy.kl_beta, self.advantage_scaling)
        if needs_reference(policy, replay, watch_kl) and reference is None:
            raise ValueError(
                "policy.kl_beta, watch_kl and the dpo objective compare with the initial policy: pass a reference"
            )
        self.spans = spans or Spans()
        self.taid = TAIDScheduler(TAIDConfig(total_steps=steps))
        self.outer: Outer | None = None  # of a trainer that is one of several replicas
        self.parameters = [p for p in policy_model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    @property
    def model(self) -> Any:
        """The Hugging Face model being trained (`PreTrainedModel`, or its adapter's wrapper)."""
        return self.policy_model.model

    def plan(self, batch: TrainBatch, procs: int = 1) -> StepPlan:
        """Lay out the step: which samples run together, which failing turns are distilled, which pairs are compared.

        `procs`: between how many `share` will deal it out.
        """
        pairs = pair_samples(batch.pairs, self.encode, self.eos_id) if self.replay.beta else ([], [])
        max_sites = self.sdpo.max_sites if self.sdpo.alpha else 0
        padded = not self.policy_model.packing
        return plan_step(
            batch, max_tokens=self.max_tokens, max_sites=max_sites, pairs=pairs, padded=padded, procs=procs
        )

    # ---- the step ------------------------------------------------------------------------------------------------

    def step(self, plan: StepPlan, hinted: Hinted | None) -> dict[str, float]:
        """Train one batch; returns its metrics. `hinted` None: this step goes without the SDPO channel.

        It also does when the teacher's hinted accuracy is too low ("sdpo/gated"), or when its rows cannot be read
        ("sdpo/unread"; `hinted.failure` says why). ValueError for an answer that does not fit the plan.
        """
        if hinted is not None:
            hinted.check(plan)
        for parameter in self.parameters:
            parameter.grad = None  # of the step before
        gradient: list[torch.Tensor | None] = [None] * len(self.parameters)
        channels, metrics = self._rollout_channels(plan, hinted)
        # Before the next channel makes a gradient, because each is as large as the model.
        metrics |= self._pour(channels, gradient)
        if plan.pair_batches:
            with self.spans("trainer/replay"):
                replay = {"replay": self._replay_channel(plan)}
            metrics |= self._pour(replay, gradient)
            channels |= replay
        for name, channel in channels.items():
            metrics |= channel.figures(name, self.total)
        metrics["replay/pairs"] = float(plan.pairs)
        metrics["optimizer/lr"] = self._update(gradient, plan.batch)
        return metrics | (self.outer.metrics() if self.outer is not None else {})

    def _rollout_channels(self, plan: StepPlan, hinted: Hinted | None) -> tuple[dict[str, Channel], dict[str, float]]:
        """The policy and SDPO channels, which share each micro-batch's forward pass, and what became of the hints."""
        policy = Channel(1.0, self.optimizer_config.max_grad_norm)
        sdpo = Channel(self.sdpo.alpha, self.sdpo.max_grad_norm)
        mismatch, drift = Averages(), Averages()
        with self.spans("trainer/inputs"):
            compared = self.policy.kl_beta > 0 or self.watch_kl
            inputs = [self._inputs(m.samples, self.temperature, compared) for m in plan.micro_batches]
            self._take_kl_off_advantages(plan, inputs)
            normalizer = self.total({"policy": sum(map(self._normalizer, inputs))})["policy"]
        figures, rows = self._sdpo_figures(plan, hinted)
        counts = iter(hinted.row_counts if hinted else [])
        for micro, x in zip(plan.micro_batches, inputs, strict=True):
            distillation = None
            if micro.distills and rows and not figures["sdpo/gated"]:
                distillation = self._distillation(micro, x, [next(counts) for _ in micro.sites], hinted, rows)
            with self.spans("trainer/forward"):
                output = self.policy_model(x.packed, self.temperature, distillation)
                logprobs = x.packed.spread(output.logprobs)
                old, generator = (
                    (logprobs.detach(), x.behaviour_logprobs)
                    if self.policy.correction != "none"
                    else (x.behaviour_logprobs, None)
                )
                found = policy_loss(
                    logprobs, old, x.advantages, x.loss_mask, self.policy, normalizer=normalizer,
                    ref_logprobs=x.reference, generator_logprobs=generator, truncated=x.truncated,
                )  # fmt: skip
            with self.spans("trainer/backward"):
                policy.add(found, self.parameters, keep_graph=output.distilled is not None)
                if output.distilled is not None:
                    sdpo.add(output.distilled, self.parameters, keep_graph=False)
            mismatch.add(*_mean_kl("kl", logprobs, x.behaviour_logprobs, x.loss_mask))
            if self.watch_kl and x.reference is not None:
                drift.add(*_mean_kl("ref_kl", logprobs, x.reference, x.loss_mask))
        figures |= mismatch.over_procs(self.total).figures("mismatch")
        if self.watch_kl:
            figures |= drift.over_procs(self.total).figures("policy")
        unread = self.total({"unread": float(hinted is not None and bool(hinted.failure))})["unread"]
        figures["sdpo/unread"] = float(unread > 0)
        if sdpo.gradient is None or unread:
            # A teacher that dies while it is read costs the step this channel, whole: half of it would be biased.
            return {"policy": policy}, figures
        if self.sdpo.loss.kind == "taid":
            self.taid.update(self.total({"loss": sdpo.loss})["loss"], plan.batch.id + 1)
        return {"policy": policy, "sdpo": sdpo}, figures

    def _distillation(
        self, micro: MicroBatch, x: Inputs, counts: list[int], hinted: Hinted | None, rows: float
    ) -> Distillation:
        """The micro-batch's part of the SDPO loss, which is normalized by the step's `rows`."""
        loss = partial(
            sdpo_loss,
            config=self.sdpo.loss,
            normalizer=rows,
            t=self.taid.t if self.sdpo.loss.kind == "taid" else None,
        )
        at = site_rows(micro.sites, counts, x.packed.starts).to(x.packed.ids.device)
        return Distillation(
            at, partial(self._read, hinted), lambda student, teacher: loss(student, teacher.to(student.device))
        )

    def _read(self, hinted: Hinted | None, count: int) -> torch.Tensor | TopKRows | None:
        """The teacher's next `count` rows; None, and `hinted.failure`, when they cannot be read."""
        if hinted is None or hinted.failure:
            return None
        # The forward pass that asks for the rows does not work while it waits for them.
        with self.spans.interrupted("trainer/forward"), self.spans("trainer/wait_logits", waiting=True):
            try:
                return hinted.read(count)
            except (LogitsGone, RegionError, TimeoutError) as error:
                hinted.failure = f"{type(error).__name__}: {error}"
                return None

    def _sdpo_figures(self, plan: StepPlan, hinted: Hinted | None) -> tuple[dict[str, float], float]:
        """What becomes of the plan's failing turns, what the teacher said of itself, and its rows; of all procs."""
        answered = hinted is not None
        accuracy = hinted.accuracy if hinted else None
        gated = accuracy is not None and accuracy < self.sdpo.min_hinted_accuracy
        own = {
            "sites": float(len(plan.contexts)),
            "sites_left_out": float(plan.sites_left_out),
            "missing": float(bool(plan.contexts) and not answered),
            "gated": float(gated),
        }
        said = Averages()
        if hinted is not None:
            own["rows"] = float(sum(hinted.row_counts))
            own["contexts_left_out"] = float(sum(count == 0 for count in hinted.row_counts))
            said.add({"teacher_version": float(hinted.version)}, 1)
        measured = Averages()
        if accuracy is not None:
            measured.add({"hinted_accuracy": accuracy}, 1)
        own = self.total(own)
        # The procs go with or without the channel together: one that has no answer leaves it out for all.
        own |= {name: float(own[name] > 0) for name in ("missing", "gated")}
        figures = {f"sdpo/{name}": value for name, value in own.items()}
        figures |= said.over_procs(self.total).figures("sdpo") | measured.over_procs(self.total).figures("sdpo")
        return figures, 0.0 if own["missing"] else own.get("rows", 0.0)

    def _replay_channel(self, plan: StepPlan) -> Channel:
        channel = Channel(self.replay.beta, self.replay.max_grad_norm)
        for batch in plan.pair_batches:
            chosen, rejected = self._responses(batch)
            found = preference_loss(chosen, rejected, self.replay.loss, normalizer=float(plan.pairs))
            channel.add(found, self.parameters, keep_graph=False)
        return channel

    def _responses(self, batch: PairBatch) -> tuple[Responses, Responses]:
        """Both sides from one forward pass. Nobody sampled them at a temperature: they are compared at 1."""
        number = len(batch.chosen)
        x = self._inputs([*batch.chosen, *batch.rejected], 1.0, self.replay.loss.objective == "dpo")
        logprobs = x.packed.spread(self.policy_model(x.packed).logprobs)
        halves = slice(0, number), slice(number, None)
        chosen, rejected = (
            Responses(logprobs[half], x.loss_mask[half], None if x.reference is None else x.reference[half])
            for half in halves
        )
        return chosen, rejected

    def _inputs(self, samples: list[TrainSample], temperature: float, compared: bool) -> Inputs:
        device = self.policy_model.device
        packed = pack(samples, device)
        x = Inputs(packed, **{name: tensor.to(device) for name, tensor in collate(samples).items()})
        if compared:
            assert self.reference is not None
            with torch.no_grad():
                x.reference = packed.spread(self.reference(packed, temperature).logprobs)
        return x

    def _normalizer(self, x: Inputs) -> float:
        return policy_normalizer(x.loss_mask, self.policy, old_logprobs=x.behaviour_logprobs, truncated=x.truncated)

    @torch.no_grad()
    def _take_kl_off_advantages(self, plan: StepPlan, inputs: list[Inputs]) -> None:
        """Where the KL belongs to the reward, set each micro-batch's advantages (B,) accordingly.

        The KL is a rollout's, over all of its sequences, and so is the mean over its group. Both may be spread over
        micro-batches and procs, so they are taken before the advantages are dealt out to sequences again.
        """
        if not self.policy.kl_in_reward:
            return
        groups = plan.batch.groups
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        kl = {rollout.id: 0.0 for rollout in rollouts}
        for micro, x in zip(plan.micro_batches, inputs, strict=True):
            assert x.reference is not None
            current = x.packed.spread(self.policy_model(x.packed, self.temperature).logprobs)
            of_sequences = kl_estimate(current, x.reference, "k1").masked_fill(~x.loss_mask, 0.0).sum(1)
            for sample, value in zip(micro.samples, of_sequences.tolist(), strict=True):
                kl[sample.rollout_id] = kl.get(sample.rollout_id, 0.0) + value
        kl = self.total(kl)
        # k1 is a difference of logprobs, so a rollout's KL stands for its logprob against a reference of 0.
        of_rollouts = torch.tensor([[kl[rollout.id]] for rollout in rollouts]).reshape(-1, 1)
        adjusted = kl_in_reward(
            torch.tensor([advantage for group in groups for advantage in group.advantages]),
            of_rollouts,
            torch.zeros_like(of_rollouts),
            torch.ones_like(of_rollouts),
            torch.tensor([number for number, group in enumerate(groups) for _ in group.rollouts]),
            beta=self.policy.kl_beta,
            scaling=self.advantage_scaling,
            scorable=torch.tensor([bool(scorable([rollout.reward])) for rollout in rollouts]),
        )
        advantage_of = dict(zip((rollout.id for rollout in rollouts), adjusted.tolist(), strict=True))
        for micro, x in zip(plan.micro_batches, inputs, strict=True):
            # An empty sample is of no rollout.
            x.advantages = x.advantages.new_tensor([advantage_of.get(s.rollout_id, 0.0) for s in micro.samples])

    # ---- the optimizer -------------------------------------------------------------------------------------------

    def _pour(self, channels: dict[str, Channel], gradient: list[torch.Tensor | None]) -> dict[str, float]:
        """Clip each channel on its own, weigh it and add it to the step's gradient; returns the norms."""
        with self.spans("trainer/optimizer"):
            poured = {name: channel.pour(gradient) for name, channel in channels.items()}
        return {f"{name}/{figure}": value for name, figures in poured.items() for figure, value in figures.items()}

    def _update(self, gradient: list[torch.Tensor | None], batch: TrainBatch) -> float:
        """Let AdamW step, and with it the outer loop when a sync is due; returns the learning rate."""
        with self.spans("trainer/optimizer"):
            for parameter, g in zip(self.parameters, gradient, strict=True):
                parameter.grad = g
            rate = self.optimizer_config.rate(batch.id, self.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            if self.outer is not None:
                self.outer.step = batch.id + 1
                self.outer.trained(sum(rollout.sampled_tokens for group in batch.groups for rollout in group.rollouts))
            self.optimizer.step()
            if self.outer is not None and self.outer.step >= self.steps:
                self.outer.finish()
        return rate


def needs_reference(policy: PolicyConfig, replay: ReplayConfig, watch_kl: bool = False) -> bool:
    """Whether these settings compare with the initial policy."""
    return policy.kl_beta > 0 or watch_kl or (replay.beta > 0 and replay.loss.objective == "dpo")


def _mean_kl(
    name: str, logprobs: torch.Tensor, others: torch.Tensor, sampled: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """KL (k3) between the policy at the start of the step and another, over the sampled tokens, and how many those are.

    All are (B, T - 1). Tokens to which the other gave no finite logprob are left out.
    """
    mask = finite_tokens(sampled, others)
    return {name: masked_mean(kl_estimate(logprobs.detach(), others), mask)}, mask.sum()
