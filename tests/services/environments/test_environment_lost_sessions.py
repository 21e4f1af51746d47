"""The client against servers that are slow, leave, or answer nonsense."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from services.environments import EnvironmentClient, EnvironmentConfig, EnvironmentFailure

FakeServer = Callable[..., Any]
SILENCE = "(silence)"  # the fake server's word for no reply at all


def config(url: str, **settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(url=url, **{"step_limit_s": 1.0, "open_limit_s": 20.0, **settings})


def says(connection: int, kind: str, text: str | None = None) -> Callable[[int, dict[str, Any]], bool]:
    """Whether a message is the one at which the fault is to happen."""

    def matches(number: int, message: dict[str, Any]) -> bool:
        sent = message.get("data", {}).get("message")
        return number == connection and message["type"] == kind and (text is None or sent == text)

    return matches


@pytest.mark.parametrize("takes_replay", [True, False])
def test_a_late_reply_is_never_taken_for_that_of_the_next_call(
    fake_environment: FakeServer, takes_replay: bool
) -> None:
    async def play() -> None:
        release = asyncio.Event()
        late = says(0, "step", "b")

        async def hold(number: int, message: dict[str, Any]) -> None:
            if late(number, message):
                await release.wait()

        async with fake_environment(hold, takes_replay) as server:
            client = EnvironmentClient(server.url, config(server.url))
            try:
                async with client.session() as session:
                    assert (await session.reset(7)).content == "7:"
                    assert (await session.step("a")).content == "7:a"
                    assert (await session.step("b")).content == "7:a|b"  # timed out once, then from a new session
                    release.set()  # now the late reply is sent
                    assert (await session.step("c")).content == "7:a|b|c"
                    assert (await session.step("d")).content == "7:a|b|c|d"
            finally:
                release.set()
            assert (server.connections, client.lost_sessions) == (2, 1)
            assert [m for n, m in server.received if n == 0][-1]["data"] == {"message": "b"}

    asyncio.run(play())


def test_a_cancelled_call_leaves_no_reply_behind_for_the_next_one(fake_environment: FakeServer) -> None:
    async def play() -> None:
        arrived, release = asyncio.Event(), asyncio.Event()
        slow = says(0, "step", "slow")

        async def hold(number: int, message: dict[str, Any]) -> None:
            if slow(number, message):
                arrived.set()
                await release.wait()

        async with fake_environment(hold) as server:
            async with EnvironmentClient(server.url, config(server.url, step_limit_s=30.0)).session() as session:
                await session.reset(7)
                call = asyncio.create_task(session.step("slow"))
                await arrived.wait()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                release.set()
                assert (await session.step("next")).content == "7:next"
            assert server.connections == 2

    asyncio.run(play())


@pytest.mark.parametrize("takes_replay", [True, False])
def test_a_new_session_is_brought_to_the_same_state(fake_environment: FakeServer, takes_replay: bool) -> None:
    async def play() -> None:
        leave = says(0, "step", "c")

        async def drop(number: int, message: dict[str, Any]) -> str | None:
            return "garbage" if leave(number, message) else None

        async with fake_environment(drop, takes_replay) as server:
            async with EnvironmentClient(server.url, config(server.url)).session() as session:
                await session.reset(7)
                for action in "abcd":
                    observation = await session.step(action)
                assert observation.content == "7:a|b|c|d"
            sent = [
                (m["type"], m["data"].get("message")) for n, m in server.received if n == 1 and m["type"] != "close"
            ]
            assert ("reset", None) in sent
            replayed = [] if takes_replay else [("step", "a"), ("step", "b")]
            assert sent == [("reset", None), *replayed, ("step", "c"), ("step", "d")]

    asyncio.run(play())


def test_a_server_that_refuses_replay_is_stepped_through_the_actions(fake_environment: FakeServer) -> None:
    async def play() -> None:
        lost = says(0, "step", "b")

        async def strict(number: int, message: dict[str, Any]) -> dict[str, Any] | str | None:
            if "replay" in message.get("data", {}):
                return {"type": "error", "data": {"message": "reset() got an unexpected argument", "code": "E"}}
            return "garbage" if lost(number, message) else None

        async with (
            fake_environment(strict) as server,
            EnvironmentClient(server.url, config(server.url)).session() as session,
        ):
            await session.reset(7)
            await session.step("a")
            assert (await session.step("b")).content == "7:a|b"

    asyncio.run(play())


def test_the_state_of_a_server_without_a_transcript_comes_from_the_sessions_record(
    fake_environment: FakeServer,
) -> None:
    async def play() -> None:
        async with (
            fake_environment() as server,
            EnvironmentClient(server.url, config(server.url)).session() as session,
        ):
            await session.reset(7)
            await session.step("a")
            assert await session.state(0) == [{"role": "user", "content": "7:"}]
            assert await session.state() == [
                {"role": "user", "content": "7:"},
                {"role": "assistant", "content": "a"},
                {"role": "tool", "content": "7:a"},
            ]
            assert await session.server_state() == {"seed": 7}

    asyncio.run(play())


def test_an_environment_that_stays_lost_is_a_failure_that_names_everything(fake_environment: FakeServer) -> None:
    async def play() -> None:
        async def mute(number: int, message: dict[str, Any]) -> str | None:
            return SILENCE if message.get("data", {}).get("message") == "b" else None

        async with fake_environment(mute) as server:
            client = EnvironmentClient(server.url, config(server.url, reopen=1, step_limit_s=0.5))
            async with client.session() as session:
                await session.reset(7)
                await session.step("a")
                with pytest.raises(EnvironmentFailure) as caught:
                    await session.step("b")
                failure = caught.value
                assert (failure.url, failure.seed, failure.turn) == (server.url, 7, 1)
                for part in (server.url, "seed 7", "turn 1", "no reply to step within 0.5 s", "2 lost sessions"):
                    assert part in str(failure)
                assert session.actions == ["a"]
                assert (await session.reset(8)).content == "8:"  # the next episode gets a new session
            assert server.connections == 3

    asyncio.run(play())


def test_an_environment_that_replays_to_another_state_is_a_failure(fake_environment: FakeServer) -> None:
    async def play() -> None:
        async def moody(number: int, message: dict[str, Any]) -> dict[str, Any] | str | None:
            if number == 0 and message.get("data", {}).get("message") == "b":
                return "garbage"
            if number == 1 and message["type"] == "step":
                return {"type": "observation", "data": {"observation": {"content": "other"}, "reward": 1, "done": True}}
            return None

        async with (
            fake_environment(moody) as server,
            EnvironmentClient(server.url, config(server.url)).session() as session,
        ):
            await session.reset(7)
            await session.step("a")
            with pytest.raises(EnvironmentFailure, match=r"says 'other' where it said '7:a'"):
                await session.step("b")

    asyncio.run(play())


def test_a_server_that_is_gone_for_good_is_a_failure_within_the_open_limit(fake_environment: FakeServer) -> None:
    async def play() -> None:
        async with fake_environment() as server:
            client = EnvironmentClient(server.url, config(server.url, open_limit_s=0.5))
            session = await client.session().__aenter__()
            await session.reset(7)
        with pytest.raises(EnvironmentFailure, match=r"no session within 0\.5 s: cannot connect"):
            await session.step("a")
        await session.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ('["list"]', "of type 'unknown'"),
        ('{"type": "state", "data": {}}', "of type 'state'"),
        ("<html>", "no JSON"),
        (
            '{"type": "observation", "data": {"observation": {"text": "hi"}}}',
            r"set observation_field to one of \['text'\]",
        ),
        ('{"type": "error", "data": {"message": "no GPU", "code": "FACTORY_ERROR"}}', r"no GPU \[FACTORY_ERROR\]"),
    ],
)
def test_a_probe_says_what_is_wrong_with_the_reply(fake_environment: FakeServer, reply: str, cause: str) -> None:
    async def play() -> None:
        async def odd(number: int, message: dict[str, Any]) -> str:
            return reply

        async with fake_environment(odd) as server:
            with pytest.raises(EnvironmentFailure, match=cause):
                await EnvironmentClient(server.url, config(server.url)).probe()

    asyncio.run(play())


def test_a_probe_of_a_silent_server_ends_within_its_limit(fake_environment: FakeServer) -> None:
    async def play() -> None:
        async def mute(number: int, message: dict[str, Any]) -> str:
            return SILENCE

        async with fake_environment(mute) as server:
            with pytest.raises(EnvironmentFailure, match=r"no reply to reset within 0\.3 s"):
                await EnvironmentClient(server.url, config(server.url)).probe(0.3)

    asyncio.run(play())


def test_fields_of_a_foreign_environment_are_read_as_configured(fake_environment: FakeServer) -> None:
    async def play() -> None:
        fields = {"board": ["x", "o"], "metadata": {"error_kind": "type_error", "hint_context": {"form": 1}}}

        async def chess(number: int, message: dict[str, Any]) -> str:
            return json.dumps({"type": "observation", "data": {"observation": fields, "reward": 1, "done": True}})

        async with fake_environment(chess) as server:
            settings = config(server.url, observation_field="board")
            async with EnvironmentClient(server.url, settings).session() as session:
                observation = await session.reset(7)
        assert (observation.content, observation.reward, observation.done) == ('["x", "o"]', 1.0, True)
        # The server declares no template key, so the kind's default template is meant.
        assert (observation.error_kind, observation.hint_template_key) == ("type_error", "type_error")
        assert observation.hint_context == {"form": "1"}

    asyncio.run(play())
