"""Reading one file whole, and replacing it whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass

from m3agent.errors import ToolError
from m3agent.tools.workspace.beneath import Place

MAX_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Content:
    """What a file held when it was read, and which file it was."""

    data: bytes
    status: os.stat_result


def read_content(descriptor: int, path: str) -> Content:
    """All of an open regular file. Raises ToolError for anything else and for what is too large."""
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise ToolError(f"{path!r} is not a regular file.")
    if status.st_size > MAX_BYTES:
        raise ToolError(f"{path!r} has {status.st_size} bytes, over the limit of {MAX_BYTES}.")
    with open(descriptor, "rb", closefd=False) as file:
        return Content(file.read(MAX_BYTES + 1), status)


def current(place: Place) -> Content | None:
    """What is at `place`, None when nothing is. Opened for writing, so that a file which may not be written is told."""
    try:
        descriptor = place.open(os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return read_content(descriptor, place.path)
    finally:
        os.close(descriptor)


def save(place: Place, data: bytes, before: Content | None) -> None:
    """Put `data` at `place`, under a temporary name first: at every instant the file has its old or its new bytes.

    Mode, owner and access list are kept as far as the system lets us. `before` is what the new bytes were made from;
    raises ToolError when the file is another one by now, and OSError, all cleaned up, when it cannot be written.
    """
    temporary = f".{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600 if before else 0o666, dir_fd=place.directory)
    try:
        try:
            waiting = memoryview(data)
            while waiting:
                waiting = waiting[os.write(descriptor, waiting) :]
            if before:
                _keep_status(place, descriptor, before.status)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _check_unchanged(place, before)
        os.replace(temporary, place.name, src_dir_fd=place.directory, dst_dir_fd=place.directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=place.directory)
        raise
    _sync_directory(place)


def remove(place: Place, before: Content) -> None:
    """Take away the file that was read as `before`. Raises as `save`."""
    _check_unchanged(place, before)
    os.unlink(place.name, dir_fd=place.directory)
    _sync_directory(place)


def _keep_status(place: Place, descriptor: int, status: os.stat_result) -> None:
    with suppress(PermissionError):  # only root gives files away; the file then belongs to whoever changed it
        os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
    if not hasattr(os, "listxattr"):
        return
    with suppress(OSError):
        original = place.open(os.O_RDONLY)
        try:
            for name in os.listxattr(original):
                if name.startswith("user.") or name == "system.posix_acl_access":
                    os.setxattr(descriptor, name, os.getxattr(original, name))
        finally:
            os.close(original)


def _check_unchanged(place: Place, before: Content | None) -> None:
    try:
        now = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
    except FileNotFoundError:
        now = None
    if now is None and before is None:
        return
    if now is None or before is None or _identity(now) != _identity(before.status):
        raise ToolError(f"{place.path!r} was changed by something else during the call. Nothing was changed; read it.")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _sync_directory(place: Place) -> None:
    with suppress(OSError):  # the new name is in place; some file systems cannot sync directories
        directory = os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=place.directory)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
