"""A generator over vLLM, set up as in a run; the buffer and the episodes are stood in for."""

from __future__ import annotations

import asyncio

import pytest

from actors.generator import GeneratorActor, GeneratorConfig
from mesh.binding import Binding
from mesh.messages import Lease, Task
from services.engines.engine import EngineConfig, EngineError, GenerationRequest
from services.engines.vllm_engine import VLLMEngine
from services.environments.config import EnvironmentConfig
from services.rollouts.episode import EpisodeConfig
from services.weights.config import WeightsConfig

LIMIT_S = 120.0


class Buffer:
    """Hands out two leases once, and keeps which came back."""

    def __init__(self) -> None:
        self.leases = [Lease(f"lease-{n}", Task(f"t{n}", n, n), 0, 60.0) for n in range(2)]
        self.abandoned: list[str] = []

    def only(self, member):
        return self

    async def call(self, endpoint, *args):
        if endpoint.__name__ == "claim":
            await asyncio.sleep(0.001)
            leases, self.leases = self.leases, []
            return leases
        assert endpoint.__name__ == "abandon"
        self.abandoned += args[0]


class OneTurn:
    """An episode of one long turn."""

    def __init__(self, actor: GeneratorActor) -> None:
        self.actor = actor

    async def run(self, lease: Lease, greedy: bool = False):
        assert self.actor.engine is not None
        await self.actor.engine.generate(GenerationRequest(lease.id, [5, 6, 7], 200))


def test_a_vllm_that_dies_under_its_episodes_ends_the_actor_and_their_leases_go_back(model_path, monkeypatch):
    engine = EngineConfig(engine="vllm", max_batch=4, max_length=256, threads=1)

    async def scenario():
        actor = GeneratorActor(
            "g", GeneratorConfig(episodes=4, engine=engine), model_path, "http://env", EnvironmentConfig(),
            WeightsConfig(), 7,
        )  # fmt: skip
        await actor.setup()
        vllm = actor.engine._engine
        assert isinstance(vllm, VLLMEngine)
        step, steps = vllm._vllm.step, []

        def dying():
            steps.append(1)
            if len(steps) == 5:
                raise RuntimeError("the device is gone")
            return step()

        monkeypatch.setattr(vllm._vllm, "step", dying)
        buffer = Buffer()
        actor.runner = OneTurn(actor)
        actor.bindings = {"rollout_buffer": buffer, "trainer": Binding("trainer")}  # no trainer comes
        actor._have_weights.set()
        await asyncio.wait_for(actor._guarded_run(), LIMIT_S)
        assert actor.failure.startswith("EngineError: the engine died (RuntimeError: the device is gone)")
        assert sorted(buffer.abandoned) == ["lease-0", "lease-1"]
        with pytest.raises(EngineError, match="the device is gone"):
            await actor.engine.generate(GenerationRequest("later", [5], 1))
        await actor.teardown()
        vllm.close()

    asyncio.run(scenario())


def test_a_temperature_that_vllm_does_not_sample_at_is_refused_with_the_configuration():
    hot = EpisodeConfig(temperature=3.0)
    assert GeneratorConfig(episode=hot).episode.temperature == 3.0
    with pytest.raises(ValueError, match=r'vLLM samples at 0.01 to 2: choose one of these, or engine = "transformers"'):
        GeneratorConfig(engine=EngineConfig(engine="vllm"), episode=hot)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"devices": ["0", "1"]}, 'set engine.device = "cuda"'),
        ({"devices": ["0"], "engine": {"device": "cuda"}}, "1 entries for count = 2: name one per generator"),
    ],
)
def test_devices_that_do_not_go_with_the_generators_are_refused(settings, advice):
    with pytest.raises(ValueError, match=advice):
        GeneratorConfig.model_validate({"count": 2, **settings})
    two = GeneratorConfig.model_validate({"count": 2, "devices": ["0", "0"], "engine": {"device": "cuda"}})
    assert two.devices == ("0", "0")
