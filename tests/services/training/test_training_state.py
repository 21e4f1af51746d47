"""A checkpoint of the trainer continues exactly where it was written, and its policy is an ordinary model folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from procs import on_procs
from sharded import sharded_learner, whole_weights
from training_builders import EOS, batch, encode, group, pair, step, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from mesh.messages import TrainBatch
from services.demo.tiny_model import TinyModelConfig, build_model
from services.demo.tokenizer import build_tokenizer
from services.losses.policy import PolicyConfig
from services.losses.preference import PreferenceConfig
from services.losses.sdpo import SDPOLossConfig
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.training.hinted import HintedTeacher, HintedTeacherConfig
from services.training.learner import Learner
from services.training.policy_model import PolicyModel
from services.training.sharding import Replica
from services.training.state import load_state, save_state

SHAPE = TinyModelConfig(hidden_size=32, intermediate_size=48, layers=2, heads=1, head_dim=32)


def make_learner(model: Any, **optimizer: Any) -> Learner:
    """All channels on, with every piece of state that a step leaves behind."""
    return Learner(
        PolicyModel(model), PolicyModel(build_model(SHAPE, 0)), encode, EOS, steps=6, temperature=1.0, max_tokens=200,
        optimizer=OptimizerConfig(**{"lr": 1e-3, "warmup_steps": 2, "weight_decay": 0.01, **optimizer}),
        policy=PolicyConfig(objective="dapo"),
        sdpo=SDPOConfig(alpha=0.2, loss=SDPOLossConfig(kind="taid")),
        replay=ReplayConfig(beta=0.1, loss=PreferenceConfig(objective="dpo", nll_weight=0.1)),
    )  # fmt: skip


def train(learner: Learner, numbers: range) -> dict[str, float]:
    metrics: dict[str, float] = {}
    teacher = HintedTeacher(build_model(SHAPE, 1), None, HintedTeacherConfig(align="turn"))
    for number in numbers:
        rng = random.Random(number)
        made = TrainBatch(number, [group(rng, number, [1.0, 0.0, 0.5])], [pair(rng, number)])
        metrics = step(learner, made, teacher)
    return metrics


def test_the_step_after_a_resume_is_bit_identical_to_an_uninterrupted_one(tmp_path):
    through = make_learner(build_model(SHAPE, 0))
    train(through, range(3))
    save_state(tmp_path, through, build_tokenizer(), 3)
    noise = torch.rand(4)
    expected = train(through, range(3, 5))

    torch.manual_seed(999)
    resumed = make_learner(build_model(SHAPE, 9))  # whatever it held
    assert load_state(tmp_path, resumed) == 3
    assert torch.equal(torch.rand(4), noise)  # what is drawn next is drawn again
    metrics = train(resumed, range(3, 5))
    assert metrics == expected
    assert torch.equal(weights(resumed), weights(through))
    assert resumed.taid.state_dict() == through.taid.state_dict()


def test_a_resume_without_the_optimizers_state_would_differ(tmp_path):
    through = make_learner(build_model(SHAPE, 0))
    train(through, range(3))
    save_state(tmp_path, through, build_tokenizer(), 3)
    train(through, range(3, 4))
    fresh = make_learner(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    train(fresh, range(3, 4))
    assert not torch.equal(weights(fresh), weights(through))


def test_a_resume_continues_with_the_settings_of_its_own_configuration(tmp_path):
    learner = make_learner(build_model(SHAPE, 0))
    train(learner, range(1))
    save_state(tmp_path, learner, build_tokenizer(), 1)
    resumed = make_learner(build_model(SHAPE, 0), betas=(0.5, 0.6), eps=1e-4, weight_decay=0.3)
    load_state(tmp_path, resumed)
    for settings in resumed.optimizer.param_groups:
        assert (settings["betas"], settings["eps"], settings["weight_decay"]) == ((0.5, 0.6), 1e-4, 0.3)
    moments = [state["exp_avg"] for state in learner.optimizer.state_dict()["state"].values()]
    loaded = [state["exp_avg"] for state in resumed.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, loaded, strict=True))


def test_the_saved_policy_is_a_model_folder_with_its_chat_template(tmp_path):
    learner = make_learner(build_model(SHAPE, 0))
    train(learner, range(1))
    save_state(tmp_path, learner, build_tokenizer(), 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    for (name, saved), (same, trained) in zip(model.named_parameters(), learner.model.named_parameters(), strict=True):
        assert name == same
        assert torch.equal(saved, trained)
    chat = [{"role": "user", "content": "3+4*2"}, {"role": "hint", "content": "sum(a,b)"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>3+4*2<|end|><|hint|>sum(a,b)<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|end|>"


def test_the_state_of_another_model_is_refused(tmp_path):
    learner = make_learner(build_model(SHAPE, 0))
    step(learner, batch(pairs=0))
    save_state(tmp_path, learner, build_tokenizer(), 1)
    deeper = make_learner(build_model(SHAPE.model_copy(update={"layers": 3}), 0))
    with pytest.raises(ValueError, match=r"written for another model: 11 tensors differ, model\.layers\.2"):
        load_state(tmp_path, deeper)
    wider = make_learner(build_model(SHAPE.model_copy(update={"intermediate_size": 64}), 0))
    with pytest.raises(ValueError, match=r"down_proj\.weight is \(32, 64\) here and \(32, 48\) there"):
        load_state(tmp_path, wider)


# ---- several procs ---------------------------------------------------------------------------------------------------


def first_course(replica: Replica, path: Path, settings: dict[str, Any]) -> torch.Tensor:
    """Train three steps and save; the weights two steps later."""
    learner = sharded_learner(replica, **settings)
    sharded.train(learner, replica, range(3))
    save_state(path, learner, build_tokenizer(), 3, replica)
    sharded.train(learner, replica, range(3, 5))
    return whole_weights(learner)


def second_course(replica: Replica, path: Path, settings: dict[str, Any]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Resume; the step, the weights there and the weights two steps later."""
    learner = sharded_learner(replica, **{"model_seed": 9, **settings})
    step_n = load_state(path, learner, replica)
    loaded = whole_weights(learner)
    sharded.train(learner, replica, range(3, 5))
    return step_n, loaded, whole_weights(learner)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"frozen": ("layers.0",), "model_seed": 0},
        {"dtype": "bfloat16"},
        {"tune": {"kind": "lora", "rank": 4}, "model_seed": 0},
    ],
)
def test_what_two_procs_wrote_one_and_three_continue_identically(tmp_path, settings):
    expected = on_procs(2, first_course, tmp_path, settings)[0]
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    written = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
    close = {"atol": 1e-6, "rtol": 0} if settings.get("dtype") != "bfloat16" else {"atol": 2e-3, "rtol": 0}
    for size in (1, 3):
        for step_n, loaded, weights_then in on_procs(size, second_course, tmp_path, settings):
            assert step_n == 3
            if "tune" not in settings:  # an adapter is merged into the policy, and is not the policy
                assert torch.equal(loaded, written)
            torch.testing.assert_close(weights_then, expected, **close)


