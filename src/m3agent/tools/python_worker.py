"""The program in the python toolset's process: runs code, answers, keeps the variables. Standard library alone.

Run as `python -P python_worker.py SOCKET MEMORY`. A request is 4 bytes of length (big-endian), then the code in UTF-8;
an answer is framed alike and holds JSON: {"value": str | null, "error": str | null, "figures": [base64 PNG],
"more": int}, where `more` counts the figures that are left out.
What the code prints goes to the standard output, which is not this socket.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import linecache
import os
import queue
import resource
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator
from typing import Any

MAX_TEXT = 8_000  # characters of a value or of a traceback
MAX_FRAMES = 8  # of a traceback
MAX_FIGURES = 8
MAX_FRAME = 64 * 1024 * 1024  # bytes of an answer


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # programs that the code starts must not hold it open
    memory = int(sys.argv[2])
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    sys.path.insert(0, "")
    warnings.filterwarnings("ignore", message=".*is non-interactive, and thus cannot be shown")
    # The code's `__main__`, so that pickle, dataclasses and typing find there what it defines.
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    process = os.getpid()
    for number, code in enumerate(_requests(channel), 1):
        answer = _run(code, f"<call {number}>", module.__dict__)
        if os.getpid() != process:
            os._exit(0)  # a fork that came back from the code
        _send(channel, answer)


def _requests(channel: socket.socket) -> Iterator[str]:
    """Read in a thread, which also sees, while code runs, that nobody is there any more to answer to."""
    requests: queue.Queue[str] = queue.Queue()

    def read() -> None:
        try:
            while True:
                length = int.from_bytes(_exactly(channel, 4), "big")
                requests.put(_exactly(channel, length).decode("utf-8", "surrogatepass"))
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield requests.get()


def _exactly(channel: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = channel.recv(min(65536, length - len(data)))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _send(channel: socket.socket, answer: dict[str, Any]) -> None:
    frame = json.dumps(answer).encode()
    channel.sendall(len(frame).to_bytes(4, "big") + frame)


def _run(code: str, name: str, variables: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"value": None, "error": None, "figures": [], "more": 0}
    # So that tracebacks show the lines.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        value = _execute(code, name, variables)
        if value is not None:
            variables["_"] = value
            answer["value"] = _shorten(repr(value))
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the code's too
        answer["error"] = _explain(error)
    try:
        answer["figures"], answer["more"] = _figures()
    except BaseException as error:
        answer["error"] = answer["error"] or f"the figures could not be drawn: {_explain(error)}"
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed or replaced by the code
            continue
    return answer


def _execute(code: str, name: str, variables: dict[str, Any]) -> Any:
    """Run all, and give the value of the last statement when it is an expression."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), variables)
    return eval(compile(ast.Expression(last.value), name, "eval"), variables) if isinstance(last, ast.Expr) else None


def _explain(error: BaseException) -> str:
    """The traceback from the code's own first frame on."""
    try:
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
            trace = trace.tb_next
        shown = traceback.TracebackException(type(error), error, trace, compact=True)
        for part in (shown, shown.__cause__, shown.__context__):
            if part is not None and len(part.stack) > MAX_FRAMES:
                part.stack[:] = part.stack[:2] + part.stack[2 - MAX_FRAMES :]
        return _shorten("".join(shown.format())).rstrip()
    except BaseException as second:  # an exception class of the code's own may do anything
        return f"{type(error).__name__}, which cannot be shown ({type(second).__name__})"


def _shorten(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()  # no lone surrogates, which JSON readers refuse
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}[{len(text) - 2 * half} characters omitted]{text[-half:]}"


def _figures() -> tuple[list[str], int]:
    """Every open matplotlib figure as base64 PNG, and how many more there were; they are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return [], 0
    numbers = pyplot.get_fignums()
    try:
        drawn: list[str] = []
        for number in numbers[:MAX_FIGURES]:
            png = io.BytesIO()
            pyplot.figure(number).savefig(png, format="png")
            drawn.append(base64.b64encode(png.getvalue()).decode())
        while sum(map(len, drawn)) > MAX_FRAME - 1_000_000:
            drawn.pop()
        return drawn, len(numbers) - len(drawn)
    finally:
        pyplot.close("all")


if __name__ == "__main__":
    main()
