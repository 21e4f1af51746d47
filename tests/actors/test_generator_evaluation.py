"""Held-out episodes of a generator: reproducible, bounded, under weights that stay; on a real engine loop."""

import asyncio
import inspect

import pytest

from actors.generator import GeneratorActor, GeneratorConfig
from mesh import roles
from mesh.messages import Rollout
from services.engines.engine import EngineConfig, Generation, GenerationRequest
from services.engines.loop import EngineLoop
from services.environments.config import EnvironmentConfig
from services.rollouts.episode import turn_seed
from services.weights.config import WeightsConfig

LIMIT_S = 30.0


class Engine:
    """Answers every request with one token: its seed, or, while `stuck`, not at all."""

    def __init__(self):
        self.version, self.capacity, self.requests, self.asked, self.stuck = 3, 8, [], [], False

    def submit(self, request):
        self.requests.append(request)
        self.asked.append(request)

    def step(self):
        if self.stuck:
            return []
        done, self.requests = self.requests, []
        return [Generation(request.id, [request.seed or 0], [0.0], [], "length") for request in done]

    def abort(self, request_id):
        self.requests = [request for request in self.requests if request.id != request_id]
        return Generation(request_id, [], [], [], "abort")

    def load_weights(self, version, tensors, *, partial=False):
        self.version = version


class OneTurn:
    """An episode of a single turn, whose reward is what was sampled."""

    def __init__(self, generate):
        self.generate, self.at_once, self.most = generate, 0, 0

    async def run(self, lease, *, greedy=False):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        request = GenerationRequest(f"{lease.id}#0", [1], 1, greedy=greedy, seed=turn_seed(7, lease.id, 0) % 1000)
        generation = await self.generate(request)
        self.at_once -= 1
        reward = float(generation.token_ids[0])
        return Rollout(lease.rollout_id, lease.task, 0, lease.id, [], [], [], "finished", reward, reward)


class Rewarder:
    async def call_within(self, limit_s, endpoint, rollout):
        return rollout


def drive(body, max_sessions=64, episodes=4, weights=True):
    async def main():
        config = GeneratorConfig(episodes=episodes)
        environment = EnvironmentConfig(max_sessions=max_sessions)
        actor = GeneratorActor("g", config, "nowhere", "http://env", environment, WeightsConfig(), seed=7)
        actor.engine = EngineLoop(Engine(), EngineConfig())
        actor.held_out_runner = OneTurn(actor._generate_held_out)
        actor.bindings["rewarder"] = Rewarder()
        if weights:
            actor._have_weights.set()
        try:
            await asyncio.wait_for(body(actor, actor.engine._engine), LIMIT_S)
        finally:
            await actor.engine.stop()

    asyncio.run(main())


async def evaluate(actor, seeds, greedy=False, limit_s=None):
    """The endpoint without Monarch around it."""
    return await inspect.unwrap(GeneratorActor.evaluate._method)(actor, seeds, greedy, limit_s)


async def hold(actor, seconds):
    return await inspect.unwrap(GeneratorActor.hold._method)(actor, seconds)


def test_the_same_seeds_are_played_with_the_same_random_numbers_each_time():
    async def body(actor, engine):
        first, second = await evaluate(actor, [11, 13]), await evaluate(actor, [11, 13])
        assert [r.reward for r in first] == [r.reward for r in second]
        assert [r.task.seed for r in first] == [11, 13]
        assert first[0].reward != first[1].reward

    drive(body)


def test_an_evaluation_that_nobody_waits_for_any_more_does_not_stand_in_the_way_of_the_next():
    async def body(actor, engine):
        engine.stuck = True
        abandoned = asyncio.create_task(evaluate(actor, [11]))
        await until(lambda: engine.requests)
        again = asyncio.create_task(evaluate(actor, [11]))
        await until(lambda: len(engine.requests) == 2)
        engine.stuck = False
        await actor.engine.hold(0)  # anything that lets it step again
        assert [r.reward for r in await abandoned] == [r.reward for r in await again]
        assert len({request.id for request in engine.asked}) == 2

    drive(body)


def test_what_is_not_done_in_time_is_left_out_and_ended():
    async def body(actor, engine):
        engine.stuck = True
        assert await evaluate(actor, [11, 13], limit_s=0.2) == []
        await until(lambda: actor.engine.stats().running == 0)

    drive(body)


@pytest.mark.parametrize(("max_sessions", "places"), [(64, 6), (6, 2), (4, 1)])
def test_held_out_episodes_leave_training_its_sessions(max_sessions, places):
    async def body(actor, engine):
        engine.stuck = True
        playing = asyncio.create_task(evaluate(actor, list(range(1, 13, 2))))
        await until(lambda: len(engine.requests) == min(places, 6))
        engine.stuck = False
        await actor.engine.hold(0)
        assert len(await playing) == 6
        assert actor.held_out_runner.most == places

    drive(body, max_sessions=max_sessions)


def test_a_held_generator_keeps_its_version_until_it_is_let_go():
    async def body(actor, engine):
        assert await hold(actor, 1000.0) == ("trainer-0", 3)
        update = asyncio.create_task(actor.engine.update(4, {}))
        assert len(await evaluate(actor, [11])) == 1
        assert (engine.version, update.done()) == (3, False)
        await hold(actor, 0)
        await update
        assert engine.version == 4

    drive(body)


def test_a_generator_without_weights_says_so_and_holds_nothing():
    async def body(actor, engine):
        assert await hold(actor, 1000.0) == ("trainer-0", roles.NO_VERSION)
        await actor.engine.update(4, {})

    drive(body, weights=False)


def test_what_was_played_while_it_went_over_to_another_trainer_is_worth_nothing():
    async def body(actor, engine):
        engine.stuck = True
        playing = asyncio.create_task(evaluate(actor, [11]))
        await until(lambda: engine.requests)
        actor.trainer, engine.stuck = "trainer-1", False
        await actor.engine.hold(0)
        assert await playing == []

    drive(body)


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
