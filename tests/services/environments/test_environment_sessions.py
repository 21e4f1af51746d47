"""The client on the real server."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
from pathlib import Path

import pytest

from services.environments import (
    EnvironmentClient,
    EnvironmentConfig,
    EnvironmentFailure,
    HintLayers,
    ServerProcess,
    Session,
    ToolboxConfig,
    load_hint_modules,
)
from services.environments.connection import Connection, ErrorReply
from services.environments.toolbox.grammar import Toolbox, oracle_action

PATIENT = EnvironmentConfig(toolbox=ToolboxConfig(level="hard"), max_sessions=16, open_limit_s=120, step_limit_s=60)


def seed_with_first_operator(symbol: str) -> int:
    return next(seed for seed in range(1000) if Toolbox("hard").reset(seed)[1] == symbol)


async def solve(session: Session, seed: int) -> float | None:
    observation = await session.reset(seed)
    assert (observation.turn, observation.reward, observation.done) == (0, None, False)
    while not observation.done:
        observation = await session.step(oracle_action(await session.state(), "hard"))
    return observation.reward


def test_sixteen_sessions_at_once_each_solve_their_own_task(toolbox_url: str) -> None:
    async def play() -> None:
        client = EnvironmentClient(toolbox_url, PATIENT)
        everyone_in = asyncio.Barrier(16)

        async def one(seed: int) -> float | None:
            async with client.session() as session:
                first = await session.reset(seed)
                assert first.content == Toolbox("hard").reset(seed)
                await everyone_in.wait()  # sixteen sessions are open now
                return await solve(session, seed)

        assert await asyncio.gather(*(one(seed) for seed in range(16))) == [1.0] * 16
        assert client.lost_sessions == 0

    asyncio.run(play())


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("add(1,2)", "tool_not_found"),
        ("sum[1,2]", "json_decode"),
        ("", "json_decode"),
        ("sum(1,2)\n" * 99, "json_decode"),
        ("sum(\N{SNOWMAN},2)", "json_decode"),
        ("sum(1)", "type_error"),
        ("sum(77,88)", "runtime_error"),
    ],
)
def test_a_refused_turn_carries_its_kind_and_its_hint(toolbox_url: str, action: str, kind: str) -> None:
    async def play() -> None:
        async with EnvironmentClient(toolbox_url, PATIENT).session() as session:
            await session.reset(seed_with_first_operator("+"))
            refused = await session.step(action)
            assert (refused.error_kind, refused.hint_template_key) == (kind, f"toolbox/{kind}")
            assert refused.metadata["error_kind"] == kind
            assert refused.metadata["hint_template_key"] == f"toolbox/{kind}"
            assert (refused.turn, refused.reward, refused.done) == (1, None, False)
            load_hint_modules(PATIENT.hint_modules)
            hint = HintLayers().hint_for(kind, refused.hint_template_key, refused.hint_context, refused.content)
            assert hint == ("sum(a,b)", "template")

    asyncio.run(play())


def test_an_operator_without_a_hint_has_no_template(toolbox_url: str) -> None:
    async def play() -> None:
        async with EnvironmentClient(toolbox_url, PATIENT).session() as session:
            await session.reset(seed_with_first_operator("%"))
            refused = await session.step("mod(1,2)")
            assert (refused.error_kind, refused.hint_template_key) == ("tool_not_found", None)
            layers = HintLayers(("template",))
            key, context = refused.hint_template_key, refused.hint_context
            assert layers.hint_for("tool_not_found", key, context, refused.content) is None

    asyncio.run(play())


def test_state_gives_back_exactly_what_the_agent_saw_at_each_turn(toolbox_url: str) -> None:
    async def play() -> None:
        async with EnvironmentClient(toolbox_url, PATIENT).session() as session:
            seen = [{"role": "user", "content": (await session.reset(11)).content}]
            snapshots = [list(seen)]
            for action in ("nope(1)", "", "sum(1,2", "{}", "\N{SNOWMAN}"):
                content = (await session.step(action)).content
                seen += [{"role": "assistant", "content": action}, {"role": "tool", "content": content}]
                snapshots.append(list(seen))
            for turn, snapshot in enumerate(snapshots):
                assert await session.state(turn) == snapshot
            assert await session.state() == snapshots[-1]
            state = await session.server_state()
            assert (state["seed"], state["step_count"], state["done"]) == (11, 5, True)
            for turn in (-1, 6):
                with pytest.raises(IndexError, match="5 actions so far"):
                    await session.state(turn)

    asyncio.run(play())


def test_the_server_replays_actions_within_reset_and_refuses_more_than_the_episode_has(toolbox_url: str) -> None:
    async def play() -> None:
        connection = await Connection.open(toolbox_url, 60)
        reply = await connection.ask("reset", {"seed": 11, "replay": ["nope(1)", "sum["]}, 60)
        assert (reply["observation"]["turn"], reply["observation"]["error_kind"]) == (2, "json_decode")
        with pytest.raises(ErrorReply, match="replay holds 6 actions, but the episode of seed 11 is over after 5"):
            await connection.ask("reset", {"seed": 11, "replay": ["nope(1)"] * 6}, 60)
        await connection.close()

    asyncio.run(play())


def test_a_session_plays_one_episode_after_the_other(toolbox_url: str) -> None:
    async def play() -> None:
        async with EnvironmentClient(toolbox_url, PATIENT).session() as session:
            for seed in (5, 6, 5):
                assert await solve(session, seed) == 1.0

    asyncio.run(play())


def test_a_call_before_reset_is_refused(toolbox_url: str) -> None:
    async def play() -> None:
        async with EnvironmentClient(toolbox_url, PATIENT).session() as session:
            with pytest.raises(RuntimeError, match=r"call reset\(seed\) first"):
                await session.step("sum(1,2)")

    asyncio.run(play())


def test_an_error_of_the_environment_is_a_failure_with_its_message_and_the_session_lives(toolbox_url: str) -> None:
    async def play() -> None:
        async with EnvironmentClient(toolbox_url, PATIENT).session() as session:
            await solve(session, 3)
            with pytest.raises(EnvironmentFailure, match="no episode running") as caught:
                await session.step("ans(1)")
            failure = caught.value
            assert (failure.url, failure.seed, failure.turn) == (toolbox_url, 3, 3)
            assert failure.code == "EXECUTION_ERROR"
            assert str(pickle.loads(pickle.dumps(failure))) == str(failure)
            assert await solve(session, 4) == 1.0

    asyncio.run(play())


def test_a_server_that_is_full_is_a_clear_failure_and_a_freed_session_is_taken(toolbox_url: str) -> None:
    async def play() -> None:
        client = EnvironmentClient(toolbox_url, PATIENT)
        late = EnvironmentClient(toolbox_url, PATIENT.model_copy(update={"open_limit_s": 1.0}))
        leave = asyncio.Event()
        everyone_in = asyncio.Barrier(17)

        async def stay(seed: int) -> None:
            async with client.session() as session:
                await session.reset(seed)
                await everyone_in.wait()
                await leave.wait()

        stays = [asyncio.create_task(stay(seed)) for seed in range(16)]
        await everyone_in.wait()
        async with late.session() as session:
            with pytest.raises(EnvironmentFailure, match="allows 16 sessions at once"):
                await session.reset(1)
        with pytest.raises(EnvironmentFailure, match="has a session free"):
            await late.probe()
        async with EnvironmentClient(toolbox_url, PATIENT).session() as session:
            waiting = asyncio.create_task(session.reset(1))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            leave.set()
            assert (await waiting).content == Toolbox("hard").reset(1)
        await asyncio.gather(*stays)

    asyncio.run(play())


def test_sessions_beyond_the_clients_own_limit_wait_for_a_bounded_time(toolbox_url: str) -> None:
    async def play() -> None:
        client = EnvironmentClient(toolbox_url, PATIENT.model_copy(update={"max_sessions": 1, "slot_limit_s": 0.2}))
        async with client.session() as session:
            with pytest.raises(EnvironmentFailure, match="all 1 sessions stayed taken"):
                async with client.session():
                    pass
            assert await solve(session, 1) == 1.0
        async with client.session() as session:
            assert await solve(session, 2) == 1.0

    asyncio.run(play())


def test_a_probe_of_a_live_server_brings_an_observation(toolbox_url: str) -> None:
    observation = asyncio.run(EnvironmentClient(toolbox_url, PATIENT).probe(60))
    assert observation.content == Toolbox("hard").reset(0)


def test_a_probe_of_a_dead_url_is_one_clear_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(EnvironmentFailure, match="cannot connect") as caught:
        asyncio.run(EnvironmentClient(f"http://127.0.0.1:{port}", PATIENT).probe())
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "check that an OpenEnv server runs" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_episode_goes_on_in_the_same_state_after_the_server_was_killed_and_restarted(tmp_path: Path) -> None:
    config = PATIENT.model_copy(update={"max_sessions": 4})
    first = ServerProcess(config.server_command(), tmp_path / "log", ready_timeout_s=120)
    first.start()
    port = first.wait_ready()
    second = ServerProcess(config.server_command(port=port), tmp_path / "log", ready_timeout_s=120)

    async def play() -> None:
        client = EnvironmentClient(f"http://127.0.0.1:{port}", config)
        async with client.session() as session, client.session() as other:
            await session.reset(21)
            await other.reset(22)
            await session.step("nope(1,2)")
            before = await session.step(oracle_action(await session.state(), "hard"))
            chat = await session.state()
            assert before.error_kind is None
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            first.stop()
            second.start()  # takes seconds, in which the client knocks in vain
            assert await session.state() == chat
            while not before.done:
                before = await session.step(oracle_action(await session.state(), "hard"))
            assert before.reward == pytest.approx(0.8)
            assert await other.step("sum[") == await _fresh(client, 22, "sum[")
            assert client.lost_sessions == 2

    try:
        asyncio.run(play())
    finally:
        second.stop()
        first.stop()


async def _fresh(client: EnvironmentClient, seed: int, action: str) -> object:
    async with client.session() as session:
        await session.reset(seed)
        return await session.step(action)
