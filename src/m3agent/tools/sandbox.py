"""`Sandbox`: what a program of the shell toolset may reach, enforced by bubblewrap (`bwrap`) in its own namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from m3agent.errors import ToolDefinitionError

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Sandbox:
    """Programs read the system, write the toolset's root alone, and see no network and no other process.

    The home folder and /tmp are empty ones that vanish with the call, but for the root where it lies inside them.

    Args:
        writable: further folders that may be written.
        readable: folders inside the home folder or /tmp that may be read all the same.
        network: let programs use the network.
    """

    writable: Sequence[Folder] = ()
    readable: Sequence[Folder] = ()
    network: bool = False

    def command(self, argv: Sequence[str], root: Path, outputs: Path | None = None) -> list[str]:
        """`argv` inside the sandbox, where `outputs` can be read. Raises ToolDefinitionError for a missing folder."""
        hidden = {Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run"), Path.home().absolute()} - {Path("/")}
        mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        for folder in sorted(hidden):  # an outer one before what lies inside it
            if folder.is_dir() and not folder.is_symlink():
                mounts += ["--tmpfs", str(folder)]
        shown = [*self.readable, *([outputs] if outputs is not None and outputs.is_dir() else [])]
        for kind, folders in (("--ro-bind", shown), ("--bind", self.writable), ("--bind", [root])):
            for folder in map(_existing, folders):
                mounts += [kind, str(folder), str(folder)]
        network = ["--share-net"] if self.network else []
        # In a pid namespace nothing can outlive its first process, whatever it does with groups and sessions.
        apart = ["--unshare-all", *network, "--die-with-parent", "--cap-drop", "ALL"]
        return [_bwrap(), *apart, *mounts, "--chdir", str(root), "--", *argv]

    def check(self, root: Path) -> None:
        """Raises ToolDefinitionError when bubblewrap is absent or may not make namespaces here."""
        command = self.command(["true"], root)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolDefinitionError(f"the sandbox does not start: {error}") from error
        if done.returncode:
            reason = done.stderr.strip() or f"bwrap ended with {done.returncode}"
            raise ToolDefinitionError(
                f"the sandbox does not start: {reason}; bubblewrap needs user namespaces, which containers may forbid"
            )


def _existing(folder: Folder) -> Path:
    path = Path(folder).absolute()
    if not path.is_dir():
        raise ToolDefinitionError(f"sandbox: {str(folder)!r} is no folder; make it first")
    return path


def _bwrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise ToolDefinitionError("sandbox needs bubblewrap, which is not installed: apt-get install bubblewrap")
    return found
