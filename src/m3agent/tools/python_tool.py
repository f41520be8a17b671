"""The python toolset: code run in a process of its own, which keeps its variables from call to call."""

from __future__ import annotations

import base64
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from m3agent.errors import MediaError, ToolDefinitionError, ToolError
from m3agent.media import Image
from m3agent.tools import process
from m3agent.tools.context import Context
from m3agent.tools.define import Tool, tool
from m3agent.tools.execute import in_thread
from m3agent.tools.output import Output, Spool, clean
from m3agent.tools.process import Job

_WORKER = Path(__file__).with_name("python_worker.py")
_MAX_ANSWER = 64 * 1024 * 1024  # bytes; the worker keeps to it, unless the code writes into its socket
_FRESH = "[a fresh Python process: what earlier calls defined or imported is gone]"
_NEXT = "the next call starts a fresh Python process, without the variables and imports of this one"


class _Answer(BaseModel):
    value: str | None
    error: str | None
    figures: list[str]
    more: int


@dataclass
class _Worker:
    job: Job
    channel: socket.socket


@dataclass
class _Interpreter:
    """What a toolset knows of its process. One call runs at a time."""

    folder: Path
    seconds: float
    memory: int
    live: list[_Worker] = field(default_factory=list[_Worker])  # none or one
    lost: bool = False  # the last process is gone, and no call has run in a new one yet
    lock: threading.Lock = field(default_factory=threading.Lock)
    spool: Spool = field(default_factory=Spool)


def python(
    root: str | os.PathLike[str] = ".", *, seconds: float = 60, memory: int = 4 * 1024**3
) -> list[Tool[..., Any]]:
    """One tool, `python(code)`: runs code in another process of this Python, with the packages that are installed.

    The answer has what the code printed, the value of a last expression, a short traceback when it failed, and every
    open matplotlib figure as a picture. Variables stay from call to call (forks of a session share them) until the
    process ends or a call takes too long; the model is told when a new one starts. It is not a sandbox: the code can
    do what this process's user can. It inherits PATH, HOME, LANG, LC_*, TMPDIR, USER and SHELL, no other variables.

    Args:
        root: the folder in which the process starts.
        seconds: time limit of one call; then, or when the run is cancelled, the process and all that it started ends.
        memory: bytes of data that it may allocate (RLIMIT_DATA, for every process of it); beyond is a MemoryError.

    Raises ToolDefinitionError when root is no folder, or seconds or memory is not above 0.
    """
    folder = process.working_folder("python", root, seconds)
    if memory <= 0:
        raise ToolDefinitionError(f"python: memory is {memory}; it has to be more than 0")
    interpreter = _Interpreter(folder, seconds, memory)

    async def run(
        code: Annotated[str, Field(description="Python source")], context: Context | None = None
    ) -> str | list[str | Image]:
        stop = context or Context("python", "")
        return await in_thread(lambda: _call(interpreter, code, lambda: stop.cancelled), stop)

    weakref.finalize(interpreter, _discard, interpreter.live)  # with the toolset, or this program, goes the process
    return [
        tool(
            run,
            name="python",
            description=(
                "Run Python code and see what it prints, the value of its last expression and its open matplotlib "
                f"figures. Variables stay for the next call. A call may take {seconds:g} s. Make one call at a time."
            ),
        )
    ]


def _call(interpreter: _Interpreter, code: str, cancelled: Callable[[], bool]) -> str | list[str | Image]:
    while not interpreter.lock.acquire(timeout=process.TICK):
        if cancelled():
            return ""
    output = Output(interpreter.spool)
    figures: list[Image] = []
    try:
        worker = _worker(interpreter)
        notes = [_FRESH] if interpreter.lost else []
        interpreter.lost = False
        try:
            answer = _exchange(worker, code, output, interpreter.seconds, cancelled)
            process.drain(worker.job, output, 0)  # printed before the answer was sent
            told, figures = _told(answer, interpreter.memory)
        except _Ended as ended:
            process.kill(worker.job, output)
            process.drain(worker.job, output, 0)
            told = [f"[{ended.reason or _how_it_ended(worker.job)}; {_NEXT}]"]
            _discard_lost(interpreter)
        except BaseException:
            _discard_lost(interpreter)
            raise
        printed = output.text().removesuffix("\n")
    finally:
        output.close()
        interpreter.lock.release()
    text = "\n".join([*notes, *([printed] if printed else []), *told])
    if figures:
        return [text, *figures] if text else [*figures]
    return text or "[no output]"


