import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from mesh.messages import Rollout, Sequence, Task, VersionSpan
from services.rewards.sandbox import RewardConfig, RewardSandbox


def rollout(env_reward: float | None = 1.0, **fields) -> Rollout:
    sequence = Sequence([1, 2, 3, 4], [0.0] * 4, [(1, 3)], [VersionSpan(0, 1, 3)])
    fields = {"status": "finished", "env_reward": env_reward, **fields}
    return Rollout("t/0", Task("t", 0, 0), 0, "lease", [sequence], [], [], **fields)


def config(*names: str, timeout_s: float = 20.0, **fields) -> RewardConfig:
    functions = [{"path": f"reward_functions:{name}", "timeout_s": timeout_s} for name in names]
    return RewardConfig(functions=functions, **{"workers": 1, **fields})


def scored(settings: RewardConfig, *rollouts: Rollout) -> list[Rollout]:
    async def scenario():
        sandbox = RewardSandbox(settings)
        await sandbox.start()
        try:
            return list(await asyncio.gather(*(sandbox.score(r) for r in rollouts)))
        finally:
            pids = sandbox.pids()
            await sandbox.close()
            assert not any(running(pid) for pid in pids)

    return asyncio.run(scenario())


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(running(pid) for pid in pids)


def test_the_reward_is_the_weighted_sum_of_the_functions_and_the_environment():
    settings = RewardConfig(
        functions=[
            {"path": "reward_functions:tokens", "weight": 0.1},
            {"path": "reward_functions:half", "name": "style", "weight": -2.0},
            {"path": "reward_functions:right"},
        ],
        environment_weight=3.0,
    )
    original = rollout(env_reward=0.5)
    (result,) = scored(settings, original)
    assert result.rewards == {"environment": 0.5, "tokens": 2.0, "style": 0.5, "right": 1.0}
    assert result.reward == pytest.approx(3.0 * 0.5 + 0.1 * 2 - 2.0 * 0.5 + 1.0)
    assert result.reason == ""
    assert original.reward is None, "the caller's rollout is left as it was"


def test_the_environment_alone_needs_no_process():
    async def scenario():
        sandbox = RewardSandbox(RewardConfig(environment_weight=2.0))
        await sandbox.start()
        assert sandbox.pids() == []
        result = await sandbox.score(rollout(env_reward=0.25))
        await sandbox.close()
        return result

    assert asyncio.run(scenario()).reward == 0.5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "raised KeyError: 'no answer in the rollout'"),
        ("leaves", "raised SystemExit: 3"),
        ("nan", "returned nan, which is not finite"),
        ("text", "returned a str, not a number"),
        ("huge", "raised OverflowError"),
        ("crashes", "ended its process (exit code 7)"),
        ("segfaults", "ended its process (signal SIGSEGV)"),
    ],
)
def test_a_failure_is_unscorable_with_its_reason_and_the_next_rollout_is_scored(name, why):
    async def scenario():
        sandbox = RewardSandbox(config(name, "half"))
        await sandbox.start()
        results = [await sandbox.score(rollout()) for _ in range(2)]
        await sandbox.close()
        return results, sandbox.failures

    results, failures = asyncio.run(scenario())
    for result in results:
        assert result.reward is None
        assert result.rewards == {"environment": 1.0, name: None, "half": 0.5}
        assert result.reason.startswith(f"reward function {name!r} {why}")
    assert failures == {name: 2}


def test_an_endless_function_is_killed_and_its_process_replaced():
    async def scenario():
        sandbox = RewardSandbox(config("loops", "half", timeout_s=0.3))
        await sandbox.start()
        before = sandbox.pids()
        result = await asyncio.wait_for(sandbox.score(rollout()), 60)
        assert wait_until_gone(before)
        after = sandbox.pids()
        await sandbox.close()
        return result, before, after, sandbox.kills

    result, before, after, kills = asyncio.run(scenario())
    assert result.reward is None
    assert result.reason == "reward function 'loops' took longer than 0.3 s and was killed"
    assert result.rewards["half"] == 0.5
    assert before != after
    assert kills == 1


def test_a_kill_reaches_what_the_function_started(tmp_path):
    note = tmp_path / "pid"
    settings = config("starts_a_child_and_loops", timeout_s=1.0)
    (result,) = scored(settings, rollout(reason=str(note)))
    assert result.reward is None
    assert wait_until_gone([int(note.read_text())])


def test_a_late_reply_is_never_the_next_rollouts():
    async def scenario():
        sandbox = RewardSandbox(config("sleeps_by_reward", timeout_s=0.5))
        await sandbox.start()
        slow = await sandbox.score(rollout(env_reward=5.0))
        fast = [await sandbox.score(rollout(env_reward=r)) for r in (0.0, 0.01)]
        await sandbox.close()
        return slow, fast

    slow, fast = asyncio.run(scenario())
    assert slow.reward is None
    assert [r.rewards["sleeps_by_reward"] for r in fast] == [0.0, 0.01]


def test_a_cancelled_score_leaves_no_reply_behind():
    async def scenario():
        sandbox = RewardSandbox(config("sleeps_by_reward"))
        await sandbox.start()
        cancelled = asyncio.create_task(sandbox.score(rollout(env_reward=1.0)))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        result = await sandbox.score(rollout(env_reward=0.0))
        await sandbox.close()
        return result

    assert asyncio.run(scenario()).rewards["sleeps_by_reward"] == 0.0


def test_a_failing_rollout_does_not_affect_those_beside_it():
    rollouts = [rollout(env_reward=r) for r in (0.0, 30.0, 0.0, 0.0)]
    results = scored(config("sleeps_by_reward", timeout_s=1.0, workers=2), *rollouts)
    assert [r.reward for r in results] == [0.0, None, 0.0, 0.0]


