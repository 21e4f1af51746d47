"""The packed policy is the model: same log-probabilities and gradients, for every architecture that is not refused."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch
from training_builders import forward_calls
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from services.losses.sdpo import SDPOLossConfig, sdpo_loss
from services.models import ModelError
from services.training.attention import PackingError
from services.training.packing import Packed, pack_ids
from services.training.policy_model import Distillation, PolicyModel

VOCAB = 99
LENGTHS = (25, 13, 13, 5, 1, 30)  # neighbours of equal length, a token alone, and longer than the windows below

# What is special about each: grouped key-value heads, windows in some layers, learned positions, and what stands
# between the output head and the logits.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": True},
    "phi": {},  # a bias on the head
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 8.0},
    "nanochat": {"final_logit_softcapping": 3.0},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def make(architecture: str, **settings: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "attention_dropout": 0.5,
    }  # fmt: skip
    shape |= ARCHITECTURES.get(architecture, {}) | settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**shape)).eval()


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def one_by_one(model: Any, temperature: float = 1.0) -> torch.Tensor:
    """Each sequence alone through the model's own forward: no padding, no packing, whole logits."""
    found = []
    for ids in sequences():
        logprobs = (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)
        found += [logprobs[t, token] for t, token in enumerate(ids[1:])]
    return torch.stack(found)


def gradients(values: torch.Tensor, model: Any) -> torch.Tensor:
    """Of a sum that gives each value another weight."""
    loss = (values * torch.linspace(-1, 2, len(values))).sum() / len(values)
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(architecture, packing):
    model = make(architecture)
    expected = one_by_one(model, temperature=0.7)
    policy = PolicyModel(copy.deepcopy(model), packing=packing, logits_chunk=16)
    found = policy(pack_ids(sequences()), temperature=0.7).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    expected_gradients = gradients(expected, model)
    assert expected_gradients.norm() > 0.1
    torch.testing.assert_close(
        gradients(found, policy), expected_gradients, rtol=1e-5, atol=1e-6 * float(expected_gradients.abs().max())
    )


def test_what_one_sequence_holds_changes_nothing_in_the_others():
    policy = PolicyModel(make("llama"))
    one, other = sequences(), sequences()
    other[1] = [(token + 7) % VOCAB for token in other[1]]
    with torch.no_grad():
        before, after = policy(pack_ids(one)).logprobs, policy(pack_ids(other)).logprobs
    changed = (before != after).nonzero().flatten().tolist()
    start = LENGTHS[0] - 1
    assert set(changed) <= set(range(start, start + LENGTHS[1] - 1))
    assert len(changed) > LENGTHS[1] // 2


def test_the_packed_form_computes_no_padding():
    for packing, shape in ((True, (1, sum(LENGTHS))), (False, (len(LENGTHS), max(LENGTHS)))):
        policy = PolicyModel(make("llama"), packing=packing)
        with forward_calls(policy.model) as calls:
            policy(pack_ids(sequences()))
        assert calls == [shape]


def test_windows_act_in_sequences_that_are_longer_than_they_are():
    expected = one_by_one(make("mistral"))
    unlimited = PolicyModel(make("mistral", sliding_window=None))(pack_ids(sequences())).logprobs
    assert (unlimited - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}, "its attention takes softcap"),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "its attention takes s_aux"),
        ("mamba", {"state_size": 8, "expand": 2}, "MambaForCausalLM cannot run packed"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "it has attention code of its own"),
        ("nemotron", {}, "does not hand keyword arguments down"),
        ("recurrent_gemma", {"head_dim": 8}, "its layers mix packed sequences"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "cannot run packed"),
    ],
)
def test_a_model_that_cannot_pack_is_refused_with_the_remedy_and_runs_padded(architecture, settings, why):
    model = make(architecture, **settings)
    expected = one_by_one(model)
    with pytest.raises(PackingError, match=rf"{why}.*; set trainer.packing = false"):
        PolicyModel(model)
    torch.testing.assert_close(one_by_one(model), expected)  # a refusal leaves it as it was
    found = PolicyModel(model, packing=False)(pack_ids(sequences())).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_layers_that_differ_in_long_sequences_only_are_refused():
    model = make("llama")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(PackingError, match="layers of kind chunked_attention"):
        PolicyModel(model)
    model.config.layer_types, model.config.sliding_window = None, 4096
    with pytest.raises(PackingError, match="not told the sliding window"):
        PolicyModel(model)


def test_logits_that_are_not_those_of_the_head_are_refused():
    with pytest.raises(ModelError, match="not a linear function of its last hidden states"):
        PolicyModel(make("modernbert-decoder", cls_token_id=1, sep_token_id=1))
    model = make("llama")
    model.config.final_logit_softcapping = 1.0  # which this model does not have
    with pytest.raises(ModelError, match="use a model whose output head is a linear layer"):
        PolicyModel(model, packing=False)


def test_an_adapter_on_the_output_head_is_refused():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make("llama"), LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ModelError, match="an adapter that leaves it alone"):
        PolicyModel(model)


