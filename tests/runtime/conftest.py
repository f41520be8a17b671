"""The tiny checkpoint, its model, and a runtime on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m3agent.model import M3Model, load_model
from m3agent.runtime import Runtime
from m3agent.runtime.runtime import Opening
from tests.runtime.tiny import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> M3Model:
    return load_model(checkpoint)


@pytest.fixture
def opening(checkpoint: Path) -> Callable[..., Opening]:
    def make(cache_tokens: int = 1024) -> Opening:
        return Runtime.open(checkpoint, cache_tokens=cache_tokens)

    return make


@pytest.fixture
def opening_with(checkpoint: Path) -> Callable[..., Opening]:
    def make(**options: Any) -> Opening:
        return Runtime.open(checkpoint, **{"cache_tokens": 1024, **options})

    return make
