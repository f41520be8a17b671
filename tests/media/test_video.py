"""Video: which frames are kept and at what times, rotation, damage, animations, frame lists, saved form."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pil

from m3agent.errors import MissingDependency, VideoError
from m3agent.media import Image, PixelSpec, Video, video_patches
from m3agent.media import video as video_module
from m3agent.media.films import Frame, frame_time
from m3agent.media.video import sample
from tests.media.makers import avi, encode, encode_film, film, mp4, turn_mp4, y4m


def ticks(count: int, rate: float) -> list[Frame]:
    return [(index / rate, np.zeros((1, 1, 3), np.uint8)) for index in range(count)]


@pytest.mark.parametrize(
    ("count", "rate", "expected"),
    [
        (150, 30, [0, 30, 60, 90, 120, 149]),
        (100, 29.97, [0, 30, 60, 90, 99]),
        (60, 24, [0, 24, 48, 59]),
        (25, 25, [0, 24]),
        (10, 30, [0, 9]),
        (1, 30, [0]),
        (241, 23.976, [*range(0, 241, 24)]),
    ],
)
def test_sampling_as_trained(count: int, rate: float, expected: list[int]) -> None:
    assert [round(time * rate) for time, _ in sample(ticks(count, rate), 1.0)] == expected


@given(st.lists(st.floats(0.001, 3), min_size=1, max_size=60), st.floats(0.2, 40))
def test_sampling_of_any_times(gaps: list[float], fps: float) -> None:
    times = [float(time) for time in np.cumsum(gaps)]
    frames = [(time, np.full((1, 1, 3), 0, np.uint8)) for time in times]
    kept = [time for time, _ in sample(frames, fps)]
    assert kept[0] == times[0]
    assert kept[-1] == times[-1]
    assert sorted(set(kept)) == kept
    # only the last frame may come early, and none comes later than the first one that is due
    due = [time + 1 / fps - 1e-4 for time in kept[:-2]]
    assert all(later >= earliest for later, earliest in zip(kept[1:-1], due, strict=True))
    for before, after in itertools.pairwise(kept):
        assert not [time for time in times if before < time < after and time >= before + 1 / fps - 1e-4]
    assert [time for time, _ in sample(frames, None)] == times


@pytest.mark.parametrize(
    ("rate", "stamps", "expected"),
    [
        (30.0, [0.0, 0.033, 0.067, 0.1], [0.0, 1 / 30, 2 / 30, 0.1]),  # a millisecond clock's rounding is undone
        (10.0, [0.0, 0.5, 0.6, 2.0], [0.0, 0.5, 0.6, 2.0]),  # a variable rate keeps its own times
        (10.0, [0.0, 0.0, 0.0, 0.0], [0.0, 0.1, 0.2, 0.3]),  # no times in the file
        (0.0, [0.0, 0.0, 0.0], [0.0, 0.04, 0.08]),  # neither times nor a rate
        (10.0, [0.0, 0.1, 5.0, 0.3], [0.0, 0.1, 5.0, 5.1]),  # never backwards
    ],
)
def test_frame_times(rate: float, stamps: list[float], expected: list[float]) -> None:
    times, last = [], -1.0
    for index, stamp in enumerate(stamps):
        last = frame_time(index, rate, stamp, last)
        times.append(last)
    assert times == pytest.approx(expected, abs=1e-12)


def test_film_from_path_and_bytes(tmp_path: Path) -> None:
    frames = [np.full((48, 64, 3), 6 * index, np.uint8) for index in range(40)]
    encoded = mp4(frames, 30, tmp_path)
    path = tmp_path / "no_extension"
    path.write_bytes(encoded)
    clip = Video(path)
    assert repr(clip) == f"Video({str(path)!r}, not decoded yet)"
    assert clip.timestamps == [0.0, 1.0, 39 / 30]
    assert clip.warnings == ()
    assert clip.frames.shape == (3, 48, 64, 3)
    assert np.abs(clip.frames[:, 24, 32].astype(int) - [[0], [180], [234]]).max() <= 6
    assert (clip.width, clip.height, clip.format) == (64, 48, "mp4")
    assert repr(clip) == f"Video(3 frames of 64x48, mp4, {clip.digest[:4]}…)"
    assert Video(encoded) == clip
    assert len(Video(encoded, fps=None).frames) == 40
    assert Video(encoded, fps=10).timestamps == [index / 30 for index in [*range(0, 40, 3)]]


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_display_rotation(degrees: int, tmp_path: Path) -> None:
    coded = np.zeros((32, 64, 3), np.uint8)
    coded[:16, :32], coded[16:, 32:] = (255, 0, 0), (0, 0, 255)
    clip = Video(turn_mp4(mp4([coded] * 4, 10, tmp_path), degrees))
    upright = np.rot90(coded, -degrees // 90)
    assert (clip.height, clip.width) == upright.shape[:2]
    for y, x in ((5, 5), (5, -6), (-6, 5), (-6, -6)):
        assert np.abs(clip.frames[0, y, x].astype(int) - upright[y, x]).max() <= 12


@pytest.mark.parametrize(("width", "height"), [(33, 17), (1, 1), (151, 95)])
def test_odd_sizes_are_exact(width: int, height: int) -> None:
    clip = Video(y4m([16 + 4 * index for index in range(30)], width, height, "24:1"))
    assert clip.frames.shape == (3, height, width, 3)
    assert clip.timestamps == [0.0, 1.0, 29 / 24]
    # level 16 is black, 235 white; every pixel of a plain frame is the same, up to the last column
    assert [int(level) for level in clip.frames[:, 0, 0, 0]] == [0, 112, 135]
    assert all(len(np.unique(frame)) == 1 for frame in clip.frames)


def test_fewer_frames_than_announced_is_a_warning() -> None:
    frames = [np.full((17, 33, 3), 8 * index, np.uint8) for index in range(31)]
    clip = Video(avi(frames, 10, announce=32))
    assert clip.timestamps == [0.0, 1.0, 2.0, 3.0]
    assert clip.warnings == ("31 frames could be decoded, the file announces 32",)
    assert Video(avi(frames, 10)).warnings == ()
    cut = Video(avi(frames, 10)[:8000], fps=None)
    assert 0 < len(cut.frames) < 31
    assert "announces 31" in cut.warnings[0]


def test_nothing_decodable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="no frame could be decoded"):
        Video(avi([], 10)).load()
    whole = mp4([np.zeros((32, 32, 3), np.uint8)] * 8, 10, tmp_path)
    for length in (40, len(whole) // 2):
        with pytest.raises(VideoError, match="cannot be opened"):
            Video(whole[:length]).load()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n", "not a film"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "not a film"),
        (encode(Pil.new("RGB", (4, 4)), "JPEG"), "use m3agent.Image"),
        (b"GIF89a", "gif data that cannot be decoded"),
    ],
)
def test_what_is_no_film_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    with pytest.raises(VideoError, match=words) as caught:
        Video(path).load()
    assert "clip.mp4" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"missing\.mp4: cannot be read"):
        Video(tmp_path / "missing.mp4").load()
    with pytest.raises(VideoError, match="not int"):
        Video(3)  # type: ignore[arg-type]
    for rates in ({"fps": 0}, {"fps": float("nan")}, {"frame_rate": -1}, {"fps": "fast"}):
        with pytest.raises(VideoError, match="positive number"):
            Video([film(1, 4, 4)[0]], **rates)  # type: ignore[arg-type]
    with pytest.raises(VideoError, match="a film knows its own"):
        Video("clip.mp4", frame_rate=3)


def moving(count: int) -> list[Pil.Image]:
    """Frames that differ only in a small square, which a GIF stores alone."""
    ground = np.full((30, 60, 3), 200, np.uint8)
    frames = []
    for index in range(count):
        array = ground.copy()
        array[10:15, 5 + 8 * index : 10 + 8 * index] = (255, 0, 0)
        frames.append(Pil.fromarray(array))
    return frames


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "AVIF"])
def test_animations_have_real_times_and_whole_frames(kind: str) -> None:
    options = {"GIF": {}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}.get(kind, {"lossless": True})
    encoded = encode_film(moving(4), kind, [400, 700, 900, 300], **options)
    clip = Video(encoded, fps=None)
    assert clip.timestamps == pytest.approx([0.0, 0.4, 1.1, 2.0])
    expected = np.stack([np.asarray(frame) for frame in moving(4)]).astype(int)
    assert np.abs(clip.frames - expected).max() <= (6 if kind == "AVIF" else 0)
    assert Video(encoded).timestamps == pytest.approx([0.0, 1.1, 2.0])
    assert Image(encoded).frames == 4
    assert np.array_equal(Image(encoded).rgb, clip.frames[0])


def test_gif_without_durations_runs_as_in_a_browser() -> None:
    assert Video(encode_film(moving(3), "GIF", [0, 0, 0]), fps=None).timestamps == pytest.approx([0.0, 0.1, 0.2])


def test_transparent_animation_on_a_background() -> None:
    frames = []
    for index in range(2):
        frame = Pil.new("RGBA", (8, 8), (0, 0, 0, 0))
        frame.putpixel((index, 0), (255, 0, 0, 255))
        frames.append(frame)
    clip = Video(encode_film(frames, "WEBP", [100, 100], lossless=True), fps=None, background="#0000ff")
    assert clip.frames[:, 0, :3].tolist() == [
        [[255, 0, 0], [0, 0, 255], [0, 0, 255]],
        [[0, 0, 255], [255, 0, 0], [0, 0, 255]],
    ]


def test_stand_in_picture_of_an_apng_is_no_frame() -> None:
    stand_in = Pil.new("RGB", (60, 30), "blue")
    options = {"save_all": True, "append_images": moving(3), "duration": 500, "default_image": True}
    clip = Video(encode(stand_in, "PNG", **options), fps=None)
    assert clip.timestamps == [0.0, 0.5, 1.0]
    assert np.array_equal(clip.frames[0], np.asarray(moving(1)[0]))


def test_damaged_animation_keeps_what_decodes() -> None:
    rng = np.random.default_rng(0)
    noise = [Pil.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)) for _ in range(4)]
    encoded = encode_film(noise, "PNG", [100] * 4)
    clip = Video(encoded[: int(0.6 * len(encoded))], fps=None)
    assert len(clip.frames) == 2
    assert clip.warnings[0].startswith("2 of 4 frames could be decoded")
    with pytest.raises(VideoError, match="no frame could be decoded"):
        Video(encoded[: len(encoded) // 10]).load()


@given(st.sampled_from(["GIF", "WEBP", "PNG"]), st.data())
def test_damaged_animations_raise_nothing_else(kind: str, data: st.DataObject) -> None:
    encoded = bytearray(encode_film(moving(2), kind, [100, 100]))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(VideoError):
        assert len(Video(bytes(encoded)).frames) >= 1


def test_a_list_of_frames() -> None:
    frames = film(5, 20, 10)
    every = Video(list(frames))
    assert every.timestamps is None
    assert np.array_equal(every.frames, frames)
    assert Video(frames) == every == Video([Image(frame) for frame in frames]) == Video([*map(Pil.fromarray, frames)])
    timed = Video(list(frames), frame_rate=2)
    assert timed.timestamps == [0.0, 1.0, 2.0]
    assert np.array_equal(timed.frames, frames[::2])
    assert Video(list(frames), frame_rate=2, fps=None).timestamps == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert timed != every
    frames[:] = 0
    assert every.frames.any()


def test_frames_of_different_sizes() -> None:
    with pytest.raises(VideoError, match="changes from 20x10 to 10x20"):
        Video([film(1, 20, 10)[0], film(1, 10, 20)[0]])
    with pytest.raises(VideoError, match="no frame"):
        Video([])
    with pytest.raises(VideoError, match=r"frame 1: .*int64"):
        Video([film(1, 4, 4)[0], np.zeros((4, 4), np.int64)])


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = mp4([np.zeros((32, 32, 3), np.uint8)] * 30, 10, tmp_path)
    with pytest.raises(VideoError, match=r"over the limit of 3 frames.*fps"):
        Video(encoded, max_frames=3).load()
    assert len(Video(encoded, max_frames=4).frames) == 4
    monkeypatch.setattr(video_module, "MAX_FILM_PIXELS", 4 * 32 * 32 - 1)
    with pytest.raises(VideoError, match="4 frames of 32x32 are over the limit of 4095 pixels"):
        Video(encoded).load()
    monkeypatch.setattr(video_module, "MAX_PIXELS", 32 * 32 - 1)
    for data in (encoded, encode_film(moving(2), "GIF", [100, 100])):
        with pytest.raises(VideoError, match="over the limit of 1023 pixels"):
            Video(data).load()
    monkeypatch.setattr(video_module, "MAX_FILE_BYTES", 10)
    (tmp_path / "big.mp4").write_bytes(encoded)
    with pytest.raises(VideoError, match=r"big\.mp4: \d+ bytes is over the limit of 10"):
        Video(tmp_path / "big.mp4").load()


def test_without_opencv_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MissingDependency, match=r"m3agent\[video\]"):
        Video(y4m([16], 4, 4, "24:1")).load()
    assert len(Video(encode_film(moving(2), "GIF", [100, 100])).frames) == 2


@pytest.mark.parametrize("source", [y4m([16, 90, 200], 4, 4, "1:1"), [*film(3, 8, 6)]], ids=["film", "frames"])
def test_json_round_trip(source: object) -> None:
    rates = {"frame_rate": 0.5} if isinstance(source, list) else {}
    for clip in (Video(source, fps=None, **rates), Video(source)):  # type: ignore[arg-type]
        data = json.loads(json.dumps(clip.to_json()))
        again = Video.from_json(data)
        assert again == clip
        assert again.timestamps == clip.timestamps
        assert again.to_json() == data


def test_a_field_of_a_pydantic_model() -> None:
    class Shot(pydantic.BaseModel):
        clip: Video

    shot = Shot(clip=Video([*film(2, 8, 6)]))
    assert Shot.model_validate_json(shot.model_dump_json()) == shot
    with pytest.raises(pydantic.ValidationError, match="video data need"):
        Shot.model_validate({"clip": {}})


@pytest.mark.parametrize(
    "data", [{"data": "!"}, {"frames": ["!"]}, {"frames": []}, {"data": "", "fps": "x"}, {"data": "", "max_frames": 0}]
)
def test_damaged_json(data: dict[str, object]) -> None:
    with pytest.raises(VideoError):
        Video.from_json(data)


def test_damaged_times_in_json() -> None:
    data = Video([*film(2, 8, 6)]).to_json()
    for times in ([0.0], "ab", [0.0, "x"]):
        with pytest.raises(VideoError, match="timestamps"):
            Video.from_json({**data, "timestamps": times})


def test_from_film_to_patches() -> None:
    """150 frames at 30 a second, sampled with the last frame: the times that stand before each temporal patch."""
    clip = Video(y4m([16 + index for index in range(150)], 33, 17, "30:1"))
    patches = video_patches(clip.frames, clip.timestamps, PixelSpec())
    assert patches.timestamps == [0.0, 2.0, 4.0]
    assert patches.grids == [(3, 4, 6)]
    assert patches.tokens == 3 * patches.tokens_per_frame == 18
