import itertools

import pytest
import torch
from pydantic import ValidationError

from services.losses.policy import ADVANTAGE_SCALING, PolicyConfig, policy_loss, policy_normalizer

LOGP = [[-0.2, -1, -0.5], [-0.7, -0.3, 0]]
OLD = [[-0.5, -0.9, -0.5], [-0.2, -0.6, 0]]
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0])
OBJECTIVES = ["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "dppo"]


def example(dtype=torch.float32):
    logp = torch.tensor(LOGP, dtype=dtype, requires_grad=True)
    return logp, torch.tensor(OLD, dtype=dtype), ADVANTAGES.to(dtype), MASK


def random_batch(seed=0, batch=6, length=7):
    """Six sequences of uneven masks, one of them empty; float64 so that sums can be compared to the last digits."""
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(batch, length, generator=g, dtype=torch.float64) * 2
    old = logp + 0.4 * torch.randn(batch, length, generator=g, dtype=torch.float64)
    advantages = torch.randn(batch, generator=g, dtype=torch.float64)
    mask = torch.rand(batch, length, generator=g) < 0.6
    mask[2] = False
    return logp.requires_grad_(), old.clamp(max=0), advantages, mask


@pytest.mark.parametrize(
    ("settings", "golden"),
    [
        ({"objective": "grpo"}, 0.019992),
        ({"objective": "bnpo"}, -0.190996),
        ({"objective": "dapo", "eps_high": 0.2}, -0.190996),
        ({"objective": "dr_grpo", "max_completion_length": 4}, -0.119372),
        ({"objective": "gspo"}, -0.082051),
        ({"objective": "cispo", "ratio_max": 5}, 0.169056),
        ({"objective": "cispo", "ratio_min": 0.8, "ratio_max": 1.2}, 0.144967),
        ({"objective": "dppo"}, -0.110908),
    ],
)
def test_each_objective_gives_its_golden_number(settings, golden):
    assert policy_loss(*example(), PolicyConfig(**settings)).loss.item() == pytest.approx(golden, abs=1e-6)


def test_gspo_has_one_ratio_per_sequence():
    config = PolicyConfig(objective="gspo")
    values = [policy_loss(*(x[i : i + 1] for x in example()), config) for i in range(2)]
    assert [v.loss.item() for v in values] == pytest.approx([-1.068939, 0.904837], abs=1e-6)


def test_dppo_masks_the_first_token_of_each_sequence():
    logp, *rest = example()
    result = policy_loss(logp, *rest, PolicyConfig(objective="dppo", kl_tau=0.0))
    (grad,) = torch.autograd.grad(result.loss, logp)
    assert (grad == 0).tolist() == [[True, False, False], [True, False, True]]
    assert result.metrics["kept_fraction"].item() == pytest.approx(3 / 5)


def test_dppo_penalty_covers_masked_tokens_and_zero_advantage_uses_the_low_side():
    logp = torch.tensor([[-0.2, -3.0, -0.1]], requires_grad=True)
    old = torch.tensor([[-0.5, -0.2, -3.0]])  # probability +.21, -.77, +.86
    mask = torch.ones(1, 3)
    cut = {1.0: 2 / 3, 0.0: 1 / 3, -1.0: 1 / 3}
    for advantage, fraction in cut.items():
        result = policy_loss(logp, old, torch.tensor([advantage]), mask, PolicyConfig(objective="dppo"))
        assert result.metrics["clip_fraction"].item() == pytest.approx(fraction)
    zero = policy_loss(logp, old, torch.tensor([0.0]), mask, PolicyConfig(objective="dppo"))
    assert zero.loss.item() == pytest.approx(1e-3 * (logp - old).square().sum().item() / 3, rel=1e-5)


def test_dapo_widens_only_the_upper_clip():
    config = PolicyConfig(objective="dapo")
    assert (config.eps_low, config.upper) == (0.2, 0.28)
    logp = torch.tensor([[0.25]]).log().requires_grad_()
    loss = policy_loss(logp, torch.tensor([[0.2]]).log(), torch.tensor([1.0]), torch.ones(1, 1), config).loss
    assert loss.item() == pytest.approx(-1.25)


def naive(logp, old, advantages, mask, objective):
    """The table of formulas, one token at a time, in float64 autograd."""
    sequences, tokens = [], []
    for row in range(len(logp)):
        columns = [c for c in range(logp.shape[1]) if mask[row, c]]
        gaps = [logp[row, c] - old[row, c] for c in columns]
        a, terms = advantages[row], []
        for c, gap in zip(columns, gaps, strict=True):
            if objective == "gspo":
                gap = sum(gaps) / len(gaps)
            r = gap.exp()
            if objective == "cispo":
                terms.append(-min(r.item(), 5.0) * a * logp[row, c])
            elif objective == "dppo":
                moved = (logp[row, c].exp() - old[row, c].exp()).item()
                keep = not (moved > 0.2) if a > 0 else not (moved < -0.2)
                terms.append(-float(keep) * a * r + 1e-3 * gap**2)
            else:
                high = 1.28 if objective == "dapo" else 1.2
                terms.append(-torch.minimum(r * a, r.clamp(0.8, high) * a))
        if terms:
            sequences.append(sum(terms) / len(terms))
            tokens += terms
    if objective in ("grpo", "gspo"):
        return sum(sequences) / len(sequences)
    return sum(tokens) / (len(sequences) * 512 if objective == "dr_grpo" else len(tokens))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_value_and_gradient_equal_the_written_out_formula(objective):
    logp, old, advantages, mask = random_batch()
    loss = policy_loss(logp, old, advantages, mask, PolicyConfig(objective=objective)).loss
    expected = naive(logp, old, advantages, mask, objective)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    (grad,), (expected_grad,) = torch.autograd.grad(loss, logp), torch.autograd.grad(expected, logp)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)
    assert grad.abs().max() > 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_bfloat16_inputs_are_computed_in_float32(objective):
    logp, old, advantages, mask = random_batch()
    half = [x.detach().bfloat16() for x in (logp, old)]
    config = PolicyConfig(objective=objective)
    result = policy_loss(*half, advantages.bfloat16(), mask, config)
    exact = policy_loss(*(x.double() for x in half), advantages.bfloat16().double(), mask, config)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(exact.loss.item(), abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_positive_advantage_raises_the_sampled_tokens_probability(objective):
    logp = torch.full((1, 4), -1.0, requires_grad=True)
    policy_loss(
        logp, logp.detach(), torch.tensor([1.0]), torch.ones(1, 4), PolicyConfig(objective=objective)
    ).loss.backward()
    assert (logp.grad < 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_empty_mask_gives_zero_with_a_live_graph(objective):
    logp = torch.full((2, 3), float("nan")).requires_grad_()
    result = policy_loss(logp, torch.zeros(2, 3), ADVANTAGES, torch.zeros(2, 3), PolicyConfig(objective=objective))
    result.loss.backward()
    assert result.loss.item() == 0
    assert logp.grad.tolist() == [[0.0] * 3] * 2
    assert all(torch.isfinite(v) for v in result.metrics.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_stands_at_masked_tokens_does_not_matter(objective):
    logp, old, advantages, mask = random_batch()
    config = PolicyConfig(objective=objective)
    garbage = logp.detach().masked_fill(~mask, float("nan")).requires_grad_()
    loss = policy_loss(garbage, old.masked_fill(~mask, float("inf")), advantages, mask, config).loss
    (grad,) = torch.autograd.grad(loss, garbage)
    assert loss.item() == policy_loss(logp, old, advantages, mask, config).loss.item()
    assert grad.isfinite().all()


@pytest.mark.parametrize(("objective", "size"), list(itertools.product(OBJECTIVES, [1, 2, 4])))
def test_micro_batches_add_up_to_the_whole_batch(objective, size):
    logp, old, advantages, mask = random_batch()
    config = PolicyConfig(objective=objective, kl_beta=0.0 if objective == "dapo" else 0.1)
    normalizer = policy_normalizer(mask, config)
    whole = policy_loss(logp, old, advantages, mask, config, ref_logprobs=old).loss
    parts = [
        policy_loss(logp[s], old[s], advantages[s], mask[s], config, normalizer=normalizer, ref_logprobs=old[s]).loss
        for s in (slice(start, start + size) for start in range(0, len(logp), size))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-14, abs=1e-15)
    (grad,), (expected,) = torch.autograd.grad(sum(parts), logp), torch.autograd.grad(whole, logp)
    torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-15)


def test_normalizers_add_up_over_micro_batches():
    _, _, _, mask = random_batch()
    for objective in OBJECTIVES:
        config = PolicyConfig(objective=objective)
        assert policy_normalizer(mask[:3], config) + policy_normalizer(mask[3:], config) == policy_normalizer(
            mask, config
        )


def test_dapo_tokens_are_counted_over_all_replicas():
    logp, old, advantages, mask = random_batch()
    config = PolicyConfig(objective="dapo")
    tokens = policy_normalizer(mask[:4], config) + policy_normalizer(mask[4:], config)
    replicas = [
        policy_loss(logp[s], old[s], advantages[s], mask[s], config, normalizer=tokens).loss
        for s in (slice(0, 4), slice(4, 6))
    ]
    assert sum(replicas).item() == pytest.approx(
        policy_loss(logp, old, advantages, mask, config).loss.item(), rel=1e-14
    )


def test_truncated_sequences_leave_numerator_and_denominator():
    logp, old, advantages, mask = random_batch()
    truncated = torch.tensor([False, True, False, False, True, False])
    for objective in OBJECTIVES:
        config = PolicyConfig(objective=objective, mask_truncated=True)
        loss = policy_loss(logp, old, advantages, mask, config, truncated=truncated).loss
        rest = policy_loss(logp[~truncated], old[~truncated], advantages[~truncated], mask[~truncated], config).loss
        assert loss.item() == pytest.approx(rest.item(), rel=1e-14)
        counted = policy_normalizer(mask, config, truncated=truncated)
        assert counted == policy_normalizer(mask[~truncated], config)


def test_only_dapo_masks_truncated_sequences_by_default():
    assert [o for o in OBJECTIVES if PolicyConfig(objective=o).drops_truncated] == ["dapo"]
    assert not PolicyConfig(objective="dapo", mask_truncated=False).drops_truncated


@pytest.mark.parametrize("objective", ["grpo", "bnpo", "dr_grpo"])
def test_a_token_without_a_finite_behaviour_logprob_is_dropped_and_counted(objective):
    logp, old, advantages, mask = random_batch()
    row, column = mask.nonzero()[0].tolist()
    generator, config = old.clone(), PolicyConfig(objective=objective)
    generator[row, column] = float("nan")
    smaller = mask.clone()
    smaller[row, column] = False
    result = policy_loss(logp, old, advantages, mask, config, generator_logprobs=generator)
    assert result.metrics["dropped_tokens"].item() == 1
    assert result.count.item() == smaller.sum().item()
    assert result.loss.item() == policy_loss(logp, old, advantages, smaller, config).loss.item()
    counted = policy_normalizer(mask, config, generator_logprobs=generator)
    assert counted == policy_normalizer(smaller, config)
    infinite_old = old.masked_fill(mask & ~smaller, -float("inf"))
    assert policy_loss(logp, infinite_old, advantages, mask, config).loss.item() == result.loss.item()


def test_the_kl_joins_the_loss_unless_it_is_in_the_reward():
    logp, old, advantages, mask = example()
    plain = policy_loss(logp, old, advantages, mask, PolicyConfig(objective="bnpo")).loss
    with_kl = policy_loss(logp, old, advantages, mask, PolicyConfig(objective="bnpo", kl_beta=0.5), ref_logprobs=old)
    gap = old - logp.detach()
    k3 = ((gap.exp() - gap - 1) * mask).sum() / 5
    assert with_kl.loss.item() == pytest.approx(plain.item() + 0.5 * k3.item(), abs=1e-6)
    assert with_kl.metrics["ref_kl"].item() == pytest.approx(k3.item(), abs=1e-6)
    in_reward = PolicyConfig(objective="bnpo", kl_beta=0.5, kl_in_reward=True)
    assert policy_loss(logp, old, advantages, mask, in_reward, ref_logprobs=old).loss.item() == plain.item()


def test_clip_fraction_counts_the_tokens_that_the_clip_holds():
    result = policy_loss(*example(), PolicyConfig(objective="grpo"))
    assert result.metrics["clip_fraction"].item() == pytest.approx(2 / 5)
    assert result.metrics["ratio"].item() == pytest.approx(1.0422, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"objective": "dapo", "kl_beta": 0.1}, "set kl_beta = 0"),
        ({"kl_in_reward": True}, "set kl_beta > 0"),
        ({"objective": "cispo", "ratio_min": 6}, "lower ratio_min"),
        ({"correction_cap": 2.0}, "set correction ="),
        ({"objective": "ppo"}, "grpo"),
        ({"epsilon": 0.2}, "epsilon"),
    ],
)
def test_contradictory_settings_are_refused_with_advice(settings, advice):
    with pytest.raises(ValidationError, match=advice):
        PolicyConfig(**settings)


def test_inputs_that_do_not_fit_are_named():
    logp, old, advantages, mask = example()
    config = PolicyConfig()
    with pytest.raises(ValueError, match="old_logprobs is \\(2, 2\\)"):
        policy_loss(logp, old[:, :2], advantages, mask, config)
    with pytest.raises(ValueError, match="advantages is \\(3,\\)"):
        policy_loss(logp, old, torch.zeros(3), mask, config)
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        policy_loss(logp, old, advantages, mask, PolicyConfig(kl_beta=0.1))
    with pytest.raises(ValueError, match="needs generator_logprobs"):
        policy_loss(logp, old, advantages, mask, PolicyConfig(correction="tis"))
    with pytest.raises(ValueError, match="normalizer is -1"):
        policy_loss(logp, old, advantages, mask, config, normalizer=-1.0)


def test_every_objective_names_its_advantage_scaling():
    assert {o: ADVANTAGE_SCALING[o] for o in OBJECTIVES} == {
        "grpo": "group",
        "dr_grpo": "none",
        "bnpo": "batch",
        "dapo": "none",
        "gspo": "group",
        "cispo": "none",
        "dppo": "none",
    }
