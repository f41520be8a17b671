"""Scripted runtimes for the turn loop, and a tiny real one."""

from pathlib import Path

import pytest

from m3agent.chat import Tokenizer
from tests.agent.double import ScriptedRuntime, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return make_tokenizer(folder)


@pytest.fixture
def runtime(tokenizer: Tokenizer) -> ScriptedRuntime:
    return ScriptedRuntime(tokenizer)
