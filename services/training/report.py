"""What a batch looked like, as metrics: rewards, errors, staleness, and what the buffer counted."""

from __future__ import annotations

from statistics import fmean, pstdev

from mesh.messages import Rollout, TrainBatch
from services.rollouts.advantages import scorable


def describe_batch(batch: TrainBatch) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Scalars by metric name, and samples for histograms. Means over nothing are left out, not 0.

    Staleness is in versions, against the version that this batch is trained from (`batch.id`).
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    rewards = scorable(rollout.reward for rollout in rollouts)
    staleness = [batch.id - r.oldest_version for r in rollouts if r.oldest_version is not None]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    sites = [turn.error for turn in turns if turn.error is not None]
    flagged = [{flag.partition("/")[0] for flag in rollout.flags} for rollout in rollouts]  # kinds, by rollout
    metrics = {
        "rollouts": float(len(rollouts)),
        "groups": float(len(batch.groups)),
        "tokens": float(sum(rollout.sampled_tokens for rollout in rollouts)),
        "reward/unscorable": float(len(rollouts) - len(rewards)),
        "rollouts/truncated": float(sum(rollout.status == "truncated" for rollout in rollouts)),
        "safety/flagged": float(sum(map(bool, flagged))),
    }
    if batch.groups:
        metrics["groups/dead_fraction"] = fmean(group.dead for group in batch.groups)
    if rollouts:
        metrics["turns/per_rollout"] = len(turns) / len(rollouts)
        metrics["errors/per_rollout"] = len(sites) / len(rollouts)
        metrics["rollouts/mixed_versions"] = fmean(len(_versions(rollout)) > 1 for rollout in rollouts)
    if staleness:
        metrics["staleness/mean"], metrics["staleness/max"] = fmean(staleness), float(max(staleness))
        metrics["staleness/off_policy"] = fmean(s > 0 for s in staleness)
    if rewards:
        metrics["reward/mean"], metrics["reward/std"] = fmean(rewards), pstdev(rewards)
    for kind in sorted({site.kind for site in sites}):
        metrics[f"errors/{kind}"] = sum(site.kind == kind for site in sites) / len(rollouts)
    for kind in sorted(set().union(*flagged)):
        metrics[f"safety/flagged/{kind}"] = float(sum(kind in kinds for kinds in flagged))
    for layer in sorted({site.hint_layer or "none" for site in sites}):
        metrics[f"hints/{layer}"] = float(sum((site.hint_layer or "none") == layer for site in sites))
    metrics |= {f"buffer/{name}": value for name, value in batch.counts.items()}
    return metrics, {"staleness": [float(s) for s in staleness], "reward": rewards}


def _versions(rollout: Rollout) -> set[int]:
    """The weights that sampled a token of the rollout."""
    return {span.version for sequence in rollout.sequences for span in sequence.versions}
