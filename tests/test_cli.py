"""The command line: the demo from picture to film strip, plain errors, the doctor, and a conversation."""

import builtins
import errno
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from m3agent.cli import doctor
from m3agent.cli.app import app
from m3agent.cli.screen import half_blocks
from m3agent.loops import SvgRenderer, render_tool
from m3agent.media.image import Image
from m3agent.runtime import Runtime
from tests.loops.rigged import rig, write_rigged_checkpoint

SCENES = sorted((Path(doctor.__file__).parent.parent / "demo_scenes").glob("*.svg"))
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 224 224">{}</svg>'
OFF = SVG.format('\n<circle cx="30" cy="90" r="9" fill="red"/>\n')


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rigged_checkpoint(tmp_path_factory.mktemp("rigged"))


@pytest.fixture
def says(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the commands a model that says these turns."""

    def script(*turns: str | list[str]) -> None:
        @asynccontextmanager
        async def opened(console: Console, model: str | None) -> AsyncIterator[Runtime]:
            async with Runtime.open(checkpoint, cache_tokens=8192) as runtime:
                rig(runtime, turns, render_tool(SvgRenderer()).definition)
                yield runtime

        monkeypatch.setattr("m3agent.cli.demo.opened", opened)
        monkeypatch.setattr("m3agent.cli.chat.opened", opened)

    return script


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_demo_draws_a_scene_and_leaves_a_film_strip(says: Callable[..., None], tmp_path: Path):
    answer = SCENES[1].read_text("utf-8").strip()
    says([OFF], [answer], "Done.")
    result = invoke("demo", "--seed", "1", "--out", tmp_path / "new" / "folder")
    assert result.exit_code == 0, result.output
    assert "draft 1" in result.output
    assert "Draft 2 of 2 matches the picture" in result.output
    assert answer.splitlines()[3] in result.output  # the code, streamed
    report = tmp_path / "new" / "folder" / "report.html"
    assert str(report) in result.output
    page = report.read_text("utf-8")
    assert page.count("<article") == 3
    assert "100%" in page


def test_the_demo_draws_a_given_picture_on_a_white_canvas(says: Callable[..., None], tmp_path: Path):
    picture = tmp_path / "wide.png"
    PIL.Image.new("RGB", (400, 200), "red").save(picture)
    says([SVG.format('<rect y="56" width="224" height="112" fill="red"/>')], "Done.")
    result = invoke("demo", "--image", picture, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Draft 1 of 1 matches the picture" in result.output


def test_a_demo_without_a_drawing_says_so(says: Callable[..., None], tmp_path: Path):
    says(["<svg><oops"], "Done.")
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "No draft could be rendered" in result.output
    assert (tmp_path / "report.html").is_file()


def huge_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "picture.png"),
        (b"", "empty"),
        (b"<html></html>", "not a picture"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "cannot be decoded"),
        (huge_png(), "over the limit"),
    ],
)
def test_a_picture_that_is_none_is_one_line_and_exit_code_2(tmp_path: Path, data: bytes | None, reason: str):
    path = tmp_path / "picture.png"
    if data is not None:
        path.write_bytes(data)
    check_one_line(invoke("demo", "--image", path, "--out", tmp_path), reason)


def test_folders_that_cannot_be_written_are_one_line_and_exit_code_2(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    check_one_line(invoke("demo", "--out", file), "cannot write to")
    check_one_line(invoke("demo", "--out", file / "below"), "cannot write to")
    (tmp_path / "report.html").mkdir()
    check_one_line(invoke("demo", "--out", tmp_path), "report.html is a folder")


def test_a_full_disk_is_one_line_and_leaves_the_older_film_strip(
    says: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(path: Path, data: str, **_: object) -> int:
        path.write_bytes(data.encode()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "report.html").write_text("older")
    says([OFF], "Done.")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        check_one_line(invoke("demo", "--out", tmp_path), "report.html: No space left on device; choose another")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]


def test_a_pipe_that_is_not_utf_8_gets_question_marks():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    command = [sys.executable, "-c", "from m3agent.cli import main; main()", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("?  Python")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("arguments", [["demo"], ["doctor"], ["chat"], ["--help"], ["demo", "--help"]])
def test_output_that_cannot_be_written_is_one_line(checkpoint: Path, tmp_path: Path, arguments: list[str]):
    if arguments in (["demo"], ["chat"]):
        arguments = [*arguments, "--model", str(checkpoint)]
    command = [sys.executable, "-c", "from m3agent.cli import main; main()", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            cwd=tmp_path,
        )  # fmt: skip
    assert done.stderr == "m3agent: cannot write the output: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize("command", ["demo", "chat"])
def test_an_empty_name_is_told(tmp_path: Path, command: str):
    out = ["--out", tmp_path] if command == "demo" else []
    check_one_line(invoke(command, "--image", "", *out), "the path of the picture is empty")
    check_one_line(invoke(command, "--model", "", *out), "the name of the model is empty")


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path):
    check_one_line(invoke("demo", "--out", tmp_path, "--model", tmp_path / "nowhere"), "nowhere")


def test_damaged_weights_are_one_line_and_exit_code_2(checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (shard,) = folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-4000:] = b"\xff" * 4000  # NaN in every type of float
    shard.write_bytes(data)
    check_one_line(invoke("demo", "--out", tmp_path, "--model", folder), "has numbers that are not finite")


def check_one_line(result: Result, reason: str) -> None:
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line]
    assert line.startswith("m3agent: ")
    assert reason in line


def test_without_the_cli_extra_a_line_tells_how_to_get_it():
    code = "import sys; sys.modules['typer'] = None; from m3agent.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "m3agent: the command line needs typer: pip install 'm3agent[cli]'\n"


def test_the_doctor_tells_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-thing": ("no_such_thing", "video", "films")})
    monkeypatch.setattr(doctor, "NANO", tmp_path)
    result = invoke("doctor")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "no-such-thing missing; for films: pip install 'm3agent[video]'" in text
    assert "m3-nano not in this installation" in text
    assert "device cpu" in text
    assert "float32, bfloat16" in text


def test_the_doctor_is_content_when_all_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(doctor, "NANO", tmp_path)
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert "3 MiB, embedded" in result.output


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def lines(*texts: str) -> None:
        waiting: Iterator[str] = iter(texts)

        def read(prompt: str = "") -> str:
            try:
                return next(waiting)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)

    return lines


def test_a_conversation_with_a_picture_and_a_tool(
    says: Callable[..., None], typed: Callable[..., None], tmp_path: Path
):
    picture = tmp_path / "picture.png"
    PIL.Image.new("RGB", (56, 56), "red").save(picture)
    says(["<svg><oops"], "I cannot.", "Bye.")
    typed("/image /no/such/file", f"/image {picture}", "Draw this picture.", "/image ", "Thanks", "/quit", "never said")
    result = invoke("chat")
    assert result.exit_code == 0, result.output
    assert "/no/such/file" in result.output
    assert result.output.count("/image FILE shows") == 2  # at the start, and for /image without a file
    assert "<svg><oops" in result.output
    assert "I cannot." in result.output
    assert "Bye." in result.output
    assert result.output.index("I cannot.") < result.output.index("Bye.")


def test_half_blocks_show_two_pixels_a_character():
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[1] = 255
    text = half_blocks(Image(pixels), columns=4)
    assert text.plain == "▀▀▀▀\n▀▀▀▀"
    styles = [span.style for span in text.spans]
    assert styles == ["#000000 on #ffffff"] * 4 + ["#000000 on #000000"] * 4


def test_every_demo_scene_renders():
    assert len(SCENES) >= 8
    pictures = {SvgRenderer().render(path.read_text("utf-8")).digest for path in SCENES}
    assert len(pictures) == len(SCENES)
