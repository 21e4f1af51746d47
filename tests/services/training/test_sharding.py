"""Several procs train as one does; what is kept is in float32; a proc that is gone is noticed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from procs import on_procs
from sharded import sharded_learner, train, trained, whole_weights

from services.training.sharding import Replica, alone, shard

STEPS = 5


def assert_equal_figures(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(
    ("size", "settings", "even"),
    [
        (2, {}, True),
        (3, {"max_tokens": 1000}, False),  # one micro-batch: two procs have nothing but empty passes
        (2, {"kl_in_reward": True, "frozen": ("layers.0", "embed_tokens")}, True),
        (2, {"model": {"checkpointing": True, "packing": False}}, True),
        (2, {"tune": {"kind": "lora", "rank": 4}, "model": {"checkpointing": True}}, True),
    ],
)
def test_several_procs_give_the_losses_and_weights_of_one(size: int, settings: dict[str, Any], even: bool) -> None:
    expected, weights = trained(Replica(), STEPS, settings)
    assert all(metrics["sdpo/grad_norm"] > 0 and metrics["replay/grad_norm"] > 0 for metrics in expected)
    found = on_procs(size, trained, STEPS, settings, even)
    for metrics, sharded in found:
        assert_equal_figures(metrics, expected)
        assert (sharded - weights).abs().max() < 1e-5
    assert len({tuple(map(float, sharded[:50])) for _, sharded in found}) == 1


def shares(replica: Replica) -> tuple[int, int, bool]:
    learner = sharded_learner(replica)
    head = learner.policy_model.model.lm_head.weight
    local = sum(parameter.to_local().numel() for parameter in learner.parameters)
    train(learner, replica, range(1))
    moments = sum(state["exp_avg"].to_local().numel() for state in learner.optimizer.state.values())
    assert all(parameter.grad.to_local().shape == parameter.to_local().shape for parameter in learner.parameters)
    return local, moments, head is learner.policy_model.model.model.embed_tokens.weight


def test_each_proc_holds_its_part_of_parameters_gradients_and_moments_and_tied_ones_stay_tied() -> None:
    total = sum(parameter.numel() for parameter in sharded_learner(Replica()).parameters)
    found = on_procs(2, shares)
    assert sum(local for local, _, _ in found) == total
    assert all(local == moments and tied for local, moments, tied in found)
    assert all(0.4 * total < local < 0.6 * total for local, _, _ in found)


def bfloat16_course(replica: Replica) -> list[torch.Tensor]:
    """The weights before, after 1 and after 20 tiny steps on one batch."""
    learner = sharded_learner(replica, dtype="bfloat16", optimizer={"lr": 2e-5, "weight_decay": 0.0})
    course = [whole_weights(learner)]
    for steps in (1, 19):
        for _ in range(steps):
            train(learner, replica, range(1))
        course.append(whole_weights(learner))
    return course


@pytest.mark.parametrize("size", [1, 2])
def test_updates_that_bfloat16_does_not_resolve_accumulate(size: int) -> None:
    before, after_1, after_20 = on_procs(size, bfloat16_course)[0]
    assert before.dtype == torch.float32
    large = before.abs() > 0.05  # a step of the optimizer is less than a tenth of what bfloat16 resolves there
    assert (after_1 - before)[large].abs().mean() == pytest.approx(2e-5, rel=0.2)
    assert (after_1.bfloat16() != before.bfloat16())[large].float().mean() < 0.05
    # Rounded to bfloat16 after each step, nearly all would stand where they began.
    assert (after_20 - before)[large].abs().mean() > 12e-5
    assert (after_20.bfloat16() != before.bfloat16())[large].float().mean() > 0.2


def computed(replica: Replica, dtype: Any) -> tuple[torch.dtype, torch.dtype]:
    """The type of a layer's output and of what the optimizer gets."""
    learner = sharded_learner(replica, dtype=dtype)
    seen: list[torch.dtype] = []
    learner.policy_model.model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    train(learner, replica, range(1))
    gradients = {parameter.grad.dtype for parameter in learner.parameters}
    assert len(gradients) == 1
    return seen[0], gradients.pop()


@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16_is_what_is_computed_in_and_gradients_are_float32(size: int) -> None:
    for dtype in ("float32", "bfloat16"):
        assert set(on_procs(size, computed, dtype)) == {(getattr(torch, dtype), torch.float32)}


def test_one_proc_in_float32_leaves_the_model_as_it_is() -> None:
    replica = alone()
    model = torch.nn.Linear(2, 2)
    weight = model.weight
    shard(model, replica)
    assert model.weight is weight
    assert replica.total({"a": 1.5}) == {"a": 1.5}
    replica.close()


def totals(replica: Replica) -> dict[str, float]:
    return replica.total({"all": 0.1 * (replica.rank + 1), f"only {replica.rank}": 1.0})


def test_totals_are_by_name_and_the_same_on_every_proc() -> None:
    found = on_procs(3, totals)
    assert found[0] == pytest.approx({"all": 0.6, "only 0": 1.0, "only 1": 1.0, "only 2": 1.0})
    assert found[0] == found[1] == found[2]


def outlive(replica: Replica, blow: int) -> tuple[str, float]:
    """What rank 0 is told when rank 1 is struck, and after how many seconds."""
    pids = replica.total({str(replica.rank): float(os.getpid())})
    if replica.rank == 1:
        time.sleep(60)
    learner = sharded_learner(replica)
    os.kill(int(pids["1"]), blow)
    began = time.monotonic()
    try:
        train(learner, replica, range(1))
    except RuntimeError as error:
        return type(error).__name__, time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.parametrize(("blow", "within_s"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, 8.0)])
def test_a_collective_fails_within_its_limit_when_a_proc_is_gone_or_stuck(blow: int, within_s: float) -> None:
    told, after_s = on_procs(2, outlive, blow, collective_s=4.0, lost=1)[0]
    assert told == "RuntimeError"
    assert after_s < within_s
