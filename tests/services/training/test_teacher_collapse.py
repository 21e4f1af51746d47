"""Why the teacher is frozen by default: distilled from its own present self, the demo's policy forgets the task.

The same model, problems, random state and learning rate, and the SDPO channel alone: only the teacher's weights differ.
"""

from __future__ import annotations

from statistics import fmean

import pytest
import torch
from toolbox_player import ask, mean_reward, play_groups

from mesh.messages import TrainBatch
from services.demo import warm_start
from services.losses.policy import PolicyConfig
from services.models import load_model, load_tokenizer
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.training.hinted import HintedTeacher, HintedTeacherConfig
from services.training.learner import Learner
from services.training.policy_model import PolicyModel

STEPS, PROBLEMS, GROUP = 10, 4, 8


def distill(weights: str) -> tuple[list[float], float]:
    """Mean reward (1 is best) of each step's rollouts, and the final teacher's hinted accuracy."""
    torch.set_num_threads(1)
    path = str(warm_start.demo_model("easy"))
    tokenizer, policy = load_tokenizer(path), load_model(path)
    config = HintedTeacherConfig(**({"weights": weights} if weights != "the default" else {}))
    teacher = HintedTeacher(load_model(path), policy, config)
    learner = Learner(
        PolicyModel(policy), None, lambda text: [], tokenizer.eos_token_id, steps=STEPS,
        optimizer=OptimizerConfig(lr=1e-3, schedule="constant"), policy=PolicyConfig(),
        sdpo=SDPOConfig(alpha=1.0, hinted=config), replay=ReplayConfig(beta=0.0),
    )  # fmt: skip
    rewards = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for step in range(STEPS):
            groups = play_groups(policy, tokenizer, range(step * PROBLEMS, (step + 1) * PROBLEMS), GROUP, step)
            rewards.append(mean_reward(groups))
            for group in groups:
                group.advantages = [0.0] * GROUP  # no reinforcement
            plan = learner.plan(TrainBatch(step, groups, []))
            learner.step(plan, ask(teacher, plan))
            teacher.follow(step + 1, dict(policy.named_parameters()))
    taught_by = load_model(path)
    if weights == "live":
        taught_by.load_state_dict(policy.state_dict())
    return rewards, warm_start.hinted_accuracy(taught_by, tokenizer, "easy", problems=32)


@pytest.mark.timeout(900)  # the demo's model is built on first use
def test_a_live_teacher_collapses_with_its_student_and_the_default_does_not():
    frozen_rewards, frozen_accuracy = distill("the default")
    live_rewards, live_accuracy = distill("live")
    assert frozen_rewards[0] == live_rewards[0] < 0.2
    assert frozen_accuracy > 0.9
    assert fmean(frozen_rewards[-3:]) > 0.35
    assert live_accuracy < 0.3
    assert fmean(live_rewards[-3:]) < 0.15
