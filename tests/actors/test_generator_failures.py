"""What ends a generator and what does not, on a real engine loop; the other actors are stood in for."""

import asyncio

import pytest

from actors.generator import GeneratorActor, GeneratorConfig
from mesh.binding import Binding, CallTimeout, MemberDied, NoMember, RemoteFailure
from mesh.messages import Lease, Rollout, Task
from services.demo.tokenizer import build_tokenizer
from services.engines.engine import EngineConfig, GenerationRequest
from services.engines.loop import EngineLoop
from services.environments.config import EnvironmentConfig
from services.rollouts.episode import EpisodeConfig
from services.weights.config import WeightsConfig

LIMIT_S = 30.0


class BrokenEngine:
    """Takes any request and dies in the step after it."""

    def __init__(self):
        self.version, self.capacity, self.requests = 0, 8, 0

    def submit(self, request):
        self.requests += 1

    def step(self):
        if self.requests:
            raise RuntimeError("out of memory")
        return []

    def load_weights(self, version, tensors, *, partial=False):
        self.version = version


class OneRequest:
    """An episode of a single turn."""

    def __init__(self, engine):
        self.engine = engine

    async def run(self, lease, greedy=False):
        await self.engine.generate(GenerationRequest(lease.id, [1], 1))


class Buffer:
    """Hands out its leases once and keeps what comes back."""

    def __init__(self, leases=0, put_error=None, claim_error=None):
        self.leases = [Lease(f"lease-{n}", Task(f"t{n}", n, n), 0, 60.0) for n in range(leases)]
        self.put_error, self.claim_error, self.abandoned, self.put = put_error, claim_error, [], []
        self.put_called = asyncio.Event()

    def only(self, member):
        return self

    async def call(self, endpoint, *args):
        if endpoint.__name__ == "claim":
            await asyncio.sleep(0.001)
            error, self.claim_error = self.claim_error, None
            if error:
                raise error
            leases, self.leases = self.leases, []
            return leases
        if endpoint.__name__ == "abandon":
            self.abandoned += args[0]
            return None
        self.put.append(args[0].id)
        self.put_called.set()
        if self.put_error:
            raise self.put_error
        return True


def generator(buffer=None, engine=None, **episode):
    config = GeneratorConfig(episodes=4, episode=EpisodeConfig(**episode))
    actor = GeneratorActor("generator-0", config, "nowhere", "http://env", EnvironmentConfig(), WeightsConfig(), seed=7)
    if engine is not None:
        actor.engine = EngineLoop(engine, EngineConfig())
        actor.runner = OneRequest(actor.engine)
        actor._have_weights.set()
        actor.bindings = {"rollout_buffer": buffer, "trainer": Binding("trainer")}  # no trainer comes
    return actor


async def run_to_its_end(actor):
    await asyncio.wait_for(actor._guarded_run(), LIMIT_S)
    await actor.teardown()
    return actor.failure


async def die(actor):
    with pytest.raises(Exception, match="out of memory"):
        await actor.engine.generate(GenerationRequest("x", [1], 1))


def test_an_engine_that_dies_under_its_episodes_ends_the_actor_and_their_leases_go_back():
    async def scenario():
        buffer = Buffer(leases=3)
        failure = await run_to_its_end(generator(buffer, BrokenEngine()))
        assert failure.startswith("EngineError: the engine died (RuntimeError: out of memory)")
        assert sorted(buffer.abandoned) == ["lease-0", "lease-1", "lease-2"]
        assert buffer.put == []

    asyncio.run(scenario())


def test_an_engine_that_died_without_any_episode_ends_the_actor():
    async def scenario():
        actor = generator(Buffer(), BrokenEngine())
        await die(actor)
        assert "out of memory" in await run_to_its_end(actor)

    asyncio.run(scenario())


def test_an_engine_that_is_dead_when_new_weights_come_ends_the_actor(monkeypatch):
    async def newest(*_):
        return 1, {}

    async def scenario():
        actor = generator(Buffer(), BrokenEngine())
        actor._have_weights.clear()
        monkeypatch.setattr("actors.weights_follower.pull_newest", newest)
        await die(actor)
        assert "out of memory" in await run_to_its_end(actor)

    asyncio.run(scenario())


