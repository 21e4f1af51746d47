"""How good the final policy is on tasks that no run trains on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from launch.config import Config
from mesh import roles
from mesh.binding import Binding, BindingError
from services.rollouts.tasks import held_out_seeds

WEIGHTS_LIMIT_S = 60.0  # for all generators to hold the final weights
TASK_LIMIT_S = 2.0  # per held-out task of one generator, on top of the contract's limit


async def evaluate(generators: Binding[Any], config: Config, say: Callable[[str], None]) -> float | None:
    """Mean reward of the final policy on `run.evaluate` held-out tasks, played by the generators.

    None, with a line to `say`, when it could not be measured: a figure of older weights would be a wrong one.
    """
    count, version = config.generator.count, config.trainer.steps
    until = time.monotonic() + WEIGHTS_LIMIT_S
    seeds = held_out_seeds(config.run.evaluate, config.run.seed)
    share = -(-len(seeds) // count)
    try:
        while True:
            # As many calls as generators at once go to each of them once: the least loaded is asked next.
            status = await asyncio.gather(*[generators.call(roles.Generator.status) for _ in range(count)])
            if all(each.get("version") == version for each in status):
                break
            if time.monotonic() > until:
                say(f"no evaluation: the generators do not hold version {version} after {WEIGHTS_LIMIT_S:g} s")
                return None
            await asyncio.sleep(0.2)
        limit_s = 120.0 + TASK_LIMIT_S * share
        parts = [seeds[i : i + share] for i in range(0, len(seeds), share)]
        calls = [generators.call_within(limit_s, roles.Generator.evaluate, part, False) for part in parts]
        rollouts = [rollout for played in await asyncio.gather(*calls) for rollout in played]
    except BindingError as error:
        say(f"no evaluation: {error}")
        return None
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    say(f"evaluated {len(rewards)} of {len(seeds)} held-out tasks")
    return fmean(rewards) if rewards else None
