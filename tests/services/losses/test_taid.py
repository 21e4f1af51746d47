import math

import pytest
import torch
from pydantic import ValidationError

from services.losses.taid import TAIDConfig, TAIDScheduler, taid_loss, taid_rows

STUDENT = torch.tensor([[2, 0.5, -1, 0]])
TEACHER = torch.tensor([[0.5, 1.5, -0.5, 0.25]])


def test_golden_number():
    assert taid_rows(STUDENT, TEACHER, 0.4).item() == pytest.approx(1.240535, abs=1e-6)


def test_the_gradient_is_student_minus_target():
    student = STUDENT.double().requires_grad_()
    (grad,) = torch.autograd.grad(taid_rows(student, TEACHER, 0.4, temperature=2.0).sum(), student)
    target = torch.softmax((0.6 * STUDENT + 0.4 * TEACHER).double() / 2, -1)
    torch.testing.assert_close(grad, (torch.softmax(STUDENT.double() / 2, -1) - target) / 2, atol=1e-7, rtol=1e-6)


def test_t_zero_has_no_teacher_signal_and_t_one_is_the_teachers_cross_entropy():
    student = STUDENT.clone().requires_grad_()
    (grad,) = torch.autograd.grad(taid_rows(student, TEACHER, 0.0).sum(), student)
    torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-7, rtol=0)
    full = -(TEACHER.softmax(-1) * STUDENT.log_softmax(-1)).sum()
    torch.testing.assert_close(taid_rows(student, TEACHER, 1.0).sum(), full)


def test_loss_divides_by_the_mask_and_an_empty_mask_is_zero():
    student = STUDENT.repeat(3, 1)[None].clone().requires_grad_()
    teacher = TEACHER.repeat(3, 1)[None]
    mask = torch.tensor([[1, 0, 1]])
    assert taid_loss(student, teacher, 0.4, mask).item() == pytest.approx(1.240535, abs=1e-6)
    empty = taid_loss(student, teacher, 0.4, torch.zeros(1, 3))
    empty.backward()
    assert empty.item() == 0
    assert (student.grad == 0).all()


def test_bfloat16_inputs_are_computed_in_float32():
    rows = taid_rows(STUDENT.bfloat16(), TEACHER.bfloat16(), 0.4)
    assert rows.dtype == torch.float32
    assert rows.item() == pytest.approx(1.240535, abs=1e-6)  # these logits are exact in bfloat16


@pytest.mark.parametrize("t", [None, -0.1, 1.1, float("nan")])
def test_t_missing_or_outside_is_refused(t):
    with pytest.raises(ValueError, match="t in \\[0, 1\\]"):
        taid_rows(STUDENT, TEACHER, t)


def scheduler(**settings):
    return TAIDScheduler(TAIDConfig(**{"t_start": 0.4, "t_end": 1.0, "total_steps": 100, **settings}))


def test_the_first_finite_loss_only_seeds():
    s = scheduler()
    assert s.update(float("nan"), 0) == 0.4
    assert s.update(float("inf"), 50) == 0.4
    assert s.update(2.0, 50) == 0.4
    assert (s.previous, s.momentum) == (2.0, 0.0)


def test_updates_follow_the_formula_above_the_linear_floor():
    s = scheduler(total_steps=10**9)
    s.update(2.0, 0)
    t, m, previous = 0.4, 0.0, 2.0
    for step, loss in enumerate([1.5, 1.6, 0.8], start=1):
        m = 0.99 * m + 0.01 * (previous - loss) / (previous + 1e-15)
        t += 5e-4 / (1 + math.exp(-m)) * (1 - t)
        previous = loss
        assert s.update(loss, step) == pytest.approx(t, abs=1e-9)


def test_the_linear_floor_holds_and_t_end_is_never_passed():
    s = scheduler()
    s.update(1.0, 0)
    assert s.update(1.0, 50) == pytest.approx(0.7)
    assert s.update(1.0, 1000) == 1.0
    assert scheduler(t_end=0.4).update(1.0, 80) == 0.4


def test_t_never_falls():
    s = scheduler()
    values = [s.update(loss, step) for step, loss in [(0, 1.0), (60, 1e9), (10, -1e9), (5, float("nan")), (90, 3.0)]]
    assert values == sorted(values)


def test_disabling_adaptation_gives_the_linear_floor():
    s = scheduler(disable_adaptive=True)
    assert [s.update(loss, step) for loss, step in [(5.0, 0), (0.1, 25), (9.0, 50)]] == pytest.approx([0.4, 0.55, 0.7])


def test_a_restored_scheduler_goes_on_where_it_was():
    s, restored = scheduler(), scheduler()
    for step in range(5):
        s.update(2.0 / (step + 1), step)
    restored.load_state_dict(s.state_dict())
    assert s.update(0.1, 5) == restored.update(0.1, 5)


def test_a_falling_schedule_is_refused():
    with pytest.raises(ValidationError, match="swap them"):
        TAIDConfig(t_start=0.8, t_end=0.5, total_steps=10)
