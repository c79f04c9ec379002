import io
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data.decode import (
    UnreadableImage,
    _check_size,
    _decode_pillow,
    decode,
    decode_jpeg,
    read_header,
    to_channels,
)
from regard.errors import InputError

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (5, 7, 3), np.uint8)
GREY = RNG.integers(0, 256, (5, 7), np.uint8)


def saved(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(raw, channels=3):
    tensor = decode(raw, channels)
    assert tensor.dtype == torch.uint8
    return tensor.permute(1, 2, 0).numpy()


def check_fast(raw, orientation=1):
    """The fast path takes this file, and gives what Pillow does."""
    found, wanted = decode_jpeg(raw, _check_size), _decode_pillow(raw)
    assert found is not None
    assert found[1] == wanted[1] == orientation
    assert np.array_equal(found[0], wanted[0])


def with_segment(raw, marker, body):
    """A JPEG with one more segment at its head."""
    return raw[:2] + b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body + raw[2:]


def exif_of(order, *entries):
    """An Exif segment's body with one directory: (tag, type, count, value) each."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    rows = b"".join(struct.pack(order + "HHIHH", *entry, 0) for entry in entries)
    return b"Exif\0\0" + head + struct.pack(order + "IH", 8, len(entries)) + rows + bytes(4)


def luma(colour):
    r, g, b = (colour[..., k].astype(int) for k in range(3))
    return ((19595 * r + 38470 * g + 7471 * b + 32768) >> 16).astype(np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_give_their_pixels(kind):
    assert np.array_equal(pixels(saved(Image.fromarray(COLOUR), kind)), COLOUR)


def test_grey_and_colour_convert_by_the_stated_rule():
    assert np.array_equal(pixels(saved(Image.fromarray(GREY)), 1)[..., 0], GREY)
    assert np.array_equal(pixels(saved(Image.fromarray(GREY))), np.stack([GREY] * 3, -1))
    grey = pixels(saved(Image.fromarray(COLOUR)), 1)[..., 0]
    assert np.array_equal(grey, luma(COLOUR))
    assert np.array_equal(grey, np.asarray(Image.fromarray(COLOUR).convert("L")))


def test_one_bit_pictures_are_black_and_white():
    bits = Image.fromarray(GREY > 128)
    assert np.array_equal(pixels(saved(bits), 1)[..., 0], np.where(GREY > 128, 255, 0))


# How to lay the upright picture (h, w) down so that each EXIF value turns it upright again.
LAID = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: np.rot90(p, 1),
    7: lambda p: p[::-1, ::-1].swapaxes(0, 1),
    8: lambda p: np.rot90(p, -1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_orientation_is_honoured(kind, orientation):
    upright = np.zeros((24, 40, 3), np.uint8)
    upright[:12, :20] = 255  # the top left corner is white
    stored = Image.fromarray(np.ascontiguousarray(LAID[orientation](upright)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(kind, {})
    shown = pixels(saved(stored, kind, exif=exif, **options))
    assert shown.shape == upright.shape
    assert np.abs(shown.astype(int) - upright).mean() < 6


def test_palette_with_transparency_is_laid_over_white():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putpixel((1, 0), 1)
    shown = pixels(saved(image, transparency=1))
    assert shown.tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_alpha_is_laid_over_white():
    image = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((255, 0, 51)):
        image.putpixel((x, 0), (100, 0, 200, alpha))
    # 51/255 = 1/5 of the colour, 4/5 of white
    assert pixels(saved(image)).tolist() == [[[100, 0, 200], [255, 255, 255], [224, 204, 244]]]
    grey = Image.new("LA", (1, 1), (0, 51))
    assert pixels(saved(grey), 1).tolist() == [[[204]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(kind):
    values = np.array([[0, 128, 129, 256, 4095, 32768, 65535]], np.uint16)
    shown = pixels(saved(Image.fromarray(values), kind), 1)[0, :, 0]
    assert shown.tolist() == [round(v * 255 / 65535) for v in values[0].tolist()]


def png_of_rgb16(rows):
    """A PNG with three 16-bit channels, written by hand: PIL cannot."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    height, width, _ = rows.shape
    body = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(body))
        + chunk(b"IEND", b"")
    )


def test_16_bit_colour_keeps_its_high_byte():
    values = RNG.integers(0, 65536, (3, 4, 3), np.uint16)
    assert np.array_equal(pixels(png_of_rgb16(values)), (values >> 8).astype(np.uint8))


def test_float_in_unit_range_is_scaled_and_other_ranges_are_refused():
    unit = np.array([[0.0, 0.25, 1.0]], np.float32)
    assert pixels(saved(Image.fromarray(unit), "TIFF"), 1)[0, :, 0].tolist() == [0, 64, 255]
    with pytest.raises(UnreadableImage, match="from 0 to 900 have no stated range"):
        decode(saved(Image.fromarray(unit * 900), "TIFF"), 1)
    wide = np.array([[0, 70000]], np.int32)
    with pytest.raises(UnreadableImage, match="integer values from 0 to 70000"):
        decode(saved(Image.fromarray(wide), "TIFF"), 1)


