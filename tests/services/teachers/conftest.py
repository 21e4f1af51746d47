from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faulty_teacher import FaultyTeacher


@pytest.fixture
def faulty() -> Iterator[FaultyTeacher]:
    teacher = FaultyTeacher()
    try:
        yield teacher
    finally:
        teacher.close()


@pytest.fixture
def hang(faulty: FaultyTeacher) -> Callable[[Any, dict[str, Any]], None]:
    """A reply that never comes."""

    def silent(handler: Any, request: dict[str, Any]) -> None:
        faulty.release.wait(60)
        handler.close_connection = True

    return silent
