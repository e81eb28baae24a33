import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, features

from cutslots.data import images
from cutslots.data.folder import Folder
from cutslots.data.images import EXTENSIONS, FORMATS, list_images, read_image
from cutslots.data.open import open_dataset
from cutslots.files import Notice
from tests.small_runs import Command

SIDE = 8
RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
JPEG = {"quality": 95, "subsampling": 0}
LABELS = RNG.integers(0, 4, (SIDE, SIDE), dtype=np.uint8)


def make_image(colors=COLORS):
    return Image.fromarray(colors)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return tmp_path


def add_mask(folder, mask, name="a"):
    (folder / "masks").mkdir(exist_ok=True)
    mask.save(folder / "masks" / f"{name}.png")


def write_numbered(folder, count):
    """Write images whose gray value is their index."""
    for i in range(count):
        Image.new("RGB", (2, 2), (i, i, i)).save(folder / "images" / f"{i:03d}.png")


def gray_values(data):
    return data.get_batch(range(len(data))).image[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    "extension, options, tolerance",
    [("png", {}, 0), ("PNG", {}, 0), ("webp", {"lossless": True}, 0), ("jpg", JPEG, 6), ("jpeg", JPEG, 6)],
)
def test_reads_every_extension(folder, extension, options, tolerance):
    smooth = np.stack(np.broadcast_arrays(*np.ogrid[0:240:8j, 0:240:8j], 90), -1).astype(np.uint8)
    make_image(smooth).save(folder / "images" / f"a.{extension}", **options)
    image, mask = Folder(folder, image_size=SIDE)[0]
    assert image.shape == (3, SIDE, SIDE) and image.dtype == mask.dtype == torch.uint8
    assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - smooth).max() <= tolerance
    assert mask.shape == (SIDE, SIDE) and not mask.any(), "without masks/ all is background"


OTHER_FORMATS = {
    "bmp": {},
    "gif": {},
    "tif": {},
    "tiff": {"compression": "tiff_lzw"},
    "ppm": {},
    "jp2": {"irreversible": False},
}
OTHER_FORMATS |= {"avif": {"quality": 100, "subsampling": "4:4:4"}} if features.check("avif") else {}