def test_one_proc_continues_what_two_wrote_and_two_what_one_wrote(tmp_path):
    one = first_course(Replica(), tmp_path, {})
    for _, _, weights_then in on_procs(2, second_course, tmp_path, {}):
        torch.testing.assert_close(weights_then, one, atol=1e-6, rtol=0)
    again = tmp_path / "again"
    two = on_procs(2, first_course, again, {})[0]
    torch.testing.assert_close(second_course(Replica(), again, {})[2], two, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_in_one_file_is_continued_too(tmp_path, size):
    learner = sharded_learner(Replica())
    sharded.train(learner, Replica(), range(3))
    learner.model.save_pretrained(tmp_path / "policy")
    state = {"step": 3, "optimizer": learner.optimizer.state_dict(), "taid": learner.taid.state_dict()}
    torch.save({**state, "rng": torch.get_rng_state()}, tmp_path / "trainer.pt")
    sharded.train(learner, Replica(), range(3, 5))
    for weights_then in on_procs(size, one_file_course, tmp_path):
        torch.testing.assert_close(weights_then, whole_weights(learner), atol=1e-6, rtol=0)


def one_file_course(replica: Replica, path: Path) -> torch.Tensor:
    learner = sharded_learner(replica, model_path=str(path / "policy"))
    assert load_state(path, learner, replica) == 3
    sharded.train(learner, replica, range(3, 5))
    return whole_weights(learner)
