import math

import pytest
import torch

from services.losses.divergence import jsd_rows
from services.losses.entropy import entropy_gated_rows, eopd_rows
from services.losses.logprobs import token_entropy
from services.losses.topk import top_k_rows, topk_jsd_rows, topk_rows_jsd

STUDENT = torch.tensor([[2, 0.5, -1, 0]])
TEACHER = torch.tensor([[0.5, 1.5, -0.5, 0.25]])


def pair(rows=6, vocab=9):
    g = torch.Generator().manual_seed(0)
    student = (torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 2).requires_grad_()
    return student, torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 2


@pytest.mark.parametrize(
    ("support", "tail", "beta", "golden"),
    [
        ("teacher", None, 0.0, 0.715798),
        ("teacher", None, 0.5, 0.160773),
        ("teacher", None, 1.0, 0.655785),
        ("student", None, 0.0, 0.586986),
        ("student", None, 0.5, 0.140232),
        ("student", None, 1.0, 0.603874),
        # Both sides' top 2 are the same two tokens here, so that the same bucket gives the same numbers.
        ("teacher", True, 0.0, 0.586986),
        ("teacher", True, 0.5, 0.140232),
        ("teacher", True, 1.0, 0.603874),
    ],
)
def test_top_2_golden_numbers(support, tail, beta, golden):
    found = topk_jsd_rows(STUDENT, TEACHER, beta=beta, top_k=2, support=support, tail=tail)
    assert found.item() == pytest.approx(golden, abs=1e-6)


SUPPORTS = [("teacher", None), ("teacher", True), ("student", None), ("student", False)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("support", "tail"), SUPPORTS)
def test_top_k_is_never_negative_and_its_gradient_is_exact(beta, support, tail):
    student, teacher = pair()

    def rows(logits):
        return topk_jsd_rows(logits, teacher, beta=beta, top_k=3, support=support, tail=tail, temperature=1.3)

    assert (rows(student) >= 0).all()
    assert torch.autograd.gradcheck(rows, student)


@pytest.mark.parametrize(("support", "tail"), SUPPORTS)
def test_a_support_of_the_whole_vocabulary_is_the_full_divergence(support, tail):
    student, teacher = pair()
    rows = topk_jsd_rows(student, teacher, beta=0.4, top_k=1000, support=support, tail=tail)
    torch.testing.assert_close(rows, jsd_rows(student, teacher, beta=0.4))


@pytest.mark.parametrize("support", ["student", "teacher"])
def test_the_tail_bucket_holds_the_mass_of_all_other_tokens(support):
    student, teacher = pair(rows=1)
    s, t = student.detach().softmax(-1)[0], teacher.softmax(-1)[0]
    kept = {"student": s, "teacher": t}[support].topk(3).indices
    s3, t3 = (torch.cat([p[kept], (1 - p[kept].sum()).reshape(1)]) for p in (s, t))
    expected = (t3 * (t3 / s3).log()).sum()
    found = topk_jsd_rows(student, teacher, beta=0.0, top_k=3, support=support, tail=True)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("support", ["student", "teacher"])
def test_a_bucket_hides_some_of_the_divergence_and_never_adds_to_it(support, beta):
    student, teacher = pair(rows=50)
    cut = topk_jsd_rows(student, teacher, beta=beta, top_k=3, support=support, tail=True)
    assert (cut < jsd_rows(student, teacher, beta=beta)).all()


def test_cut_rows_say_what_whole_ones_do_about_the_likeliest_tokens_and_the_rest():
    _, teacher = pair()
    rows = top_k_rows(teacher, 3)
    p = teacher.softmax(-1)
    torch.testing.assert_close(rows.values.exp(), p.sort(descending=True).values[:, :3])
    torch.testing.assert_close(rows.values.exp(), p.gather(1, rows.indices))
    torch.testing.assert_close(rows.tail.exp(), p.sort(descending=True).values[:, 3:].sum(1))
    assert top_k_rows(teacher, 100).k == 9
    assert (top_k_rows(teacher, 100).tail.exp() == 0).all()
    with pytest.raises(ValueError, match="at least its likeliest token"):
        top_k_rows(teacher, 0)


def test_a_tail_that_float32_cannot_tell_from_one_minus_the_rest_is_exact():
    sure = torch.tensor([[40.0, 0.0, 0.0, 0.0, 0.0]])
    assert top_k_rows(sure, 1).tail.item() == pytest.approx(math.log(4) - 40, abs=1e-4)
    # The student thinks ten times as much of the rest as the teacher does.
    other = torch.tensor([[40.0 - math.log(10), 0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    found = topk_rows_jsd(other, top_k_rows(sure, 1), beta=0.0, tail=True)
    found.sum().backward()
    assert 0 <= found.item() < 1e-6
    assert other.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_are_masked_out_on_both_sides_do_no_harm(beta):
    masked = -float("inf")
    student = torch.tensor([[1.0, 0.5, masked, masked]], requires_grad=True)
    rows = topk_rows_jsd(student, top_k_rows(torch.tensor([[0.0, 2.0, masked, masked]]), 3), beta=beta, tail=True)
    rows.sum().backward()
    plain = jsd_rows(student.detach()[:, :2], torch.tensor([[0.0, 2.0]]), beta=beta)
    torch.testing.assert_close(rows.detach(), plain)
    assert student.grad.isfinite().all()


def test_cut_rows_refuse_a_temperature_that_their_tail_was_not_made_at():
    rows = top_k_rows(TEACHER, 2)
    with pytest.raises(ValueError, match="summed at temperature 1"):
        topk_rows_jsd(STUDENT, rows, beta=0.0, tail=True, temperature=2.0)
    with pytest.raises(ValueError, match="do not fit"):
        topk_rows_jsd(STUDENT.expand(2, 4), rows, beta=0.0, tail=False)


def test_a_kept_mass_that_rounds_to_one_stays_finite():
    sure = torch.tensor([[60.0, 0.0, 0.0, 0.0]], requires_grad=True)
    rows = topk_jsd_rows(sure, TEACHER, beta=0.5, top_k=1, support="student")
    rows.sum().backward()
    assert rows.isfinite().all()
    assert sure.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
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
