import warnings

import pytest
import torch

from services.losses.chunked import chunked_jsd, chunked_rows
from services.losses.divergence import generalized_jsd, jsd_rows, warn_near_the_ends

torch.set_num_threads(1)

STUDENT = torch.tensor([[2, 0.5, -1, 0]])
TEACHER = torch.tensor([[0.5, 1.5, -0.5, 0.25]])
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
GOLDEN = {
    1.0: [0.588540, 0.051910, 0.140504, 0.053023, 0.604712],
    2.0: [0.135469, 0.012213, 0.034551, 0.012923, 0.145505],
}
CASES = [(beta, tau, value) for tau, values in GOLDEN.items() for beta, value in zip(BETAS, values, strict=True)]


def pair(rows=7, vocab=11, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    student = torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 3
    teacher = torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 3
    return student.to(dtype).requires_grad_(), teacher.to(dtype)


def written_out(student, teacher, beta, tau):
    """The definition with probabilities, in float64 autograd."""
    s, t = torch.softmax(student / tau, -1), torch.softmax(teacher / tau, -1)

    def kl(p, q):
        return (p * (p / q).log()).sum(-1)

    if beta in (0, 1):
        return kl(t, s) if beta == 0 else kl(s, t)
    m = (1 - beta) * s + beta * t
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


@pytest.mark.parametrize(("beta", "tau", "golden"), CASES)
def test_golden_numbers_plain_and_chunked(beta, tau, golden):
    plain = generalized_jsd(STUDENT, TEACHER, beta=beta, temperature=tau)
    chunked = chunked_jsd(STUDENT, TEACHER, beta=beta, temperature=tau, token_chunk=1, vocab_chunk=3)
    assert plain.item() == pytest.approx(golden, abs=1e-6)
    assert chunked.item() == pytest.approx(golden, abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tau", [1.0, 1.7])
@pytest.mark.parametrize("chunks", [(1, 1), (3, 4), (7, 11), (100, 100)])
def test_chunked_value_and_gradient_equal_float64_autograd(beta, tau, chunks):
    student, teacher = pair()
    weights = torch.linspace(0.5, 2, 7, dtype=torch.float64)
    rows = chunked_jsd(student, teacher, beta=beta, temperature=tau, token_chunk=chunks[0], vocab_chunk=chunks[1])
    expected = written_out(student, teacher, beta, tau)
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)
    (grad,) = torch.autograd.grad((rows * weights).sum(), student)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), student)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta):
    student, teacher = pair(rows=3, vocab=5)
    assert torch.autograd.gradcheck(lambda s: chunked_jsd(s, teacher, beta=beta, token_chunk=2, vocab_chunk=2), student)
    assert torch.autograd.gradcheck(lambda s: jsd_rows(s, teacher, beta=beta), student)


@pytest.mark.parametrize("beta", BETAS)
def test_bfloat16_logits_are_computed_in_float32(beta):
    student, teacher = pair(dtype=torch.bfloat16, vocab=300)
    exact = written_out(student.detach().double().requires_grad_(), teacher.double(), beta, 1.0)
    rows = chunked_jsd(student, teacher, beta=beta, token_chunk=2, vocab_chunk=64)
    assert rows.dtype == torch.float32
    assert jsd_rows(student, teacher, beta=beta).dtype == torch.float32
    torch.testing.assert_close(rows.double(), exact, rtol=1e-5, atol=1e-6)
    rows.sum().backward()
    assert student.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("beta", BETAS)
def test_a_rounded_teacher_never_gives_a_negative_divergence(beta):
    student = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.01], [8.0]]) + 20
    for teacher in (student.bfloat16(), student + 1e-5):
        assert chunked_jsd(student, teacher, beta=beta).min() >= -1e-6
        assert jsd_rows(student, teacher, beta=beta).min() >= -1e-6


@pytest.mark.parametrize("beta", BETAS)
def test_a_gradient_step_moves_the_student_toward_the_teacher(beta):
    student, teacher = pair()
    before = chunked_jsd(student, teacher, beta=beta)
    (grad,) = torch.autograd.grad(before.sum(), student)
    after = chunked_jsd(student - 0.1 * grad, teacher, beta=beta)
    assert grad.abs().sum() > 0
    assert (after < before).all()


def test_equal_logits_are_at_zero_divergence():
    student, _ = pair()
    for beta in BETAS:
        rows = chunked_jsd(student, student.detach() + 5, beta=beta)  # a constant shift is the same distribution
        torch.testing.assert_close(rows, torch.zeros_like(rows), rtol=0, atol=1e-12)


def test_the_interior_vanishes_at_the_ends_and_the_ends_do_not():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        near = [jsd_rows(STUDENT, TEACHER, beta=beta).item() for beta in (1e-4, 1 - 1e-4)]
    assert max(near) < 1e-3
    assert min(jsd_rows(STUDENT, TEACHER, beta=beta).item() for beta in (0, 1)) > 0.5


def test_a_beta_next_to_an_end_warns_once():
    warn_near_the_ends.cache_clear()
    with pytest.warns(UserWarning, match="Set beta = 0"):
        chunked_jsd(STUDENT, TEACHER, beta=0.005)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunked_jsd(STUDENT, TEACHER, beta=0.005)
        chunked_jsd(STUDENT, TEACHER, beta=0.01)
    with pytest.warns(UserWarning, match="Set beta = 1"):
        jsd_rows(STUDENT, TEACHER, beta=0.995)


