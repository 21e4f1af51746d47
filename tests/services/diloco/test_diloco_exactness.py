"""Replicas under the outer loop against DiLoCo in plain numpy, in float64, at every inner step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diloco_builders import SHAPES, Reference, adamw, config, in_threads, inner_step, parameters, same
from torch import nn

from services.diloco.config import DilocoConfig
from services.diloco.lighthouse import Lighthouse
from services.diloco.manager import open_manager
from services.diloco.outer_loop import make_diloco_outer_loop
from services.diloco.replicas import Outer, split_evenly
from services.meeting import free_port

STEPS = 18
NAMES = list(SHAPES)


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    made = Lighthouse(config(), free_port("127.0.0.1"))
    yield made
    made.close()


def fragments(parts: int) -> list[list[str]]:
    return [list(part) for part in split_evenly(parameters(), parts)]


def trained_by(
    replicas: int, settings: DilocoConfig, lighthouse: Lighthouse, dtype: torch.dtype = torch.float64
) -> Any:
    """The parameters after every step, by replica; replica r trains r + 1 tokens a step."""

    ready = threading.Barrier(replicas, timeout=60)

    def train(replica: int) -> Any:
        trained = parameters(dtype)
        optimizer = adamw(trained)
        outer = Outer(
            settings, trained, optimizer, open_manager(settings, replica=replica, lighthouse=lighthouse.address)
        )
        ready.wait()  # who is not there yet is not waited for
        found = []
        for step in range(STEPS):
            outer.step = step + 1
            outer.trained(replica + 1)
            found.append(inner_step(trained, optimizer, replica, step))
        outer.close()
        return found

    return in_threads(replicas, train)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("parts", "sync_every", "delay", "alpha"),
    [(1, 3, 0, 0.0), (1, 6, 2, 0.5), (2, 6, 0, 0.0), (3, 6, 1, 0.0), (3, 9, 2, 0.5)],
)
def test_replicas_equal_the_reference_at_every_inner_step(
    lighthouse: Lighthouse, replicas: int, parts: int, sync_every: int, delay: int, alpha: float
) -> None:
    settings = config(
        sync_every=sync_every,
        fragments=parts,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
        weighting="uniform",
    )
    expected = Reference(replicas, fragments(parts), sync_every, delay, alpha).run(STEPS)
    for replica, found in enumerate(trained_by(replicas, settings, lighthouse)):
        for step in range(STEPS):
            assert same(expected[step][replica], found[step], 1e-12), f"replica {replica} differs after step {step}"


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.8, False)])
def test_outer_settings_reach_the_outer_step(lighthouse: Lighthouse, momentum: float, nesterov: bool) -> None:
    settings = config(sync_every=3, outer_lr=0.4, outer_momentum=momentum, nesterov=nesterov, weighting="uniform")
    expected = Reference(2, fragments(1), 3, lr=0.4, momentum=momentum, nesterov=nesterov).run(STEPS)
    for replica, found in enumerate(trained_by(2, settings, lighthouse)):
        assert same(expected[-1][replica], found[-1], 1e-12)


def test_contributions_count_for_the_tokens_trained(lighthouse: Lighthouse) -> None:
    settings = config(sync_every=6, fragments=2, fragment_sync_delay=1)
    expected = Reference(3, fragments(2), 6, delay=1, weights=[1.0, 2.0, 3.0]).run(STEPS)
    uniform = Reference(3, fragments(2), 6, delay=1).run(STEPS)
    for replica, found in enumerate(trained_by(3, settings, lighthouse)):
        assert all(same(expected[step][replica], found[step], 1e-12) for step in range(STEPS))
        assert not same(uniform[-1][replica], found[-1], 1e-3)


def test_float32_parameters_are_close_and_equal_between_replicas(lighthouse: Lighthouse) -> None:
    settings = config(sync_every=3)
    expected = Reference(2, fragments(1), 3, weights=[1.0, 2.0]).run(STEPS)
    found = trained_by(2, settings, lighthouse, torch.float32)
    for step in range(STEPS):
        assert all(same(expected[step][replica], found[replica][step], 1e-5) for replica in range(2))
    assert same(found[0][-1], found[1][-1], 0.0)


def test_the_loop_over_plain_modules_equals_the_reference(lighthouse: Lighthouse) -> None:
    parts = fragments(2)
    expected = Reference(2, parts, 4).run(STEPS)
    ready = threading.Barrier(2, timeout=60)

    def train(replica: int) -> Any:
        trained = parameters()
        modules = [nn.ParameterDict({name.replace(".", "_"): trained[name] for name in part}) for part in parts]
        optimizer = adamw(trained)
        manager = open_manager(config(), replica=replica, lighthouse=lighthouse.address)
        ready.wait()
        with make_diloco_outer_loop(manager, modules, optimizer, sync_every=4):
            found = [inner_step(trained, optimizer, replica, step) for step in range(STEPS)]
        manager.shutdown()
        return found

    for replica, found in enumerate(in_threads(2, train)):
        assert all(same(expected[step][replica], found[step], 1e-12) for step in range(STEPS))


def test_one_replica_is_plain_training_followed_by_the_outer_step(lighthouse: Lighthouse) -> None:
    """Without any of ours: torch's AdamW, and torch's SGD over the way that it went."""
    settings = config(sync_every=3)
    (found,) = trained_by(1, settings, lighthouse)
    trained, originals = parameters(), parameters()
    inner = adamw(trained)
    outer = torch.optim.SGD(originals.values(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        after = inner_step(trained, inner, 0, step)
        if (step + 1) % 3 == 0:
            for name, original in originals.items():
                original.grad = original.detach() - trained[name].detach()
            outer.step()
            with torch.no_grad():
                for name, p in trained.items():
                    p.copy_(originals[name])
            after = {name: p.detach().numpy() for name, p in trained.items()}
        assert same(after, found[step], 1e-12)
