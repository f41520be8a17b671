"""The small program that searches where there is no ripgrep: a regular expression can run for ever and hold Python up.

Started by `search` as `python -I -S search_child.py SECONDS CASE LIMIT COLUMNS PATTERN DESCRIPTOR…`; prints matches as
ripgrep does. Exit code 3 and a reason on stderr for a pattern that is none. Imports nothing of m3agent.
"""

import os
import re
import sys

MEMORY = 2 << 30


def decoded(data: bytes) -> str:
    for mark, codec in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark):
            return data[len(mark) :].decode(codec, "replace")
    for codec in ("utf-8", "cp1252"):
        try:
            return data.decode(codec)
        except UnicodeDecodeError:
            pass
    return data.decode("latin-1")


def main() -> None:
    seconds, case, limit, columns, pattern, *descriptors = sys.argv[1:]
    try:
        import resource
    except ImportError:  # the parent's time limit still holds
        pass
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        wanted = re.compile(pattern, re.IGNORECASE if case == "ignore" else 0)
    except (re.error, RecursionError, OverflowError) as error:
        sys.stderr.write(str(error))
        sys.exit(3)
    for descriptor in descriptors:
        with os.fdopen(int(descriptor), "rb", closefd=False) as file:
            text = decoded(file.read())
        found = 0
        for number, line in enumerate(text.split("\n"), 1):
            line = line.removesuffix("\r")
            if wanted.search(line):
                cut = line[: int(columns)] + (" [...]" if len(line) > int(columns) else "")
                row = f"/dev/fd/{descriptor}\0{number}:{cut}\n"
                sys.stdout.buffer.write(row.encode("utf-8", "replace"))
                found += 1
                if found >= int(limit):
                    break


main()
