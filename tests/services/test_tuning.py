"""What is trained and published under each kind of tuning, and that readers and checkpoints get the same policy."""

import copy
import importlib.util

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from services.engines.engine import EngineConfig
from services.engines.transformers_engine import TransformersEngine
from services.models import load_model
from services.training.hinted import HintedTeacher, HintedTeacherConfig
from services.tuning import Merger, TuneConfig, TuneError, check_installed, merged, prepare, published, save_policy

LORA = TuneConfig(kind="lora", rank=4, alpha=12)
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 50, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "tied"
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(path)
    return path


@pytest.fixture
def initial(folder):
    return load_model(str(folder))


IDS = torch.arange(12).reshape(2, 6)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(model, steps=3):
    """The model after a few optimizer steps on random labels: every trained tensor has moved, B of an adapter too."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS.flip(0)).loss.backward()
        optimizer.step()
    return model


def test_full_trains_and_publishes_every_parameter(initial):
    names = dict(initial.named_parameters()).keys()
    assert published(prepare(initial, TuneConfig())).keys() == names


def test_the_top_layers_and_the_norm_behind_them_are_trained_and_nothing_else_moves(initial, folder):
    model = trained(prepare(initial, TuneConfig(kind="top_layers", top_layers=2)))
    before = load_model(str(folder)).state_dict()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == published(model).keys()
    assert {name.split(".")[2] for name in moved if ".layers." in name} == {"2", "3"}
    assert {name for name in moved if ".layers." not in name} == {"model.norm.weight"}


def test_more_layers_than_there_are_are_refused(initial):
    with pytest.raises(TuneError, match="top_layers is 5 and the model has 4 layers: set 4 or less"):
        prepare(initial, TuneConfig(kind="top_layers", top_layers=5))


def test_an_adapter_starts_without_effect_and_only_it_is_trained(initial, folder):
    before = logits(initial)
    model = prepare(initial, LORA)
    assert torch.allclose(logits(model), before, atol=1e-6)
    trained(model)
    assert not torch.allclose(logits(model), before, atol=1e-2)
    plain = load_model(str(folder)).state_dict()
    base = merged(model, {n: t for n, t in model.state_dict().items() if "lora_" not in n})
    assert base.keys() == plain.keys()
    assert all(torch.equal(base[name], plain[name]) for name in plain)
    # 7 linear layers in each of 4 decoder layers, 2 matrices each; the output head has none
    assert len(published(model)) == 4 * 7 * 2
    assert not any("lm_head" in name for name in published(model))


def test_the_same_random_state_gives_the_same_adapter(folder):
    def adapter(seed):
        torch.manual_seed(seed)
        return published(prepare(load_model(str(folder)), LORA))

    first, again, other = adapter(1), adapter(1), adapter(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_a_reader_merges_what_peft_itself_would(initial, folder, targets):
    config = TuneConfig(kind="lora", rank=4, alpha=12, targets=targets)
    model = trained(prepare(initial, config))
    weights = Merger.of_model(str(folder), config)(published(model))
    unloaded = copy.deepcopy(model).merge_and_unload()
    expected = dict(unloaded.named_parameters())
    assert len(weights) == 4 * (7 if targets == "all-linear" else 2)
    for name, weight in weights.items():
        assert (weight - expected[name]).abs().max() < 1e-6, name
    plain = load_model(str(folder))
    assert plain.load_state_dict(weights, strict=False).unexpected_keys == []
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)


def test_engine_and_teacher_load_what_was_merged(initial, folder):
    model = trained(prepare(initial, LORA))
    weights = Merger.of_model(str(folder), LORA)(published(model))
    generating = load_model(str(folder))
    TransformersEngine(generating, EngineConfig(max_batch=2, max_length=32)).load_weights(1, weights, partial=True)
    assert torch.allclose(logits(generating), logits(model), atol=1e-5)
    policy = load_model(str(folder))
    teacher = HintedTeacher(policy, policy, HintedTeacherConfig(weights="live"))
    teacher.follow(1, weights)
    assert torch.allclose(logits(teacher._own), logits(model), atol=1e-5)


def test_merging_leaves_the_callers_random_state_alone(folder):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Merger.of_model(str(folder), LORA)
    assert torch.equal(torch.rand(1), expected)


def test_without_an_adapter_there_is_nothing_to_merge(folder):
    assert Merger.of_model(str(folder), TuneConfig(kind="top_layers", top_layers=2)) is None


def test_an_adapter_of_another_model_or_half_of_one_is_refused(initial, folder):
    tensors = published(prepare(initial, LORA))
    merge = Merger.of_model(str(folder), TuneConfig(kind="lora", rank=4, targets=["q_proj"]))
    with pytest.raises(ValueError, match="must be told the same model and"):
        merge(tensors)
    half = {name: tensor for name, tensor in tensors.items() if "q_proj.lora_A" in name}
    with pytest.raises(ValueError, match="it has A, and the model has a such weight"):
        merge(half)


@pytest.mark.parametrize(
    "config", [TuneConfig(), TuneConfig(kind="top_layers", top_layers=2), LORA], ids=lambda c: c.kind
)
def test_a_checkpoint_holds_the_policy_in_hugging_face_form(initial, tmp_path, config):
    model = trained(prepare(initial, config))
    save_policy(model, model.state_dict(), tmp_path / "policy", tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "policy"))
    assert type(loaded) is LlamaForCausalLM
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)
    assert (tmp_path / "adapter").exists() == (config is LORA)


def test_peft_loads_the_adapter_of_a_checkpoint_on_the_initial_model(initial, folder, tmp_path):
    from peft import PeftModel

    model = trained(prepare(initial, LORA))
    save_policy(model, model.state_dict(), tmp_path / "policy", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.allclose(logits(loaded), logits(model), atol=1e-6)
    assert not torch.allclose(logits(loaded), logits(load_model(str(folder))), atol=1e-2)


def test_layers_that_cannot_be_merged_or_do_not_exist_are_refused(initial):
    other = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20))
    refusal = pytest.raises(TuneError, match=r"c_attn is no plain linear layer.*set tune.kind = \"top_layers\"")
    with pytest.warns(UserWarning, match="fan_in_fan_out"), refusal:
        prepare(other, TuneConfig(kind="lora", targets=["c_attn"]))
    with pytest.raises(TuneError, match=r"tune.targets: .*nowhere"):
        prepare(initial, TuneConfig(kind="lora", targets=["nowhere"]))


def test_other_architectures_have_top_layers_too():
    model = prepare(
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=20)),
        TuneConfig(kind="top_layers", top_layers=1),
    )
    assert {".".join(name.split(".")[:3]) for name in published(model)} == {
        "transformer.h.2", "transformer.ln_f.weight", "transformer.ln_f.bias"
    }  # fmt: skip


def test_a_missing_package_is_named_with_the_extra(initial, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name))
    with pytest.raises(TuneError, match=r"needs the package peft: pip install 'milkweed\[lora\]'"):
        prepare(initial, LORA)
    check_installed(TuneConfig())


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"kind": "full", "top_layers": 4}, 'set tune.kind = "top_layers"'),
        ({"kind": "top_layers", "rank": 4}, 'set tune.kind = "lora"'),
        ({"kind": "lora", "targets": []}, 'use "all-linear"'),
        ({"kind": "lora", "dropout": 0.1}, "extra"),
    ],
)
def test_contradictions_are_refused_with_the_fix(settings, fix):
    with pytest.raises(ValidationError, match=fix):
        TuneConfig(**settings)


def test_defaults_that_were_written_down_are_no_contradiction():
    assert TuneConfig(**TuneConfig(kind="lora", rank=4).model_dump()).rank == 4
    assert TuneConfig(**TuneConfig().model_dump()).kind == "full"