@pytest.mark.parametrize("extension", OTHER_FORMATS)
def test_reads_other_formats(folder, extension):
    colors = np.repeat(np.uint8([[[250, 0, 0], [0, 0, 250]]]), 4, 0).repeat(4, 1)
    make_image(colors).save(folder / "images" / f"a.{extension}", **OTHER_FORMATS[extension])
    data = Folder(folder, image_size=SIDE)
    assert data.name(0) == "a"
    expected = np.asarray(make_image(colors).resize((SIDE, SIDE), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(data[0].image.permute(1, 2, 0).numpy() - expected).max() <= (3 if extension == "avif" else 0)


def test_every_format_has_an_extension():
    registered = Image.registered_extensions()
    assert {registered[extension] for extension in EXTENSIONS if extension in registered} <= set(FORMATS)
    assert {registered.get(extension) for extension in EXTENSIONS} | {"MPO"} >= set(FORMATS) - {"AVIF"}


@pytest.mark.parametrize("mode", ["P", "L"])
def test_mask_values_are_kept(folder, mode):
    make_image().save(folder / "images" / "a.png")
    mask = Image.fromarray(LABELS)
    if mode == "P":
        mask = mask.convert("P")
        mask.putpalette(RNG.integers(0, 256, 768, dtype=np.uint8).tobytes())
    add_mask(folder, mask)
    data = Folder(folder, image_size=SIDE)
    assert data.has_masks and data.name(0) == "a"
    assert np.array_equal(data[0].mask, LABELS)


def test_binary_mask_is_one_object(folder):
    make_image().save(folder / "images" / "a.png")
    add_mask(folder, Image.fromarray(LABELS > 1))
    assert np.array_equal(Folder(folder, image_size=SIDE)[0].mask, LABELS > 1)


def test_resized_mask_has_no_new_values(folder):
    labels = np.where(np.arange(30)[:, None] < 15, 0, np.where(np.arange(20) < 10, 3, 200)).astype(np.uint8)
    Image.new("RGB", (20, 30), "red").save(folder / "images" / "a.png")
    add_mask(folder, Image.fromarray(labels))
    mask = Folder(folder, image_size=16)[0].mask
    assert mask.shape == (16, 16) and set(mask.unique().tolist()) == {0, 3, 200}
    assert (mask[:8] == 0).all() and (mask[8:, :8] == 3).all() and (mask[8:, 8:] == 200).all()


@pytest.mark.parametrize("count", [2, 10, 25])
def test_splits_are_disjoint_and_complete(folder, count):
    write_numbered(folder, count)
    test, val, train = (gray_values(Folder(folder, split, 4)) for split in ("test", "val", "train"))
    assert test == list(range(count))
    assert val == list(range(0, count, 10))
    assert train == [i for i in range(count) if i % 10]


@pytest.fixture
def split_folder(tmp_path):
    """A folder with splits of its own: 12, 3 and 2 images."""
    for split, count in (("train", 12), ("val", 3), ("test", 2)):
        (tmp_path / split / "images").mkdir(parents=True)
        write_numbered(tmp_path / split, count)
    return tmp_path


def test_folder_with_splits(split_folder):
    for split, count in (("train", 12), ("val", 3), ("test", 2)):
        data = Folder(split_folder, split, 4)
        assert gray_values(data) == list(range(count)), "no image is left out"
        assert data.path == split_folder / split and not data.has_masks
    assert gray_values(Folder(split_folder, "train", 4, count=2)) == [0, 1]
    assert gray_values(open_dataset(str(split_folder), "train", 4)) == list(range(12))


def test_each_split_has_its_masks(split_folder):
    for name in ("000", "001", "002"):
        add_mask(split_folder / "val", Image.new("L", (2, 2), int(name) + 1), name)
    data = Folder(split_folder, "val", 4)
    assert data.has_masks and data.get_batch([2, 0]).mask[:, 0, 0].tolist() == [3, 1]
    assert (
        not Folder(split_folder, "val", 4).without_masks().has_masks and not Folder(split_folder, "train", 4).has_masks
    )


def test_missing_split_is_refused(split_folder):
    shutil.rmtree(split_folder / "test")
    assert len(Folder(split_folder, "train", 4)) == 12 and len(Folder(split_folder, "val", 4)) == 3
    with pytest.raises(ValueError, match=rf"\A{split_folder / 'test'} holds no folder images/; expected [^\n]+\Z"):
        Folder(split_folder, "test", 4)
    with pytest.raises(ValueError, match=r"split is 'all'; expected one of train, val, test"):
        Folder(split_folder, "all", 4)
    (split_folder / "test" / "images").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"\A{split_folder / 'test' / 'images'} holds no images"):
        Folder(split_folder, "test", 4)


def test_images_of_the_folder_take_precedence_over_splits(split_folder):
    (split_folder / "images").mkdir()
    write_numbered(split_folder, 1)
    assert all(gray_values(Folder(split_folder, split, 4)) == [0] for split in ("train", "val", "test"))


def test_folder_without_images_or_splits_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=rf"\A{tmp_path} holds no folder images/"):
        Folder(tmp_path, "train", 4)


def test_single_image_is_in_every_split(folder):
    write_numbered(folder, 1)
    assert all(gray_values(Folder(folder, split, 4)) == [0] for split in ("test", "val", "train"))


def test_count_keeps_the_first_images(folder):
    write_numbered(folder, 12)
    assert gray_values(Folder(folder, "test", 4, count=3)) == [0, 1, 2]
    assert gray_values(Folder(folder, "train", 4, count=3)) == [1, 2, 3]
    assert len(Folder(folder, "test", 4, count=100)) == 12


def test_batch_has_the_order_of_the_indices(folder):
    write_numbered(folder, 12)
    data = Folder(folder, "test", 4)
    assert data.get_batch(torch.tensor([7, 0, 7])).image[:, 0, 0, 0].tolist() == [7, 0, 7]
    with pytest.raises(IndexError, match="12 is out of range"):
        data.get_batch([12])


