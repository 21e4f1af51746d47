import math

import pytest
import torch
from pydantic import ValidationError

from services.losses.preference import PreferenceConfig, Responses, preference_loss


def responses(*rows, ref=None):
    """Uneven lists of token logprobs as one padded side; what stands in the padding is NaN on purpose."""
    length = max(len(row) for row in rows)
    values = torch.full((len(rows), length), float("nan"))
    mask = torch.zeros(len(rows), length)
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    references = None if ref is None else responses(*ref).logprobs
    return Responses(values.requires_grad_(), mask, references)


def test_dpo_golden_number_from_token_sums():
    chosen = responses([-0.5, -0.5], ref=[[-0.75, -0.75]])  # + .5 over the reference
    rejected = responses([-1.0, -1.0, -1.0], ref=[[-1.0, -1.0, -1.0]])
    result = preference_loss(chosen, rejected, PreferenceConfig(objective="dpo"))
    assert result.loss.item() == pytest.approx(0.668460, abs=1e-6)
    assert result.metrics["margin"].item() == pytest.approx(0.5)
    assert result.metrics["accuracy"].item() == 1


def test_simpo_golden_number_from_token_means():
    chosen, rejected = responses([-0.4, -0.6]), responses([-0.9, -0.8, -1.0])
    result = preference_loss(chosen, rejected, PreferenceConfig(objective="simpo", beta=2.0, gamma=0.5))
    assert result.loss.item() == pytest.approx(0.554355, abs=1e-6)


def test_a_policy_equal_to_its_reference_starts_at_log_2():
    side = responses([-1.0, -2.0], ref=[[-1.0, -2.0]])
    assert preference_loss(side, side, PreferenceConfig()).loss.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("objective", ["dpo", "simpo"])
def test_the_gradient_raises_the_chosen_and_lowers_the_rejected(objective):
    chosen = responses([-0.5, -0.5], [-1.0], ref=[[-0.6, -0.4], [-1.0]])
    rejected = responses([-1.0], [-0.3, -0.2], ref=[[-0.9], [-0.4, -0.4]])
    preference_loss(chosen, rejected, PreferenceConfig(objective=objective)).loss.backward()
    assert (chosen.logprobs.grad[chosen.mask.bool()] < 0).all()
    assert (rejected.logprobs.grad[rejected.mask.bool()] > 0).all()
    assert (chosen.logprobs.grad[~chosen.mask.bool()] == 0).all()


def test_gradients_are_exact_in_float64():
    g = torch.Generator().manual_seed(0)
    values = [-torch.rand(3, 4, generator=g, dtype=torch.float64) for _ in range(4)]
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    for objective in ("dpo", "simpo"):
        config = PreferenceConfig(objective=objective, nll_weight=0.1)

        def loss(chosen, rejected, config=config):
            return preference_loss(
                Responses(chosen, mask, values[2]), Responses(rejected, mask, values[3]), config
            ).loss

        assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in values[:2]])


def test_the_chosen_likelihood_is_a_token_mean():
    chosen, rejected = responses([-0.4, -0.6]), responses([-0.9])
    plain = preference_loss(chosen, rejected, PreferenceConfig(objective="simpo")).loss
    extra = preference_loss(chosen, rejected, PreferenceConfig(objective="simpo", nll_weight=0.1)).loss
    assert extra.item() == pytest.approx(plain.item() + 0.1 * 0.5)


def test_micro_batches_of_pairs_add_up():
    rows_c, rows_r = [[-0.5], [-1.0, -0.2], [-0.3]], [[-0.7, -0.1], [-0.4], [-2.0]]
    config = PreferenceConfig(objective="simpo")
    whole = preference_loss(responses(*rows_c), responses(*rows_r), config).loss
    parts = [
        preference_loss(responses(*rows_c[s]), responses(*rows_r[s]), config, normalizer=3).loss
        for s in (slice(0, 1), slice(1, 3))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)


def test_pairs_with_an_empty_response_are_not_counted():
    chosen, rejected = responses([-0.4, -0.6], []), responses([-0.9, -0.8, -1.0], [-1.0])
    result = preference_loss(chosen, rejected, PreferenceConfig(objective="simpo", beta=2.0, gamma=0.5))
    result.loss.backward()
    assert result.count.item() == 1
    assert result.loss.item() == pytest.approx(0.554355, abs=1e-6)
    assert (rejected.logprobs.grad[1] == 0).all()


@pytest.mark.parametrize("objective", ["dpo", "simpo"])
def test_no_pair_gives_zero_with_a_live_graph(objective):
    for pairs in (0, 2):
        logprobs = torch.zeros(pairs, 3, requires_grad=True)
        side = Responses(logprobs, torch.zeros(pairs, 3), torch.zeros(pairs, 3))
        result = preference_loss(side, side, PreferenceConfig(objective=objective, nll_weight=0.1))
        result.loss.backward()
        assert result.loss.item() == 0
        assert (logprobs.grad == 0).all()


def test_bfloat16_logprobs_are_summed_in_float32():
    long = Responses(torch.full((1, 1000), -0.5).bfloat16(), torch.ones(1, 1000), torch.full((1, 1000), -0.5))
    other = Responses(torch.full((1, 1), -0.5).bfloat16(), torch.ones(1, 1), torch.full((1, 1), -1.0))
    result = preference_loss(long, other, PreferenceConfig(beta=1.0))
    assert result.loss.dtype == torch.float32
    assert result.metrics["margin"].item() == pytest.approx(-0.5)


def test_dpo_without_reference_logprobs_is_refused():
    side = responses([-1.0])
    with pytest.raises(ValueError, match="run the initial policy"):
        preference_loss(side, side, PreferenceConfig(objective="dpo"))


def test_unequal_numbers_of_pairs_and_contradictory_settings_are_refused():
    with pytest.raises(ValueError, match="2 chosen and 1 rejected"):
        preference_loss(responses([-1.0], [-1.0]), responses([-1.0]), PreferenceConfig(objective="simpo"))
    with pytest.raises(ValidationError, match="objective = 'simpo'"):
        PreferenceConfig(objective="dpo", gamma=0.5)
