"""The guard of a run and its evaluations on plain coroutines: what is played with which version, and what is kept."""

import asyncio
import json
import math

import pytest

from launch.evaluation import Evaluation, evaluate_beside_training
from launch.guard import FILE, RunGuard
from mesh.binding import MemberDied, RemoteFailure
from mesh.messages import Rollout, Sequence, Task, VersionSpan
from services.rollouts.tasks import TaskStream, held_out_seeds
from services.safety import CollapseStopError, LeakedTaskError, SafetyConfig

SEEDS = held_out_seeds(8)


def rollout(seed, *versions, reward=0.5, env_reward=1.0):
    spans = [VersionSpan(version, n, n + 1) for n, version in enumerate(versions)]
    sequence = Sequence([0] * len(versions), [0.0] * len(versions), [(0, len(versions))], spans)
    return Rollout("r", Task("t", -1, seed), 0, "l", [sequence], [], [], "finished", env_reward, reward)


class Generator:
    """One generator: which version it has, and how it fails."""

    def __init__(self, version=3, trainer="trainer-0", plays=None, dies_in=None):
        self.version, self.trainer, self.plays, self.dies_in = version, trainer, plays, dies_in
        self.held, self.seeds = [], []

    async def call(self, endpoint, *args):
        return await self.call_within(0.0, endpoint, *args)

    async def call_within(self, limit_s, endpoint, *args):
        if endpoint.__name__ == self.dies_in:
            raise MemberDied(f"generator.{self.dies_in}: the actor died")
        if endpoint.__name__ == "hold":
            self.held.append(args[0])
            return self.trainer, self.version
        seeds, greedy, in_s = args
        assert not greedy
        assert in_s <= limit_s
        self.seeds += seeds
        return [self.plays(seed) if self.plays else rollout(seed, self.version) for seed in seeds]


def play(*generators, trainer="trainer-0", **settings):
    said = []
    evaluation = asyncio.run(evaluate_beside_training(generators, SEEDS, trainer, 60.0, said.append, **settings))
    return evaluation, said


def released(generator):
    return generator.held[0] == 60.0 and generator.held[-1] == 0.0


# ---- one evaluation ----------------------------------------------------------------------------------------------


def test_the_tasks_are_dealt_out_to_those_that_have_the_version_that_most_have():
    generators = [Generator(4), Generator(3), Generator(4)]
    evaluation, _ = play(*generators)
    assert (evaluation.version, evaluation.score, len(evaluation.scores)) == (4, 0.5, 8)
    assert [len(g.seeds) for g in generators] == [4, 0, 4]
    assert sorted(generators[0].seeds + generators[2].seeds) == sorted(SEEDS) == sorted(evaluation.seeds)
    assert all(map(released, generators))


def test_of_two_versions_that_equally_many_have_the_newer_one_is_judged():
    assert play(Generator(3), Generator(4))[0].version == 4


def test_generators_of_the_same_trainer_are_asked_and_others_only_when_nobody_follows_it():
    own, others = Generator(3), [Generator(9, "trainer-1"), Generator(9, "trainer-1")]
    assert play(own, *others)[0].version == 3
    assert [other.seeds for other in others] == [[], []]
    assert play(*others)[0].version == 9


def test_a_generator_that_has_no_weights_yet_is_not_asked():
    fresh, own = Generator(-1), Generator(3)
    assert play(fresh, own)[0].version == 3
    assert fresh.seeds == []


def test_rollouts_with_tokens_of_another_version_are_discarded_and_counted():
    mixed = Generator(3, plays=lambda seed: rollout(seed, 3, 4) if seed == SEEDS[0] else rollout(seed, 3, 3))
    evaluation, _ = play(mixed)
    assert (evaluation.discarded, len(evaluation.scores), evaluation.score) == (1, 7, 0.5)


def test_what_a_generator_that_died_should_have_played_is_missing_and_said():
    evaluation, said = play(Generator(), Generator(dies_in="evaluate"))
    assert len(evaluation.scores) == 4
    assert math.isnan(evaluation.score)  # half of the tasks is no score of all
    assert any("4 tasks are not played: generator.evaluate: the actor died" in line for line in said)


def test_a_generator_that_is_gone_is_not_waited_for_when_its_call_stays_without_an_answer(monkeypatch):
    class Silent(Generator):
        async def call_within(self, limit_s, endpoint, *args):
            if endpoint.__name__ == "evaluate":
                await asyncio.Event().wait()
            return await super().call_within(limit_s, endpoint, *args)

    monkeypatch.setattr("launch.evaluation.LOOK_S", 0.01)
    silent, living = Silent(), Generator()
    silent.role = "generator-1"
    evaluation, said = play(silent, living, alive=lambda generator: generator is living)
    assert len(evaluation.scores) == 4
    assert "evaluation: 4 tasks are not played: generator-1 died" in said
    assert released(living)


