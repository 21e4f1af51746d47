import warnings

import pytest
import torch

from services.losses.alignment import gather_aligned
from services.losses.divergence import jsd_rows
from services.losses.sdpo import SDPOLossConfig, sdpo_loss

BATCH, STUDENT_LENGTH, TEACHER_LENGTH, VOCAB = 2, 4, 6, 3


def logits():
    """Every logit tells where it stands: sequence * 100 + position * 10 + token."""

    def side(length):
        b, t, v = torch.meshgrid(torch.arange(BATCH), torch.arange(length), torch.arange(VOCAB), indexing="ij")
        return (b * 100 + t * 10 + v).float()

    return side(STUDENT_LENGTH).requires_grad_(), side(TEACHER_LENGTH) + 0.5


def test_rows_are_gathered_by_index_on_both_sides():
    student, teacher = logits()
    rows = gather_aligned(student, teacher, torch.tensor([[1, 2], [0, -1]]), torch.tensor([[4, 5], [3, -1]]))
    assert rows.student[:, 0].tolist() == [10, 20, 100]
    assert rows.teacher[:, 0].tolist() == [40.5, 50.5, 130.5]
    assert rows.slots.tolist() == [[0, 0], [0, 1], [1, 0]]


def test_padding_may_stand_anywhere_and_positions_may_repeat_or_descend():
    student, teacher = logits()
    rows = gather_aligned(
        student, teacher, torch.tensor([[-1, 3, 0], [2, 2, -1]]), torch.tensor([[-1, 5, 1], [0, 1, -1]])
    )
    assert rows.student[:, 0].tolist() == [30, 0, 120, 120]
    assert rows.teacher[:, 0].tolist() == [50.5, 10.5, 100.5, 110.5]


def test_equal_shapes_do_not_mean_equal_positions():
    student, _ = logits()
    shifted = gather_aligned(student, student + 1, torch.tensor([[0, 1], [-1, -1]]), torch.tensor([[1, 2], [-1, -1]]))
    assert (shifted.teacher - shifted.student == 11).all()


def test_the_gradient_reaches_exactly_the_aligned_student_positions():
    student, teacher = logits()
    teacher.requires_grad_()
    rows = gather_aligned(student, teacher, torch.tensor([[1, -1], [3, 3]]), torch.tensor([[2, -1], [0, 1]]))
    (rows.student.sum() + rows.teacher.sum()).backward()
    assert student.grad.sum(-1).tolist() == [[0, 3, 0, 0], [0, 0, 0, 6]]
    assert teacher.grad is None


def test_all_padding_gives_no_rows_and_a_zero_loss_with_a_live_graph():
    student, teacher = logits()
    nothing = torch.full((BATCH, 2), -1)
    rows = gather_aligned(student, teacher, nothing, nothing)
    loss = sdpo_loss(rows.student, rows.teacher, config=SDPOLossConfig()).loss
    loss.backward()
    assert rows.student.shape == (0, VOCAB)
    assert loss.item() == 0
    assert (student.grad == 0).all()


@pytest.mark.parametrize(
    ("student_idx", "teacher_idx", "message"),
    [
        ([[1, 2], [0, -1]], [[4, -1], [3, -1]], r"1 of 3 slots .* at \(0, 1\)"),
        ([[1, -1], [0, -1]], [[4, 5], [3, -1]], r"1 of 3 slots .* at \(0, 1\)"),
        ([[1, 4], [0, -1]], [[4, 5], [3, -1]], "student 4 of 4 positions"),
        ([[1, 2], [0, -1]], [[4, 6], [3, -1]], "teacher 6 of 6"),
        ([[1, -2], [0, -1]], [[4, 5], [3, -1]], "student -2 of 4"),
    ],
)
def test_a_slot_without_both_indices_raises_or_is_skipped_aloud(student_idx, teacher_idx, message):
    student, teacher = logits()
    indices = torch.tensor(student_idx), torch.tensor(teacher_idx)
    with pytest.raises(ValueError, match=message):
        gather_aligned(student, teacher, *indices)
    with pytest.warns(UserWarning, match=message):
        rows = gather_aligned(student, teacher, *indices, missing="warn")
    assert rows.student[:, 0].tolist() == [10, 100]
    assert rows.teacher[:, 0].tolist() == [40.5, 130.5]


@pytest.mark.parametrize("missing_side", ["student_idx", "teacher_idx"])
def test_missing_index_tensors_raise_or_skip_everything_aloud(missing_side):
    student, teacher = logits()
    indices = {"student_idx": torch.zeros(2, 1).long(), "teacher_idx": torch.zeros(2, 1).long(), missing_side: None}
    with pytest.raises(ValueError, match=f"{missing_side} is missing"):
        gather_aligned(student, teacher, **indices)
    with pytest.warns(UserWarning, match=f"{missing_side} is missing"):
        rows = gather_aligned(student, teacher, **indices, missing="warn")
    loss = jsd_rows(rows.student, rows.teacher, beta=0.5).sum()
    loss.backward()
    assert loss.item() == 0
    assert (student.grad == 0).all()


def test_complete_indices_do_not_warn():
    student, teacher = logits()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gather_aligned(student, teacher, torch.tensor([[1], [-1]]), torch.tensor([[0], [-1]]), missing="warn")


def test_shapes_that_can_not_correspond_always_raise():
    student, teacher = logits()
    index = torch.zeros(BATCH, 1).long()
    for missing in ("raise", "warn"):
        with pytest.raises(ValueError, match="same vocabulary"):
            gather_aligned(student, teacher[..., :2], index, index, missing=missing)
        with pytest.raises(ValueError, match="same sequences"):
            gather_aligned(student, teacher[:1], index, index, missing=missing)
        with pytest.raises(ValueError, match="slot k of both"):
            gather_aligned(student, teacher, index, torch.zeros(BATCH, 2).long(), missing=missing)
    with pytest.raises(ValueError, match="use 'raise' or 'warn'"):
        gather_aligned(student, teacher, None, index, missing="skip")
