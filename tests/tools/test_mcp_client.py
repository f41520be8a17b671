"""The client, against real servers: processes that speak stdio, and HTTP on this machine."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import stdio

import m3agent as m3
from m3agent.tools.execute import call_tool
from m3agent.tools.mcp import client as client_module
from tests.agent.double import ScriptedRuntime, block, make_tokenizer
from tests.agent.double import call as written_call
from tests.tools.mcp_servers import header_server
from tests.tools.processes import alive, children, eventually

pytestmark = pytest.mark.anyio
SERVERS = Path(__file__).parent / "mcp_servers"
EVERYTHING = (sys.executable, str(SERVERS / "everything.py"))
BY_HAND = (sys.executable, str(SERVERS / "by_hand.py"))


async def use(server: Any, name: str, on_progress: Any = None, /, **arguments: Any) -> list[Any]:
    tools = {tool.name: tool for tool in server}
    return await call_tool(tools, name, arguments, m3.Context(name, "call_1", on_progress=on_progress))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of `everything.py` served over HTTP by uvicorn."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*EVERYTHING, str(port)], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def opened(kind: str, address: str) -> AsyncIterator[m3.tools.McpServer]:
    server = m3.tools.mcp(*EVERYTHING) if kind == "stdio" else m3.tools.mcp(url=address)
    async with server:
        yield server


def running() -> set[int]:
    return {child.pid for child in children() if alive(child.pid)}


# What works, by both transports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_tools_are_ours(kind: str, address: str, tmp_path: Path) -> None:
    async with opened(kind, address) as server:
        assert [tool.name for tool in server] == sorted(tool.name for tool in server)
        add = next(tool for tool in server if tool.name == "add")
        assert add.description == "Add two numbers."
        assert add.parameters["required"] == ["a"]
        assert server.instructions == "Add things."
        assert await use(server, "add", a=2, b=40) == ["42"]
        assert await use(server, "echo", agent="x", name="y", context="z") == ["x y z"]
        with pytest.raises(m3.ToolError, match="'a' is a required property"):
            await use(server, "add", b=1)
        with pytest.raises(m3.ToolError, match="the disk is full"):
            await use(server, "fail")
        (shown,) = await use(server, "picture", colour="green")
        assert isinstance(shown, m3.Image)
        assert shown.rgb[0, 0].tolist() == [0, 128, 0]
        await everything_at_once(server)
        await progress(server)
        await cancellation(server, tmp_path)
        assert await use(server, "add", a=1) == ["2"]  # and it goes on


async def everything_at_once(server: Any) -> None:
    before, red, after, blue, rest = await use(server, "mixed")
    assert before == "before\nstill before"
    assert red.rgb[0, 0].tolist() == [255, 0, 0]
    lines = after.split("\n")
    assert lines[0] == "after"
    assert lines[1].startswith("[picture (image/png) that cannot be shown: ")
    assert lines[2] == "[picture (image/png) that cannot be shown: its base64 is damaged]"
    assert lines[3].startswith("[sound (audio/wav, ")
    assert lines[4:] == ["[resource file:///note]", "a note", "[resource file:///blue]"]
    assert blue.rgb[0, 0].tolist() == [0, 0, 255]
    assert rest == '{"n": 3}'


async def progress(server: Any) -> None:
    told: list[Any] = []
    assert await use(server, "count", told.append, to=3) == ["counted"]
    assert told == [{"progress": number, "total": 3, "message": f"at {number}"} for number in (1, 2, 3)]


async def cancellation(server: Any, folder: Path) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: use(server, "wait", folder=str(folder)))
        await eventually((folder / "began").exists)
        group.cancel_scope.cancel()
    await eventually((folder / "ended").exists)


async def test_the_time_limit_reaches_the_server(tmp_path: Path, address: str) -> None:
    async with m3.tools.mcp(url=address, timeout=0.5, only=["wait"]) as server:
        with pytest.raises(m3.ToolError, match=r"0\.5"):
            await use(server, "wait", folder=str(tmp_path))
        # On a busy machine the call may be over before the tool began.
        await eventually(lambda: (tmp_path / "ended").exists() or not (tmp_path / "began").exists())


async def test_tools_that_ask_first(address: str) -> None:
    async with m3.tools.mcp(url=address, only=["add", "die"], needs_approval=["die"]) as server:
        assert {tool.name: tool.needs_approval for tool in server} == {"add": False, "die": True}
    with pytest.raises(m3.ToolDefinitionError, match="has no tool 'kill'"):  # a slip must not leave it unasked
        async with m3.tools.mcp(url=address, needs_approval=["kill"]):
            pass


async def test_a_session_calls_them_and_sees_their_pictures(tmp_path: Path, address: str) -> None:
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(
        block(written_call("srv_add", a=20, b=22), written_call("srv_picture", colour="red")), "Both are there."
    )
    async with m3.tools.mcp(url=address, prefix="srv_", only=["add", "picture"]) as server:
        session = m3.Agent(runtime, tools=[*server]).session()
        assert (await session.run("Add, and show red.")).text == "Both are there."
    added, shown = session.messages[2].results
    assert added.text == "42"
    assert [part.width for part in shown.parts if isinstance(part, m3.Image)] == [12]


async def test_a_session_hears_their_progress_and_asks_first(tmp_path: Path, address: str) -> None:
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(
        block(written_call("count", to=2), written_call("add", a=1)), "Done."
    )
    async with m3.tools.mcp(url=address, only=["add", "count"], needs_approval=["add"]) as server:
        session = m3.Agent(runtime, tools=[*server]).session()
        async with session.stream("Count, and add.") as stream:
            events = [event async for event in stream]
        told = [event.value["message"] for event in events if isinstance(event, m3.ToolProgress)]
        assert told == ["at 1", "at 2"]
        (waiting,) = session.pending
        assert waiting.name == "add"
        assert (await session.run(approve={waiting.id: True})).text == "Done."
    assert [result.text for result in session.messages[2].results] == ["counted", "2"]


async def test_calls_run_side_by_side(address: str) -> None:
    async with m3.tools.mcp(url=address) as server:
        answers: dict[int, Any] = {}

        async def one(number: int) -> None:
            answers[number] = await use(server, "add", a=number, b=0)

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(one, number)
        assert answers == {number: [str(number)] for number in range(20)}


async def test_surroundings_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of this process")
    async with m3.tools.mcp(*EVERYTHING, env={"GIVEN": "yes"}, cwd=tmp_path) as server:
        (text,) = await use(server, "surroundings")
    assert f'"cwd": "{tmp_path}"' in text
    assert '"secret": ""' in text
    assert '"given": "yes"' in text


async def test_headers_reach_an_http_server() -> None:
    async with header_server.serving() as (url, seen):
        async with m3.tools.mcp(url=url, headers={"Authorization": "Bearer abc"}) as server:
            assert [tool.name for tool in server] == ["hello"]
        assert seen == {"Bearer abc"}


# Names ---------------------------------------------------------------------------------------------------------------


async def test_names_are_chosen_and_prefixed(address: str) -> None:
    async with m3.tools.mcp(url=address, only=["add", "fail"], prefix="maths_") as server:
        assert [tool.name for tool in server] == ["maths_add", "maths_fail"]
        assert await use(server, "maths_add", a=1) == ["2"]
    with pytest.raises(m3.ToolDefinitionError, match=r"has no tool 'sub'\. It has: add, count, die"):
        async with m3.tools.mcp(url=address, only=["sub"]):
            pass
    with pytest.raises(ValueError, match=r"only= is a list of names: \['add'\]"):
        m3.tools.mcp("x", only="add")


async def test_malformed_tools_are_named_and_left_out() -> None:
    server = m3.tools.mcp(*BY_HAND, "tools")
    with pytest.warns(UserWarning, match="is left out") as warned:
        await server.__aenter__()
    assert [(tool.name, tool.description) for tool in server] == [("good", "Works.")]
    assert set(server.skipped) == {
        "good", "no_schema", "list_schema", "wrong_type", "string_schema", "two words", "(without a name)",
    }  # fmt: skip
    assert "inputSchema" in server.skipped["no_schema"]
    assert "twice" in server.skipped["good"]
    await server.close()
    text = "\n".join(str(warning.message) for warning in warned)
    assert all(f"tool {name!r} is left out: " in text for name in server.skipped)
    async with m3.tools.mcp(*BY_HAND, "tools", only=["good"]) as server:  # nobody asked for the others
        assert len(server) == 1
    with pytest.raises(m3.ToolDefinitionError, match="tool 'no_schema' cannot be used: inputSchema"):
        async with m3.tools.mcp(*BY_HAND, "tools", only=["no_schema"]):
            pass


@pytest.mark.filterwarnings("ignore:.*is left out:UserWarning")
async def test_references_that_lead_nowhere_leave_a_tool_out_and_end_no_run(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(
        block(written_call("fine", a="1"), written_call("fine", a="x")), "Done."
    )
    async with m3.tools.mcp(*BY_HAND, "references") as server:
        assert set(server.skipped) == {"named", "dynamic", "circle"}
        assert "leads back to itself" in server.skipped["circle"]
        reply = await m3.Agent(runtime, tools=[*server]).run("Go")
    assert reply.text == "Done."
    good, bad = reply.messages[2].results
    assert good.text == "fine"
    assert "a: 'x' is not of type 'integer'" in bad.text


async def test_new_tools_come_when_asked_for_and_in_order() -> None:
    async with m3.tools.mcp(*BY_HAND, "grows") as server:
        (first,) = server
        await server.refresh()
        await server.refresh()
        assert [tool.name for tool in server] == ["tool_0", "tool_1", "tool_2"]
        assert next(iter(server)) is first


# Servers that fail ---------------------------------------------------------------------------------------------------


async def test_a_server_killed_during_a_call(tmp_path: Path) -> None:
    async with m3.tools.mcp(*EVERYTHING) as server:

        async def kill() -> None:
            await eventually((tmp_path / "began").exists)
            await eventually(lambda: (tmp_path / "began").read_text() != "")
            os.kill(int((tmp_path / "began").read_text()), signal.SIGKILL)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(kill)
                with pytest.raises(m3.ToolError, match=r"(?s)is gone: it ended.*to standard error"):
                    await use(server, "wait", folder=str(tmp_path))
            with pytest.raises(m3.ToolError, match="is gone"):
                await use(server, "add", a=1)
            before = list(server)
            await server.refresh()
            assert list(server) == before  # the same tools, so that a running session's go on
            assert await use(server, "add", a=1) == ["2"]
            with pytest.raises(m3.ToolError, match="is gone"):
                await use(server, "die")


async def test_an_http_server_killed_during_a_call(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*EVERYTHING, str(port)], stderr=subprocess.DEVNULL)
    try:
        with anyio.fail_after(60):
            while True:
                try:
                    await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                    break
                except OSError:
                    await anyio.sleep(0.05)
            async with m3.tools.mcp(url=f"http://127.0.0.1:{port}/mcp") as server:

                async def kill() -> None:
                    await eventually((tmp_path / "began").exists)
                    process.kill()

                async with anyio.create_task_group() as group:
                    group.start_soon(kill)
                    with pytest.raises(m3.ToolError):
                        await use(server, "wait", folder=str(tmp_path))
                with pytest.raises(m3.ToolError):
                    await use(server, "add", a=1)
                with pytest.raises(m3.ToolsetError, match="cannot be used"):
                    await server.refresh()
    finally:
        process.kill()
        process.wait()


async def test_garbage_between_messages_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    async with m3.tools.mcp(*BY_HAND, "garbage") as server:
        assert await use(server, "good") == ["after the garbage"]
    assert capsys.readouterr().out == ""


async def test_an_answer_outside_the_protocol_is_an_error() -> None:
    async with m3.tools.mcp(*BY_HAND, "shape") as server:
        with pytest.raises(m3.ToolError, match="answered outside the protocol: ValidationError"):
            await use(server, "good")


async def test_a_server_that_never_answers_a_call() -> None:
    async with m3.tools.mcp(*BY_HAND, "silent", timeout=0.3) as server:
        with pytest.raises(m3.ToolError, match=r"0\.3"):
            await use(server, "good")
        await server.refresh()  # nothing is in the way of what comes next
        assert [tool.name for tool in server] == ["good"]


async def test_a_server_that_never_starts_to_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    before = running()
    monkeypatch.setattr(client_module, "OPENING", 0.5)
    monkeypatch.setattr(stdio, "PROCESS_TERMINATION_TIMEOUT", 0.1)
    with pytest.raises(m3.ToolsetError, match=r"by_hand.py mute' cannot be used: TimeoutError: no answer in 0\.5 s"):
        async with m3.tools.mcp(*BY_HAND, "mute"):
            pass
    assert running() == before


async def test_a_server_that_cannot_be_started() -> None:
    with pytest.raises(m3.ToolsetError, match="no-such-program"):
        async with m3.tools.mcp("no-such-program"):
            pass
    with pytest.raises(m3.ToolsetError, match=r"(?s)cannot be used.*Its last output:\na file is missing: config.toml"):
        async with m3.tools.mcp(*BY_HAND, "exits"):
            pass
    with pytest.raises(m3.ToolsetError, match="cannot be used"):
        async with m3.tools.mcp(url="http://127.0.0.1:9/mcp"):
            pass
    async with header_server.serving() as (url, _):
        with pytest.raises(m3.ToolsetError, match=r"(?s)cannot be used.*\nHTTP 404 Not Found"):
            async with m3.tools.mcp(url=url + "/elsewhere"):
                pass


# Life ----------------------------------------------------------------------------------------------------------------


async def test_opened_in_one_task_and_closed_in_another() -> None:
    before = running()
    first, second = m3.tools.mcp(*BY_HAND, "sound"), m3.tools.mcp(*BY_HAND, "sound")
    async with anyio.create_task_group() as group:
        group.start_soon(first.__aenter__)
        group.start_soon(second.__aenter__)
    assert await use(first, "good") == ["fine"]
    async with anyio.create_task_group() as group:
        group.start_soon(first.close)  # not the last one opened
    assert await use(second, "good") == ["fine"]
    with pytest.raises(m3.ToolError, match="is gone: it was closed"):
        await use(first, "good")
    await second.close()
    await second.close()
    assert running() == before


async def test_cancelled_while_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    before = running()
    monkeypatch.setattr(stdio, "PROCESS_TERMINATION_TIMEOUT", 0.1)
    with anyio.move_on_after(0.3) as scope:
        async with m3.tools.mcp(*BY_HAND, "mute"):
            pass
    assert scope.cancelled_caught
    assert running() == before


async def test_cancelled_at_any_instant_of_opening_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = running()
    monkeypatch.setattr(stdio, "PROCESS_TERMINATION_TIMEOUT", 0.1)
    for step in range(12):
        with anyio.move_on_after(0.004 * step):
            async with m3.tools.mcp(*BY_HAND, "sound"):
                pass
    assert running() == before
    gc.collect()  # a pipe or process that was left to the collector would be an error here


def test_without_an_event_loop() -> None:
    before = running()
    with m3.tools.mcp(*EVERYTHING, only=["add"]) as server:
        assert anyio.run(lambda: use(server, "add", a=1)) == ["2"]
        assert anyio.run(lambda: use(server, "add", a=2), backend="trio") == ["3"]  # another loop, the same server
    assert running() == before


async def test_standard_error_goes_to_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "m3agent.tools.mcp")
    async with m3.tools.mcp(*EVERYTHING) as server:
        await use(server, "add", a=1)
    await eventually(lambda: "this goes to standard error" in caplog.messages)
    assert "this goes" not in "".join(capfd.readouterr())


def test_what_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="give a command"):
        m3.tools.mcp()
    with pytest.raises(ValueError, match="is an address"):
        m3.tools.mcp("http://127.0.0.1/mcp")
    with pytest.raises(m3.ToolsetError, match="is not open"):
        list(m3.tools.mcp("x"))
