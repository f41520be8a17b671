"""Shared by all tests: async tests run under asyncio and under trio."""

import pytest
from hypothesis import settings

# How long an example takes on a machine under load says nothing about the code.
settings.register_profile("m3agent", deadline=None)
settings.load_profile("m3agent")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param
