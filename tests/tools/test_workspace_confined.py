"""No path leads out of a workspace: not by spelling, not by links, not by links that are swapped during a call."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil

import m3agent as m3
from m3agent.tools.workspace import beneath

SECRET = "the secret outside"


@pytest.fixture(params=["kernel", "walk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to find a path; the second is that of systems without openat2."""
    if request.param == "walk":
        monkeypatch.setattr(beneath, "has_open_beneath", lambda descriptor: False)
    return request.param


class Scene:
    """outside/secret.txt, outside/secret.png and, beside them, a root with files and links of all kinds."""

    def __init__(self, folder: Path) -> None:
        self.outside, self.root = folder / "outside", folder / "root"
        for made in (self.outside, self.root, self.root / "sub", self.root / "sub/deep"):
            made.mkdir()
        (self.outside / "secret.txt").write_text(SECRET)
        Pil.new("RGB", (2, 2)).save(self.outside / "secret.png")
        (self.root / "sub/in.txt").write_text("inside")
        for name, target in {
            "out": self.outside,
            "out.txt": self.outside / "secret.txt",
            "out.png": self.outside / "secret.png",
            "up": "..",
            "up.txt": "../outside/secret.txt",
            "sub/up2": "../../outside",
            "hidden": "sub/up2",  # inside, to a link that leads out
            "in": "sub",
            "sub/back": "..",  # to the root itself
            "in.txt": "sub/in.txt",
            "absolute.txt": self.root / "sub/in.txt",
            "loop": "loop",
            "proc": "/proc/self",
            "self": "/proc/self/fd",
        }.items():
            (self.root / name).symlink_to(target)
        self.tools = {tool.name: tool for tool in m3.tools.workspace(self.root)}

    def call(self, tool: str, **arguments: Any) -> Any:
        args, kwargs = self.tools[tool].bind(arguments, m3.Context(tool, "call_1"))
        return self.tools[tool](*args, **kwargs)

    def check(self) -> None:
        assert {path.name for path in self.outside.iterdir()} == {"secret.txt", "secret.png"}
        assert (self.outside / "secret.txt").read_text() == SECRET
        assert {path.name for path in self.outside.parent.iterdir()} == {"outside", "root"}


@pytest.fixture
def scene(tmp_path: Path, way: str) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.check()


