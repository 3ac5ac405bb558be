"""What the tests with vLLM share."""

from collections.abc import Iterator

import pytest
from engine_process import EngineProcess


@pytest.fixture(scope="session")
def engines() -> Iterator[EngineProcess]:
    """The process with vLLM."""
    with EngineProcess() as process:
        yield process