def test_a_rollout_that_the_buffer_does_not_take_is_counted_and_the_actor_goes_on():
    class Finished:
        async def run(self, lease, greedy=False):
            return Rollout(lease.rollout_id, lease.task, 0, lease.id, [], [], [], "failed")

    async def scenario():
        buffer = Buffer(leases=1, put_error=NoMember("rollout_buffer.put: it has no member"))
        actor = generator(buffer, BrokenEngine())
        actor.runner = Finished()
        running = asyncio.create_task(run_to_its_end(actor))
        await asyncio.wait_for(buffer.put_called.wait(), LIMIT_S)
        actor.finishing.set()
        assert await running is None
        assert (actor.counts["lost"], actor.counts["failed"], actor.trouble) == (
            1, 1, "t0/0: rollout_buffer.put: it has no member"
        )  # fmt: skip

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["claim", "put"])
def test_a_buffer_that_answers_that_it_is_broken_ends_the_actor(call):
    class Finished:
        async def run(self, lease, greedy=False):
            return Rollout(lease.rollout_id, lease.task, 0, lease.id, [], [], [], "failed")

    async def scenario():
        broken = RemoteFailure("rollout_buffer failed: JournalError: cannot write", "JournalError: cannot write")
        actor = generator(Buffer(1, **{f"{call}_error": broken}), BrokenEngine())
        actor.runner = Finished()
        assert await run_to_its_end(actor) == "RemoteFailure: rollout_buffer failed: JournalError: cannot write"

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [NoMember("away"), CallTimeout("away"), MemberDied("away")])
def test_a_buffer_that_is_away_is_asked_again(error):
    async def scenario():
        buffer = Buffer(leases=1, claim_error=error)
        actor = generator(buffer, BrokenEngine())
        running = asyncio.create_task(run_to_its_end(actor))
        assert "out of memory" in await running  # the second claim brought the lease that breaks the engine
        assert actor.trouble == "claim: away"

    asyncio.run(scenario())


def test_a_rollout_waits_for_its_reward_as_long_as_the_reward_functions_may_take():
    class Rewarder:
        async def call_within(self, limit_s, endpoint, rollout):
            self.asked = (limit_s, endpoint.__name__)
            return rollout

    async def scenario():
        actor = GeneratorActor(
            "g", GeneratorConfig(), "nowhere", "http://env", EnvironmentConfig(), WeightsConfig(), 7, 250.0
        )
        rewarder = actor.bindings["rewarder"] = Rewarder()
        await actor._score(Rollout("t/0", Task("t", 0, 0), 0, "0.0", [], [], [], "finished"))
        assert rewarder.asked == (250.0, "score")

    asyncio.run(scenario())


def test_leases_of_unfinished_episodes_go_back_when_the_actor_is_told_to_finish():
    class Endless:
        def __init__(self):
            self.began = asyncio.Event()

        async def run(self, lease, greedy=False):
            self.began.set()
            await asyncio.Event().wait()

    async def scenario():
        buffer = Buffer(leases=2)
        actor = generator(buffer, BrokenEngine())
        actor.runner = Endless()
        running = asyncio.create_task(run_to_its_end(actor))
        await asyncio.wait_for(actor.runner.began.wait(), LIMIT_S)
        actor.finishing.set()
        assert await running is None
        assert sorted(buffer.abandoned) == ["lease-0", "lease-1"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("engine_seed", "used"), [(None, 7), (3, 3), (0, 0)])
def test_sampling_follows_the_run_s_seed_unless_the_engine_has_one(monkeypatch, engine_seed, used):
    monkeypatch.setattr("actors.generator.load_tokenizer", lambda _: build_tokenizer())
    monkeypatch.setattr("actors.generator.generation_stop_ids", lambda _: ())
    monkeypatch.setattr("actors.generator.make_engine", lambda *_: BrokenEngine())
    config = GeneratorConfig(engine=EngineConfig(seed=engine_seed))

    async def scenario():
        actor = GeneratorActor("g", config, "nowhere", "http://env", EnvironmentConfig(), WeightsConfig(), 7)
        await actor.setup()
        assert actor.runner.seed == used
        await actor.teardown()

    asyncio.run(scenario())


def test_a_hint_role_that_the_template_does_not_write_is_refused_at_the_start(tmp_path):
    tokenizer = build_tokenizer()
    known = "{% if message.role in ('user', 'assistant', 'tool') %}"
    written = "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(written, known + written + "{% endif %}")
    tokenizer.save_pretrained(tmp_path)
    actor = generator(hint_role="hint")
    actor.model_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"hint of role 'hint'.*set hint_role to \"user\""):
        asyncio.run(actor.setup())
