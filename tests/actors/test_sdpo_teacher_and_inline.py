"""The teacher in an actor of its own and the one in the trainer's process teach the same, to rounding.

One side is the teacher actor's own code with its store, read as the trainer reads it; the other makes rows when the
learner asks for them. Both go through the learner, on equal models.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import random

import pytest
import torch
from pydantic import ValidationError

from actors.remote_rows import RemoteRows
from actors.sdpo_teacher import SDPOTeacherActor
from mesh.messages import ErrorSite, Group, Rollout, Sequence, Task, TrainBatch, Turn, VersionSpan
from services.environments.config import EnvironmentConfig
from services.losses.policy import PolicyConfig
from services.losses.sdpo import SDPOLossConfig
from services.models import load_model
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.training.hinted import HintedTeacher, HintedTeacherConfig
from services.training.learner import Learner
from services.training.plan import Hinted
from services.training.policy_model import PolicyModel
from services.weights.config import WeightsConfig

LIMIT_S = 60.0
CHUNK = 5  # rows of logits at a time, on both sides; micro-batches have more


def batch():
    """Two groups of rollouts with a failing turn each, of several lengths; their advantages are 0."""
    rng, groups = random.Random(0), []
    for index in range(2):
        task, rollouts = Task(f"t{index}", index, index), []
        for member in range(3):
            cut, length = rng.randrange(4, 9), rng.randrange(3, 8)
            ids = [rng.randrange(3, 40) for _ in range(cut + 1 + length)]
            hint = [rng.randrange(3, 40) for _ in range(4)] + [ids[cut]]
            site = ErrorSite("tool_not_found", "no", "h", "template", cut=cut, hint_ids=hint)
            turn = Turn(0, cut + 1, len(ids), "action", "seen", None, site)
            sequence = Sequence(ids, [-1.0] * len(ids), [(cut + 1, len(ids))], [VersionSpan(0, cut + 1, len(ids))])
            rollouts.append(
                Rollout(f"t{index}/{member}", task, member, "", [sequence], [turn], [], "finished", 0.0, 0.0)
            )
        groups.append(Group(task, rollouts, [0.0] * 3, True, 0))
    return TrainBatch(0, groups, [])


def a_learner(model, loss):
    return Learner(
        PolicyModel(copy.deepcopy(model), logits_chunk=CHUNK), None, lambda text: [], 1, steps=10,
        optimizer=OptimizerConfig(), policy=PolicyConfig(max_completion_length=10), max_tokens=40,
        sdpo=SDPOConfig(alpha=1.0, loss=SDPOLossConfig(**loss), max_grad_norm=1e9), replay=ReplayConfig(beta=0.0),
    )  # fmt: skip


def gradients(learner):
    return torch.cat([p.grad.flatten() for p in learner.parameters])


async def step_with_the_actor(learner, model_path, config, policy):
    """One step on the rows of a teacher actor that has taken in `policy`; how many bytes they were, too."""
    weights = WeightsConfig(via="shm")
    actor = SDPOTeacherActor("sdpo-teacher-0", config, model_path, "http://nowhere", EnvironmentConfig(), weights)
    actor._probe_due = 1000  # there is no environment to measure in
    await actor.setup()
    actor.teacher.follow(1, policy)
    plan = learner.plan(batch())
    ask = inspect.unwrap(SDPOTeacherActor.logits._method)
    ref = await ask(actor, plan.contexts, "trainer-0/0")
    remote = RemoteRows.of_plan(ref, plan, asyncio.get_running_loop(), chunk_rows=CHUNK, via="shm")
    hinted = Hinted.from_reader(remote, ref.row_offsets, version=ref.teacher_version)
    metrics = await asyncio.to_thread(learner.step, plan, hinted)
    assert len(plan.micro_batches) > 1
    assert max(sum(len(site.context.turn_ids) for site in micro.sites) for micro in plan.micro_batches) > CHUNK
    await actor.teardown()
    return metrics, ref.region.nbytes


def step_inline(learner, model_path, config, policy):
    initial = load_model(model_path)
    teacher = HintedTeacher(initial, initial, config)
    teacher.follow(1, policy)
    plan = learner.plan(batch())
    rows = teacher.align(plan.contexts)
    return learner.step(plan, Hinted.from_reader(rows.in_order(), rows.row_offsets, version=rows.version))


def both_ways(model_path, loss, logits=None, **hinted):
    """Metrics and gradients of a step with the actor and of one inline; the bytes of the answer."""
    model = load_model(model_path)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    policy = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = HintedTeacherConfig(row_chunk=3, reject_below=0.01, logits=logits or {}, **hinted)
    remote, inline = a_learner(model, loss), a_learner(model, loss)
    running = step_with_the_actor(remote, model_path, config, policy)
    metrics, nbytes = asyncio.run(asyncio.wait_for(running, LIMIT_S))
    return (metrics, gradients(remote)), (step_inline(inline, model_path, config, policy), gradients(inline)), nbytes


@pytest.mark.parametrize("weights", ["initial", "ema", "trust_region"])
@pytest.mark.parametrize("align", ["turn", "prefix"])
@pytest.mark.parametrize(
    "loss", [{"beta": 0.0}, {"beta": 0.5, "temperature": 1.5}, {"kind": "taid"}, {"support": "student", "top_k": 4}]
)
def test_both_give_the_same_loss_and_gradients(model_path, loss, align, weights):
    (remote, remote_gradient), (inline, inline_gradient), _ = both_ways(
        model_path, loss, align=align, weights=weights, ema=0.5, trust=0.5
    )
    assert remote["sdpo/rows"] == inline["sdpo/rows"] > 6
    assert remote["sdpo/loss"] == pytest.approx(inline["sdpo/loss"], abs=1e-5)
    assert remote["sdpo/loss"] > 1e-3
    assert remote["sdpo/grad_norm"] > 1e-3
    torch.testing.assert_close(remote_gradient, inline_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tail", [True, False])
def test_rows_that_travel_cut_give_the_loss_of_whole_ones_on_their_support(model_path, tail):
    loss = {"support": "teacher", "top_k": 6, "tail": tail, "beta": 0.5}
    (cut, cut_gradient), (whole, whole_gradient), nbytes = both_ways(model_path, loss, {"top_k": 6}, align="turn")
    assert cut["sdpo/loss"] == pytest.approx(whole["sdpo/loss"], abs=1e-5)
    assert whole["sdpo/loss"] > 1e-3
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=1e-5, atol=1e-5)
    assert nbytes == 4096 + 52 * cut["sdpo/rows"]


@pytest.mark.parametrize("loss", [{}, {"support": "student", "top_k": 6}, {"support": "teacher", "top_k": 5}])
def test_a_loss_that_cut_rows_are_not_enough_for_is_refused_with_the_fix(loss):
    with pytest.raises(ValidationError, match=r"sdpo.hinted.logits.top_k = 6 .*sdpo.hinted.logits.top_k = 0"):
        SDPOConfig(loss=loss, hinted={"logits": {"top_k": 6}})
    SDPOConfig(loss={"support": "teacher", "top_k": 6}, hinted={"logits": {"top_k": 6}})


def test_bfloat16_rows_give_nearly_the_same_loss(model_path):
    (half, half_gradient), (exact, exact_gradient), _ = both_ways(model_path, {"beta": 0.0}, {"dtype": "bfloat16"})
    assert half["sdpo/loss"] != exact["sdpo/loss"]
    assert half["sdpo/loss"] == pytest.approx(exact["sdpo/loss"], rel=0.01)
    assert (half_gradient - exact_gradient).norm() < 0.01 * exact_gradient.norm()
