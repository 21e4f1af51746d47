import pytest
import torch
from pydantic import ValidationError

from services.losses.divergence import jsd_rows
from services.losses.sdpo import SDPOLossConfig, sdpo_loss
from services.losses.taid import taid_rows
from services.losses.topk import TopKRows, cat_rows, top_k_rows

torch.set_num_threads(1)

KINDS = [
    {"beta": 0.0},
    {"beta": 0.5, "temperature": 1.5},
    {"beta": 1.0},
    {"support": "teacher", "top_k": 3, "beta": 0.5},
    {"support": "teacher", "top_k": 3, "tail": True, "beta": 0.5},
    {"support": "student", "top_k": 3, "beta": 0.5},
    {"kind": "taid"},
    {"kind": "entropy_gated"},
    {"kind": "eopd", "entropy_threshold": 1.0},
]


def config(settings, **more):
    return SDPOLossConfig(**settings, **more, token_chunk=3, vocab_chunk=4)


def pair(rows=8, vocab=10, dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    student = (torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 2).to(dtype).requires_grad_()
    return student, (torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 2).to(dtype)


@pytest.mark.parametrize("settings", KINDS)
def test_teacher_rows_in_pieces_add_up_to_one_call(settings):
    student, teacher = pair()
    weights = torch.rand(8, dtype=torch.float64)
    total = weights.sum().item()
    whole = sdpo_loss(student, teacher, config=config(settings), weights=weights, t=0.6).loss
    parts = [
        sdpo_loss(student[s], teacher[s], config=config(settings), weights=weights[s], normalizer=total, t=0.6).loss
        for s in (slice(0, 1), slice(1, 5), slice(5, 5), slice(5, 8))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-14)
    (grad,), (expected,) = torch.autograd.grad(sum(parts), student), torch.autograd.grad(whole, student)
    torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("settings", KINDS)
def test_gradients_are_exact_in_float64(settings):
    student, teacher = pair(rows=4, vocab=5)

    def loss(logits):  # at t = 1 TAID's target holds no stopped gradient, which finite differences would see
        return sdpo_loss(logits, teacher, config=config(settings), t=1.0).loss

    assert torch.autograd.gradcheck(loss, student)


@pytest.mark.parametrize("settings", KINDS)
def test_a_gradient_step_moves_the_student_toward_the_teacher(settings):
    student, teacher = pair()
    loss = sdpo_loss(student, teacher, config=config(settings), t=0.6).loss
    loss.backward()
    moved = student.detach() - 0.5 * student.grad
    assert student.grad.abs().sum() > 0
    before, after = (jsd_rows(s, teacher, beta=0.5).sum() for s in (student.detach(), moved))
    assert after < before


@pytest.mark.parametrize("settings", KINDS)
def test_bfloat16_rows_give_a_float32_loss_and_a_bfloat16_gradient(settings):
    student, teacher = pair(dtype=torch.bfloat16)
    loss = sdpo_loss(student, teacher.float(), config=config(settings), t=0.6).loss
    exact = sdpo_loss(student.double(), teacher.double(), config=config(settings), t=0.6).loss
    loss.backward()
    assert (loss.dtype, student.grad.dtype) == (torch.float32, torch.bfloat16)
    assert loss.item() == pytest.approx(exact.item(), abs=1e-5)


@pytest.mark.parametrize("settings", KINDS)
def test_no_rows_give_zero_with_a_live_graph(settings):
    student, teacher = pair()
    result = sdpo_loss(student[:0], teacher[:0], config=config(settings), t=0.6)
    result.loss.backward()
    assert result.loss.item() == 0
    assert (student.grad == 0).all()
    assert result.metrics["divergence"].item() == 0


@pytest.mark.parametrize("settings", KINDS)
def test_reused_rows_hold_the_same_gradient(settings):
    source, teacher = pair()
    index = torch.tensor([5, 0, 2])

    def gradient(reuse):
        rows = source.index_select(0, index)
        loss = sdpo_loss(rows, teacher[index], config=config(settings, reuse_rows=reuse), t=0.6).loss
        return torch.autograd.grad(loss, source)[0]

    torch.testing.assert_close(gradient(True), gradient(False))


def test_rows_of_weight_zero_are_in_neither_numerator_nor_denominator():
    student, teacher = pair()
    weights = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 1])
    result = sdpo_loss(student, teacher, config=config({"beta": 0.5}), weights=weights)
    expected = jsd_rows(student, teacher, beta=0.5)[weights.bool()].mean()
    torch.testing.assert_close(result.loss, expected)
    assert result.count.item() == 5


def test_token_clip_bounds_each_row():
    student, teacher = pair()
    rows = jsd_rows(student, teacher, beta=0.0)
    limit = rows.median().item()
    result = sdpo_loss(student, teacher, config=config({"beta": 0.0, "token_clip": limit}))
    torch.testing.assert_close(result.loss, rows.clamp(max=limit).mean())
    torch.testing.assert_close(result.metrics["divergence"], rows.detach().mean())
    assert result.metrics["clip_fraction"].item() == (rows > limit).double().mean().item()


