import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from services.losses.compose import HintInputs, attach_reference, build_batch, compose, compose_loss
from services.losses.logprobs import shift_mask, token_logprobs
from services.losses.policy import PolicyConfig, policy_loss
from services.losses.preference import PreferenceConfig
from services.losses.reduction import LossResult
from services.losses.sdpo import SDPOLossConfig

torch.set_num_threads(1)


class ByteTokenizer:
    def encode(self, text, add_special_tokens=True):
        return list(text.encode()) + ([0] if add_special_tokens else [])


class Counting(nn.Module):
    """Passes calls on and counts them."""

    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, **inputs):
        self.calls += 1
        return self.model(**inputs)


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def batch(model):
    return attach_reference(model, build_batch(ByteTokenizer()))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_with_both_weights_zero_the_total_is_bit_identical_to_the_policy_channel(model, batch):
    model.train()
    counted = Counting(model)
    torch.manual_seed(1)
    composed = compose_loss(counted, batch, alpha_sdpo=0.0, beta_replay=0.0)
    composed_grads = gradients(model, composed.total)
    torch.manual_seed(1)
    logits = model(input_ids=batch.tokens.ids, attention_mask=batch.tokens.attention, use_cache=False).logits
    logprobs = token_logprobs(logits, batch.tokens.ids)
    alone = policy_loss(logprobs, logprobs.detach(), batch.advantages, shift_mask(batch.tokens.mask), PolicyConfig())
    assert torch.equal(composed.total, alone.loss)
    assert all(torch.equal(a, b) for a, b in zip(composed_grads, gradients(model, alone.loss), strict=True))
    assert (composed.sdpo.item(), composed.replay.item()) == (0.0, 0.0)
    assert counted.calls == 1


def test_a_channel_without_weight_or_inputs_costs_no_forward_pass(model, batch):
    def calls(batch, **weights):
        counted = Counting(model)
        compose_loss(counted, batch, **weights)
        return counted.calls

    assert calls(batch, alpha_sdpo=1.0, beta_replay=0.0) == 2
    assert calls(batch, alpha_sdpo=0.0, beta_replay=1.0) == 3
    assert calls(batch, alpha_sdpo=1.0, beta_replay=1.0) == 4
    assert calls(copy_without(batch, "hint", "pairs"), alpha_sdpo=1.0, beta_replay=1.0) == 1


def copy_without(batch, *fields):
    result = copy.copy(batch)
    for name in fields:
        setattr(result, name, None)
    return result


def test_the_total_is_the_weighted_sum_of_three_channels_that_all_act(model, batch):
    model.eval()
    parts = compose_loss(model, batch, alpha_sdpo=0.5, beta_replay=0.1)
    expected = parts.policy + 0.5 * parts.sdpo + 0.1 * parts.replay
    torch.testing.assert_close(parts.total, expected)
    for channel in (parts.policy, parts.sdpo, parts.replay):
        norm = sum(g.abs().sum() for g in torch.autograd.grad(channel, list(model.parameters()), retain_graph=True))
        assert norm > 0
    assert {name.split("/")[0] for name in parts.metrics} == {"policy", "sdpo", "replay"}


@pytest.mark.parametrize("channel", ["policy", "sdpo", "replay"])
def test_descending_a_channel_does_what_the_channel_is_for(model, batch, channel):
    student = copy.deepcopy(model).eval()
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2)

    def figures():
        parts = compose_loss(student, batch, teacher=teacher)
        logits = student(input_ids=batch.tokens.ids, attention_mask=batch.tokens.attention, use_cache=False).logits
        logprobs = token_logprobs(logits, batch.tokens.ids) * shift_mask(batch.tokens.mask)
        good_over_bad = (logprobs.sum(1) * batch.advantages.sign()).sum()
        return parts, {"policy": good_over_bad, "sdpo": -parts.sdpo, "replay": parts.metrics["replay/margin"]}[channel]

    parts, before = figures()
    for _ in range(3):
        optimizer.zero_grad()
        getattr(parts, channel).backward()
        optimizer.step()
        parts, after = figures()
    assert after > before


