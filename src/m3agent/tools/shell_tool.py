"""The shell toolset: commands that cannot hang the agent, flood it, or outlive their call unasked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from m3agent.errors import ToolDefinitionError, ToolError
from m3agent.tools import process
from m3agent.tools.context import Context
from m3agent.tools.define import Tool, tool
from m3agent.tools.execute import in_thread
from m3agent.tools.output import Output, Spool, clean
from m3agent.tools.process import Job, Running
from m3agent.tools.sandbox import Sandbox

_LATE = 0.2  # seconds for what is printed just after the shell's own end, as by `> >(tee log)`
_MAX_LISTED = 10


def shell(
    root: str | os.PathLike[str] = ".",
    *,
    seconds: float = 120,
    env: Mapping[str, str] | None = None,
    keep_background: bool = False,
    sandbox: Sandbox | None = None,
) -> list[Tool[..., Any]]:
    """One tool, `shell(command)`: runs a command in bash (else sh) and answers with its output and exit code.

    A command has no terminal and an empty standard input. It can do what this process's user can, unless `sandbox` says
    otherwise.

    Args:
        root: the folder in which every command starts.
        seconds: time limit of one command; then, or when the run is cancelled, everything that it started is ended,
            by SIGTERM and 0.4 s later by SIGKILL.
        env: variables of the command, beside PATH, HOME, LANG, LC_*, TMPDIR, USER and SHELL; no others are inherited.
        keep_background: let processes live on that a command leaves behind, their output going on into a file;
            otherwise they are ended with the command. The model is told which they are.
        sandbox: `m3agent.tools.Sandbox()` runs every command under bubblewrap: the root alone can be written, there is
            no network, and nothing outlives the command, so that keep_background is refused.

    Raises ToolDefinitionError when root is no folder, seconds is not above 0, or the sandbox cannot be had.
    """
    folder = process.working_folder("shell", root, seconds)
    if sandbox is not None:
        if keep_background:
            raise ToolDefinitionError("shell: nothing outlives a command in a sandbox; leave out keep_background")
        sandbox.check(folder)
    variables = process.environment(env)
    spool = Spool()
    left_behind = "go on" if keep_background else "are ended with it"

    async def run(
        command: Annotated[str, Field(description="what bash -c is given")], context: Context | None = None
    ) -> str:
        stop = context or Context("shell", "")
        # In a thread: forking, waiting and reading block, and must not depend on how busy the event loop is.
        return await in_thread(
            lambda: _run(command, folder, variables, seconds, keep_background, sandbox, spool, lambda: stop.cancelled),
            stop,
        )

    return [
        tool(
            run,
            name="shell",
            description=(
                f"Run a command in a shell. Every command starts anew in {folder}, without input or terminal, and may "
                f"take {seconds:g} s. Processes that it leaves in the background {left_behind}. Long output is shown "
                "without its middle."
            ),
        )
    ]


def _run(
    command: str,
    folder: Path,
    env: Mapping[str, str],
    seconds: float,
    keep: bool,
    sandbox: Sandbox | None,
    spool: Spool,
    cancelled: Callable[[], bool],
) -> str:
    bash = shutil.which("bash", path=env.get("PATH")) or "/bin/sh"
    output = Output(spool)
    argv = [bash, "-c", command]
    try:
        job = process.start(argv if sandbox is None else sandbox.command(argv, folder, spool.folder), folder, env)
    except (OSError, ValueError) as error:
        raise ToolError(
            f"The command could not be started ({error}). Put a long one into a file and run that."
        ) from error
    try:
        ended = process.wait(job, output, seconds, cancelled)
        if not ended:
            process.kill(job, output)
            end = f"[stopped: the time limit of {seconds:g} s is over; everything that the command started was ended]"
            notes = [end]
        else:
            process.drain(job, output, _LATE)
            if sandbox is None:
                notes = [_exit(job.process.returncode), *_background(job, output, keep)]
            else:  # the rest of the namespace is dying already
                process.kill(job, output, grace=0)
                notes = [_exit(job.process.returncode)]
        process.drain(job, output, 0)
    except BaseException:
        process.kill(job, output, grace=0)
        raise
    finally:
        process.close(job)
        output.close()
    text = output.text()
    return "\n".join([*([text.removesuffix("\n")] if text else []), *notes])


def _exit(code: int) -> str:
    if code < 0:
        return f"[killed by {process.signal_name(-code)}]"
    # How shells tell that the last program was killed.
    return f"[exit code {code}{f' ({process.signal_name(code - 128)})' if 128 < code < 128 + 65 else ''}]"


def _background(job: Job, output: Output, keep: bool) -> list[str]:
    """What to do with, and say about, the processes that outlived the shell."""
    left = process.running(job)
    if not left:
        return []
    names = _list(left)
    if not keep:
        process.kill(job, output)
        return [f"[ended, as it was still running: {names}]"]
    path = process.hand_over(job, output)
    return [f"[still running: {names}{f'; further output: {path}' if path else ''}]"]


def _list(processes: list[Running]) -> str:
    shown = [f"{one.pid} {' '.join(clean(one.command).split())[:100]}" for one in processes[:_MAX_LISTED]]
    more = len(processes) - len(shown)
    return ", ".join([*shown, f"and {more} more"] if more else shown)
