import math

import pytest
import torch

from services.losses.divergence import jsd_rows
from services.losses.entropy import entropy_gated_rows, eopd_rows
from services.losses.logprobs import token_entropy
from services.losses.topk import topk_jsd_rows

STUDENT = torch.tensor([[2, 0.5, -1, 0]])
TEACHER = torch.tensor([[0.5, 1.5, -0.5, 0.25]])


def pair(rows=6, vocab=9):
    g = torch.Generator().manual_seed(0)
    student = (torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 2).requires_grad_()
    return student, torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 2


@pytest.mark.parametrize(
    ("support", "beta", "golden"),
    [
        ("teacher", 0.0, 0.715798),
        ("teacher", 0.5, 0.160773),
        ("teacher", 1.0, 0.655785),
        ("student", 0.0, 0.586986),
        ("student", 0.5, 0.140232),
        ("student", 1.0, 0.603874),
    ],
)
def test_top_2_golden_numbers(support, beta, golden):
    assert topk_jsd_rows(STUDENT, TEACHER, beta=beta, top_k=2, support=support).item() == pytest.approx(
        golden, abs=1e-6
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("support", "tail"), [("teacher", None), ("student", None), ("student", False)])
def test_top_k_is_never_negative_and_its_gradient_is_exact(beta, support, tail):
    student, teacher = pair()

    def rows(logits):
        return topk_jsd_rows(logits, teacher, beta=beta, top_k=3, support=support, tail=tail, temperature=1.3)

    assert (rows(student) >= 0).all()
    assert torch.autograd.gradcheck(rows, student)


@pytest.mark.parametrize(("support", "tail"), [("teacher", None), ("student", None), ("student", False)])
def test_a_support_of_the_whole_vocabulary_is_the_full_divergence(support, tail):
    student, teacher = pair()
    rows = topk_jsd_rows(student, teacher, beta=0.4, top_k=1000, support=support, tail=tail)
    torch.testing.assert_close(rows, jsd_rows(student, teacher, beta=0.4))


def test_the_tail_bucket_holds_the_mass_of_all_other_tokens():
    student, teacher = pair(rows=1)
    s, t = student.detach().softmax(-1)[0], teacher.softmax(-1)[0]
    kept = s.topk(3).indices
    s3, t3 = (torch.cat([p[kept], (1 - p[kept].sum()).reshape(1)]) for p in (s, t))
    expected = (t3 * (t3 / s3).log()).sum()
    torch.testing.assert_close(topk_jsd_rows(student, teacher, beta=0.0, top_k=3, support="student")[0], expected)


def test_a_kept_mass_that_rounds_to_one_stays_finite():
    sure = torch.tensor([[60.0, 0.0, 0.0, 0.0]], requires_grad=True)
    rows = topk_jsd_rows(sure, TEACHER, beta=0.5, top_k=1, support="student")
    rows.sum().backward()
    assert rows.isfinite().all()
    assert sure.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"support": "teacher", "top_k": 2, "tail": True}, "set tail = false"),
        ({"support": "student", "top_k": 0}, "set top_k"),
        ({"support": "both", "top_k": 2}, "'teacher' or 'student'"),
    ],
)
def test_supports_that_are_not_offered_are_refused(settings, advice):
    with pytest.raises(ValueError, match=advice):
        topk_jsd_rows(STUDENT, TEACHER, beta=0.5, **settings)


def test_teacher_entropy_golden_number():
    assert token_entropy(TEACHER).item() == pytest.approx(1.138951, abs=1e-6)
    assert token_entropy(torch.tensor([[0.0, -float("inf"), 0.0]])).item() == pytest.approx(math.log(2))


def test_entropy_gated_mixes_the_two_kls_by_the_teachers_entropy():
    forward, reverse = (jsd_rows(STUDENT, TEACHER, beta=beta).item() for beta in (0, 1))
    w = 1.138951 / math.log(4)
    assert entropy_gated_rows(STUDENT, TEACHER).item() == pytest.approx(w * forward + (1 - w) * reverse, abs=1e-6)
    assert entropy_gated_rows(STUDENT, TEACHER, h_max=1.0).item() == pytest.approx(forward, abs=1e-6)
    sure = torch.tensor([[0.0, 50.0, 0.0, 0.0]])
    assert entropy_gated_rows(STUDENT, sure).item() == pytest.approx(jsd_rows(STUDENT, sure, beta=1).item(), rel=1e-5)


def test_eopd_keeps_the_reverse_kl_and_adds_the_forward_kl_where_the_teacher_is_unsure():
    forward, reverse = (jsd_rows(STUDENT, TEACHER, beta=beta).item() for beta in (0, 1))
    assert eopd_rows(STUDENT, TEACHER, threshold=1.13).item() == pytest.approx(reverse + forward, abs=1e-6)
    assert eopd_rows(STUDENT, TEACHER, threshold=1.14).item() == pytest.approx(reverse, abs=1e-6)


def test_entropy_aware_gradients_are_exact():
    student, teacher = pair()
    assert torch.autograd.gradcheck(lambda s: entropy_gated_rows(s, teacher, temperature=1.5), student)
    assert torch.autograd.gradcheck(lambda s: eopd_rows(s, teacher, threshold=1.5), student)


def test_a_gate_without_a_positive_limit_is_refused():
    with pytest.raises(ValueError, match="h_max is 0"):
        entropy_gated_rows(STUDENT, TEACHER, h_max=0.0)
