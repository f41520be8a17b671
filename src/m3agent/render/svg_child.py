"""The small program in which one SVG is rendered: a process of its own, without files, bounded in memory and time.

Started by `svg.SvgRenderer` as `python -I -S svg_child.py SITE_FOLDER WIDTH HEIGHT SECONDS FONTS`; SVG text on stdin,
PNG on stdout; exit code 3 and a reason on stderr when the SVG cannot be rendered. Imports nothing of m3agent.
"""

import sys

MEMORY = 1 << 30  # bytes of address space; a picture within the size limits needs a tenth of it


def main() -> None:
    site_folder, width, height, seconds, fonts = sys.argv[1:]
    sys.path.append(site_folder)
    import resvg_py

    code = sys.stdin.buffer.read().decode()
    try:
        import resource
    except ImportError:  # not a Unix: the parent's time limit still holds
        pass
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if fonts == "no":  # from here on no file can be opened, whatever the SVG refers to
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    try:
        png = resvg_py.svg_to_bytes(
            svg_string=code,
            width=int(width),
            height=int(height),
            background="white",
            skip_system_fonts=fonts == "no",
        )
    except ValueError as error:
        sys.stderr.write(str(error))
        sys.exit(3)
    sys.stdout.buffer.write(png)


main()
