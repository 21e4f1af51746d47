"""One proc of a trainer that trains a part of the policy: what it publishes, saves and goes on from."""

import pytest
import torch
from trainer_actors import batch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.trainer_part import TrainerConfig, TrainerPart, TrainerSettings
from services.demo.tokenizer import build_tokenizer
from services.losses.policy import PolicyConfig
from services.models import load_model
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.tuning import Merger, TuneConfig
from services.weights.config import WeightsConfig

KINDS = [
    TuneConfig(kind="top_layers", top_layers=1),
    TuneConfig(kind="lora", rank=2, alpha=6),
    TuneConfig(kind="lora", targets=["v_proj"]),
]
IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    tokenizer = build_tokenizer()
    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True, dtype="float32",
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def started(model_path, tune, checkpoint=None):
    """A trainer that is its own hinted teacher, so that every channel and reader of the weights is there."""
    part = TrainerPart(
        TrainerSettings(
            TrainerConfig(steps=6, optimizer=OptimizerConfig(lr=1e-2)),
            PolicyConfig(max_completion_length=8, kl_beta=0.05),
            SDPOConfig(alpha=0.5, teacher="inline", hinted={"align": "turn", "weights": "ema"}),
            ReplayConfig(beta=0.0),
            WeightsConfig(via="shm"),
            model_path,
            temperature=1.0,
            advantage_scaling="none",
            seed=0,
            tune=tune,
        )
    )
    assert part.load(0, 1, None, checkpoint) == (3 if checkpoint else 0)
    return part


def train(part, numbers):
    return [part.step(part.shares(batch(number))[0], None) for number in numbers]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("tune", KINDS, ids=lambda tune: f"{tune.kind}-{tune.targets}")
def test_what_is_published_on_the_initial_model_is_the_policy(model_path, tune):
    part = started(model_path, tune)
    train(part, range(3))
    reader, merge = load_model(model_path), Merger.of_model(model_path, tune)
    before = logits(reader)
    tensors = {name: parameter.detach() for name, parameter in part.source().items()}
    assert sum(t.numel() for t in tensors.values()) < sum(p.numel() for p in reader.parameters()) / 2
    fitted = reader.load_state_dict(merge(tensors) if merge else tensors, strict=False)
    assert fitted.unexpected_keys == []
    assert torch.allclose(logits(reader), logits(part.learner.model), atol=1e-5)
    assert not torch.allclose(logits(reader), before, atol=1e-2)


@pytest.mark.parametrize("tune", KINDS, ids=lambda tune: f"{tune.kind}-{tune.targets}")
def test_a_checkpoint_is_the_policy_and_the_run_goes_on_from_it_as_if_it_had_not_stopped(model_path, tune, tmp_path):
    through = started(model_path, tune)
    train(through, range(3))
    through.save(tmp_path, 3)
    assert torch.allclose(logits(load_model(str(tmp_path / "policy"))), logits(through.learner.model), atol=1e-5)

    resumed = started(model_path, tune, checkpoint=tmp_path)
    # The teacher's average is no part of a checkpoint, so it is left out here: the policy channel alone.
    for part in (through, resumed):
        part.inline = None
    expected, found = train(through, range(3, 5)), train(resumed, range(3, 5))
    assert found == expected
    for name, parameter in through.source().items():
        assert torch.equal(resumed.source()[name], parameter), name


@pytest.mark.parametrize("tune", KINDS, ids=lambda tune: f"{tune.kind}-{tune.targets}")
def test_the_trainers_own_teacher_follows_the_policy(model_path, tune):
    part = started(model_path, tune)
    before = logits(part.inline._own)
    train(part, range(2))
    assert part.inline.version == 2
    assert not torch.equal(logits(part.inline._own), before)


def test_a_checkpoint_of_another_kind_is_refused(model_path, tmp_path):
    part = started(model_path, TuneConfig(kind="top_layers", top_layers=1))
    train(part, range(1))
    part.save(tmp_path, 3)
    with pytest.raises(ValueError, match="was written for another model"):
        started(model_path, TuneConfig(), checkpoint=tmp_path)