def test_the_model_generates_as_before_and_is_saved_without_a_trace(tmp_path):
    model = make("llama")
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])  # padded on the left: a mask that is lost would show

    def generated() -> list[list[int]]:
        return model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=5, do_sample=False).tolist()

    before = generated()
    PolicyModel(model)
    assert generated() == before
    model.save_pretrained(tmp_path)
    assert "milkweed" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_checkpointing_computes_layers_again_and_changes_no_gradient(packing):
    model = make("llama")
    plain = PolicyModel(copy.deepcopy(model), packing=packing)
    expected = gradients(plain(pack_ids(sequences())).logprobs, plain)
    policy = PolicyModel(model, packing=packing, checkpointing=True)
    policy.train(True)  # of no consequence: the model's dropout of one half would show in the gradient
    calls: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    found = policy(pack_ids(sequences())).logprobs
    assert len(calls) == 2
    torch.testing.assert_close(gradients(found, policy), expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == 4


def test_checkpointing_silences_dropout_that_is_in_a_layer_s_own_code():
    settings = {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.5}
    model = make("opt", **settings)
    expected = gradients(one_by_one(model), model)
    policy = PolicyModel(model, checkpointing=True)
    torch.testing.assert_close(
        gradients(policy(pack_ids(sequences())).logprobs, policy), expected, rtol=1e-4, atol=1e-5
    )


def test_layers_below_the_first_trained_one_keep_nothing_for_backward():
    model = make("llama", tie_word_embeddings=False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad_(True)
    policy, seen = PolicyModel(model), {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, args, output, number=number: seen.update({number: output.requires_grad}))
    policy(pack_ids(sequences())).logprobs.sum().backward()
    assert seen == {0: False, 1: True}
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_only_an_adapter_s_weights_get_gradients_and_they_are_those_of_its_own_forward():
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(make("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)  # an adapter begins as nothing
    model.eval()
    expected = one_by_one(model)
    expected_gradients = gradients(expected, model)
    policy = PolicyModel(model)
    found = policy(pack_ids(sequences())).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients(found, policy), expected_gradients, rtol=1e-4, atol=1e-6)
    policy(pack_ids(sequences())).logprobs.sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, _ in model.named_parameters() if "lora" in name
    }


def test_a_model_in_bfloat16_gives_logprobs_in_float32_near_those_of_full_precision():
    model = make("llama")
    expected = one_by_one(model)
    policy = PolicyModel(model.bfloat16())
    found = policy(pack_ids(sequences())).logprobs
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.1
    found.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in policy.parameters())


def distilled(packed: Packed, rows: list[int], read: Any) -> Distillation:
    config = SDPOLossConfig()
    return Distillation(
        torch.tensor(rows), read, lambda s, t: sdpo_loss(s, t, config=config, normalizer=float(len(rows)))
    )


def test_distillation_shares_the_forward_pass_and_its_gradient_is_its_own():
    model = make("llama")
    packed, rows = pack_ids(sequences()), [3, 4, 5, 26, 27]
    teacher = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0))
    states = model.model(packed.padded()[0], attention_mask=packed.padded()[1]).last_hidden_state
    expected = sdpo_loss(
        model.lm_head(states[packed.padded()[1].bool()])[rows], teacher, config=SDPOLossConfig(), normalizer=5.0
    ).loss
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    policy, left = PolicyModel(model, logits_chunk=2), [0]

    def read(count: int) -> torch.Tensor:
        left[0] += count
        return teacher[left[0] - count : left[0]]

    with forward_calls(model) as calls:
        output = policy(packed, 1.0, distilled(packed, rows, read))
    assert len(calls) == 1
    assert output.distilled is not None
    assert int(output.distilled.count) == len(rows)
    assert output.distilled.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    logprobs_alone = torch.autograd.grad(output.logprobs.sum(), list(model.parameters()), retain_graph=True)
    found = torch.autograd.grad(output.distilled.loss, list(model.parameters()))
    for ours, theirs, other in zip(found, expected_gradients, logprobs_alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(ours, other)


def test_a_distillation_without_its_teacher_is_zero_and_still_has_a_backward_pass():
    policy = PolicyModel(make("llama"))
    packed = pack_ids(sequences())
    output = policy(packed, 1.0, distilled(packed, [3, 4], lambda count: None))
    assert (output.distilled_loss.item(), int(output.distilled_rows)) == (0.0, 0)
    output.distilled_loss.backward()
    # Every parameter takes part: procs that share the model's gradients must agree on which there are.
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_logits_that_are_asked_for_come_in_chunks():
    model = make("llama")
    packed, rows = pack_ids(sequences()), torch.tensor([2, 30, 31, 60])
    parts = list(PolicyModel(copy.deepcopy(model), logits_chunk=3).logits(packed, rows))
    assert [len(part) for part in parts] == [3, 1]
    ids, attended = packed.padded()
    whole = model(ids, attention_mask=attended).logits[attended.bool()]
    torch.testing.assert_close(torch.cat(parts), whole[rows], rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention over variable lengths needs a GPU")
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_on_a_gpu_in_bfloat16_packed_and_padded_agree(architecture):
    model = make(architecture).to("cuda", torch.bfloat16)
    packed = pack_ids(sequences(), "cuda")
    found = [PolicyModel(copy.deepcopy(model), packing=packing)(packed).logprobs for packing in (True, False)]
    assert (found[0] - found[1]).abs().mean() < 0.05
