"""How good a policy is on tasks that no run trains on: while the run trains, and at its end.

While it trains, an evaluation judges one version and disturbs training as little as can be:

    hold      every generator keeps its weights, for at most `hold_s` ─▶ the version that most of them have
    release   those that have another one
    play      the held-out tasks, dealt out to those left; whoever is done is released at once

A held generator plays training episodes too, with the weights that it holds. The trainer may meanwhile be waiting for
rollouts of a newer version than that: so a hold ends by itself, whatever became of the evaluation and of the driver.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from launch.config import Config
from mesh import roles
from mesh.binding import Binding, BindingError
from mesh.messages import Rollout
from services.rollouts.advantages import scorable
from services.rollouts.tasks import held_out_seeds

WEIGHTS_LIMIT_S = 60.0  # for all generators to hold the final weights
TASK_LIMIT_S = 2.0  # per held-out task of one generator, on top of the contract's limit
LOOK_S = 0.5  # between two looks at whether a generator that plays is still there
ANSWER_LIMIT_S = 10.0  # for a generator to answer once the time of its episodes is over
ENOUGH = 0.75  # of the tasks must have a score: those that are done first are the easy ones

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came of playing `tasks` held-out tasks with the weights `version` of one trainer."""

    tasks: int
    scores: tuple[float, ...]
    seconds: float
    version: int = roles.NO_VERSION
    discarded: int = 0  # rollouts with tokens of another version
    seeds: tuple[int, ...] = ()  # of the tasks that were played

    @property
    def score(self) -> float:
        """Their mean; NaN when too few of the tasks have one."""
        return fmean(self.scores) if len(self.scores) >= max(1.0, ENOUGH * self.tasks) else math.nan


async def evaluate_beside_training(
    generators: Sequence[Binding[Any]],
    seeds: Sequence[int],
    trainer: str,
    hold_s: float,
    say: Say,
    score: Literal["reward", "environment"] = "reward",
    alive: Callable[[Any], bool] = lambda generator: True,
) -> Evaluation:
    """Play the held-out tasks `seeds` with one version of `trainer`, by those generators that have it.

    Each of `generators` is bound to one of them. One that is not `alive` any more is not waited for: a call to an actor
    that died may be left without an answer. What fails on the way is told to `say` and missing in the result.
    """
    began = time.monotonic()
    held = await asyncio.gather(*[_hold(generator, hold_s, say) for generator in generators])
    try:
        version = _common_version([each for each in held if each is not None], trainer)
        playing = [g for g, each in zip(generators, held, strict=True) if version is not None and each == version]
        await asyncio.gather(*[_hold(g, 0.0, say) for g in generators if g not in playing])
        left_s = max(0.0, hold_s - (time.monotonic() - began))
        parts = [list(seeds[i :: len(playing)]) for i in range(len(playing))]
        played = await asyncio.gather(
            *[_play(generator, part, left_s, say, alive) for generator, part in zip(playing, parts, strict=True)]
        )
    except asyncio.CancelledError:
        await asyncio.gather(*[_hold(generator, 0.0, say) for generator in generators])
        raise
    seconds = time.monotonic() - began
    if version is None:
        say("no evaluation: no generator has weights that could be held")
        return Evaluation(len(seeds), (), seconds)
    rollouts = [rollout for part in played for rollout in part]
    whole = [rollout for rollout in rollouts if _versions(rollout) <= {version[1]}]
    scores = scorable(r.reward if score == "reward" else r.env_reward for r in whole)
    say(f"evaluated {len(scores)} of {len(seeds)} held-out tasks at version {version[1]} in {seconds:.1f} s")
    return Evaluation(
        len(seeds), tuple(scores), seconds, version[1], len(rollouts) - len(whole), tuple(r.task.seed for r in rollouts)
    )


async def _hold(generator: Binding[Any], seconds: float, say: Say) -> tuple[str, int] | None:
    """Let a generator keep its weights for so long; its trainer and version, None when it does not answer."""
    try:
        return await generator.call(roles.Generator.hold, seconds)
    except BindingError as error:
        say(f"evaluation: {error}")
        return None


def _common_version(held: Sequence[tuple[str, int]], trainer: str) -> tuple[str, int] | None:
    """The version of `trainer` that most have, the newest of several; another trainer's where nobody follows it."""
    usable = [each for each in held if each[1] != roles.NO_VERSION]
    counted = Counter([each for each in usable if each[0] == trainer] or usable)
    return max(counted, key=lambda each: (counted[each], each[1]), default=None)


async def _play(
    generator: Binding[Any], seeds: list[int], limit_s: float, say: Say, alive: Callable[[Any], bool]
) -> list[Rollout]:
    """What one held generator has played within the limit; it is released then. [] when it died."""
    asked = generator.call_within(limit_s + ANSWER_LIMIT_S, roles.Generator.evaluate, seeds, False, limit_s)
    playing = asyncio.create_task(asked)
    try:
        while not (await asyncio.wait({playing}, timeout=LOOK_S))[0]:
            if not alive(generator):
                say(f"evaluation: {len(seeds)} tasks are not played: {generator.role} died")
                return []
        return playing.result()
    except BindingError as error:
        say(f"evaluation: {len(seeds)} tasks are not played: {error}")
        return []
    finally:
        playing.cancel()
        if alive(generator):
            await _hold(generator, 0.0, say)


def _versions(rollout: Rollout) -> set[int]:
    return {span.version for sequence in rollout.sequences for span in sequence.versions}


async def evaluate(generators: Binding[Any], config: Config, say: Say) -> float | None:
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