def test_cmyk_is_converted():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = pixels(saved(image, "JPEG", quality=100))
    assert np.abs(red.astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "TIFF"])
def test_first_of_several_frames_is_read(kind):
    frames = [Image.new("L", (6, 4), value) for value in (10, 200)]
    raw = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    assert read_header(raw).frames == 2
    assert set(pixels(raw, 1).ravel().tolist()) == {10}


def test_huge_pictures_are_refused_before_their_pixels(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 17)
    assert decode(saved(Image.new("L", (17, 2))), 1).shape == (1, 2, 17)
    for kind in ("PNG", "JPEG"):
        with pytest.raises(UnreadableImage, match=r"limit of 34( pixels)?;"):
            decode(saved(Image.new("L", (7, 5)), kind), 1, "wide")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "GIF", "BMP"])
def test_truncated_files_are_unreadable(kind):
    noise = Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8))
    raw = saved(noise, kind)
    with pytest.raises(UnreadableImage, match=r"^half\.img cannot be read: ") as caught:
        decode(raw[: len(raw) // 2], 3, "half.img")
    assert caught.value.reason


def test_reasons_help_and_survive_pickling():
    with pytest.raises(UnreadableImage, match="the file is empty"):
        decode(b"", 3)
    with pytest.raises(UnreadableImage, match="no known picture format"):
        decode(b"hello, I am no picture", 3)
    with pytest.raises(UnreadableImage, match="it is HEIC"):
        decode(b"\0\0\0\x18ftypheic" + bytes(32), 3)
    error = pickle.loads(pickle.dumps(UnreadableImage("a.png", "torn")))
    assert (error.name, error.reason) == ("a.png", "torn")


def test_channels_other_than_one_and_three_are_refused():
    with pytest.raises(InputError, match="channels is 4"):
        decode(saved(Image.fromarray(GREY)), 4)
    with pytest.raises(InputError, match="a picture has 2 channels"):
        to_channels(torch.zeros(2, 3, 3, dtype=torch.uint8), 1)


@pytest.fixture(scope="module")
def smooth():
    pytest.importorskip("simplejpeg")
    coarse = Image.fromarray(RNG.integers(0, 256, (9, 11, 3), np.uint8))
    return coarse.resize((93, 71), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_the_fast_jpeg_path_gives_pillows_bits(smooth, subsampling, progressive):
    check_fast(saved(smooth, "JPEG", quality=88, subsampling=subsampling, progressive=progressive))
    check_fast(saved(smooth.convert("L"), "JPEG", progressive=progressive))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_fast_jpeg_path_reads_orientation_as_pillow_does(smooth, order, orientation):
    plain = saved(smooth, "JPEG")
    exif = exif_of(order, (0x010F, 3, 1, 7), (0x0112, 3, 1, orientation), (0x0128, 3, 1, 2))
    check_fast(with_segment(plain, 0xE1, exif), orientation)
    without = exif_of(order, (0x010F, 3, 1, 7))
    check_fast(with_segment(plain, 0xE1, without))
    for kind in (f'"{orientation}"', f">{orientation}<"):
        words = f"<x:xmpmeta tiff:Orientation={kind}/>".replace("=>", ">").encode()
        xmp = with_segment(plain, 0xE1, b"http://ns.adobe.com/xap/1.0/\0" + words)
        check_fast(xmp, orientation)
        check_fast(with_segment(xmp, 0xE1, without), orientation)
        check_fast(with_segment(xmp, 0xE1, exif_of(order, (0x0112, 3, 1, 5))), 5)
    icc, adobe = b"ICC_PROFILE\0\1\1junk", b"Adobe\0d\0\0\0\0\1"
    check_fast(with_segment(with_segment(plain, 0xEE, adobe), 0xE2, icc))


def test_jpegs_that_are_not_as_the_standard_has_them_go_to_pillow(smooth):
    plain = saved(smooth, "JPEG")
    twice = exif_of("<", (0x0112, 3, 1, 6), (0x0112, 3, 1, 6))
    for body in (
        exif_of("<", (0x0112, 4, 1, 6)),  # a LONG
        exif_of("<", (0x0112, 3, 2, 6)),  # two values
        exif_of("<", (0x0112, 3, 1, 0)),
        twice,
        twice[:-10],
        b"Exif\0\0what",
    ):
        raw = with_segment(plain, 0xE1, body)
        assert decode_jpeg(raw, _check_size) is None
        assert decode(raw, 3).shape in ((3, 71, 93), (3, 93, 71))
    two = with_segment(with_segment(plain, 0xE1, b"Exif\0\0II"), 0xE1, b"Exif\0\0*\0")
    assert decode_jpeg(two, _check_size) is None
    assert decode_jpeg(saved(smooth.convert("CMYK"), "JPEG"), _check_size) is None
    rgb = with_segment(saved(smooth, "JPEG", keep_rgb=True), 0xEE, b"Adobe\0d\0\0\0\0\0")
    assert decode_jpeg(rgb, _check_size) is None
    assert decode(rgb, 3).shape == (3, 71, 93)
    assert decode_jpeg(plain[: len(plain) // 2], _check_size) is None
