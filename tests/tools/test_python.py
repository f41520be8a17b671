"""The python toolset: what code prints and means, kept variables, and what happens when the process goes."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import m3agent as m3
from m3agent.tools.output import SHOWN_BYTES
from tests.agent.double import ScriptedRuntime, block, make_tokenizer
from tests.agent.double import call as written_call
from tests.tools.processes import alive, call, children, descriptors, eventually, read_pids

pytestmark = pytest.mark.anyio
HANG = 20  # seconds; code that is not stopped here would go on for ever
FRESH = "[a fresh Python process: what earlier calls defined or imported is gone]"
NEXT = "the next call starts a fresh Python process, without the variables and imports of this one]"


async def ask(tools: list[m3.Tool[..., Any]], code: str) -> str:
    (text,) = await call(tools, code)
    assert isinstance(text, str)
    return text


# What it answers --------------------------------------------------------------------------------------------------


async def test_what_is_printed_the_last_value_and_the_kept_variables(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    assert await ask(tools, "x = 20\nprint('hi')\nx + 1") == "hi\n21"
    assert await ask(tools, "x + _") == "41"
    assert await ask(tools, "None") == "[no output]"
    assert await ask(tools, "") == "[no output]"
    assert await ask(tools, "x = 5;") == "[no output]"
    assert await ask(tools, "import os; os.getcwd()") == repr(str(tmp_path))
    assert await ask(tools, "os.system('echo from a program; echo err >&2')") == "from a program\nerr\n0"
    assert await ask(tools, "print('é€😀', end='')") == "é€😀"
    assert await ask(tools, "input()") != ""  # and no hang


async def test_failures_are_told_by_a_short_traceback(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    text = await ask(tools, "y = 1\ndef half(n):\n    return 1 / n\nprint('before')\nhalf(0)")
    lines = text.splitlines()
    assert lines[:2] == ["before", "Traceback (most recent call last):"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "return 1 / n" in text
    assert "python_worker" not in text
    assert await ask(tools, "y") == "1"

    text = await ask(tools, "x = ")
    assert "SyntaxError" in text
    assert "ast.py" not in text
    assert "python_worker" not in text

    text = await ask(tools, "def down(n):\n    return down(n + 1) if n < 300 else 1 / 0\ndown(0)")
    assert text.count("\n") < 40
    assert text.endswith("ZeroDivisionError: division by zero")

    assert (await ask(tools, "import sys; sys.exit(3)")).endswith("SystemExit: 3")
    assert (await ask(tools, "raise KeyboardInterrupt")).endswith("KeyboardInterrupt")
    text = await ask(tools, "class Bad(Exception):\n    def __str__(self): raise self\nraise Bad")
    assert "Bad" in text
    text = await ask(tools, "class Shy:\n    def __repr__(self): raise ValueError('no')\nShy()")
    assert text.endswith("ValueError: no")
    assert await ask(tools, "y") == "1"  # all of it in one process


async def test_the_code_is_a_main_module(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    code = "import pickle, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\n"
    assert await ask(tools, f"{code}pickle.loads(pickle.dumps(A(3)))") == "A(x=3)"
    assert await ask(tools, "__name__") == "'__main__'"
    (tmp_path / "beside.py").write_text("value = 7")
    assert await ask(tools, "import beside; beside.value") == "7"
    assert "ModuleNotFoundError" in await ask(tools, "import python_worker")  # nothing of ours is in the way


async def test_a_fork_that_comes_back_does_not_answer_too(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    assert await ask(tools, "import os\nchild = os.fork()\n'parent' if child else 'child'") == "'parent'"
    assert await ask(tools, "os.waitpid(child, 0)[1]") == "0"


async def test_long_values_and_long_output_are_cut(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    text = await ask(tools, "'a' * 1_000_000")
    assert len(text) < 10_000
    assert "characters omitted]" in text
    text = await ask(tools, "for n in range(100_000): print(n)\n1 / 0")
    assert len(text) < 3 * SHOWN_BYTES
    assert text.startswith("0\n1\n")
    assert re.search(r"\n\[\d+ lines / \d+ bytes omitted; full output: .+\]\n", text)
    assert "\n99999\n" in text
    assert text.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("code", ["'\\ud800'", "raise ValueError('\\ud800')", "print('\\x1b[31mred\\x00')"])
async def test_what_no_text_may_hold_is_left_out(tmp_path: Path, code: str) -> None:
    text = await ask(m3.tools.python(tmp_path), code)
    text.encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


async def test_a_long_request_arrives_whole(tmp_path: Path) -> None:
    text = "é" * 1_000_000
    assert await ask(m3.tools.python(tmp_path), f"len('{text}')") == "1000000"


async def test_the_environment_is_an_allow_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden-value")
    monkeypatch.setenv("PYTHONPATH", "/hidden-value")
    text = await ask(m3.tools.python(tmp_path), "import os, sys; (dict(os.environ), sys.path)")
    assert "hidden-value" not in text
    assert "'MPLBACKEND': 'Agg'" in text


def test_a_toolset_is_refused_where_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(m3.ToolDefinitionError, match="no folder"):
        m3.tools.python(tmp_path / "nothing")
    with pytest.raises(m3.ToolDefinitionError, match="seconds"):
        m3.tools.python(tmp_path, seconds=-1)
    with pytest.raises(m3.ToolDefinitionError, match="memory"):
        m3.tools.python(tmp_path, memory=0)


# Figures ----------------------------------------------------------------------------------------------------------


async def test_open_figures_are_pictures_and_are_closed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tools = m3.tools.python(tmp_path)
    code = "import matplotlib.pyplot as plt\nplt.figure(figsize=(2, 1), dpi=50)\nplt.plot([1, 2])\nplt.show()\n"
    text, first, second = await call(tools, f"{code}plt.figure(figsize=(1, 1), dpi=50, facecolor='red')\nprint('two')")
    assert text == "two"
    assert isinstance(first, m3.Image)
    assert (first.width, first.height) == (100, 50)
    assert (second.width, second.height) == (50, 50)
    assert tuple(second.rgb[0, 0]) == (255, 0, 0)
    assert await ask(tools, "plt.get_fignums()") == "[]"
    (alone,) = await call(tools, "_ = plt.figure(figsize=(1, 1))")
    assert isinstance(alone, m3.Image)
    told, *pictures = await call(tools, "for _ in range(11): plt.figure(figsize=(1, 1))")
    assert len(pictures) == 8
    assert told == "[3 more figures are not shown]"


async def test_a_figure_that_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tools = m3.tools.python(tmp_path)
    text = await ask(tools, "import matplotlib.pyplot as plt\nplt.figure(figsize=(1, 1)).suptitle('$\\\\nothing$')")
    assert "the figures could not be drawn" in text
    assert await ask(tools, "plt.get_fignums()") == "[]"


# The end of the process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (
            "import os, signal\nprint('last words', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)",
            "was killed by SIGSEGV",
        ),
        ("import os\nprint('last words', flush=True)\nos._exit(3)", "ended with exit code 3"),
    ],
)
async def test_a_process_that_dies_is_told_and_a_fresh_one_comes(tmp_path: Path, code: str, end: str) -> None:
    tools = m3.tools.python(tmp_path)
    before = descriptors()
    assert await ask(tools, "x = 1") == "[no output]"
    assert await ask(tools, code) == f"last words\n[the Python process {end}; {NEXT}"
    await eventually(lambda: descriptors() <= before)  # what earlier tests left may go in between
    assert await ask(tools, "'x' in globals()") == f"{FRESH}\nFalse"
    assert await ask(tools, "1") == "1"


async def test_a_process_that_dies_between_calls_is_told(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    pid = int(await ask(tools, "import os; os.getpid()"))
    os.kill(pid, signal.SIGKILL)
    while alive(pid) or len(os.listdir(f"/proc/{pid}/task")) > 1:  # a thread may outlive the first one
        await anyio.sleep(0.01)
    assert await ask(tools, "1") == f"{FRESH}\n1"


@pytest.mark.parametrize("code", ["import os; os.closerange(3, 100)", "import os; os.write(CHANNEL, b'nonsense' * 9)"])
async def test_code_that_breaks_the_channel_loses_its_process_alone(tmp_path: Path, code: str) -> None:
    tools = m3.tools.python(tmp_path)
    await ask(tools, "import sys; CHANNEL = int(sys.argv[1])")
    with anyio.fail_after(HANG):
        assert NEXT in await ask(tools, code)
    assert await ask(tools, "1") == f"{FRESH}\n1"


async def test_code_may_close_its_output(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    assert await ask(tools, "import os, sys; os.close(1); os.close(2); 5") == "5"
    assert await ask(tools, "6") == "6"
    assert await ask(tools, "sys.stdout.close(); sys.stdout = None; 7") == "7"
    assert await ask(tools, "8") == "8"


@pytest.mark.parametrize("code", ["while True: pass", "print('x' * 99)\nwhile True: print('y' * 99)"])
async def test_the_time_limit_ends_the_process_and_what_it_started(tmp_path: Path, code: str) -> None:
    tools = m3.tools.python(tmp_path, seconds=1.5)
    programs = "import os, subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    programs += "_ = open('pids', 'w').write(f'{os.getpid()}\\n{child.pid}\\n')\n"
    with anyio.fail_after(HANG):
        text = await ask(tools, programs + code)
    assert text.endswith(f"[stopped: the time limit of 1.5 s is over; {NEXT}")
    assert [pid for pid in read_pids(tmp_path / "pids", 2) if alive(pid)] == []
    assert children() == []


async def test_the_memory_limit(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path, memory=300_000_000)
    text = await ask(tools, "x = 1\nbytearray(400_000_000)")
    assert text.endswith("MemoryError\n[the process may allocate 300000000 bytes]")
    assert await ask(tools, "x") == "1"


async def test_cancel_01_cancelling_the_run_ends_the_process_before_it_returns(tmp_path: Path) -> None:
    code = "import os, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
    code += "_ = open('pids', 'w').write(f'{os.getpid()}\\n{child.pid}\\n')\nwhile True: pass"
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(
        block(written_call("python", code=code)), block(written_call("python", code="1")), "Still here."
    )
    session = m3.Agent(runtime, tools=m3.tools.python(tmp_path)).session()
    async with anyio.create_task_group() as group:
        group.start_soon(session.run, "x")
        pids = await anyio.to_thread.run_sync(read_pids, tmp_path / "pids", 2)
        group.cancel_scope.cancel()
    assert [pid for pid in pids if alive(pid)] == []
    assert children() == []
    assert session.messages[-1].results[0].text == "cancelled"
    assert (await session.run("And now?")).text == "Still here."
    assert session.messages[-2].results[0].text == f"{FRESH}\n1"


async def test_calls_side_by_side_run_one_after_the_other(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    await ask(tools, "import time; running = 0; seen = []")
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask, tools, "running += 1; time.sleep(0.05); seen.append(running); running -= 1")
    assert await ask(tools, "seen") == "[1, 1, 1]"


async def test_a_waiting_call_can_be_cancelled_alone(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    answers: list[str] = []

    async def long() -> None:
        answers.append(await ask(tools, "x = 4\nwhile not os.path.exists('go'): time.sleep(0.01)\nx"))

    await ask(tools, "import os, time")
    async with anyio.create_task_group() as group:
        group.start_soon(long)
        await anyio.sleep(0.1)
        with anyio.move_on_after(0.1):
            await ask(tools, "1")
        (tmp_path / "go").touch()
    assert answers == ["4"]


async def test_many_calls_leave_nothing_behind(tmp_path: Path) -> None:
    tools = m3.tools.python(tmp_path)
    pid = int(await ask(tools, "import os; os.getpid()"))
    before = descriptors()
    for n in range(100):
        assert await ask(tools, f"{n}") == str(n)
    await eventually(lambda: descriptors() <= before)  # what earlier tests left may go in between
    assert [child.pid for child in children()] == [pid]
    del tools
    gc.collect()
    await eventually(lambda: children() == [])
    await eventually(lambda: descriptors() <= before - 2)  # the pipe and the socket


PROGRAM = """
import os, sys, threading, time, anyio, m3agent as m3
from pathlib import Path
(tool,) = m3.tools.python(".")
pid = anyio.run(tool, "import os, pathlib; os.getpid()")
Path("pid").write_text(pid + "\\n")
if sys.argv[1] == "killed":  # while code runs
    code = "pathlib.Path('busy').touch()\\nwhile True: pass"
    threading.Thread(target=anyio.run, args=(tool, code)).start()
    while not os.path.exists("busy"):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("how", "status"), [("normal", 0), ("killed", -signal.SIGKILL)])
def test_the_process_ends_with_the_program_however_it_ends(tmp_path: Path, how: str, status: int) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, how],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(m3.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (status, "")
    (pid,) = read_pids(tmp_path / "pid", 1)
    end = time.monotonic() + HANG
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)
