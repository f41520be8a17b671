"""The system call openat2, which Python does not have: Linux finds a path and refuses to leave a directory.

Kernel 5.6 and later; see openat2(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_OPENAT2 = 437  # the same number on every architecture that numbers its calls the common way
_NO_MAGICLINKS = 0x02
_BENEATH = 0x08
_ATTEMPTS = 4  # a rename anywhere during a path with ".." makes the kernel ask to try again


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_beneath(directory: int, path: str, flags: int) -> int:
    """A descriptor of `path`, found from `directory` and never outside it.

    Raises OSError: EXDEV where the path leads out (absolute links do, wherever they point), ELOOP for magic links,
    EAGAIN when renames kept the kernel from an answer, ENOSYS without the call.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    library = ctypes.CDLL(None, use_errno=True)
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _BENEATH | _NO_MAGICLINKS)
    problem = 0
    for _ in range(_ATTEMPTS):
        opened = library.syscall(
            ctypes.c_long(_OPENAT2),
            ctypes.c_int(directory),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if opened >= 0:
            return opened
        problem = ctypes.get_errno()
        if problem not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(problem, os.strerror(problem))


def has_open_beneath(directory: int) -> bool:
    """Whether the call works here: an old kernel lacks it, and a container's filter may forbid it."""
    try:
        os.close(open_beneath(directory, ".", os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return False
    return True
