"""What a batch looked like, as metrics: rewards, errors, staleness, and what the buffer counted."""

from __future__ import annotations

from statistics import fmean, pstdev

from mesh.messages import TrainBatch


def describe_batch(batch: TrainBatch) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Scalars by metric name, and samples for histograms. Means over nothing are left out, not 0."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    staleness = [batch.id - r.oldest_version for r in rollouts if r.oldest_version is not None]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    sites = [turn.error for turn in turns if turn.error is not None]
    metrics = {
        "rollouts": float(len(rollouts)),
        "groups": float(len(batch.groups)),
        "tokens": float(sum(rollout.sampled_tokens for rollout in rollouts)),
        "reward/unscorable": float(len(rollouts) - len(rewards)),
        "groups/dead_fraction": fmean(group.dead for group in batch.groups),
        "rollouts/truncated": float(sum(rollout.status == "truncated" for rollout in rollouts)),
        "turns/per_rollout": len(turns) / len(rollouts),
        "errors/per_rollout": len(sites) / len(rollouts),
        "staleness/mean": fmean(staleness),
        "staleness/max": float(max(staleness)),
        "staleness/off_policy": fmean(s > 0 for s in staleness),
        "rollouts/mixed_versions": fmean(_versions(rollout) > 1 for rollout in rollouts),
    }
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
    for kind in sorted({site.kind for site in sites}):
        metrics[f"errors/{kind}"] = sum(site.kind == kind for site in sites) / len(rollouts)
    for layer in sorted({site.hint_layer or "none" for site in sites}):
        metrics[f"hints/{layer}"] = float(sum((site.hint_layer or "none") == layer for site in sites))
    metrics |= {f"buffer/{name}": value for name, value in batch.counts.items()}
    return metrics, {"staleness": [float(s) for s in staleness], "reward": rewards}


def _versions(rollout) -> int:  # type: ignore[no-untyped-def]
    return len({span.version for sequence in rollout.sequences for span in sequence.versions})