def test_noise_on_stdout_and_reads_of_stdin_do_not_disturb():
    results = scored(config("noisy", "reads_stdin"), rollout())
    assert results[0].rewards == {"environment": 1.0, "noisy": 0.25, "reads_stdin": 0.0}
    assert results[0].reward == 1.25


def test_workers_do_not_import_torch():
    assert scored(config("has_torch"), rollout())[0].rewards["has_torch"] == 0.0


def test_retry_tries_once_more_in_a_fresh_process(tmp_path):
    settings = config("crashes_once", on_failure="retry", environment_weight=0.0)
    (result,) = scored(settings, rollout(reason=str(tmp_path / "crashed")))
    assert result.reward == 1.0
    (result,) = scored(config("crashes", on_failure="retry"), rollout())
    assert result.reward is None


def test_no_environment_reward_is_unscorable_unless_its_weight_is_0():
    (result,) = scored(config("half"), rollout(env_reward=None))
    assert (result.reward, result.reason) == (None, "the environment gave no reward")
    (result,) = scored(config("half", environment_weight=0.0), rollout(env_reward=None))
    assert (result.reward, result.rewards) == (0.5, {"environment": None, "half": 0.5})


def test_a_failed_rollout_is_not_scored_and_a_truncated_one_keeps_its_reason():
    settings = config("half", environment_weight=0.0)
    failed, truncated = scored(
        settings,
        rollout(status="failed", env_reward=None, reason="the socket broke"),
        rollout(status="truncated", reason="turn limit"),
    )
    assert (failed.reward, failed.reason) == (None, "the socket broke")
    assert (truncated.reward, truncated.reason) == (0.5, "turn limit")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("reward_functions:missing", "has no attribute 'missing'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("reward_module_that_fails:f", "no database here"),
        ("reward_functions:__doc__", "is a str, not a function"),
    ],
)
def test_a_bad_import_path_is_one_clear_error_at_start(path, why):
    async def scenario():
        sandbox = RewardSandbox(RewardConfig(functions=[{"path": path}], workers=3))
        with pytest.raises(ValueError, match=why) as caught:
            await sandbox.start()
        assert path in str(caught.value)
        assert sandbox.pids() == []

    asyncio.run(scenario())


def test_contradictory_settings_are_refused_with_advice():
    with pytest.raises(ValidationError, match="add a function"):
        RewardConfig(environment_weight=0.0)
    with pytest.raises(ValidationError, match=r"set `name`"):
        RewardConfig(functions=[{"path": "a:f"}, {"path": "b:f"}])
    with pytest.raises(ValidationError, match=r"package\.module:function"):
        RewardConfig(functions=[{"path": "a.f"}])
    with pytest.raises(ValidationError, match="extra"):
        RewardConfig(timeout=3)


def test_scoring_outside_of_start_and_close_is_an_error_and_close_ends_calls_under_way():
    async def scenario():
        sandbox = RewardSandbox(config("loops", timeout_s=60.0))
        with pytest.raises(RuntimeError, match="start"):
            await sandbox.score(rollout())
        await sandbox.start()
        calls = [asyncio.create_task(sandbox.score(rollout())) for _ in range(2)]
        await asyncio.sleep(0.2)
        await asyncio.wait_for(sandbox.close(), 20)
        results = await asyncio.wait_for(asyncio.gather(*calls), 20)
        await sandbox.close()
        with pytest.raises(RuntimeError, match="close"):
            await sandbox.score(rollout())
        assert sandbox.pids() == []
        return results

    under_way, waiting = asyncio.run(scenario())
    assert under_way.reason == "reward function 'loops' ended its process (signal SIGKILL)"
    assert "the sandbox was closed" in waiting.reason


PARENT = """
import asyncio, sys
from test_reward_sandbox import config, rollout
from services.rewards.sandbox import RewardSandbox

async def main():
    sandbox = RewardSandbox(config(sys.argv[1], timeout_s=float(sys.argv[2]), workers=2))
    await sandbox.start()
    call = asyncio.create_task(sandbox.score(rollout()))
    await asyncio.sleep(0.3)
    print(*sandbox.pids(), flush=True)
    await call

asyncio.run(main())
"""


@pytest.mark.parametrize(("name", "timeout_s"), [("loops", 60.0), ("never_lets_go_of_the_interpreter", 2.0)])
def test_a_killed_parent_leaves_no_process_even_while_a_function_loops(name, timeout_s):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", PARENT, name, str(timeout_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(running(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    assert wait_until_gone(pids)


@pytest.mark.parametrize(
    ("settings", "concurrent", "limit_s"),
    [
        (RewardConfig(), 64, 60.0),
        (config("tokens", timeout_s=0.1, start_timeout_s=1.0), 8, 60.0),
        (config("tokens", timeout_s=90.0, start_timeout_s=60.0), 0, 150.0),
        (config("tokens", timeout_s=5.0, start_timeout_s=60.0, workers=2), 64, 5.0 * 33 + 60.0),
        (config("tokens", "half", timeout_s=5.0, start_timeout_s=60.0, workers=2), 64, 10.0 * 33 + 60.0),
        (config("tokens", timeout_s=5.0, start_timeout_s=60.0, workers=2, on_failure="retry"), 64, 10.0 * 33 + 60.0),
    ],
)
def test_a_caller_waits_for_the_queue_in_front_of_the_functions_too(settings, concurrent, limit_s):
    assert settings.limit_s(concurrent) == limit_s