def test_taid_takes_t_from_the_scheduler():
    student, teacher = pair()
    loss = sdpo_loss(student, teacher, config=config({"kind": "taid"}), t=0.3).loss
    torch.testing.assert_close(loss, taid_rows(student, teacher, 0.3).mean())
    with pytest.raises(ValueError, match="needs t"):
        sdpo_loss(student, teacher, config=config({"kind": "taid"}))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"top_k": 5}, "set support ="),
        ({"tail": True}, "set support ="),
        ({"support": "teacher"}, "set top_k"),
        ({"support": "student", "top_k": 5, "kind": "taid"}, "set support = 'full'"),
        ({"kind": "eopd"}, "set the teacher entropy"),
        ({"beta": 1.5}, "beta"),
    ],
)
def test_contradictory_settings_are_refused_with_advice(settings, advice):
    with pytest.raises(ValidationError, match=advice):
        SDPOLossConfig(**settings)


CUT = [
    {"support": "teacher", "top_k": 3, "beta": 0.0, "temperature": 1.7},
    {"support": "teacher", "top_k": 3, "beta": 1.0, "token_clip": 0.5},
    {"support": "teacher", "top_k": 3, "tail": True, "beta": 0.0},
    {"support": "teacher", "top_k": 3, "tail": True, "beta": 0.5, "reuse_rows": True},
    {"support": "teacher", "top_k": 99, "tail": True, "beta": 0.5},
]


@pytest.mark.parametrize("settings", CUT)
def test_cut_rows_give_the_loss_and_gradient_of_whole_ones(settings):
    source, teacher = pair()
    weights = torch.rand(8, dtype=torch.float64)

    def found(teacher_rows):
        student = source * 1.0  # gathered: reuse_rows overwrites it
        result = sdpo_loss(student, teacher_rows, config=config(settings), weights=weights)
        return result, torch.autograd.grad(result.loss, source)[0]

    whole, expected = found(teacher)
    cut, gradient = found(top_k_rows(teacher, settings["top_k"]))
    torch.testing.assert_close(cut.loss, whole.loss)
    torch.testing.assert_close(gradient, expected)
    assert whole.loss > 0
    for name, value in whole.metrics.items():
        torch.testing.assert_close(cut.metrics[name], value)


def test_cut_rows_in_pieces_add_up_to_one_call():
    student, teacher = pair()
    settings = config({"support": "teacher", "top_k": 3, "tail": True})
    rows = top_k_rows(teacher, 3)
    again = cat_rows([rows[:2], rows[2:2], rows[2:]])
    assert isinstance(again, TopKRows)
    whole = sdpo_loss(student, again, config=settings).loss
    parts = [
        sdpo_loss(student[s], rows[s], config=settings, normalizer=8.0).loss
        for s in (slice(0, 3), slice(3, 3), slice(3, 8))
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"kind": "taid"}, 'set sdpo.loss.kind = "jsd"'),
        ({}, 'sdpo.loss.support = "teacher"'),
        ({"support": "student", "top_k": 3}, "sdpo.hinted.logits.top_k = 0 for whole rows"),
        ({"support": "teacher", "top_k": 4}, "set both to the same number"),
        ({"support": "teacher", "top_k": 3, "tail": True, "temperature": 2.0}, "sdpo.loss.tail = false"),
    ],
)
def test_losses_that_need_more_than_cut_rows_hold_refuse_them_with_advice(settings, advice):
    student, teacher = pair()
    for refused in (
        lambda: SDPOLossConfig(**settings).check_rows(3),
        lambda: sdpo_loss(student, top_k_rows(teacher, 3), config=config(settings), t=0.5),
    ):
        with pytest.raises(ValueError, match=advice):
            refused()
    SDPOLossConfig(**settings).check_rows(0)


def test_rows_of_a_whole_small_vocabulary_are_no_excuse_for_another_loss():
    student, teacher = pair()
    every = top_k_rows(teacher, 99)
    for settings in ({}, {"support": "teacher", "top_k": 3}, {"support": "student", "top_k": 99}):
        with pytest.raises(ValueError, match=r"sdpo\.hinted\.logits\.top_k = (10|99)"):
            sdpo_loss(student, every, config=config(settings))


def test_rows_that_do_not_fit_are_refused():
    student, teacher = pair()
    with pytest.raises(ValueError, match="gather them first"):
        sdpo_loss(student, teacher[:3], config=SDPOLossConfig())
    with pytest.raises(ValueError, match="one per row"):
        sdpo_loss(student, teacher, config=SDPOLossConfig(), weights=torch.ones(3))
    with pytest.raises(ValueError, match="have the same number of rows"):
        sdpo_loss(student, top_k_rows(teacher, 3)[:5], config=config({"support": "teacher", "top_k": 3}))
