"""The shell toolset: nothing hangs, nothing floods, nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import m3agent as m3
from m3agent.tools import output as output_module
from m3agent.tools.output import SHOWN_BYTES, Output, Spool, clean
from tests.agent.double import ScriptedRuntime, block, make_tokenizer
from tests.agent.double import call as written_call
from tests.tools.processes import alive, call, children, descriptors, eventually, read_pids

pytestmark = pytest.mark.anyio
HANG = 10  # seconds; a command that waits for its children here would take 600


async def sh(command: str, folder: Path, **options: Any) -> str:
    (text,) = await call(m3.tools.shell(folder, **options), command)
    assert isinstance(text, str)
    return text


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# What it answers --------------------------------------------------------------------------------------------------


async def test_output_errors_and_exit_code_in_order(tmp_path: Path) -> None:
    assert await sh("echo out; echo err >&2; echo out; exit 3", tmp_path) == "out\nerr\nout\n[exit code 3]"
    assert await sh("true", tmp_path) == "[exit code 0]"
    assert await sh("printf 'no newline'", tmp_path) == "no newline\n[exit code 0]"


async def test_every_command_starts_in_the_root(tmp_path: Path) -> None:
    tools = m3.tools.shell(tmp_path)
    assert await call(tools, "pwd; cd /") == [f"{tmp_path}\n[exit code 0]"]
    assert await call(tools, "pwd") == [f"{tmp_path}\n[exit code 0]"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_signals_are_said_by_name(tmp_path: Path, number: signal.Signals) -> None:
    assert await sh(f"kill -{number.value} $$", tmp_path) == f"[killed by {number.name}]"
    inner = await sh(f"bash -c 'kill -{number.value} $$'; exit $?", tmp_path)
    assert inner.endswith(f"[exit code {128 + number.value} ({number.name})]")


@pytest.mark.parametrize("command", ["echo \0", f"echo {'a' * 3_000_000}"])
async def test_what_cannot_be_started_is_a_tool_error(tmp_path: Path, command: str) -> None:
    before = descriptors()
    with pytest.raises(m3.ToolError, match="could not be started"):
        await sh(command, tmp_path)
    await eventually(lambda: descriptors() <= before)  # what earlier tests left may go in between


async def test_a_root_that_is_gone_is_a_tool_error(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    tools = m3.tools.shell(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(m3.ToolError, match="gone"):
        await call(tools, "true")


def test_a_toolset_is_refused_where_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(m3.ToolDefinitionError, match="no folder"):
        m3.tools.shell(tmp_path / "nothing")
    with pytest.raises(m3.ToolDefinitionError, match="seconds"):
        m3.tools.shell(tmp_path, seconds=0)


async def test_the_tool_stays_a_function(tmp_path: Path) -> None:
    (tool,) = m3.tools.shell(tmp_path)
    assert await tool("echo hi") == "hi\n[exit code 0]"
    assert tool.parameters["required"] == ["command"]
    assert list(tool.parameters["properties"]) == ["command"]


# Its surroundings -------------------------------------------------------------------------------------------------


async def test_the_environment_is_an_allow_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["OPENAI_API_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "HF_TOKEN", "LC_API_KEY", "EDITOR", "BASH_ENV"]:
        monkeypatch.setenv(name, "hidden-value")
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("M3AGENT_PROCESS", ".outer")  # itself run by a toolset, which has to find what this one starts
    text = await sh("env", tmp_path, env={"MY_TOKEN": "given", "TERM": "xterm"})
    names = {line.partition("=")[0] for line in text.splitlines()}
    assert "hidden-value" not in text
    assert "MY_TOKEN=given" in text.splitlines()  # asked for
    assert "TERM=xterm" in text.splitlines()
    assert "LC_TIME" in names
    assert "M3AGENT_PROCESS=.outer." in text
    allowed = {"PATH", "HOME", "LANG", "TMPDIR", "USER", "SHELL", "LC_TIME", "LC_ALL", "LC_CTYPE", "TERM", "MY_TOKEN"}
    unattended = {"PAGER", "GIT_PAGER", "MANPAGER", "GIT_TERMINAL_PROMPT", "M3AGENT_PROCESS"}
    of_bash = {"PWD", "SHLVL", "_", "OLDPWD", "[exit code 0]"}
    assert names <= allowed | unattended | of_bash


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("read x; echo $?", "1\n[exit code 0]"),
        ("cat", "[exit code 0]"),
        ("printf '\\033[6n'; read -d R answer; echo over", "over\n[exit code 0]"),
        ("(exec </dev/tty) 2>/dev/null || echo no terminal", "no terminal\n[exit code 0]"),
        ("echo $PAGER $GIT_PAGER $TERM", "cat cat dumb\n[exit code 0]"),
    ],
)
async def test_shell_05_nothing_waits_for_someone_at_a_terminal(tmp_path: Path, command: str, answer: str) -> None:
    with anyio.fail_after(HANG):
        assert await sh(command, tmp_path) == answer


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
async def test_shell_05_git_log_is_not_paged(tmp_path: Path) -> None:
    message = "\n".join(f"line {n}" for n in range(400))
    git = "git -c user.name=a -c user.email=a@b.invalid"
    command = f"git init -q . && {git} commit -q --allow-empty -m '{message}' && git log -p"
    with anyio.fail_after(HANG):
        text = await sh(command, tmp_path)
    assert "line 399" in text
    assert text.endswith("[exit code 0]")


# Background processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "background",
    [
        "sleep 600 &",
        "sleep 600 >/dev/null 2>&1 &",
        "sleep 600 >/dev/null &",  # standard error alone is left open
        "nohup sleep 600 &",
        "setsid sleep 600 &",  # a daemon: in no group or session of ours
        "setsid bash -c 'trap \"\" TERM; sleep 600; sleep 600' &",
    ],
)
async def test_shell_01_background_processes_do_not_hold_up_the_call_and_are_ended(
    tmp_path: Path, background: str
) -> None:
    with anyio.fail_after(HANG):
        text = await sh(f"{background} echo $! > pids; echo hi", tmp_path)
    (pid,) = read_pids(tmp_path / "pids", 1)
    assert text.splitlines()[:2] == ["hi", "[exit code 0]"] or "nohup" in background
    assert re.search(r"\[ended, as it was still running: .*sleep 600.*\]", text)
    assert not alive(pid)


async def test_shell_01_a_double_forked_daemon_is_found(tmp_path: Path) -> None:
    script = "import os,time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    script += "open('pids', 'w').write(f'{os.getpid()}\\n')\ntime.sleep(600)"
    (tmp_path / "daemon.py").write_text(script)
    with anyio.fail_after(HANG):
        text = await sh(f"{sys.executable} daemon.py; while [ ! -s pids ]; do sleep 0.01; done", tmp_path)
    (pid,) = read_pids(tmp_path / "pids", 1)
    assert f"still running: {pid} " in text
    assert not alive(pid)


async def test_shell_01_kept_processes_go_on_and_what_they_print_too(tmp_path: Path) -> None:
    with anyio.fail_after(HANG):
        text = await sh(
            "(while [ ! -e go ]; do sleep 0.01; done; echo late; touch done; exec sleep 600) & echo $! > pids; echo hi",
            tmp_path,
            keep_background=True,
        )
    (pid,) = read_pids(tmp_path / "pids", 1)
    try:
        assert text.startswith("hi\n[exit code 0]\n[still running: ")
        assert str(pid) in text
        assert alive(pid)
        assert children() == []  # neither the shell nor who copies the output is left to us
    finally:
        os.kill(pid, signal.SIGKILL)


async def test_kept_output_goes_into_the_named_file(tmp_path: Path) -> None:
    tools = m3.tools.shell(tmp_path, keep_background=True)
    (text,) = await call(tools, "(while [ ! -e go ]; do sleep 0.01; done; echo late; touch done) & echo hi")
    file = Path(text.partition("further output: ")[2].removesuffix("]"))
    assert file.read_text() == "hi\n"
    (tmp_path / "go").touch()
    with anyio.fail_after(HANG):
        while file.read_text() != "hi\nlate\n":
            await anyio.sleep(0.01)
    assert (await call(tools, "echo next"))[0] == "next\n[exit code 0]"


async def test_what_is_printed_just_after_the_end_is_there(tmp_path: Path) -> None:
    assert "late\n" in await sh("echo early; (sleep 0.05; echo late) &", tmp_path)


# Time limit and cancellation --------------------------------------------------------------------------------------


async def test_the_time_limit_ends_everything(tmp_path: Path) -> None:
    command = "(trap '' TERM; sleep 600 & echo $! >> pids; sleep 601) & setsid sleep 602 & echo $! >> pids; "
    command += "trap 'echo asked to stop; exit' TERM; echo $$ >> pids; echo before; while :; do sleep 0.02; done"
    with anyio.fail_after(HANG):
        text = await sh(command, tmp_path, seconds=1.5)
    assert text.startswith("before\n")
    assert "\nasked to stop\n" in text
    assert text.endswith("[stopped: the time limit of 1.5 s is over; everything that the command started was ended]")
    assert [pid for pid in read_pids(tmp_path / "pids", 3) if alive(pid)] == []


async def test_cancel_01_cancelling_the_run_ends_the_command_before_it_returns(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(
        block(written_call("shell", command="sleep 600 & echo $! >> pids; echo $$ >> pids; sleep 601")), "Still here."
    )
    session = m3.Agent(runtime, tools=m3.tools.shell(tmp_path)).session()
    async with anyio.create_task_group() as group:
        group.start_soon(session.run, "x")
        pids = await anyio.to_thread.run_sync(read_pids, tmp_path / "pids", 2)
        group.cancel_scope.cancel()
    assert [pid for pid in pids if alive(pid)] == []
    assert children() == []
    assert session.messages[-1].results[0].text == "cancelled"
    assert (await session.run("And now?")).text == "Still here."


def test_cancel_01_a_cancelled_asyncio_task_ends_the_command(tmp_path: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(sh("echo $$ >> pids; sleep 600", tmp_path))
        (pid,) = await asyncio.to_thread(read_pids, tmp_path / "pids", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not alive(pid)

    asyncio.run(main())


# Floods -----------------------------------------------------------------------------------------------------------


async def test_shell_03_an_endless_flood_ends_with_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "FILE_BYTES", 1_000_000)
    before = peak_memory()
    text = await sh("yes", tmp_path, seconds=0.5)
    assert peak_memory() - before < 64_000_000
    assert len(text) < 3 * SHOWN_BYTES
    found = re.search(r"\n\[(\d+) lines / (\d+) bytes omitted; the first 1000000 bytes of the output: .+\]\n", text)
    assert found
    assert int(found[2]) == 2 * int(found[1])
    assert "time limit" in text.splitlines()[-1]


async def test_shell_03_the_end_of_a_long_output_is_shown(tmp_path: Path) -> None:
    tools = m3.tools.shell(tmp_path)
    before = peak_memory()
    (text,) = await call(tools, "seq 1 1000000; echo FAILED: reason >&2; exit 1")
    assert peak_memory() - before < 64_000_000
    assert text.startswith("1\n2\n3\n")
    assert text.endswith("\n999999\n1000000\nFAILED: reason\n[exit code 1]")
    found = re.search(r"\n\[(\d+) lines / (\d+) bytes omitted; full output: (.+)\]\n", text)
    assert found
    whole = "".join(f"{n}\n" for n in range(1, 1_000_001)) + "FAILED: reason\n"
    assert Path(found[3]).read_text() == whole
    shown = text[: found.start() + 1] + text[found.end() :].removesuffix("[exit code 1]")
    assert len(shown) + int(found[2]) == len(whole)
    assert shown.count("\n") + int(found[1]) == whole.count("\n")


async def test_shell_03_one_enormous_line(tmp_path: Path) -> None:
    before = peak_memory()
    text = await sh("head -c 30000000 /dev/zero | tr '\\0' a; echo; echo last", tmp_path)
    assert peak_memory() - before < 64_000_000
    assert len(text) < 3 * SHOWN_BYTES
    assert "[0 lines / " in text or "[1 lines / " in text
    assert text.endswith("a\nlast\n[exit code 0]")


async def test_shell_03_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 200)
    text = await sh("cat bytes; echo over", tmp_path)
    assert text.endswith("over\n[exit code 0]")
    assert "�" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


async def test_long_outputs_go_with_their_toolset(tmp_path: Path) -> None:
    tools = m3.tools.shell(tmp_path)
    for _ in range(output_module.FILES + 2):
        (text,) = await call(tools, "seq 1 10000")
    file = Path(re.search(r"full output: (.+)\]", text)[1])  # pyright: ignore[reportOptionalSubscript]
    assert file.exists()
    assert len(list(file.parent.iterdir())) == output_module.FILES
    del tools
    gc.collect()
    await eventually(lambda: not file.parent.exists())


async def test_a_full_disk_does_not_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Spool) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(Spool, "open", refuse)
    text = await sh("seq 1 100000", tmp_path)
    assert "the full output could not be stored" in text
    assert text.endswith("100000\n[exit code 0]")


async def test_many_calls_leave_nothing_behind(tmp_path: Path) -> None:
    tools = m3.tools.shell(tmp_path, seconds=60)
    await call(tools, "true")
    before = descriptors()
    for _ in range(40):
        await call(tools, "true")
    await call(tools, "sleep 600 & seq 1 10000")
    await eventually(lambda: descriptors() <= before)  # what earlier tests left may go in between
    assert children() == []


# What the model is shown of an output ------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    text=st.text(st.sampled_from("aé€😀\n"), max_size=40).map(lambda text: text * 40),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
)
def test_an_output_is_cut_on_characters_and_counted_exactly(
    tmp_path_factory: pytest.TempPathFactory, text: str, cuts: list[int]
) -> None:
    data = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_module, "SHOWN_BYTES", 50)
        output = Output(Spool())
        position = turn = 0
        while position < len(data):
            output.add(data[position : position + cuts[turn % len(cuts)]])
            position += cuts[turn % len(cuts)]
            turn += 1
        shown = output.text()
        output.close()
        if len(data) <= 100:
            assert shown == text
            return
        found = re.search(r"\n?\[(\d+) lines / (\d+) bytes omitted; full output: (.+)\]\n", shown)
        assert found
        head, tail = shown[: found.start()].encode(), shown[found.end() :].encode()
        head += b"\n" * (data[: len(head) + 1] == head + b"\n")  # the head's own newline, or the mark's
        assert data.startswith(head.removesuffix(b"\n"))
        assert data.endswith(tail)
        assert len(head) + len(tail) + int(found[2]) in (len(data), len(data) + 1)
        assert Path(found[3]).read_bytes() == data


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[6n\x1b[c\x1b[?25l.", "."),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1b]8;;\x1b\\", "ab"),
        ("\x1bP1;2|data\x1b\\a", "a"),
        ("\x9b31ma\x1b(Bb\x1b=c\x1b7", "abc"),
        ("cut \x1b[3", "cut "),
        ("cut \x1b", "cut "),
        ("a\r\nb\rc\x08\x07\x00\td\x7f", "a\nb\nc\td"),
        ("[31m stays", "[31m stays"),
    ],
)
def test_escape_sequences_are_left_out(raw: str, shown: str) -> None:
    assert clean(raw) == shown


@given(st.text(st.sampled_from("\x1b[]P\\;0m\x07\x9b\x9c\r\nab")))
def test_no_control_character_is_left(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", clean(text))


def test_the_toolset_ends_with_the_program(tmp_path: Path) -> None:
    """No thread or warning of a toolset is in the way of the interpreter's end."""
    code = "import anyio, m3agent as m3\n(t,) = m3.tools.shell('.')\nprint(anyio.run(t, 'seq 1 10000; sleep 600 &'))"
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(m3.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.monotonic() - started < 60
    assert run.stderr == ""
    folder = Path(re.search(r"full output: (.+)\]", run.stdout)[1]).parent  # pyright: ignore[reportOptionalSubscript]
    assert not folder.exists()
