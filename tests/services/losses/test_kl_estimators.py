import pytest
import torch

from services.losses.kl import kl_estimate, kl_in_reward

LOGP = torch.tensor([[-0.2, -1.0, -0.5], [-0.7, -0.3, 0.0]])
REF = torch.tensor([[-0.5, -0.9, -0.5], [-0.2, -0.6, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_k3_golden_numbers():
    assert kl_estimate(LOGP, REF, "k3")[0].tolist() == pytest.approx([0.040818, 0.005171, 0], abs=1e-6)


def test_k1_and_k2_follow_their_formulas():
    assert kl_estimate(LOGP, REF, "k1")[0].tolist() == pytest.approx([0.3, -0.1, 0], abs=1e-6)
    assert kl_estimate(LOGP, REF, "k2")[0].tolist() == pytest.approx([0.045, 0.005, 0], abs=1e-6)


def test_k3_is_exact_for_tiny_gaps_and_never_negative():
    gap = torch.tensor([1e-4, -1e-4, 1e-3])
    k3 = kl_estimate(torch.zeros(3), gap, "k3")
    assert (k3 >= 0).all()
    torch.testing.assert_close(k3.double(), (gap.double().exp() - gap.double() - 1), rtol=2e-3, atol=0)


def test_estimators_agree_with_the_exact_kl_in_expectation():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    exact = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k3"):
        assert (p.exp() * kl_estimate(p, q, kind)).sum().item() == pytest.approx(exact)


def test_the_gradient_reaches_the_policy_and_not_the_reference():
    logp, ref = LOGP.clone().requires_grad_(), REF.clone().requires_grad_()
    kl_estimate(logp, ref).sum().backward()
    assert logp.grad.abs().sum() > 0
    assert ref.grad is None


def test_kl_in_reward_equals_advantages_of_rewards_with_the_kl_taken_off():
    rewards, beta = torch.tensor([1.0, 0.0, 0.25, 0.75]), 0.1
    logp, ref, mask = torch.cat([LOGP, REF]), torch.cat([REF, LOGP]), torch.cat([MASK, MASK])
    groups = torch.tensor([7, 7, 3, 3])
    kl = ((logp - ref) * mask).sum(1)

    def centered(values):
        return values - values.reshape(2, 2).mean(1).repeat_interleave(2)

    result = kl_in_reward(centered(rewards), logp, ref, mask, groups, beta=beta, scaling="none")
    torch.testing.assert_close(result, centered(rewards - beta * kl))


def test_a_group_of_one_keeps_its_advantage():
    one = kl_in_reward(torch.zeros(1), LOGP[:1], REF[:1], MASK[:1], torch.tensor([0]), beta=1.0, scaling="none")
    assert one.tolist() == [0.0]


def test_unscorable_rollouts_stay_at_zero_and_out_of_the_mean():
    logp, ref, mask = LOGP.repeat(2, 1)[:3], REF.repeat(2, 1)[:3], MASK.repeat(2, 1)[:3]
    scorable = torch.tensor([True, True, False])
    group = torch.zeros(3, dtype=torch.long)
    result = kl_in_reward(torch.zeros(3), logp, ref, mask, group, beta=1.0, scaling="none", scorable=scorable)
    kl = ((logp - ref) * mask).sum(1)
    assert result.tolist() == pytest.approx([*(kl[:2].mean() - kl[:2]).tolist(), 0.0])


@pytest.mark.parametrize(("beta", "scaling", "advice"), [(0.0, "none", "set kl_beta"), (0.1, "group", "to 'none'")])
def test_kl_in_reward_refuses_settings_under_which_it_is_not_exact(beta, scaling, advice):
    with pytest.raises(ValueError, match=advice):
        kl_in_reward(torch.zeros(2), LOGP, REF, MASK, torch.zeros(2).long(), beta=beta, scaling=scaling)


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(LOGP, REF, "k4")