OUTSIDE = [
    "../outside/secret.txt",
    "sub/../../outside/secret.txt",
    "sub/deep/../../../outside/secret.txt",
    "/etc/passwd",
    "//etc/passwd",
    "/proc/self/environ",
    "out/secret.txt",
    "out.txt",
    "out.png",
    "up/outside/secret.txt",
    "up.txt",
    "hidden/secret.txt",
    "sub/back/up/outside/secret.txt",
    "in/up2/secret.txt",
    "proc/environ",
    "self/0",
    "..",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_file_07_paths_that_lead_outside_are_refused(scene: Scene, path: str) -> None:
    calls = {
        "read": {},
        "list": {},
        "glob": {"pattern": "*"},
        "grep": {"pattern": "."},
        "write": {"content": "overwritten"},
        "edit": {"old": "secret", "new": "x"},
        "insert": {"after": 0, "text": "x"},
        "undo": {},
        "diff": {},
    }
    for tool, arguments in calls.items():
        with pytest.raises(m3.ToolError) as caught:
            scene.call(tool, path=path, **arguments)
        assert str(caught.value).startswith(f"{path!r} leads outside the workspace")
        assert SECRET not in str(caught.value)
        assert str(scene.outside) not in str(caught.value)


@pytest.mark.parametrize("path", ["out/nothing", "out.txt", "../nothing", "../outside"])
def test_an_error_does_not_tell_what_is_outside(scene: Scene, path: str) -> None:
    with pytest.raises(m3.ToolError) as caught:
        scene.call("read", path=path)
    assert str(caught.value) == str(beneath.Outside(path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\0b", "NUL"),
        ("..\\outside\\secret.txt", "backslash"),
        ("~/x", "'~' is not expanded"),
        ("~root/x", "'~' is not expanded"),
        ("\ud800", "no file name"),
        ("loop", "too many links"),
        ("loop/x", "too many links"),
        ("nothing", "no such file"),
        ("sub/in.txt/x", "not a directory"),
        ("x" * 300, "name too long"),
    ],
)
def test_bad_spellings(scene: Scene, path: str, message: str) -> None:
    with pytest.raises(m3.ToolError, match=message):
        scene.tools["read"](path=path)


def test_file_07_links_inside_the_root_work(scene: Scene) -> None:
    inside = [
        "sub/in.txt",
        "in.txt",
        "in/in.txt",
        "absolute.txt",
        "sub/back/in/in.txt",
        "./sub//./deep/../in.txt",
        str(scene.root / "sub/in.txt"),
        "sub/in.txt/",
    ]
    for path in inside:
        assert scene.call("read", path=path) == "1\tinside"
    scene.call("edit", path="sub/back/in/in.txt", old="inside", new="still inside")
    assert (scene.root / "sub/in.txt").read_text() == "still inside"


def test_file_07_searches_follow_no_links(scene: Scene) -> None:
    assert scene.call("grep", pattern="secret|inside") == "sub/in.txt:1: inside"
    assert scene.call("glob", pattern="secret*") == "No file matches."
    assert "out  (link)" in scene.call("list").splitlines()
    for pattern in ("../*", "/etc/*", "sub/../../*", "..\\*"):
        with pytest.raises(m3.ToolError, match="leads outside"):
            scene.call("glob", pattern=pattern)


def test_file_07_the_root_may_be_a_link_and_may_be_moved(tmp_path: Path, way: str) -> None:
    scene = Scene(tmp_path)
    (tmp_path / "alias").symlink_to(scene.root)
    scene.tools = {tool.name: tool for tool in m3.tools.workspace(tmp_path / "alias")}
    assert scene.call("read", path="in.txt") == "1\tinside"
    assert scene.call("read", path=str(tmp_path / "alias/in.txt")) == "1\tinside"
    (tmp_path / "alias").unlink()
    (tmp_path / "alias").symlink_to(scene.outside)
    scene.root.rename(tmp_path / "moved")
    assert scene.call("read", path="in.txt") == "1\tinside"
    with pytest.raises(m3.ToolError, match="no such file"):
        scene.call("read", path="secret.txt")


def test_what_is_no_file_is_not_waited_for(scene: Scene) -> None:
    os.mkfifo(scene.root / "pipe")
    for tool, arguments in {"read": {}, "edit": {"old": "a", "new": "b"}, "write": {"content": "x"}}.items():
        with pytest.raises(m3.ToolError, match="'pipe' is not a regular file"):
            scene.call(tool, path="pipe", **arguments)
    assert scene.call("grep", pattern="x") == "No match in 1 files."


@pytest.mark.parametrize("root", ["missing", "file"])
def test_a_root_has_to_be_a_folder(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(m3.ToolDefinitionError, match="not a folder that can be opened"):
        m3.tools.workspace(tmp_path / root)


def test_without_write_nothing_can_be_changed(tmp_path: Path) -> None:
    assert [tool.name for tool in m3.tools.workspace(tmp_path, write=False)] == ["read", "list", "glob", "grep"]


NAMES = st.sampled_from(
    [
        "..",
        ".",
        "",
        "sub",
        "deep",
        "out",
        "up",
        "up2",
        "in",
        "back",
        "hidden",
        "outside",
        "secret.txt",
        "in.txt",
        "l0",
        "l1",
    ]
)
PATHS = st.builds(
    lambda start, names, end: start + "/".join(names) + end,
    st.sampled_from(["", "", "", "/", "./", "~/", "ROOT/", "ROOT/../", "/proc/self/cwd/", "\\", "//"]),
    st.lists(NAMES, min_size=1, max_size=7),
    st.sampled_from(["", "", "/", "/.", "\0", "/secret.txt"]),
)


def attempts(scene: Scene, path: str) -> Iterator[str]:
    """Everything that the tools answer to `path`."""
    for tool, arguments in (
        ("read", {}),
        ("list", {}),
        ("grep", {"pattern": "secret"}),
        ("glob", {"pattern": "**"}),
        ("edit", {"old": "secret", "new": "overwritten"}),
        ("insert", {"after": 0, "text": "overwritten"}),
        ("write", {"content": "overwritten"}),
    ):
        try:
            yield str(scene.call(tool, path=path, **arguments))
        except m3.ToolError as error:
            yield str(error).replace(repr(path), "")


@pytest.mark.parametrize("by_kernel", [True, False])
@settings(max_examples=120)
@given(path=PATHS, links=st.lists(PATHS, max_size=2))
def test_no_spelling_escapes(by_kernel: bool, path: str, links: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not by_kernel:
            patch.setattr(beneath, "has_open_beneath", lambda descriptor: False)
        scene = Scene(Path(folder).resolve())
        for number, target in enumerate(links):
            target = target.replace("ROOT", str(scene.root)).replace("\0", "") or "."
            (scene.root / f"l{number}").symlink_to(target)
            (scene.root / f"sub/l{number}").symlink_to(target)
        for answer in attempts(scene, path.replace("ROOT", str(scene.root))):
            assert SECRET not in answer
            assert "secret.png" not in answer
        scene.check()


@pytest.mark.parametrize("path", ["swap/secret.txt", "sub/swap.txt"])
def test_a_link_put_between_look_and_step_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The worst moment of all, made to happen: right after a name was seen to be no link."""
    monkeypatch.setattr(beneath, "has_open_beneath", lambda descriptor: False)
    scene = Scene(tmp_path)
    read_link = beneath._read_link

    def swap_then(name: str, directory: int) -> str | None:
        target = read_link(name, directory)
        if name.startswith("swap") and target is None:
            os.rename(name, f".{name}", src_dir_fd=directory, dst_dir_fd=directory)
            outside = scene.outside if name == "swap" else scene.outside / "secret.txt"
            os.symlink(outside, name, dir_fd=directory)
        return target

    monkeypatch.setattr(beneath, "_read_link", swap_then)
    for tool, arguments in (
        ("read", {}),
        ("edit", {"old": "secret", "new": "x"}),
        ("write", {"content": "x"}),
        ("grep", {"pattern": "."}),
    ):
        for name in ("swap", "sub/swap.txt", ".swap", "sub/.swap.txt"):
            with suppress(FileNotFoundError):
                (scene.root / name).rename(tmp_path / "root" / f".old{random.random()}")
        (scene.root / "swap").mkdir()
        (scene.root / "swap/secret.txt").write_text("decoy")
        (scene.root / "sub/swap.txt").write_text("decoy")
        try:
            answer = scene.call(tool, path=path, **arguments)
        except m3.ToolError as error:
            answer = str(error)
        assert SECRET not in answer
        scene.check()


def test_links_swapped_during_the_call_do_not_escape(tmp_path: Path, way: str) -> None:
    """A thread makes a directory and a file of the root links to the outside and back, as fast as it can."""
    scene = Scene(tmp_path)
    (scene.root / "sub/deep/secret.txt").write_text("decoy")
    (scene.root / "swap").mkdir()
    (scene.root / "swap/secret.txt").write_text("decoy")
    done = threading.Event()

    def put(source: str, target: str) -> None:
        for _ in range(100):
            try:
                return os.rename(scene.root / source, scene.root / target)
            except OSError:  # `write` has just made a directory there
                with suppress(OSError):
                    os.rename(scene.root / target, scene.root / f".aside{random.random()}")
        raise AssertionError(f"{target} is in the way")

    def swap() -> None:
        os.symlink(scene.outside, scene.root / ".link")
        while not done.is_set():
            os.symlink(scene.outside / "secret.txt", scene.root / ".file")
            put("swap", ".dir")
            put(".link", "swap")
            put(".file", "sub/deep/secret.txt")
            put("swap", ".link")
            put(".dir", "swap")
            (scene.root / ".decoy").write_text("decoy")
            put(".decoy", "sub/deep/secret.txt")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(25):
            for path in ("swap/secret.txt", "swap", "sub/deep/secret.txt"):
                for answer in attempts(scene, path):
                    assert SECRET not in answer
                    assert "secret.png" not in answer
    finally:
        done.set()
        thread.join()
    scene.check()