def test_other_files_are_skipped_with_a_notice(folder):
    write_numbered(folder, 2)
    for name in (".hidden.png", ".DS_Store"):
        (folder / "images" / name).write_text("nothing")
    with warnings.catch_warnings(action="error"):
        assert len(Folder(folder)) == 2
    for name in ("notes.txt", "b.txt", "photo.HEIC", "README"):
        (folder / "images" / name).write_text("nothing")
    (folder / "images" / "empty").mkdir()
    with pytest.warns(Notice) as caught:
        assert len(Folder(folder)) == 2
    skipped = "skipped 4 files that are not images (.heic, .txt, README)"
    assert str(caught[0].message) == f"{folder / 'images'}: {skipped}"


def test_list_images_of_one_folder_names_its_subfolders(folder):
    write_numbered(folder, 1)
    for name in "fedcba":
        (folder / "images" / name).mkdir()
    with pytest.warns(Notice) as caught:
        assert [path.name for path in list_images(folder / "images")] == ["000.png"]
    assert str(caught[0].message) == f"{folder / 'images'}: skipped 6 subfolders (a, b, c, d, e, ...)"


def test_notices_of_commands_are_one_line(folder, tmp_path):
    write_numbered(folder, 2)
    (folder / "images" / "two\nlines.txt").write_text("")
    errors = tmp_path / "errors"
    words = ["inspect", str(folder), "--out", str(tmp_path / "sheet.png")]
    assert Command(words, tmp_path / "log", errors=errors).end() == 0
    assert errors.read_text() == f"cutslots: {folder / 'images'}: skipped 1 files that are not images (.txt)\n"


@pytest.mark.parametrize("masks", [False, True])
def test_images_in_subfolders(folder, masks):
    for i, name in enumerate(["b.png", "one/a.png", "one/b.jpg", "two/deep/b.png", ".trash/c.png"]):
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (10 * i, 10 * i, 10 * i)).save(folder / "images" / name)
        mask = (folder / "masks" / name).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        if masks:
            Image.new("L", (2, 2), i).save(mask)
    data = Folder(folder, image_size=4)
    assert [data.name(i) for i in range(len(data))] == ["b", "one/a", "one/b", "two/deep/b"]
    assert gray_values(data) == [0, 10, 20, 30] and data.has_masks == masks
    assert data.get_batch(range(4)).mask[:, 0, 0].tolist() == ([0, 1, 2, 3] if masks else [0] * 4)


def read_first(folder):
    return Folder(folder, image_size=SIDE).get_batch([0])


def test_missing_mask_is_refused(folder):
    write_numbered(folder, 2)
    add_mask(folder, Image.new("L", (2, 2)), "000")
    with pytest.raises(ValueError, match=r"masks/001.png is missing; expected a mask for every image, or no folder"):
        Folder(folder).get_batch([0, 1])


def test_mask_of_another_size_is_refused(folder):
    make_image().save(folder / "images" / "a.png")
    add_mask(folder, Image.new("L", (SIDE, 5)))
    with pytest.raises(ValueError, match=r"masks/a.png .*: it is 8x5, its image 8x8$"):
        read_first(folder)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "I;16"])
def test_mask_of_another_mode_is_refused(folder, mode):
    make_image().save(folder / "images" / "a.png")
    add_mask(folder, Image.new(mode, (SIDE, SIDE)))
    with pytest.raises(ValueError, match=rf"masks/a.png .*: it has mode {mode}; expected a palette or grayscale PNG"):
        read_first(folder)


def test_two_images_of_one_name(folder):
    for name in ("a.png", "a.jpg", "b.png"):
        make_image().save(folder / "images" / name)
    data = Folder(folder)
    assert [data.name(i) for i in range(3)] == ["a.jpg", "a.png", "b"]
    add_mask(folder, Image.new("L", (SIDE, SIDE)))
    with pytest.raises(
        ValueError, match=r"images holds a.jpg and a.png, which would share a mask; expected one of each"
    ):
        Folder(folder)


