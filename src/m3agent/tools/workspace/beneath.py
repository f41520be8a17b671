"""The root of a workspace: paths become descriptors, and none of them is ever outside, whatever happens meanwhile.

A path is found component by component from the root's own descriptor. Nothing is decided by comparing path strings,
so there is no moment between a check and a use. Links are followed here, by reading them, never by the kernel alone.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from m3agent.errors import ToolDefinitionError, ToolError
from m3agent.tools.workspace.kernel import has_open_beneath, open_beneath

_DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_PASS: int = getattr(os, "O_PATH", os.O_RDONLY) | _DIRECTORY | _NOFOLLOW  # passing through needs no right to list
# A pipe without a writer must not be waited for, a terminal must not become ours.
_CALM: int = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_MAX_LINKS = 40  # as Linux has it
_ATTEMPTS = 8  # a name that becomes a link between two looks is looked at again


class Outside(ToolError):
    """A path that leads out of the root. Says nothing about what is there, not even whether it exists."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path!r} leads outside the workspace. Use a path relative to the workspace's root, without '..' or links "
            "that leave it."
        )


@dataclass(frozen=True)
class Place:
    """A name in a directory that is inside the root. The name itself may be missing but is not followed as a link."""

    directory: int  # descriptor, the place's own
    name: str  # "." for the root and for paths that end in ".."
    path: str  # from the root, with all links followed: one file, one path

    def open(self, flags: int) -> int:
        return os.open(self.name, flags | _NOFOLLOW | _CALM, dir_fd=self.directory)


class Root:
    """A folder, held open. It may be moved or its path replaced: the workspace stays that folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if os.open not in os.supports_dir_fd or not _NOFOLLOW:
            raise ToolDefinitionError("a workspace needs a system that opens files relative to a directory (a Unix)")
        try:
            self.descriptor = os.open(path, os.O_RDONLY | _DIRECTORY | getattr(os, "O_CLOEXEC", 0))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ToolDefinitionError(
                f"workspace {os.fspath(path)!r}: not a folder that can be opened: {reason}"
            ) from None
        self.path = os.path.abspath(path)
        weakref.finalize(self, os.close, self.descriptor)
        # Under these spellings absolute paths and links count as paths from the root.
        self._spellings = tuple({os.path.abspath(path), os.path.realpath(path)})
        self.by_kernel = has_open_beneath(self.descriptor)

    def open(self, path: str, flags: int) -> int:
        """A descriptor of what `path` names, links inside the root followed. Never creates.

        Raises ToolError for a path that leads outside or is badly spelled, OSError otherwise.
        """
        parts = self._parts(path)
        if self.by_kernel:
            try:
                return open_beneath(self.descriptor, "/".join(parts) or ".", flags | _CALM)
            except OSError as error:
                # Leads out, perhaps by an absolute link back into the root: the walk below decides.
                if error.errno not in (errno.EXDEV, errno.EAGAIN, errno.ELOOP):
                    raise
        for _ in range(_ATTEMPTS):
            place = self._walk(path, parts, make=False)
            try:
                return place.open(flags)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
            finally:
                os.close(place.directory)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    @contextmanager
    def place(self, path: str, *, make: bool = False) -> Generator[Place]:
        """Where `path` is or would be; `make` makes missing directories on the way. Raises as `open`."""
        place = self._walk(path, self._parts(path), make=make)
        try:
            yield place
        finally:
            os.close(place.directory)

    def _parts(self, path: str) -> list[str]:
        if "\0" in path:
            raise ToolError("The path has a NUL character; paths are plain text.")
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise ToolError("The path has characters that no file name can have.") from None
        if "\\" in path:
            raise ToolError(f"{path!r} has a backslash. Write paths with '/'.")
        if path.startswith("~"):
            raise ToolError(f"{path!r}: '~' is not expanded. Use a path relative to the workspace's root.")
        return self._inside(path, path)

    def _inside(self, target: str, path: str) -> list[str]:
        """The components of `target`; an absolute one has to be spelled from the root. `path` is for the error."""
        if target.startswith("/"):
            for spelling in self._spellings:
                if target == spelling or target.startswith(spelling.rstrip("/") + "/"):
                    target = target[len(spelling) :]
                    break
            else:
                raise Outside(path)
        return [part for part in target.split("/") if part not in ("", ".")]

    def _walk(self, path: str, parts: list[str], *, make: bool) -> Place:
        """Component by component; the descriptors of all directories on the way back to the root are kept for '..'."""
        stack, names = [os.dup(self.descriptor)], [""]
        waiting, links = parts[::-1], 0
        try:
            while waiting:
                part = waiting.pop()
                if part == "..":
                    if len(stack) == 1:
                        raise Outside(path)
                    os.close(stack.pop())
                    names.pop()
                elif (target := _read_link(part, stack[-1])) is not None:
                    links += 1
                    if links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    waiting += self._inside(target, path)[::-1]
                    while target.startswith("/") and len(stack) > 1:
                        os.close(stack.pop())
                        names.pop()
                elif not waiting:
                    return Place(stack.pop(), part, "/".join([*names[1:], part]))
                else:
                    stack.append(_pass(part, stack[-1], make=make))
                    names.append(part)
            return Place(stack.pop(), ".", "/".join(names[1:]) or ".")
        finally:
            for descriptor in stack:
                os.close(descriptor)


def _read_link(name: str, directory: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):  # no link; missing
            return None
        raise


def _pass(name: str, directory: int, *, make: bool) -> int:
    try:
        return os.open(name, _PASS, dir_fd=directory)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # someone else made it just now
        os.mkdir(name, dir_fd=directory)
    return os.open(name, _PASS, dir_fd=directory)


@contextmanager
def explained(path: str, *, changing: bool = False) -> Generator[None]:
    """Turn what the system says about `path` into a ToolError for the model."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise ToolError(f"{path!r}: {reason}." + (" Nothing was changed." if changing else "")) from None


_REASONS = {
    errno.ENOENT: "no such file or directory",
    errno.EISDIR: "it is a directory",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.EACCES: "permission denied",
    errno.ELOOP: "too many links, or it is being replaced by one",
}
