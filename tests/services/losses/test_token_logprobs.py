import pytest
import torch

from services.losses.logprobs import shift_mask, span_mask, token_logprobs


def example(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return logits, torch.randint(7, (2, 5), generator=g)


@pytest.mark.parametrize("token_chunk", [None, 1, 3, 100])
def test_column_t_is_the_probability_of_the_next_token_at_the_sampling_temperature(token_chunk):
    logits, ids = example()
    values = token_logprobs(logits, ids, temperature=0.7, token_chunk=token_chunk)
    assert values.shape == (2, 4)
    for b in range(2):
        for t in range(4):
            expected = torch.softmax(logits[b, t] / 0.7, -1)[ids[b, t + 1]].log()
            torch.testing.assert_close(values[b, t], expected)


def test_chunks_do_not_change_the_gradient():
    logits, ids = example()
    weights = torch.randn(2, 4, dtype=torch.float64)
    plain, chunked = (
        torch.autograd.grad((token_logprobs(logits, ids, token_chunk=chunk) * weights).sum(), logits)[0]
        for chunk in (None, 3)
    )
    torch.testing.assert_close(plain, chunked)
    assert (plain[:, -1] == 0).all()
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, token_chunk=3), logits)


@pytest.mark.parametrize("token_chunk", [None, 3])
def test_bfloat16_logits_give_float32_logprobs(token_chunk):
    logits, ids = example(torch.bfloat16)
    values = token_logprobs(logits, ids, token_chunk=token_chunk)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), token_logprobs(logits.double(), ids), atol=1e-6, rtol=1e-6)


def test_one_token_has_no_logprob():
    assert token_logprobs(torch.zeros(2, 1, 7), torch.zeros(2, 1).long()).shape == (2, 0)


def test_masks_come_from_spans_and_shift_with_the_labels():
    mask = span_mask([[(1, 3), (4, 5)], []], 5)
    assert mask.tolist() == [[False, True, True, False, True], [False] * 5]
    assert shift_mask(mask).tolist() == [[True, True, False, True], [False] * 4]
    with pytest.raises(ValueError, match="span \\(3, 6\\) of sequence 1"):
        span_mask([[], [(3, 6)]], 5)


def test_an_end_token_equal_to_the_pad_token_stays_in_the_loss():
    eos = pad = 0
    ids = torch.tensor([[3, 4, eos, pad, pad]])
    mask = shift_mask(span_mask([[(1, 3)]], 5))
    assert [i for i, kept in zip(ids[0, 1:].tolist(), mask[0].tolist(), strict=True) if kept] == [4, eos]


def test_shapes_and_temperatures_that_make_no_sense_are_refused():
    logits, ids = example()
    with pytest.raises(ValueError, match="same B and T"):
        token_logprobs(logits, ids[:, :3])
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(logits, ids, temperature=0.0)