def truncated(path):
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:4000])


@pytest.mark.parametrize("damage", [truncated, lambda p: p.write_text("not an image"), lambda p: p.write_bytes(b"")])
def test_error_names_the_damaged_image(folder, damage):
    damage(folder / "images" / "a.png")
    with pytest.raises(ValueError, match=r"images/a.png cannot be read as an image: .+"):
        read_first(folder)


@pytest.mark.parametrize("damage", [truncated, lambda p: p.write_text("not an image"), lambda p: p.write_bytes(b"")])
def test_error_names_the_damaged_mask(folder, damage):
    make_image().save(folder / "images" / "a.png")
    add_mask(folder, Image.new("L", (SIDE, SIDE)))
    damage(folder / "masks" / "a.png")
    with pytest.raises(ValueError, match=r"masks/a.png cannot be read as an image: .+"):
        read_first(folder)


def test_folder_without_images_is_refused(folder):
    with pytest.raises(ValueError, match=r"images holds no images \(.png, .jpg, .jpeg, .webp, .bmp, "):
        Folder(folder)
    (folder / "images").rmdir()
    with pytest.raises(ValueError, match=r"holds no folder images/; expected images/NAME.png"):
        Folder(folder)


GRAY = COLORS[..., 0]
ALPHA = COLORS[..., 1]
INDEX, TABLE = GRAY % 16, RNG.integers(0, 256, (16, 3), dtype=np.uint8)
GRAY_RGB = np.repeat(GRAY[..., None], 3, -1)


def palette_image():
    p = Image.fromarray(INDEX).convert("P")
    p.putpalette(TABLE.tobytes())
    return p


@pytest.mark.parametrize(
    "image, options, expected",
    [
        pytest.param(Image.fromarray(GRAY), {}, GRAY_RGB, id="gray"),
        pytest.param(Image.fromarray(GRAY), {"transparency": 7}, GRAY_RGB, id="gray, one value transparent"),
        pytest.param(Image.fromarray(GRAY > 99), {}, 255 * (GRAY_RGB > 99), id="black and white"),
        pytest.param(Image.fromarray(np.stack([GRAY, ALPHA], -1)), {}, GRAY_RGB, id="LA"),
        pytest.param(Image.fromarray(np.dstack([COLORS, ALPHA])), {}, COLORS, id="RGBA"),
        pytest.param(make_image(), {"transparency": (1, 2, 3)}, COLORS, id="RGB, one color transparent"),
        pytest.param(palette_image(), {}, TABLE[INDEX], id="palette"),
        pytest.param(palette_image(), {"transparency": 3}, TABLE[INDEX], id="palette, one color transparent"),
        pytest.param(palette_image(), {"transparency": bytes(range(16))}, TABLE[INDEX], id="palette, all transparent"),
        pytest.param(Image.fromarray(GRAY.astype(np.uint16) * 257), {}, GRAY_RGB, id="16-bit gray"),
    ],
)
@pytest.mark.filterwarnings("error")  # Pillow warns where it guesses
def test_image_modes(folder, image, options, expected):
    """Transparency is dropped; every pixel keeps its color."""
    image.save(folder / "images" / "a.png", **options)
    assert np.array_equal(Folder(folder, image_size=SIDE)[0].image.permute(1, 2, 0), expected)


def test_cmyk_jpeg(folder):
    Image.new("CMYK", (SIDE, SIDE), (0, 255, 255, 0)).save(folder / "images" / "a.jpg", quality=95)
    assert Image.open(folder / "images" / "a.jpg").mode == "CMYK"
    image = read_first(folder).image[0].float()
    assert (image - torch.tensor([255.0, 0, 0])[:, None, None]).abs().max() < 8, "red"


