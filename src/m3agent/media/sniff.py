"""What a file is, by its first bytes: names lie, and an error should say what the data really are."""

from __future__ import annotations

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"II+\x00", "tiff"),
    (b"MM\x00+", "tiff"),
    (b"\x1aE\xdf\xa3", "matroska"),
    (b"OggS", "ogg"),
    (b"FLV\x01", "flv"),
    (b"\x00\x00\x01\xba", "mpeg"),
    (b"0&\xb2u\x8ef\xcf\x11", "asf"),
    (b"YUV4MPEG2 ", "y4m"),
    (b"%PDF", "pdf"),
    (b"PK\x03\x04", "zip"),
    (b"\x1f\x8b", "gzip"),
)


def sniff(data: bytes) -> str:
    """The format of `data` in one lower-case word: "png", "jpeg", "mp4", "html", "text", "empty", "unknown", …

    Only the first kilobyte is looked at.
    """
    if not data:
        return "empty"
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF":
        return {b"WEBP": "webp", b"AVI ": "avi"}.get(data[8:12], "riff")
    if data[4:8] == b"ftyp":
        brand = data[8:12]
        if brand in (b"avif", b"avis"):
            return "avif"
        return "heif" if brand in (b"heic", b"heix", b"mif1", b"hevc") else "mp4"
    if data[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip"):  # QuickTime before it had a brand
        return "mp4"
    if data[:1] == b"G" and data[188:189] == b"G":
        return "mpegts"
    if len(data) > 2 and data[:1] == b"P" and data[1:2] in b"123456" and data[2:3].isspace():
        return "ppm"
    return _sniff_text(data[:1024])


def _sniff_text(head: bytes) -> str:
    if b"\x00" in head:
        return "unknown"
    text = head.decode("utf-8", errors="ignore").lstrip("\ufeff \t\r\n").lower()
    if text.startswith("<svg") or (text.startswith("<?xml") and "<svg" in text):
        return "svg"
    if text.startswith(("<!doctype html", "<html", "<head", "<body")):
        return "html"
    printable = sum(32 <= byte < 127 or byte in b"\t\r\n" for byte in head)
    return "text" if printable >= 0.9 * len(head) else "unknown"