def test_without_any_generator_there_is_no_score():
    evaluation, said = play(Generator(dies_in="hold"), Generator(-1))
    assert (evaluation.version, evaluation.scores) == (-1, ())
    assert math.isnan(evaluation.score)
    assert "no evaluation: no generator has weights that could be held" in said
    assert math.isnan(play()[0].score)


def test_unscorable_rollouts_are_left_out_and_are_not_zero():
    one = Generator(plays=lambda seed: rollout(seed, 3, reward=None if seed == SEEDS[0] else 0.5))
    assert play(one)[0].scores == (0.5,) * 7


def test_the_environment_s_own_reward_can_be_the_score():
    assert play(Generator(), score="environment")[0].score == 1.0


def test_an_evaluation_that_is_cancelled_lets_its_generators_go():
    class Endless(Generator):
        async def call_within(self, limit_s, endpoint, *args):
            if endpoint.__name__ == "evaluate":
                playing.set()
                await asyncio.Event().wait()
            return await super().call_within(limit_s, endpoint, *args)

    playing = asyncio.Event()

    async def scenario():
        generator = Endless()
        task = asyncio.create_task(evaluate_beside_training([generator], SEEDS, "trainer-0", 60.0, print))
        await asyncio.wait_for(playing.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
        assert released(generator)

    asyncio.run(scenario())


# ---- the guard of a run ------------------------------------------------------------------------------------------


class Evaluations:
    """Evaluations that are done when the test says so, with the score it says."""

    def __init__(self):
        self.begun, self.results = 0, asyncio.Queue()

    async def __call__(self, seeds):
        self.begun += 1
        score = await self.results.get()
        if isinstance(score, Exception):
            raise score
        scores = () if score is None else (score,) * len(seeds)
        return Evaluation(len(seeds), scores, 0.5, version=7, seeds=tuple(seeds))

    async def give(self, score):
        self.results.put_nowait(score)
        for _ in range(10):
            await asyncio.sleep(0)


def guarded(path, evaluate, steps=100, said=None, **settings):
    safety = SafetyConfig(**{"evaluate_every": 2, "held_out_tasks": 4, "min_steps": 0, "smoothing": 0.0, **settings})
    guard = RunGuard(safety, path, steps, TaskStream(0), evaluate, [].append if said is None else said.append)
    guard.open(0)
    return guard


def row(reward=0.5, **more):
    return {"reward/mean": reward, **more}


def lines(path):
    return [json.loads(line) for line in (path / FILE).read_text().splitlines()]


def test_a_score_is_in_the_first_row_after_it_with_its_version(tmp_path):
    async def scenario():
        evaluations = Evaluations()
        guard = guarded(tmp_path, evaluations)
        assert "safety/held_out_reward" not in guard.watch(0, row())
        await asyncio.sleep(0)
        assert "safety/held_out_reward" not in guard.watch(1, row())
        await evaluations.give(0.25)
        found = guard.watch(2, row())
        assert (found["safety/held_out_reward"], found["safety/held_out_version"]) == (0.25, 7.0)
        assert (found["safety/gap"], found["safety/evaluation_s"], found["safety/fired"]) == (0.25, 0.5, 0.0)
        await asyncio.sleep(0)
        assert evaluations.begun == 2  # row 2 began the next
        await guard.settle()

    asyncio.run(scenario())


def test_an_evaluation_that_is_late_is_not_begun_twice_and_counted(tmp_path):
    async def scenario():
        evaluations, said = Evaluations(), []
        guard = guarded(tmp_path, evaluations, said=said)
        counts = [guard.watch(step, row())["safety/skipped"] for step in range(5)]
        await asyncio.sleep(0)
        assert counts == [0, 0, 1, 1, 2]
        assert evaluations.begun == 1
        assert "no evaluation at step 2: the one before is not done yet" in said
        await guard.settle()

    asyncio.run(scenario())


@pytest.mark.parametrize("result", [None, RemoteFailure("generator failed", "x")])
def test_an_evaluation_without_a_score_is_counted_and_is_not_zero(tmp_path, result):
    async def scenario():
        evaluations = Evaluations()
        guard = guarded(tmp_path, evaluations)
        guard.watch(0, row())
        await evaluations.give(result)
        found = guard.watch(1, row())
        assert found["safety/skipped"] == 1
        assert "safety/held_out_reward" not in found
        assert lines(tmp_path)[1]["held_out"] == "nan"
        await guard.settle()

    asyncio.run(scenario())


def test_no_evaluation_begins_at_the_last_step_or_once_the_run_ends(tmp_path):
    async def scenario():
        evaluations = Evaluations()
        guard = guarded(tmp_path, evaluations, steps=3)
        guard.watch(2, row())
        await asyncio.sleep(0)
        assert evaluations.begun == 0
        guard = guarded(tmp_path, evaluations)
        guard.watch(0, row())
        await asyncio.sleep(0)
        await guard.settle()
        guard.watch(2, row())
        await asyncio.sleep(0)
        assert evaluations.begun == 1

    asyncio.run(scenario())


def test_a_resume_replays_the_steps_before_it_and_cuts_the_others(tmp_path):
    async def scenario():
        guard, twin = (guarded(path, Evaluations()) for path in (made(tmp_path / "a"), made(tmp_path / "b")))
        for step in range(6):
            guard.watch(step, row(0.1 * step, **{"policy/ref_kl": math.inf if step == 3 else 0.01 * step}))
            if step < 4:
                twin.watch(step, row(0.1 * step, **{"policy/ref_kl": math.inf if step == 3 else 0.01 * step}))
        guard.open(4)
        assert guard.guard.state_dict() == twin.guard.state_dict()
        assert [line["step"] for line in lines(tmp_path / "a")] == [0, 1, 2, 3]
        guard.watch(4, row())
        assert [line["step"] for line in lines(tmp_path / "a")] == [0, 1, 2, 3, 4]
        for each in (guard, twin):
            await each.settle()

    asyncio.run(scenario())


def test_a_line_that_was_cut_off_by_a_crash_is_left_out(tmp_path):
    async def scenario():
        guard = guarded(tmp_path, Evaluations())
        guard.watch(0, row())
        await guard.settle()
        guard.close()
        with (tmp_path / FILE).open("a") as file:
            file.write('{"step": 1, "in_lo')
        guard.open(9)
        assert [line["step"] for line in lines(tmp_path)] == [0]

    asyncio.run(scenario())


def test_an_evaluation_of_steps_that_are_done_again_is_forgotten(tmp_path):
    async def scenario():
        evaluations = Evaluations()
        guard = guarded(tmp_path, evaluations)
        guard.watch(0, row())
        await asyncio.sleep(0)
        guard.open(0)
        await evaluations.give(0.9)
        assert "safety/held_out_reward" not in guard.watch(0, row())
        await guard.settle()

    asyncio.run(scenario())


def test_a_guard_that_fires_says_so_once_and_in_every_row_from_then_on(tmp_path):
    async def scenario():
        said = []
        guard = guarded(tmp_path, Evaluations(), said=said, kl_hard_stop=0.5)
        assert guard.watch(0, row(**{"policy/ref_kl": 0.4}))["safety/kl"] == 0.4
        assert guard.watch(1, row(**{"policy/ref_kl": 0.6}))["safety/fired"] == 1.0
        assert guard.watch(2, row(**{"policy/ref_kl": 0.1}))["safety/fired"] == 1.0
        assert sum("fired at step 1" in line for line in said) == 1
        await guard.settle()

    asyncio.run(scenario())


def test_a_guard_that_fired_has_fired_after_a_resume_unless_its_limit_was_raised(tmp_path):
    async def scenario():
        guard = guarded(tmp_path, Evaluations(), kl_hard_stop=0.5)
        guard.watch(0, row(**{"policy/ref_kl": 0.6}))
        await guard.settle()
        guard.close()
        for limit, on_fire, stops, warns in [
            (0.5, "stop", True, True), (0.5, "warn", False, True), (0.7, "stop", False, False)
        ]:  # fmt: skip
            safety = SafetyConfig(evaluate_every=2, min_steps=0, kl_hard_stop=limit, on_fire=on_fire)
            again = RunGuard(safety, tmp_path, 100, TaskStream(0), Evaluations(), print)
            again.open(1)
            assert (again.stops, bool(again.warning)) == (stops, warns)
            if stops:
                with pytest.raises(CollapseStopError, match=r"higher safety\.kl_hard_stop"):
                    again.raise_if_it_stops()
            else:
                again.raise_if_it_stops()
            again.close()

    asyncio.run(scenario())


def test_a_task_that_was_issued_and_is_evaluated_is_noticed(tmp_path, monkeypatch):
    async def scenario():
        stream = TaskStream(0)
        monkeypatch.setattr("launch.guard.held_out_seeds", lambda count, seed: [stream.at(5).seed])
        guard = guarded(tmp_path, Evaluations())
        guard.watch(0, row(**{"buffer/issued": 5.0}))
        await guard.settle()
        guard = guarded(tmp_path, Evaluations())
        with pytest.raises(LeakedTaskError):
            guard.watch(0, row(**{"buffer/issued": 6.0}))

    asyncio.run(scenario())


def test_a_run_without_a_guard_has_no_file_and_nothing_to_say(tmp_path):
    async def scenario():
        guard = RunGuard(SafetyConfig(), tmp_path, 10, TaskStream(0), Evaluations(), print)
        guard.open(0)
        assert guard.watch(0, row()) == {}
        assert (guard.stops, guard.warning) == (False, "")
        await guard.settle()
        guard.close()

    asyncio.run(scenario())
    assert not (tmp_path / FILE).exists()


def made(path):
    path.mkdir()
    return path
