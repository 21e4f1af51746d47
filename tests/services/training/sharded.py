"""Learners on the procs of a replica, and what the tests want to know of them. Called by `procs.on_procs`."""

from __future__ import annotations

from typing import Any

import torch
from training_builders import EOS, answer, batch, encode, tiny_model, whole_turn_teacher

from services.losses.policy import PolicyConfig
from services.losses.preference import PreferenceConfig
from services.losses.sdpo import SDPOLossConfig
from services.models import load_model
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.training.learner import Learner
from services.training.policy_model import PolicyModel
from services.training.sharding import Replica, shard, whole
from services.tuning import TuneConfig, prepare


def sharded_learner(
    replica: Replica,
    *,
    dtype: Any = "float32",
    max_tokens: int = 60,
    kl_in_reward: bool = False,
    frozen: tuple[str, ...] = (),
    model_seed: int = 0,
    model_path: str | None = None,
    model: dict[str, Any] | None = None,
    tune: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> Learner:
    """This proc's learner, with all channels on, on its shards of the tiny model."""
    initial = tiny_model()
    trained = tiny_model(model_seed) if model_path is None else load_model(model_path)
    torch.manual_seed(0)  # an adapter begins at random
    policy_model = PolicyModel(prepare(trained, TuneConfig(**(tune or {}))), logits_chunk=8, **(model or {}))
    for name, parameter in policy_model.named_parameters():
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)
    shard(policy_model, replica, dtype)
    reference = PolicyModel(initial.to(getattr(torch, dtype)), logits_chunk=8)
    shard(reference, replica)
    return Learner(
        policy_model, reference, encode, EOS, steps=100, max_tokens=max_tokens, total=replica.total,
        optimizer=OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.01, "schedule": "constant", **(optimizer or {})}),
        policy=PolicyConfig(
            objective="dr_grpo", max_completion_length=10, kl_beta=0.05, kl_in_reward=kl_in_reward, correction="tis"
        ),
        sdpo=SDPOConfig(alpha=0.3, loss=SDPOLossConfig(kind="taid")),
        replay=ReplayConfig(beta=0.2, loss=PreferenceConfig(objective="dpo", nll_weight=0.1)),
    )  # fmt: skip


def train(learner: Learner, replica: Replica, steps: range, *, even: bool = True) -> list[dict[str, float]]:
    """Steps on batches that all procs know, each on its share; their metrics. `even`: planned for so many procs."""
    behaviour, teacher = tiny_model(), whole_turn_teacher(tiny_model(seed=1))
    metrics = []
    for number in steps:
        plan = learner.plan(batch(behaviour, seed=number, step=number), replica.size if even else 1)
        share = plan.share(replica.rank, replica.size)
        metrics.append(learner.step(share, answer(teacher, share, version=7, accuracy=0.9) if share.contexts else None))
    return metrics


def whole_weights(learner: Learner) -> torch.Tensor:
    return torch.cat([whole(parameter.detach()).flatten() for parameter in learner.model.parameters()])


def trained(
    replica: Replica, steps: int, settings: dict[str, Any], even: bool = True
) -> tuple[list[dict[str, float]], torch.Tensor]:
    learner = sharded_learner(replica, **settings)
    return train(learner, replica, range(steps), even=even), whole_weights(learner)
