"""Replays what a student saw to teachers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mesh.messages import TeacherCallResult, TraceState
from services.teachers.client import ChatClient
from services.teachers.config import TeacherConfig


async def replay_trace(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherConfig],
    *,
    client: ChatClient,
    limit_s: float | None = None,
) -> list[TeacherCallResult]:
    """Ask every teacher about every state, all in parallel within each teacher's `max_concurrency`.

    Returns one result per call, states first, then teachers: result `i * len(teachers) + j` is teacher `j` about state
    `i`. A call that fails is a result with `error`; a silent teacher delays the return by at most `limit_s` seconds
    (`replay_limit_s` of the client's config by default) and never another teacher's call. Raises LedgerError when the
    accounts cannot be kept, EngineError when the teachers' engine in this process died.
    """
    try:
        async with asyncio.TaskGroup() as calls:
            tasks = [
                calls.create_task(client.ask(teacher, state, limit_s=limit_s))
                for state in states
                for teacher in teachers
            ]
    except ExceptionGroup as group:
        # The other calls are cancelled by then. What is raised fails them all alike, and the first error tells it.
        raise group.exceptions[0] from None
    return [task.result() for task in tasks]
