"""Editing files in a workspace: what was not to be changed keeps every byte."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import m3agent as m3
from m3agent.tools.workspace import encoding, lines

# fault cases: file-01 line endings, file-02 tabs, file-05 marks and final newlines, file-09 atomic saves


def call(root: Path, tool: str, **arguments: Any) -> Any:
    return {tool.name: tool for tool in m3.tools.workspace(root)}[tool](**arguments)


def edited(root: Path, data: bytes, old: str, new: str) -> bytes:
    (root / "f").write_bytes(data)
    call(root, "edit", path="f", old=old, new=new)
    return (root / "f").read_bytes()


@pytest.mark.parametrize(
    ("data", "old", "new", "result"),
    [
        (b"a = 1\r\nb = 2\r\nc = 3", "a = 1\nb = 2", "a = 1\nb = 3", b"a = 1\r\nb = 3\r\nc = 3"),
        (b"a\r\nb\nc\r\nd\n", "b\nc", "b\nx\nc", b"a\r\nb\nx\nc\r\nd\n"),
        (b"a\r\nb\nc\r\nd\n", "a\nb\n", "a\nnew\nb\n", b"a\r\nnew\r\nb\nc\r\nd\n"),
        (b"a\nb\r\nc\n", "b", "b\nb2", b"a\nb\r\nb2\r\nc\n"),
        (b"a\r\nlast", "last", "last\nmore", b"a\r\nlast\r\nmore"),
        (b"a\rb\rc", "a\nb", "a\nx\nb", b"a\rx\rb\rc"),
        (b"a\r\nb\r\n", "a\r\nb\r\n", "b\r\n", b"b\r\n"),
        (b"one\n", "one", "", b"\n"),
        (b"a\r\nb\nc\n", "a\nb\n", "", b"c\n"),
    ],
)
def test_file_01_line_endings_are_kept(tmp_path: Path, data: bytes, old: str, new: str, result: bytes) -> None:
    assert edited(tmp_path, data, old, new) == result


MAKEFILE = b"CC = gcc\nall:\n\t@echo $(CC)\n\t@echo done\n"


def test_file_02_tabs_are_never_expanded(tmp_path: Path) -> None:
    assert edited(tmp_path, MAKEFILE, "CC = gcc", "CC = clang") == MAKEFILE.replace(b"gcc", b"clang")
    call(tmp_path, "insert", path="f", after=0, text="# top")
    assert (tmp_path / "f").read_bytes() == b"# top\n" + MAKEFILE.replace(b"gcc", b"clang")
    call(tmp_path, "edit", path="f", old="\t@echo done", new="\t@echo done\n\t@echo more")
    # Run by `make test`, make would tell of its directories: it must not know that it runs inside another one.
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    made = subprocess.run(["make", "-f", "f"], cwd=tmp_path, env=quiet, capture_output=True, text=True, check=True)
    assert made.stdout == "clang\ndone\nmore\n"


@pytest.mark.parametrize(
    ("data", "after", "text", "result"),
    [
        (b"hello\nworld", -1, "tail", b"hello\nworld\ntail"),
        (b"hello\r\nworld", -1, "tail\n", b"hello\r\nworld\r\ntail"),
        (b"hello\nworld\n", -1, "tail", b"hello\nworld\ntail\n"),
        (b"hello\n\n", -1, "tail", b"hello\n\ntail\n"),
        (b"a\r\nb\n", 1, "x\ny", b"a\r\nx\r\ny\r\nb\n"),
        (b"a\r\nb\n", 2, "x\ny", b"a\r\nb\nx\ny\n"),
        (b"a\nb\r\n", 0, "x", b"x\na\nb\r\n"),
        (b"\xef\xbb\xbfa\n", 0, "x", b"\xef\xbb\xbfx\na\n"),
        (b"", 0, "x\n", b"x\n"),
        (b"a\rb", -1, "c", b"a\rb\rc"),
    ],
)
def test_file_05_insert(tmp_path: Path, data: bytes, after: int, text: str, result: bytes) -> None:
    (tmp_path / "f").write_bytes(data)
    call(tmp_path, "insert", path="f", after=after, text=text)
    assert (tmp_path / "f").read_bytes() == result


@pytest.mark.parametrize(
    ("data", "result"),
    [
        (b"\xef\xbb\xbfold\r\n", b"\xef\xbb\xbfn\xc3\xa9w\r\n"),
        (b"\xff\xfe" + "old\r\n€".encode("utf-16-le"), b"\xff\xfe" + "néw\r\n€".encode("utf-16-le")),
        (b"\xfe\xff" + "old".encode("utf-16-be"), b"\xfe\xff" + "néw".encode("utf-16-be")),
        (b"old \x80 \xe4", b"n\xe9w \x80 \xe4"),  # Windows-1252
        (b"old \x81 \xe4", b"n\xe9w \x81 \xe4"),  # Latin-1
        ("old äöü ß 漢字".encode() + b" \xff", "néw äöü ß 漢字".encode() + b" \xff"),  # UTF-8 but for a byte
        (b"old\n\n", b"n\xc3\xa9w\n\n"),
        (b"old", b"n\xc3\xa9w"),
    ],
)
def test_file_05_marks_encodings_and_final_newlines_are_kept(tmp_path: Path, data: bytes, result: bytes) -> None:
    assert edited(tmp_path, data, "old", "néw") == result


def test_a_character_that_the_encoding_lacks_is_told_and_nothing_changes(tmp_path: Path) -> None:
    with pytest.raises(m3.ToolError, match=r"'f' is Windows-1252, which has no character '\\u6f22'"):
        edited(tmp_path, b"old \xe4", "old", "漢")
    assert (tmp_path / "f").read_bytes() == b"old \xe4"


@pytest.mark.parametrize(
    ("data", "old", "message"),
    [
        (b"a\nb\n", "c", r"'old' does not occur in 'f' \(0 matches\)"),
        (b"a\nb\na\n", "a", r"'old' occurs 2 times in 'f' \(lines 1, 3\)"),
        (b"aaa", "aa", "'old' occurs 2 times"),
        (b"a\r\n" * 12, "a\n", r"occurs 12 times in 'f' \(lines 1, 2, .*, 10, …\)"),
        (b"aaa", "", "'old' is empty"),
        (b"\x00\x01", "a", r"'f' is not text \(unknown, 2 bytes\)"),
    ],
)
def test_the_old_text_has_to_occur_once(tmp_path: Path, data: bytes, old: str, message: str) -> None:
    with pytest.raises(m3.ToolError, match=message):
        edited(tmp_path, data, old, "x")
    assert (tmp_path / "f").read_bytes() == data


def test_several_edits_are_all_made_or_none(tmp_path: Path) -> None:
    tools = {tool.name: tool for tool in m3.tools.workspace(tmp_path)}
    (tmp_path / "f").write_bytes(b"a\r\nb\r\n")

    def multi_edit(*edits: tuple[str, str]) -> str:
        arguments = {"path": "f", "edits": [{"old": old, "new": new} for old, new in edits]}
        args, kwargs = tools["multi_edit"].bind(arguments, m3.Context("multi_edit", "1"))
        return tools["multi_edit"](*args, **kwargs)

    with pytest.raises(m3.ToolError, match=r"edit 2 of 2: 'old' does not occur .* Nothing was changed"):
        multi_edit(("a", "x"), ("y", "z"))
    assert (tmp_path / "f").read_bytes() == b"a\r\nb\r\n"
    assert multi_edit(("a", "x"), ("x\nb", "y")) == "Edited f at line 1, 1."
    assert (tmp_path / "f").read_bytes() == b"y\r\n"


def test_write_keeps_what_the_file_was(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfa\r\nb\nc\r\n")
    (tmp_path / "f").chmod(0o640)
    assert call(tmp_path, "write", path="f", content="a\nb\nnew\nc") == "Wrote f: 4 lines."
    assert (tmp_path / "f").read_bytes() == b"\xef\xbb\xbfa\r\nb\nnew\nc"
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640
    assert call(tmp_path, "write", path="new/deep/g", content="x\r\ny") == "Created new/deep/g: 2 lines."
    assert (tmp_path / "new/deep/g").read_bytes() == b"x\r\ny"


def test_file_09_links_stay_links_and_modes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    real, other = tmp_path / "sub/real", tmp_path / "other"
    real.write_bytes(b"one\n")
    real.chmod(0o755)
    os.link(real, other)
    (tmp_path / "link").symlink_to("sub/real")
    (tmp_path / "absolute").symlink_to(real)
    answer = call(tmp_path, "edit", path="link", old="one", new="two")
    assert "2 hard links; the other names keep the old content" in answer
    call(tmp_path, "edit", path="absolute", old="two", new="three")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "absolute").is_symlink()
    assert (real.read_bytes(), other.read_bytes()) == (b"three\n", b"one\n")
    assert stat.S_IMODE(real.stat().st_mode) == 0o755
    (tmp_path / "dangling").symlink_to("sub/new")
    call(tmp_path, "write", path="dangling", content="made")
    assert (tmp_path / "sub/new").read_bytes() == b"made"
    assert (tmp_path / "dangling").is_symlink()


def test_file_09_a_disk_that_is_full_leaves_the_original_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"original")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))  # writes end in the middle, as on a full disk
    try:
        for path in ("f", "new"):
            with pytest.raises(m3.ToolError, match=f"'{path}': File too large. Nothing was changed"):
                call(tmp_path, "write", path=path, content="x" * 9000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"f": b"original"}


def test_a_file_that_changes_during_the_call_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    fsync = os.fsync

    def meanwhile(descriptor: int) -> None:
        fsync(descriptor)
        (tmp_path / "f").write_bytes(b"old, and someone else's")

    monkeypatch.setattr(os, "fsync", meanwhile)
    with pytest.raises(m3.ToolError, match="changed by something else during the call"):
        call(tmp_path, "edit", path="f", old="old", new="new")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old, and someone else's"


def test_calls_side_by_side_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("".join(f"<{number}>\n" for number in range(12)))
    tools = {tool.name: tool for tool in m3.tools.workspace(tmp_path)}
    threads = [
        threading.Thread(target=tools["edit"], kwargs={"path": "f", "old": f"<{number}>", "new": f"({number})"})
        for number in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "f").read_text() == "".join(f"({number})\n" for number in range(12))


def test_diff_and_undo(tmp_path: Path) -> None:
    tools = {tool.name: tool for tool in m3.tools.workspace(tmp_path)}
    (tmp_path / "f").write_bytes(b"a\r\nb\r\n")
    assert tools["diff"]() == "Nothing is changed."
    tools["edit"](path="f", old="b", new="c")
    tools["edit"](path="./f", old="c", new="d")
    tools["write"](path="sub/g", content="x\n")
    assert tools["diff"]() == ("--- f\n+++ f\n@@ -1,2 +1,2 @@\n a\n-b\n+d\n--- /dev/null\n+++ sub/g\n@@ -0,0 +1 @@\n+x")
    assert tools["diff"](path="sub") == "--- /dev/null\n+++ sub/g\n@@ -0,0 +1 @@\n+x"
    tools["undo"](path="f")
    assert (tmp_path / "f").read_bytes() == b"a\r\nc\r\n"
    tools["undo"](path="f")
    assert (tmp_path / "f").read_bytes() == b"a\r\nb\r\n"
    with pytest.raises(m3.ToolError, match="There is no change of 'f' to undo"):
        tools["undo"](path="f")
    assert "is gone again" in tools["undo"](path="sub/g")
    assert not (tmp_path / "sub/g").exists()
    assert tools["diff"]() == "Nothing is changed."
    tools["edit"](path="f", old="b", new="c")
    (tmp_path / "f").write_bytes(b"someone else's")
    with pytest.raises(m3.ToolError, match="changed by something else since"):
        tools["undo"](path="f")
    assert (tmp_path / "f").read_bytes() == b"someone else's"


# Any file × any edit. Letters are few, so that pieces occur often and often more than once.
PIECES = st.sampled_from(["\r\n", "\n", "\r", "\t", " ", "a", "b", "ä", "\x0c", "\x85", "\u2028"])
TEXTS = st.lists(PIECES, max_size=14).map("".join)
CODECS = st.sampled_from(
    [
        ("utf-8", b""),
        ("utf-8", b"\xef\xbb\xbf"),
        ("utf-16-le", b"\xff\xfe"),
        ("utf-16-be", b"\xfe\xff"),
        ("latin-1", b""),
    ]
)


@settings(max_examples=300)
@given(TEXTS, CODECS, st.data())
def test_bytes_outside_an_edit_never_change(text: str, codec: tuple[str, bytes], data: st.DataObject) -> None:
    name, mark = codec
    try:
        raw = mark + text.encode(name)
    except UnicodeEncodeError:
        return
    if (decoded := encoding.decode(raw)) is None:
        return
    text = decoded.text
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 5)))
    old, new = lines.plain(text[start:end], text), data.draw(TEXTS).replace("\x85", "").replace("\u2028", "")
    if "\n" in text:
        new = lines.plain(new, text).replace("\r", "")  # next to "\n" it would be half an ending
    found = lines.matches(text, old)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "f").write_bytes(raw)
        if len(found) != 1:
            with pytest.raises(m3.ToolError):
                call(Path(folder), "edit", path="f", old=old, new=new)
            assert (Path(folder) / "f").read_bytes() == raw
            return
        call(Path(folder), "edit", path="f", old=old, new=new)
        result = (Path(folder) / "f").read_bytes()
    head, tail = decoded.encode(text[: found[0][0]]), text[found[0][1] :].encode(decoded.codec)
    assert result.startswith(head)
    assert result.endswith(tail)
    middle = result[len(head) : len(result) - len(tail)].decode(decoded.codec)
    assert lines.plain(middle, text) == lines.plain(new, text)  # the right text, whatever its endings
    present = {"\r\n": "\r\n" in text, "\n": "\n" in text.replace("\r\n", "")}
    if present["\r\n"] and not present["\n"]:
        assert "\n" not in middle.replace("\r\n", "")


@settings(max_examples=200)
@given(TEXTS, TEXTS)
def test_a_rewrite_of_the_whole_text_is_what_was_written(before: str, after: str) -> None:
    after = after.replace("\r\n", "\n").replace("\r", "")
    result = lines.replace(before, 0, len(before), after)
    assert lines.plain(result, before) == lines.plain(after, before)
    if lines.plain(before, before) == lines.plain(after, before):
        assert result == before


@given(st.binary(max_size=40) | TEXTS.map(lambda text: text.encode("utf-8")))
def test_decoding_loses_no_byte(data: bytes) -> None:
    decoded = encoding.decode(data)
    assert decoded is None or decoded.encode(decoded.text) == data