@pytest.mark.parametrize("beta", BETAS)
def test_tokens_that_both_rule_out_contribute_nothing(beta):
    student, teacher = pair(vocab=6)
    wide = [torch.cat([x.detach(), torch.full((7, 2), -float("inf"), dtype=x.dtype)], 1) for x in (student, teacher)]
    masked = wide[0].requires_grad_()
    for rows in (jsd_rows(masked, wide[1], beta=beta), chunked_jsd(masked, wide[1], beta=beta, vocab_chunk=3)):
        torch.testing.assert_close(rows, jsd_rows(student, teacher, beta=beta))
        (grad,) = torch.autograd.grad(rows.sum(), masked)
        assert grad.isfinite().all()
        assert (grad[:, 6:] == 0).all()


def test_reductions_are_what_they_are_called():
    student, teacher = (x.detach().reshape(2, 3, 11) for x in pair(rows=6))
    labels = torch.tensor([[4, 5, -100], [-100, 7, -100]])
    rows = jsd_rows(student, teacher, beta=0.5)

    def jsd(**settings):
        return generalized_jsd(student, teacher, beta=0.5, **settings)

    valid = rows * (labels != -100)
    torch.testing.assert_close(jsd(reduction="none"), rows)
    torch.testing.assert_close(jsd(reduction="none", labels=labels), valid)
    torch.testing.assert_close(jsd(reduction="sum", labels=labels), valid.sum())
    torch.testing.assert_close(jsd(reduction="mean"), rows.mean())
    torch.testing.assert_close(jsd(reduction="batchmean"), rows.sum() / 2)
    torch.testing.assert_close(jsd(reduction="batchmean", labels=labels), valid.sum() / 3)
    with pytest.raises(ValueError, match="batchmean, sum, mean or none"):
        jsd(reduction="max")


def test_token_clip_clamps_after_the_vocabulary_sum_and_stops_the_gradient():
    student, teacher = pair()
    rows = jsd_rows(student, teacher, beta=0.0).detach()
    limit = rows.median().item()
    loss = generalized_jsd(student, teacher, beta=0.0, token_clip=limit, reduction="none")
    torch.testing.assert_close(loss, rows.clamp(max=limit))
    (grad,) = torch.autograd.grad(loss.sum(), student)
    assert ((grad.abs().sum(1) == 0) == (rows > limit)).all()


def test_no_valid_label_gives_zero_with_a_live_graph():
    student, teacher = pair()
    loss = generalized_jsd(student, teacher, beta=0.5, labels=torch.full((7,), -100))
    loss.backward()
    assert loss.item() == 0
    assert (student.grad == 0).all()


def test_no_rows_give_an_empty_result_with_a_live_graph():
    source = torch.randn(4, 5, requires_grad=True)
    rows = chunked_jsd(source[:0], torch.empty(0, 5), beta=0.5)
    rows.sum().backward()
    assert rows.shape == (0,)
    assert (source.grad == 0).all()


def test_the_teacher_gets_no_gradient():
    student, teacher = pair()
    teacher.requires_grad_()
    (chunked_jsd(student, teacher, beta=0.5).sum() + jsd_rows(student, teacher, beta=0.5).sum()).backward()
    assert teacher.grad is None
    assert student.grad.abs().sum() > 0


@pytest.mark.parametrize("beta", BETAS)
def test_reused_rows_hold_the_same_gradient(beta):
    source, teacher = pair()
    (expected,) = torch.autograd.grad(chunked_jsd(source * 2, teacher, beta=beta).sum(), source)
    rows = source * 2
    where = rows.data_ptr()
    seen = []
    rows.register_hook(lambda grad: seen.append(grad.data_ptr()))
    chunked_jsd(rows, teacher, beta=beta, token_chunk=3, vocab_chunk=4, reuse_rows=True).sum().backward()
    torch.testing.assert_close(source.grad, expected)
    assert seen == [where]


def test_using_overwritten_rows_again_is_an_error():
    source, teacher = pair()
    loss = chunked_jsd(source * 2, teacher, beta=0.5, reuse_rows=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="pass gathered rows"):
        chunked_jsd(source, teacher, beta=0.5, reuse_rows=True)


@pytest.mark.parametrize("reuse", [False, True])
def test_chunked_rows_equals_plain_autograd_for_any_row_function(reuse):
    source, teacher = pair()

    def function(s, t):
        return (s.sin() * t).sum(1) ** 2

    (expected,) = torch.autograd.grad(function(source * 2, teacher).sum(), source)
    rows = chunked_rows(function, source * 2, teacher, 3, reuse_rows=reuse)
    torch.testing.assert_close(rows, function(source * 2, teacher))
    rows.sum().backward()
    torch.testing.assert_close(source.grad, expected)


def test_blocks_bound_the_memory_of_forward_and_backward(monkeypatch):
    """No tensor of the size of the logits is made but the gradient: every float32 block is one chunk at most."""
    sizes = []
    original = torch.Tensor.to

    def recording(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(torch.Tensor, "to", recording)
    student, teacher = pair(rows=32, vocab=64, dtype=torch.float32)
    sizes.clear()
    chunked_jsd(student, teacher, beta=0.5, token_chunk=4, vocab_chunk=8).sum().backward()
    assert len(sizes) > 100
    assert max(sizes) == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beta": -0.1}, "beta"), ({"beta": 1.1}, "beta"), ({"beta": 0.5, "temperature": 0.0}, "temperature is 0")],
)
def test_settings_outside_their_range_are_refused(settings, message):
    for function in (jsd_rows, chunked_jsd):
        with pytest.raises(ValueError, match=message):
            function(STUDENT, TEACHER, **settings)


def test_shapes_that_differ_are_refused():
    for function in (jsd_rows, chunked_jsd):
        with pytest.raises(ValueError, match="gather"):
            function(STUDENT, TEACHER[:, :3], beta=0.5)
    with pytest.raises(ValueError, match="token_chunk is 0"):
        chunked_jsd(STUDENT, TEACHER, beta=0.5, token_chunk=0)