def test_float_images(tmp_path):
    values = (GRAY / 255).astype(np.float32)
    for scale in (1, 255):
        Image.fromarray(values * scale).save(tmp_path / "a.tiff")
        assert np.array_equal(read_image(tmp_path / "a.tiff"), GRAY_RGB)
    values[0, 0] = np.nan
    Image.fromarray(values).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match=r"a.tiff cannot be read as an image: it holds values that are not finite"):
        read_image(tmp_path / "a.tiff")


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_12_bits_in_16(tmp_path, suffix):
    """Scaled by 4095, with one warning however many images there are."""
    images._warn_of_12_bits.cache_clear()
    values = np.round(GRAY / 255 * 4095).astype(np.uint16)
    values[0, 0] = 4095
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    with pytest.warns(
        images.ImageWarning, match="a 16-bit image without values above 4095 is read as 12-bit"
    ) as warned:
        first, second = (np.asarray(read_image(tmp_path / f"a.{suffix}")) for _ in range(2))
    expected = GRAY_RGB.copy()
    expected[0, 0] = 255
    assert len(warned) == 1 and np.array_equal(first, expected) and np.array_equal(second, expected)


@pytest.mark.filterwarnings("error")
def test_16_bits_are_scaled_by_65535(tmp_path):
    Image.fromarray(np.array([[0, 4096, 65535]], dtype=np.uint16)).save(tmp_path / "a.png")
    assert np.asarray(read_image(tmp_path / "a.png"))[0, :, 0].tolist() == [0, 16, 255]
    images._warn_of_12_bits.cache_clear()
    Image.fromarray(np.zeros((2, 2), dtype=np.uint16)).save(tmp_path / "a.png")  # black is black either way
    assert not np.asarray(read_image(tmp_path / "a.png")).any()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_number_of_pixels_is_bounded_by_pillow(tmp_path):
    assert 2 * Image.MAX_IMAGE_PIXELS == images.MAX_PIXELS
    Image.new("1", (10_000, 10_000)).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        images.check_image(image)  # beyond 89 megapixels; reads no pixels
    Image.new("1", (20_000, 9_000)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a.png cannot be read as an image: .* exceeds limit of 178956970 pixels"):
        read_image(tmp_path / "a.png")


def test_deep_images_are_converted_in_chunks(monkeypatch, tmp_path):
    monkeypatch.setattr("cutslots.data.images.CHUNK", 7)
    Image.fromarray(GRAY.astype(np.uint16) * 257).save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png"), GRAY_RGB)


def test_metadata_is_dropped(tmp_path):
    make_image(COLORS).save(tmp_path / "a.png", transparency=(1, 2, 3), dpi=(72, 72), icc_profile=b"none")
    read = read_image(tmp_path / "a.png")
    assert np.array_equal(read, COLORS) and not read.info


def test_image_that_is_too_wide_is_refused(tmp_path):
    Image.new("L", (1_000_001, 1)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a.png .*it has 1000001x1 pixels; expected sides of at most 1,000,000"):
        read_image(tmp_path / "a.png")


def test_exif_orientation_is_applied(folder):
    """Orientation 6: the left of the file is the top of the scene."""
    colors = np.zeros((16, 32, 3), dtype=np.uint8)
    colors[:, :16, 0], colors[:, 16:, 2] = 255, 255  # red on the left, blue on the right
    colors[8:, :, 1] = 255  # green below, which becomes the left
    exif = Image.Exif()
    exif[0x0112] = 6
    make_image(colors).save(folder / "images" / "a.jpg", **JPEG, exif=exif)
    upright = read_image(folder / "images" / "a.jpg")
    assert upright.size == (16, 32)
    expected = np.rot90(colors, -1).astype(int)
    assert np.abs(np.asarray(upright).astype(int) - expected).max() < 12
    add_mask(folder, Image.fromarray(np.tile(np.uint8([[1], [2]]), (1, 16)).repeat(16, 0)))
    image, mask = Folder(folder, image_size=32)[0]
    assert (image[0, :15] > 200).all() and (image[2, 17:] > 200).all() and (image[1, :, :15] > 200).all()
    assert (mask[:16] == 1).all() and (mask[16:] == 2).all(), "a mask is stored upright"


def test_image_of_one_pixel(folder):
    Image.new("RGB", (1, 1), (10, 20, 30)).save(folder / "images" / "a.png")
    add_mask(folder, Image.new("L", (1, 1), 5))
    image, mask = Folder(folder, image_size=SIDE)[0]
    assert (image == torch.tensor([10, 20, 30])[:, None, None]).all() and (mask == 5).all()


# ------------------------------------------------------------------------------------------------------------ (H, W)


def halves(width, height):
    """An image that is red on the left and blue on the right."""
    colors = np.zeros((height, width, 3), dtype=np.uint8)
    colors[:, : width // 2, 0], colors[:, width // 2 :, 2] = 255, 255
    return colors


@pytest.mark.parametrize("resize", ["stretch", "crop"])
@pytest.mark.parametrize("image_size", [(4, 12), (12, 4), (5, 7), (1, 1), (16, 32)])
def test_image_size_is_height_and_width(folder, image_size, resize):
    make_image().save(folder / "images" / "a.png")
    add_mask(folder, Image.fromarray(LABELS))
    data = Folder(folder, image_size=image_size, resize=resize)
    assert data.image_size == image_size
    image, mask = data[0]
    assert image.shape == (3, *image_size) and mask.shape == image_size
    assert set(mask.unique().tolist()) <= set(range(4))
    empty = data.get_batch([])
    assert empty.image.shape == (0, 3, *image_size) and empty.mask.shape == (0, *image_size)


def test_stretch_uses_the_whole_image(folder):
    Image.fromarray(halves(32, 8)).save(folder / "images" / "a.png")
    image = Folder(folder, image_size=(8, 8))[0].image
    assert (image[0, :, 0] == 255).all() and (image[2, :, -1] == 255).all()
    image = Folder(folder, image_size=(8, 32))[0].image
    assert np.array_equal(image.permute(1, 2, 0), halves(32, 8)), "already of this size"


def test_crop_takes_the_center_without_scaling(folder):
    colors = RNG.integers(0, 256, (8, 32, 3), dtype=np.uint8)
    labels = RNG.integers(0, 4, (8, 32), dtype=np.uint8)
    Image.fromarray(colors).save(folder / "images" / "a.png")
    add_mask(folder, Image.fromarray(labels))
    image, mask = Folder(folder, image_size=8, resize="crop")[0]
    assert np.array_equal(image.permute(1, 2, 0), colors[:, 12:20]) and np.array_equal(mask, labels[:, 12:20])
    image, mask = Folder(folder, image_size=(8, 16), resize="crop")[0]
    assert np.array_equal(image.permute(1, 2, 0), colors[:, 8:24]) and np.array_equal(mask, labels[:, 8:24])


@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
def test_crop_scales_the_shorter_side(folder, shape):
    """A centered square of 8 in a crop of 16 is scaled to 4 of 8, in image and mask alike."""
    labels = np.zeros(shape, dtype=np.uint8)
    y, x = shape[0] // 2, shape[1] // 2
    labels[y - 4 : y + 4, x - 4 : x + 4] = 1
    Image.fromarray(np.repeat(labels[..., None] * np.uint8(255), 3, -1)).save(folder / "images" / "a.png")
    add_mask(folder, Image.fromarray(labels))
    image, mask = Folder(folder, image_size=8, resize="crop")[0]
    expected = np.zeros((8, 8))
    expected[2:6, 2:6] = 1
    assert np.array_equal(mask, expected) and np.array_equal(image[0] > 127, expected)


def test_square_images_are_the_same_stretched_and_cropped(folder):
    make_image().save(folder / "images" / "a.png")
    add_mask(folder, Image.fromarray(LABELS))
    stretched, cropped = (Folder(folder, image_size=5, resize=resize)[0] for resize in ("stretch", "crop"))
    assert all(torch.equal(*pair) for pair in zip(stretched, cropped, strict=True))


@pytest.mark.parametrize("image_size", [0, -1, (0, 4), (4,), (4, 4, 4), 2.5, "4", None])
def test_image_size_is_checked(folder, image_size):
    write_numbered(folder, 1)
    with pytest.raises(ValueError, match=r"^image_size is .*; expected a positive integer or \(height, width\)$"):
        Folder(folder, image_size=image_size)
