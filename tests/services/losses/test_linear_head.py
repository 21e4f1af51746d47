"""Losses on the output head: what whole logits give, without whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.losses.linear import Head, linear_distillation, linear_logprobs
from services.losses.reduction import LossResult
from services.losses.sdpo import SDPOLossConfig, sdpo_loss

N, H, V = 11, 5, 17

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 2.0},
    "everything": {"bias": True, "scale": 1.5, "softcap": 2.0},
}


def made(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[torch.Tensor, Head, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    settings = dict(HEADS[kind])
    bias = random(V) if settings.pop("bias", False) else None
    return random(N, H), Head(random(V, H), bias, **settings), torch.randint(V, (N,), generator=generator)


def whole_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """The definition, written out."""
    logits = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = head.scale * logits
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def gradients(loss: torch.Tensor, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *head.parameters]))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_logprobs_and_their_gradients_are_those_of_whole_logits(kind, chunk):
    hidden, head, labels = made(kind)
    upstream = torch.linspace(-1, 2, N, dtype=torch.float64)
    expected = (whole_logits(hidden, head) / 0.7).log_softmax(1)[torch.arange(N), labels]
    found = linear_logprobs(hidden, head, labels, temperature=0.7, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for ours, plain in zip(
        gradients((found * upstream).sum(), hidden, head),
        gradients((expected * upstream).sum(), hidden, head),
        strict=True,
    ):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def test_the_gradient_of_logprobs_agrees_with_finite_differences():
    hidden, head, labels = made("everything")

    def function(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear_logprobs(hidden, replace(head, weight=weight, bias=bias), labels, temperature=1.3, chunk=4)

    assert torch.autograd.gradcheck(function, (hidden, *head.parameters))


def test_logprobs_of_weights_in_bfloat16_are_computed_in_float32_behind_the_projection():
    hidden, head, labels = made("plain", torch.bfloat16)
    found = linear_logprobs(hidden, head, labels, chunk=3)
    expected = (hidden @ head.weight.T).float().log_softmax(1)[torch.arange(N), labels]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    found.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    plain = torch.autograd.grad(expected.sum(), [hidden, head.weight])
    torch.testing.assert_close(hidden.grad, plain[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(head.weight.grad, plain[1], rtol=2e-2, atol=2e-2)


def test_logprobs_of_large_logits_do_not_lose_the_small_differences():
    hidden = torch.tensor([[1.0]])
    head = Head(torch.tensor([[10000.0], [9999.0]]))
    found = linear_logprobs(hidden, head, torch.tensor([1]))
    assert float(found) == pytest.approx(-1.3132617, abs=1e-6)


@pytest.fixture
def projected(monkeypatch) -> list[int]:
    """The number of rows of every projection through a head."""
    seen: list[int] = []
    plain = Head.project
    monkeypatch.setattr(Head, "project", lambda self, hidden: (seen.append(len(hidden)), plain(self, hidden))[1])
    return seen


def test_logits_of_more_than_a_chunk_never_exist(projected):
    hidden, head, labels = made("plain")
    linear_logprobs(hidden, head, labels, chunk=4).sum().backward()
    assert projected == [4, 4, 3, 4, 4, 3]  # forward, and once more in backward
    del projected[:]
    linear_distillation(hidden, head, lambda n: torch.zeros(n, V), lambda s, t: kl(s, t), chunk=4).loss.backward()
    assert projected == [4, 4, 3]  # the gradient is computed while the teacher's rows are there


def test_frozen_parts_get_no_gradient_and_cost_none():
    hidden, head, labels = made("bias")
    frozen = replace(head, weight=head.weight.detach())
    linear_logprobs(hidden, frozen, labels, chunk=4).sum().backward()
    assert hidden.grad is not None
    assert head.bias.grad is not None
    assert frozen.weight.grad is None
    linear_distillation(hidden, frozen, lambda n: torch.zeros(n, V), kl, chunk=4).loss.backward()
    assert frozen.weight.grad is None


def kl(student: torch.Tensor, teacher: torch.Tensor, **settings: Any) -> LossResult:
    return sdpo_loss(student, teacher.to(student), config=SDPOLossConfig(**settings), normalizer=float(N), t=0.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "jsd", "beta": 0.0},
        {"kind": "jsd", "beta": 0.5, "token_clip": 0.3},
        {"kind": "jsd", "beta": 1.0, "temperature": 2.0},
        {"kind": "jsd", "beta": 0.5, "reuse_rows": True},
        {"kind": "jsd", "support": "student", "top_k": 4},
        {"kind": "jsd", "support": "teacher", "top_k": 4},
        {"kind": "taid"},
        {"kind": "taid", "reuse_rows": True},
        {"kind": "entropy_gated"},
        {"kind": "eopd", "entropy_threshold": 1.0},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_distillation_in_chunks_is_that_over_all_rows_at_once(kind, settings):
    hidden, head, _ = made(kind)
    teacher = torch.randn(N, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    asked: list[int] = []

    def read(count: int) -> torch.Tensor:
        asked.append(count)
        return teacher[sum(asked) - count : sum(asked)]

    plain = {name: value for name, value in settings.items() if name != "reuse_rows"}
    expected = kl(whole_logits(hidden, head), teacher, **plain)
    found = linear_distillation(hidden, head, read, lambda s, t: kl(s, t, **settings), chunk=4)
    assert asked == [4, 4, 3]
    assert found is not None
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=1e-10)
    assert int(found.count) == int(expected.count) == N
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-6, atol=1e-8)
    # The loss enters a sum with a factor, as any loss may.
    for ours, whole in zip(
        gradients(3 * found.loss, hidden, head), gradients(3 * expected.loss, hidden, head), strict=True
    ):
        assert float(whole.norm()) > 0
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-10)


def test_a_reader_that_fails_is_not_asked_again():
    hidden, head, _ = made("plain")
    asked: list[int] = []

    def read(count: int) -> torch.Tensor | None:
        asked.append(count)
        return torch.zeros(count, V) if len(asked) == 1 else None

    assert linear_distillation(hidden, head, read, kl, chunk=4) is None
    assert asked == [4, 4]


def test_no_row_gives_zero_with_a_gradient_of_zero_for_everything():
    hidden, head, labels = made("bias")
    none = hidden[:0]
    for loss in (
        linear_logprobs(none, head, labels[:0]).sum(),
        linear_distillation(none, head, lambda n: torch.zeros(n, V), kl).loss,
    ):
        assert loss.item() == 0.0
        for gradient in gradients(loss, hidden, head):
            assert not gradient.any()


def test_without_grad_nothing_is_kept_for_backward():
    hidden, head, labels = made("plain")
    with torch.no_grad():
        assert not linear_logprobs(hidden, head, labels).requires_grad
        assert not linear_distillation(hidden, head, lambda n: torch.zeros(n, V), kl).loss.requires_grad


def test_senseless_arguments_are_refused():
    hidden, head, labels = made("plain")
    with pytest.raises(ValueError, match="are not rows"):
        linear_logprobs(hidden, head, labels[1:])
    with pytest.raises(ValueError, match="logits_chunk"):
        linear_logprobs(hidden, head, labels, chunk=0)
    with pytest.raises(ValueError, match="temperature"):
        linear_logprobs(hidden, head, labels, temperature=0.0)
