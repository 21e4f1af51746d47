"""How a generator follows the trainer's weights when an update fails; the trainer and the engine are stood in for."""

import asyncio

import pytest
import torch

from actors.generator import GeneratorActor, GeneratorConfig
from actors.weights_follower import WeightsFollower
from mesh.binding import Binding, MemberRef, RoleTable
from services.engines.engine import EngineConfig, WeightsError
from services.environments.config import EnvironmentConfig
from services.tuning import Merger, TuneConfig
from services.weights.config import WeightsConfig

LIMIT_S = 30.0


class Engine:
    """Fails as many updates as it is given errors, then loads; runs nothing."""

    def __init__(self, *errors):
        self.errors, self.tried, self.version = list(errors), [], -1
        self.loaded = asyncio.Event()

    async def update(self, version, tensors, partial):
        self.tried.append((version, tensors))
        self.partial = partial
        if self.errors:
            raise self.errors.pop(0)
        self.version = version
        self.loaded.set()


class Trainer:
    """Stands at one version; every pull goes into its reader's own buffer."""

    def __init__(self, version):
        self.version, self.asked = version, []

    async def pull_newest(self, reader, lease, release, newer_than):
        self.asked.append(newer_than)
        if newer_than >= self.version:
            await asyncio.sleep(0.001)
            return None
        return self.version, reader


class Adapted(Trainer):
    """Publishes an adapter of one layer."""

    async def pull_newest(self, reader, lease, release, newer_than):
        found = await super().pull_newest(reader, lease, release, newer_than)
        layer = "base_model.model.layer.lora_"
        return found and (self.version, {f"{layer}A.weight": torch.ones(1, 3), f"{layer}B.weight": torch.ones(2, 1)})


def trainers_table(incarnation):
    return RoleTable("trainer", (MemberRef("trainer-0", None, incarnation, b"-"),), revision=incarnation)


@pytest.mark.parametrize("error", [WeightsError("it does not fit"), TimeoutError("it has begun and may still land")])
def test_a_version_that_could_not_be_loaded_is_asked_for_again_into_another_buffer(monkeypatch, error):
    async def scenario():
        trainer = Trainer(version=4)
        monkeypatch.setattr("actors.weights_follower.pull_newest", trainer.pull_newest)
        config = GeneratorConfig(engine=EngineConfig())
        actor = GeneratorActor("g", config, "nowhere", "http://env", EnvironmentConfig(), WeightsConfig(), seed=7)
        actor.engine = Engine(error)
        following = asyncio.create_task(actor._follow())
        await asyncio.wait_for(actor.engine.loaded.wait(), LIMIT_S)
        following.cancel()
        (first, its_buffer), (second, another) = actor.engine.tried
        assert (first, second, actor.engine.version) == (4, 4, 4)
        assert its_buffer is not another  # the first may be read by the engine yet
        assert actor._have_weights.is_set()
        assert actor.trouble == f"weights: {error}"

    asyncio.run(scenario())


def test_an_adapter_is_merged_into_the_initial_weights_before_it_is_loaded_beside_the_rest(monkeypatch):
    async def scenario():
        monkeypatch.setattr("actors.weights_follower.pull_newest", Adapted(version=4).pull_newest)
        merger = Merger({"layer.weight": torch.full((2, 3), 5.0)}, scale=2.0)
        monkeypatch.setattr(Merger, "of_model", lambda path, tune: merger if tune.kind == "lora" else None)
        actor = GeneratorActor(
            "g", GeneratorConfig(engine=EngineConfig()), "nowhere", "http://env", EnvironmentConfig(), WeightsConfig(),
            seed=7, tune=TuneConfig(kind="lora"),
        )  # fmt: skip
        actor.engine = Engine()
        following = asyncio.create_task(actor._follow())
        await asyncio.wait_for(actor.engine.loaded.wait(), LIMIT_S)
        following.cancel()
        ((version, tensors),) = actor.engine.tried
        assert version == 4
        assert tensors.keys() == {"layer.weight"}
        assert torch.equal(tensors["layer.weight"], torch.full((2, 3), 7.0))
        assert actor.engine.partial is True

    asyncio.run(scenario())


def test_a_failed_load_after_the_trainer_went_back_asks_for_its_older_version_again(monkeypatch):
    async def scenario():
        trainer = Trainer(version=9)
        monkeypatch.setattr("actors.weights_follower.pull_newest", trainer.pull_newest)
        binding = Binding("trainer", trainers_table(0))
        follower = WeightsFollower(binding)
        await follower.newer(1.0)
        assert follower.version == 9
        binding.update(trainers_table(1))
        trainer.version = 5
        await follower.newer(1.0)
        follower.not_loaded()
        assert await follower.newer(1.0) is not None
        assert follower.version == 5
        assert trainer.asked == [-1, -1, -1]

    asyncio.run(scenario())
