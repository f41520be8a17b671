"""Programs that tools start: their environment, what they print, and the end of everything that they started."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from m3agent.errors import ToolDefinitionError
from m3agent.tools.output import FILE_BYTES, Output

TICK = 0.05  # seconds between looks at the time limit and at a cancellation
GRACE = 0.4  # seconds between SIGTERM and SIGKILL
_CHUNK = 65536
_MARK = "M3AGENT_PROCESS"

_INHERITED = {"PATH", "HOME", "LANG", "TMPDIR", "USER", "SHELL"}
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
# Nothing may wait for someone at a terminal.
_UNATTENDED = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "GIT_TERMINAL_PROMPT": "0", "TERM": "dumb"}


def environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The few variables that programs need from this process, then `extra` as it is."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or (name.startswith("LC_") and not _SECRET.search(name))
    }
    return {"PATH": os.defpath, **kept, **_UNATTENDED, **(extra or {})}


def working_folder(toolset: str, root: str | os.PathLike[str], seconds: float) -> Path:
    """Check what every toolset that starts programs is given. Raises ToolDefinitionError."""
    if os.name != "posix":
        raise ToolDefinitionError(f"the {toolset} toolset needs process groups, which only Linux and macOS have")
    if not seconds > 0:
        raise ToolDefinitionError(f"{toolset}: seconds is {seconds}; it has to be more than 0")
    folder = Path(root).absolute()
    if not folder.is_dir():
        raise ToolDefinitionError(f"{toolset}: root {str(root)!r} is no folder; make it first")
    return folder


@dataclass(frozen=True)
class Running:
    """A process that is alive; a negative `pid` stands for a process group, where /proc cannot tell its members."""

    pid: int
    command: str


@dataclass
class Job:
    """A program at the head of a session (setsid) of its own, and the pipe that it and its children print into."""

    process: subprocess.Popen[bytes]
    pipe: int | None  # None once everyone has closed the other end
    mark: str  # in the environment of the program and of what it starts: also finds daemons, which leave the session


def start(argv: Sequence[str], folder: Path, env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Job:
    """Raises OSError (no such program or folder, too long) or ValueError (NUL or lone surrogates in `argv`)."""
    mark = uuid.uuid4().hex
    # After an outer mark, when this program itself runs in a toolset's process: the outer one still finds everything.
    marked = {**env, _MARK: f"{os.environ.get(_MARK, '')}.{mark}"}
    pipe, inlet = os.pipe()
    try:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=marked,
            stdin=subprocess.DEVNULL,
            stdout=inlet,
            stderr=inlet,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except BaseException:
        os.close(pipe)
        raise
    finally:
        os.close(inlet)
    os.set_blocking(pipe, False)
    return Job(process, pipe, mark)


def wait(job: Job, output: Output, seconds: float, cancelled: Callable[[], bool]) -> bool:
    """Collect output until the program itself ends; False when its time was over or `cancelled()` came first."""
    end = time.monotonic() + seconds
    while job.process.poll() is None:
        left = end - time.monotonic()
        if left <= 0 or cancelled():
            return False
        collect(job, output, min(TICK, left))
    return True


def collect(job: Job, output: Output, seconds: float) -> None:
    """Wait up to `seconds` for something printed and take it, one piece."""
    if job.pipe is None:
        try:
            job.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
    elif _readable(job.pipe, seconds):
        take(job, output)


def take(job: Job, output: Output) -> bool:
    """Take a piece of what is in the pipe now; False when there is nothing."""
    if job.pipe is None:
        return False
    try:
        data = os.read(job.pipe, _CHUNK)
    except BlockingIOError:
        return False
    if data:
        output.add(data)
    else:
        close(job)
    return bool(data)


def drain(job: Job, output: Output, seconds: float) -> None:
    """Take what comes until the pipe's other end is closed by all, for `seconds` at most."""
    end = time.monotonic() + seconds
    while job.pipe is not None and _readable(job.pipe, max(0.0, end - time.monotonic())):
        take(job, output)
        if time.monotonic() > end:
            return


def _readable(pipe: int, seconds: float) -> bool:
    poller = select.poll()  # not select.select, which refuses descriptors from 1024 on
    poller.register(pipe, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def close(job: Job) -> None:
    """Close our end of the pipe."""
    if job.pipe is not None:
        os.close(job.pipe)
        job.pipe = None


def hand_over(job: Job, output: Output) -> Path | None:
    """Let what is still printed go on into the output's file, or nowhere once that is full. Returns the file.

    Children that go on would otherwise die of a closed pipe, or stop at a full one. The copying is done by a process
    that belongs to nobody and ends with the last of them.
    """
    if job.pipe is None:
        return None
    path = output.keep()
    os.set_blocking(job.pipe, True)
    limit = f'trap "" XFSZ; ulimit -f {FILE_BYTES // 512}'
    # Through descriptor 3: a shell gives what it starts in the background an empty standard input.
    script = f'exec 3<&0; (({limit}; exec cat <&3 >>"$1"); exec cat <&3 >/dev/null) &'
    subprocess.run(
        ["/bin/sh", "-c", script, "sh", path or os.devnull],
        stdin=job.pipe,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(None),
        cwd="/",
        start_new_session=True,
        check=False,
    )
    close(job)
    return path


def running(job: Job) -> list[Running]:
    """What lives of the program and all that it started."""
    leader, mark = job.process.pid, job.mark.encode()
    if not Path("/proc/self/stat").exists():
        try:
            os.killpg(leader, 0)
        except OSError:
            return []
        return [Running(-leader, "processes that the command started")]
    return [
        Running(number, command)
        for number in sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        if (command := _command(Path("/proc", str(number)), leader, mark)) is not None
    ]


def _command(entry: Path, session: int, mark: bytes) -> str | None:
    """The command line of a live process of this session or with this mark in its environment."""
    try:
        # "pid (name) state ppid group session …", where the name may hold anything
        state, _, _, its_session = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:4]
        if state in (b"Z", b"X") or (int(its_session) != session and mark not in (entry / "environ").read_bytes()):
            return None
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # gone meanwhile, or another user's
        return None


def kill(job: Job, output: Output, grace: float = GRACE) -> None:
    """End the program and everything that it started: SIGTERM, what it still prints, then SIGKILL."""
    end = time.monotonic() + grace
    if grace:
        _signal(job, running(job), signal.SIGTERM)
        while running(job) and time.monotonic() < end:
            collect(job, output, 0.01)
            job.process.poll()
    for _ in range(100):  # again and again: they may be starting others
        job.process.poll()
        if not (left := running(job)):
            break
        _signal(job, left, signal.SIGKILL)
        time.sleep(0.01)
    # Its first thread may be a zombie before its others are gone, and only then can it be waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(1)


def _signal(job: Job, processes: Sequence[Running], number: signal.Signals) -> None:
    for pid in [-job.process.pid, *(process.pid for process in processes)] if processes else []:
        try:
            os.kill(pid, number)
        except OSError:  # gone meanwhile, or another user's
            continue


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number itself when it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