def test_the_teacher_runs_without_dropout_and_without_grad_and_gets_its_modes_back(model, batch):
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(model)

        def forward(self, **inputs):
            seen.append((torch.is_grad_enabled(), any(m.training for m in self.modules())))
            return self.inner(**inputs)

    teacher = Watched().train()
    teacher.inner.lm_head.eval()
    compose_loss(model, batch, beta_replay=0.0, teacher=teacher)
    assert seen == [(False, False)]
    assert teacher.training
    assert not teacher.inner.lm_head.training


def test_dpo_needs_a_reference_that_was_run(model, batch):
    with pytest.raises(ValueError, match="run the initial policy"):
        compose_loss(model, build_batch(ByteTokenizer()))
    with pytest.raises(ValueError, match="no preference pairs"):
        attach_reference(model, copy_without(batch, "pairs"))
    simpo = compose_loss(model, build_batch(ByteTokenizer()), preference=PreferenceConfig(objective="simpo"))
    assert simpo.replay.item() > 0
    model.eval()
    assert compose_loss(model, batch).replay.item() == pytest.approx(0.693147, abs=1e-5)


def test_all_padding_hints_are_a_zero_that_backward_runs_through(model, batch):
    empty = copy.copy(batch)
    nothing = torch.full_like(batch.hint.student_idx, -1)
    empty.hint = HintInputs(batch.hint.tokens, nothing, nothing)
    model.eval()
    parts = compose_loss(model, empty, beta_replay=0.0)
    assert parts.sdpo.item() == 0
    assert parts.total.item() == parts.policy.item()
    assert all(g.isfinite().all() for g in gradients(model, parts.total))


def test_reusing_gathered_rows_leaves_the_composed_gradient_as_it_is(model, batch):
    model.eval()
    plain, reused = (
        gradients(model, compose_loss(model, batch, sdpo=SDPOLossConfig(beta=0.5, reuse_rows=reuse)).total)
        for reuse in (False, True)
    )
    for a, b in zip(plain, reused, strict=True):
        torch.testing.assert_close(a, b)


def test_the_built_batch_aligns_each_action_token_on_both_sides():
    batch = build_batch(ByteTokenizer())
    student_ids, teacher_ids = batch.tokens.ids, batch.hint.tokens.ids
    student_idx, teacher_idx = batch.hint.student_idx, batch.hint.teacher_idx
    assert ((student_idx == -1) == (teacher_idx == -1)).all()
    assert (student_idx[0::2] == -1).all()
    for row, hint_length in ((1, 37), (3, 34)):
        kept = student_idx[row] >= 0
        predicted = student_ids[row, student_idx[row, kept] + 1]
        assert torch.equal(predicted, teacher_ids[row, teacher_idx[row, kept] + 1])
        assert torch.equal(predicted, student_ids[row, batch.tokens.mask[row]])
        assert (teacher_idx[row, kept] - student_idx[row, kept] == hint_length).all()


def test_padding_does_not_reach_the_loss(model, batch):
    model.eval()
    noisy = copy.deepcopy(batch)
    noisy.tokens.ids[noisy.tokens.attention == 0] = 77
    assert compose_loss(model, noisy).total.item() == pytest.approx(compose_loss(model, batch).total.item(), abs=1e-6)


def test_compose_skips_terms_exactly_and_refuses_negative_weights():
    policy = LossResult(torch.tensor(2.0, requires_grad=True), torch.tensor(1))
    broken = LossResult(torch.tensor(float("nan")), torch.tensor(1))
    off = compose(policy, broken, broken, alpha_sdpo=0.0, beta_replay=0.0)
    assert off.total is policy.loss
    with pytest.raises(ValueError, match="channel replay is -1"):
        compose(policy, alpha_sdpo=0.0, beta_replay=-1.0)


def test_any_callable_with_logits_will_do():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

        def forward(self, input_ids, attention_mask, use_cache):
            assert not use_cache
            return SimpleNamespace(logits=self.head(self.embed(input_ids)).bfloat16())

    tiny = Tiny()
    parts = compose_loss(tiny, attach_reference(tiny, build_batch(ByteTokenizer())))
    parts.total.backward()
    assert parts.total.dtype == torch.float32
    assert parts.total.isfinite()
