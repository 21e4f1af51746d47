import math

import pytest
import torch

from services.losses.corrections import check_sampling, finite_tokens, importance_weights
from services.losses.policy import PolicyConfig, policy_loss

# Ratios per token: 1.5, 4, 0.5 and 1, 1, (masked).
OLD = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
GENERATOR = OLD - torch.tensor([[1.5, 4.0, 0.5], [1.0, 1.0, 9.0]]).log()
MASK = torch.tensor([[True, True, True], [True, True, False]])


def weights(**settings):
    return importance_weights(OLD, GENERATOR, MASK, **settings)


@pytest.mark.parametrize(
    ("kind", "level", "expected"),
    [
        ("none", "token", [[1, 1, 1], [1, 1, 1]]),
        ("tis", "token", [[1.5, 2, 0.5], [1, 1, 1]]),
        ("mis", "token", [[1.5, 0, 0.5], [1, 1, 1]]),
        ("tis", "sequence", [[3, 3, 3], [1, 1, 1]]),  # the product 1.5 * 4 * 0.5 is exactly 3
        ("mis", "sequence", [[3, 3, 3], [1, 1, 1]]),
    ],
)
def test_weights_of_each_kind_and_level(kind, level, expected):
    cap = {"token": None, "sequence": 3.001}[level]
    torch.testing.assert_close(weights(kind=kind, level=level, cap=cap), torch.tensor(expected).float())


def test_the_sequence_cap_is_three_by_default():
    generator = OLD - math.log(2.0)  # the product over three tokens is 8, over two 4
    both = importance_weights(OLD, generator, MASK, kind="tis", level="sequence")
    assert both[MASK].tolist() == [3.0] * 5
    assert importance_weights(OLD, generator, MASK, kind="mis", level="sequence")[MASK].tolist() == [0.0] * 5


def test_huge_ratios_stay_finite():
    far = torch.full_like(OLD, -1000.0)
    assert importance_weights(OLD, far, MASK, kind="tis")[MASK].tolist() == [2.0] * 5
    assert importance_weights(OLD, far, MASK, kind="mis", level="sequence")[MASK].tolist() == [0.0] * 5


def test_non_finite_generator_logprobs_are_not_in_the_mask():
    generator = GENERATOR.clone()
    generator[0, 0], generator[0, 1], generator[1, 2] = float("nan"), -float("inf"), float("inf")
    assert finite_tokens(MASK, generator, None).tolist() == [[False, False, True], [True, True, False]]


@pytest.mark.parametrize("objective", ["bnpo", "gspo", "cispo", "dppo"])
def test_the_correction_weighs_the_policy_term_and_never_the_kl(objective):
    logp = OLD.double().clone().requires_grad_()
    config = {"objective": objective, "kl_beta": 0.7}
    zero_advantage = torch.zeros(2, dtype=torch.float64)
    ref = OLD.double() - 0.3
    plain = policy_loss(logp, OLD, zero_advantage, MASK, PolicyConfig(**config), ref_logprobs=ref)
    corrected = policy_loss(
        logp,
        OLD,
        zero_advantage,
        MASK,
        PolicyConfig(**config, correction="tis"),
        ref_logprobs=ref,
        generator_logprobs=GENERATOR,
    )
    assert plain.loss.item() != 0
    assert corrected.loss.item() == plain.loss.item()


def test_a_masked_token_keeps_its_place_in_the_denominator():
    logp = OLD.clone().requires_grad_()
    config = PolicyConfig(objective="bnpo", correction="mis")
    result = policy_loss(logp, OLD, torch.tensor([1.0, 1.0]), MASK, config, generator_logprobs=GENERATOR)
    assert result.loss.item() == pytest.approx(-(1.5 + 0 + 0.5 + 1 + 1) / 5)
    assert result.metrics["kept_fraction"].item() == pytest.approx(4 / 5)
    result.loss.backward()
    assert logp.grad[0, 1].item() == 0


def test_cut_sampling_with_importance_ratios_is_refused():
    check_sampling(top_p=1.0, top_k=None)
    check_sampling(top_p=1.0, top_k=-1)
    check_sampling(top_p=0.9, top_k=20, mask_replayed=True)
    with pytest.raises(ValueError, match="set top_p = 1"):
        check_sampling(top_p=0.95)
    with pytest.raises(ValueError, match="kept mass"):
        check_sampling(top_k=50)


def test_an_unknown_correction_is_named():
    with pytest.raises(ValueError, match="use none, tis or mis"):
        weights(kind="clip")
