"""Rows of logits as bytes and back: whole or cut, in either type, from any position of a region."""

import pytest
import torch

from services.losses.topk import TopKRows, top_k_rows
from services.weights.row_format import RowFormat


def random_rows(count, vocab=50):
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)) * 4


def through_bytes(form, logits):
    """The rows as a reader finds them."""
    raw = torch.full((len(logits) * form.row_bytes,), 255, dtype=torch.uint8)
    form.write(logits, raw)
    return raw, form.read(raw)


@pytest.mark.parametrize("vocab", [50, 51])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_rows_come_back_up_to_their_type_and_a_shift(dtype, vocab):
    form, logits = RowFormat(vocab, dtype), random_rows(7, vocab)
    assert form.row_bytes == vocab * {"float32": 4, "bfloat16": 2}[dtype]
    raw, rows = through_bytes(form, logits)
    assert rows.dtype == getattr(torch, dtype)
    if dtype == "float32":
        assert torch.equal(rows, logits)
    else:
        torch.testing.assert_close(rows.float(), logits - logits.amax(1, keepdim=True), rtol=2**-8, atol=0.0)
    assert rows.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()  # no copy


@pytest.mark.parametrize("top_k", [1, 3, 8, 51])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cut_rows_come_back_up_to_the_type_of_their_values(dtype, top_k):
    form, logits = RowFormat(51, dtype, top_k), random_rows(7, 51)
    size = 4 + top_k * (4 + {"float32": 4, "bfloat16": 2}[dtype])
    assert form.row_bytes == size + size % 4
    _, rows = through_bytes(form, logits)
    expected = top_k_rows(logits, top_k)
    assert isinstance(rows, TopKRows)
    assert torch.equal(rows.indices.long(), expected.indices)
    assert torch.equal(rows.tail, expected.tail)
    assert rows.values.dtype == getattr(torch, dtype)
    torch.testing.assert_close(
        rows.values.float(), expected.values, rtol={"float32": 0.0, "bfloat16": 2**-8}[dtype], atol=0.0
    )


@pytest.mark.parametrize("top_k", [0, 3])
def test_any_rows_are_a_range_of_bytes(top_k):
    form, logits = RowFormat(51, "bfloat16", top_k), random_rows(7, 51)
    raw, rows = through_bytes(form, logits)
    part = form.read(raw[2 * form.row_bytes : 5 * form.row_bytes])
    if isinstance(rows, TopKRows):
        assert torch.equal(part.values, rows.values[2:5])
        assert torch.equal(part.tail, rows.tail[2:5])
    else:
        assert torch.equal(part, rows[2:5])
    assert len(form.read(raw[:0])) == 0


def test_rows_in_bfloat16_keep_the_likely_tokens_of_logits_far_from_zero():
    logits = random_rows(20) + 40.0
    _, rows = through_bytes(RowFormat(50, "bfloat16"), logits)
    exact, wire, plain = (each.float().softmax(-1) for each in (logits, rows, logits.to(torch.bfloat16)))
    assert (wire - exact).abs().max() < 0.005
    assert (plain - exact).abs().max() > 5 * (wire - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_type_are_taken(dtype):
    logits = random_rows(4).to(dtype)
    _, rows = through_bytes(RowFormat(50), logits)
    assert torch.equal(rows, logits.float())
    _, cut = through_bytes(RowFormat(50, "bfloat16"), logits)
    wide = logits.float()
    torch.testing.assert_close(cut.float(), wide - wide.amax(1, keepdim=True), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"vocab": 0}, {"vocab": 5, "top_k": 6}, {"vocab": 5, "dtype": "float16"}])
def test_forms_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="vocab >= 1"):
        RowFormat(**wrong)