def _worker(interpreter: _Interpreter) -> _Worker:
    """The live process, or a new one. Raises ToolError."""
    if interpreter.live:
        if interpreter.live[0].job.process.poll() is None:
            return interpreter.live[0]
        _discard_lost(interpreter)
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-P", str(_WORKER), str(theirs.fileno()), str(interpreter.memory)]
    env = process.environment({"MPLBACKEND": "Agg"})
    try:
        with theirs:
            job = process.start(argv, interpreter.folder, env, [theirs.fileno()])
    except OSError as error:
        ours.close()
        raise ToolError(f"Python could not be started: {error}") from error
    ours.setblocking(False)
    worker = _Worker(job, ours)
    interpreter.live.append(worker)
    return worker


class _Ended(Exception):
    """The process cannot be used any more; `reason` is None when it died by itself."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason


def _exchange(worker: _Worker, code: str, output: Output, seconds: float, cancelled: Callable[[], bool]) -> _Answer:
    """Send the code, collect what it prints, receive the answer. Raises _Ended."""
    source = code.encode("utf-8", "surrogatepass")
    request = memoryview(len(source).to_bytes(4, "big") + source)
    received = bytearray()
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        if left <= 0 or cancelled():
            raise _Ended(f"stopped: the time limit of {seconds:g} s is over")
        died = worker.job.process.poll() is not None
        ready = _ready(worker, bool(request), min(process.TICK, left))
        if worker.job.pipe in ready:
            process.take(worker.job, output)
        if worker.channel.fileno() in ready:
            request = request[_send(worker.channel, request) :]
            _receive(worker.channel, received)
            size = int.from_bytes(received[:4], "big")
            if len(received) >= 4 and size > _MAX_ANSWER:
                raise _Ended("stopped: the process answered with something else than results")
            if 4 <= len(received) == size + 4:
                return _parse(received[4:])
        if died and not ready:
            raise _Ended


def _ready(worker: _Worker, sending: bool, seconds: float) -> set[int]:
    poller = select.poll()
    poller.register(worker.channel, select.POLLIN | (select.POLLOUT if sending else 0))
    if worker.job.pipe is not None:
        poller.register(worker.job.pipe, select.POLLIN)
    return {descriptor for descriptor, _ in poller.poll(seconds * 1000)}


def _send(channel: socket.socket, data: memoryview) -> int:
    try:
        return channel.send(data) if data else 0
    except BlockingIOError:
        return 0
    except OSError as error:
        raise _Ended from error


def _receive(channel: socket.socket, received: bytearray) -> None:
    try:
        data = channel.recv(1 << 20)
    except BlockingIOError:
        return
    except OSError as error:
        raise _Ended from error
    if not data:
        raise _Ended
    received += data


def _parse(frame: bytes | bytearray) -> _Answer:
    try:
        return _Answer.model_validate_json(frame)
    except ValidationError as error:
        raise _Ended("stopped: the process answered with something else than results") from error


def _told(answer: _Answer, memory: int) -> tuple[list[str], list[Image]]:
    told = [clean(text) for text in (answer.value, answer.error) if text is not None]
    if answer.error is not None and "MemoryError" in answer.error.rpartition("\n")[2]:
        told.append(f"[the process may allocate {memory} bytes]")
    figures: list[Image] = []
    for figure in answer.figures:
        try:
            image = Image(base64.b64decode(figure))
            image.load()
            figures.append(image)
        except (ValueError, MediaError) as error:
            told.append(f"[a figure cannot be shown: {error}]")
    if answer.more:
        told.append(f"[{answer.more} more figures are not shown]")
    return told, figures


def _how_it_ended(job: Job) -> str:
    code = job.process.returncode
    if code is None:
        return "the Python process cannot be reached any more"
    ended = f"was killed by {process.signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"the Python process {ended}"


def _discard_lost(interpreter: _Interpreter) -> None:
    _discard(interpreter.live)
    interpreter.lost = True


def _discard(live: list[_Worker]) -> None:
    while live:
        worker = live.pop()
        process.kill(worker.job, Output(Spool()), grace=0)
        process.close(worker.job)
        worker.channel.close()
