import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots.data import Folder, Held, hold, open_data
from cutslots.data.folder import read_image

SIDE = 8
RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
JPEG = {"quality": 95, "subsampling": 0}
LABELS = RNG.integers(0, 4, (SIDE, SIDE), dtype=np.uint8)


def picture(colours=COLOURS):
    return Image.fromarray(colours)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return tmp_path


def add_mask(folder, mask, name="a"):
    (folder / "masks").mkdir(exist_ok=True)
    mask.save(folder / "masks" / f"{name}.png")


def numbered(folder, count):
    """Pictures whose colour is their number."""
    for i in range(count):
        Image.new("RGB", (2, 2), (i, i, i)).save(folder / "images" / f"{i:03d}.png")


def numbers(data):
    return data.render(range(len(data))).image[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    "ending, options, off",
    [("png", {}, 0), ("PNG", {}, 0), ("webp", {"lossless": True}, 0), ("jpg", JPEG, 6), ("jpeg", JPEG, 6)],
)
def test_reads_every_ending(folder, ending, options, off):
    smooth = np.stack(np.broadcast_arrays(*np.ogrid[0:240:8j, 0:240:8j], 90), -1).astype(np.uint8)
    picture(smooth).save(folder / "images" / f"a.{ending}", **options)
    image, mask = Folder(folder, size=SIDE)[0]
    assert image.shape == (3, SIDE, SIDE) and image.dtype == mask.dtype == torch.uint8
    assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - smooth).max() <= off
    assert mask.shape == (SIDE, SIDE) and not mask.any(), "no masks/, no objects"


@pytest.mark.parametrize("mode", ["P", "L"])
def test_masks_keep_their_values(folder, mode):
    picture().save(folder / "images" / "a.png")
    mask = Image.fromarray(LABELS)
    if mode == "P":
        mask = mask.convert("P")
        mask.putpalette(RNG.integers(0, 256, 768, dtype=np.uint8).tobytes())
    add_mask(folder, mask)
    data = Folder(folder, size=SIDE)
    assert data.has_masks and data.name(0) == "a"
    assert np.array_equal(data[0].mask, LABELS)


def test_black_and_white_masks_are_one_object(folder):
    picture().save(folder / "images" / "a.png")
    add_mask(folder, Image.fromarray(LABELS > 1))
    assert np.array_equal(Folder(folder, size=SIDE)[0].mask, LABELS > 1)


def test_resized_masks_hold_no_new_values(folder):
    labels = np.where(np.arange(30)[:, None] < 15, 0, np.where(np.arange(20) < 10, 3, 200)).astype(np.uint8)
    Image.new("RGB", (20, 30), "red").save(folder / "images" / "a.png")
    add_mask(folder, Image.fromarray(labels))
    mask = Folder(folder, size=16)[0].mask
    assert mask.shape == (16, 16) and set(mask.unique().tolist()) == {0, 3, 200}
    assert (mask[:8] == 0).all() and (mask[8:, :8] == 3).all() and (mask[8:, 8:] == 200).all()


@pytest.mark.parametrize("count", [2, 10, 25])
def test_splits_are_disjoint_and_complete(folder, count):
    numbered(folder, count)
    test, val, train = (numbers(Folder(folder, split, 4)) for split in ("test", "val", "train"))
    assert test == list(range(count))
    assert val == list(range(0, count, 10))
    assert train == [i for i in range(count) if i % 10]


@pytest.fixture
def parted(tmp_path):
    """A folder that says itself what is for what: 12 pictures, 3 and 2, whose colours say where they are."""
    for split, count in (("train", 12), ("val", 3), ("test", 2)):
        (tmp_path / split / "images").mkdir(parents=True)
        numbered(tmp_path / split, count)
    return tmp_path


def test_a_folder_that_is_parted_already(parted):
    for split, count in (("train", 12), ("val", 3), ("test", 2)):
        data = Folder(parted, split, 4)
        assert numbers(data) == list(range(count)), "none is held out"
        assert data.path == parted / split and not data.has_masks
    assert numbers(Folder(parted, "train", 4, count=2)) == [0, 1]
    assert numbers(open_data(str(parted), "train", 4)) == list(range(12))


def test_parts_have_masks_of_their_own(parted):
    for name in ("000", "001", "002"):
        add_mask(parted / "val", Image.new("L", (2, 2), int(name) + 1), name)
    data = Folder(parted, "val", 4)
    assert data.has_masks and data.render([2, 0]).mask[:, 0, 0].tolist() == [3, 1]
    assert not Folder(parted, "val", 4, masks=False).has_masks and not Folder(parted, "train", 4).has_masks


def test_a_part_that_is_not_there(parted):
    shutil.rmtree(parted / "test")
    assert len(Folder(parted, "train", 4)) == 12 and len(Folder(parted, "val", 4)) == 3
    with pytest.raises(ValueError, match=rf"\A{parted / 'test'} holds no folder images/; expected [^\n]+\Z"):
        Folder(parted, "test", 4)
    with pytest.raises(ValueError, match=r"split is 'all'; expected one of train, val, test"):
        Folder(parted, "all", 4)
    (parted / "test" / "images").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"\A{parted / 'test' / 'images'} holds no pictures"):
        Folder(parted, "test", 4)


def test_pictures_at_the_top_go_before_parts(parted):
    (parted / "images").mkdir()
    numbered(parted, 1)
    assert all(numbers(Folder(parted, split, 4)) == [0] for split in ("train", "val", "test"))


def test_a_folder_without_pictures_or_parts(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=rf"\A{tmp_path} holds no folder images/"):
        Folder(tmp_path, "train", 4)


def test_a_single_picture_is_for_everything(folder):
    numbered(folder, 1)
    assert all(numbers(Folder(folder, split, 4)) == [0] for split in ("test", "val", "train"))


def test_count_takes_the_first(folder):
    numbered(folder, 12)
    assert numbers(Folder(folder, "test", 4, count=3)) == [0, 1, 2]
    assert numbers(Folder(folder, "train", 4, count=3)) == [1, 2, 3]
    assert len(Folder(folder, "test", 4, count=100)) == 12


def test_batches_are_in_the_order_asked_for(folder):
    numbered(folder, 12)
    data = Folder(folder, "test", 4)
    assert data.render(torch.tensor([7, 0, 7])).image[:, 0, 0, 0].tolist() == [7, 0, 7]
    with pytest.raises(IndexError, match="12 is out of range"):
        data.render([12])


def test_other_files_are_passed_over(folder):
    numbered(folder, 2)
    for name in (".hidden.png", "notes.txt", "films.gif"):
        (folder / "images" / name).write_text("nothing")
    assert len(Folder(folder)) == 2


def reading(folder):
    return Folder(folder, size=SIDE).render([0])


def test_missing_mask(folder):
    numbered(folder, 2)
    add_mask(folder, Image.new("L", (2, 2)), "000")
    with pytest.raises(ValueError, match=r"masks/001.png is missing; expected a mask for every image, or no folder"):
        Folder(folder).render([0, 1])


def test_mask_of_another_size(folder):
    picture().save(folder / "images" / "a.png")
    add_mask(folder, Image.new("L", (SIDE, 5)))
    with pytest.raises(ValueError, match=r"masks/a.png .*: it is 8x5, its image 8x8$"):
        reading(folder)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "I;16"])
def test_mask_of_another_mode(folder, mode):
    picture().save(folder / "images" / "a.png")
    add_mask(folder, Image.new(mode, (SIDE, SIDE)))
    with pytest.raises(ValueError, match=rf"masks/a.png .*: it has mode {mode}; expected a palette or grey PNG"):
        reading(folder)


def test_two_pictures_of_one_name(folder):
    picture().save(folder / "images" / "a.png")
    picture().save(folder / "images" / "a.jpg")
    with pytest.raises(ValueError, match=r"holds both a.jpg and a.png; expected one of each name"):
        Folder(folder)


def truncated(path):
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:4000])


@pytest.mark.parametrize("broken", [truncated, lambda p: p.write_text("not a picture"), lambda p: p.write_bytes(b"")])
def test_broken_pictures_are_named(folder, broken):
    broken(folder / "images" / "a.png")
    with pytest.raises(ValueError, match=r"images/a.png cannot be read as a picture: .+"):
        reading(folder)


@pytest.mark.parametrize("broken", [truncated, lambda p: p.write_text("not a picture"), lambda p: p.write_bytes(b"")])
def test_broken_masks_are_named(folder, broken):
    picture().save(folder / "images" / "a.png")
    add_mask(folder, Image.new("L", (SIDE, SIDE)))
    broken(folder / "masks" / "a.png")
    with pytest.raises(ValueError, match=r"masks/a.png cannot be read as a picture: .+"):
        reading(folder)


def test_no_pictures(folder):
    with pytest.raises(ValueError, match=r"images holds no pictures \(.png, .jpg, .jpeg, .webp\)"):
        Folder(folder)
    (folder / "images").rmdir()
    with pytest.raises(ValueError, match=r"holds no folder images/; expected images/NAME.png"):
        Folder(folder)


GREY = COLOURS[..., 0]
ALPHA = COLOURS[..., 1]
INDEX, TABLE = GREY % 16, RNG.integers(0, 256, (16, 3), dtype=np.uint8)
GREY_AS_COLOURS = np.repeat(GREY[..., None], 3, -1)


def indexed():
    p = Image.fromarray(INDEX).convert("P")
    p.putpalette(TABLE.tobytes())
    return p


@pytest.mark.parametrize(
    "made, options, expected",
    [
        pytest.param(Image.fromarray(GREY), {}, GREY_AS_COLOURS, id="grey"),
        pytest.param(Image.fromarray(GREY), {"transparency": 7}, GREY_AS_COLOURS, id="grey, one value transparent"),
        pytest.param(Image.fromarray(GREY > 99), {}, 255 * (GREY_AS_COLOURS > 99), id="black and white"),
        pytest.param(Image.fromarray(np.stack([GREY, ALPHA], -1)), {}, GREY_AS_COLOURS, id="LA"),
        pytest.param(Image.fromarray(np.dstack([COLOURS, ALPHA])), {}, COLOURS, id="RGBA"),
        pytest.param(picture(), {"transparency": (1, 2, 3)}, COLOURS, id="RGB, one colour transparent"),
        pytest.param(indexed(), {}, TABLE[INDEX], id="palette"),
        pytest.param(indexed(), {"transparency": 3}, TABLE[INDEX], id="palette, one colour transparent"),
        pytest.param(indexed(), {"transparency": bytes(range(16))}, TABLE[INDEX], id="palette, all transparent"),
        pytest.param(Image.fromarray(GREY.astype(np.uint16) * 257), {}, GREY_AS_COLOURS, id="16 bit grey"),
    ],
)
@pytest.mark.filterwarnings("error")  # Pillow warns where it guesses
def test_modes_of_pictures(folder, made, options, expected):
    """Transparency is dropped and every pixel keeps its colour."""
    made.save(folder / "images" / "a.png", **options)
    assert np.array_equal(Folder(folder, size=SIDE)[0].image.permute(1, 2, 0), expected)


def test_cmyk_jpeg(folder):
    Image.new("CMYK", (SIDE, SIDE), (0, 255, 255, 0)).save(folder / "images" / "a.jpg", quality=95)
    assert Image.open(folder / "images" / "a.jpg").mode == "CMYK"
    image = reading(folder).image[0].float()
    assert (image - torch.tensor([255.0, 0, 0])[:, None, None]).abs().max() < 8, "red"


def test_floating_point_pictures(tmp_path):
    values = (GREY / 255).astype(np.float32)
    for scale in (1, 255):
        Image.fromarray(values * scale).save(tmp_path / "a.tiff")
        assert np.array_equal(read_image(tmp_path / "a.tiff"), GREY_AS_COLOURS)
    values[0, 0] = np.nan
    Image.fromarray(values).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match=r"a.tiff cannot be read as a picture: it holds values that are not finite"):
        read_image(tmp_path / "a.tiff")


def test_large_pictures_are_brought_to_bytes_in_parts(monkeypatch, tmp_path):
    monkeypatch.setattr("cutslots.data.folder.PIECE", 7)
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png"), GREY_AS_COLOURS)


def test_what_a_picture_says_of_itself_is_dropped(tmp_path):
    picture(COLOURS).save(tmp_path / "a.png", transparency=(1, 2, 3), dpi=(72, 72), icc_profile=b"none")
    read = read_image(tmp_path / "a.png")
    assert np.array_equal(read, COLOURS) and not read.info, "nor is it written with what is made of it"


def test_a_picture_that_is_too_long(tmp_path):
    Image.new("L", (1_000_001, 1)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a.png .*it has 1000001x1 pixels; expected sides of at most 1,000,000"):
        read_image(tmp_path / "a.png")


def test_photographs_are_turned_upright(folder):
    """Orientation 6: the camera was held so that the left of the file is the top of the scene."""
    colours = np.zeros((16, 32, 3), dtype=np.uint8)
    colours[:, :16, 0], colours[:, 16:, 2] = 255, 255  # red on the left, blue on the right
    colours[8:, :, 1] = 255  # green added below, which comes to lie on the left
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(colours).save(folder / "images" / "a.jpg", **JPEG, exif=exif)
    upright = read_image(folder / "images" / "a.jpg")
    assert upright.size == (16, 32)
    expected = np.rot90(colours, -1).astype(int)
    assert np.abs(np.asarray(upright).astype(int) - expected).max() < 12
    add_mask(folder, Image.fromarray(np.tile(np.uint8([[1], [2]]), (1, 16)).repeat(16, 0)))
    image, mask = Folder(folder, size=32)[0]
    assert (image[0, :15] > 200).all() and (image[2, 17:] > 200).all() and (image[1, :, :15] > 200).all()
    assert (mask[:16] == 1).all() and (mask[16:] == 2).all(), "a mask lies on the upright picture"


def test_one_pixel(folder):
    Image.new("RGB", (1, 1), (10, 20, 30)).save(folder / "images" / "a.png")
    add_mask(folder, Image.new("L", (1, 1), 5))
    image, mask = Folder(folder, size=SIDE)[0]
    assert (image == torch.tensor([10, 20, 30])[:, None, None]).all() and (mask == 5).all()


def test_open_data_finds_scenes():
    data = open_data("plain", "val", 16, 3)
    assert (data.family, data.split, data.size, len(data), data.objects) == ("plain", "val", 16, 3, [3, 10])
    assert open_data("plain:2-5", "train", 16).objects == [2, 5]
    assert data.render([0]).image.shape == (1, 3, 16, 16)


def test_open_data_finds_folders(folder):
    numbered(folder, 25)
    data = open_data(str(folder), "val", 16, 2)
    assert isinstance(data, Folder) and numbers(data) == [0, 10] and data[0].image.shape == (3, 16, 16)


@pytest.mark.parametrize(
    "name, message",
    [
        ("plain:5-2", r"objects is \(5, 2\); expected a range between 1 and 10"),
        ("plain:0-3", r"objects is \(0, 3\); expected a range between 1 and 10"),
        ("plain:x", "data is 'plain:x'; expected numbers of objects as in plain:2-5"),
        ("nothing", "data is 'nothing'; expected one of plain, textured, ood, camo, moving, clevr:DIR, "),
    ],
)
def test_open_data_refuses(name, message):
    with pytest.raises(ValueError, match=message):
        open_data(name, "train", 16)


@pytest.mark.parametrize("count", [1, 32, 33])
def test_held_images_are_the_same(count):
    data = open_data("plain", "val", 16, count)
    held = hold(data, quiet=True)
    assert isinstance(held, Held) and len(held) == count
    chosen = [count - 1, 0, count // 2]
    for one, other in zip(held.render(chosen), data.render(chosen), strict=True):
        assert torch.equal(one, other) and one.dtype == torch.uint8
    with pytest.raises(IndexError, match=f"{count} is out of range"):
        held.render([count])


def test_what_does_not_fit_is_not_held(folder, monkeypatch):
    numbered(folder, 3)
    data = Folder(folder, size=16)
    monkeypatch.setattr("cutslots.data.HOLD", 3 * 4 * 16 * 16)
    assert isinstance(hold(data, quiet=True), Held)
    monkeypatch.setattr("cutslots.data.HOLD", 3 * 4 * 16 * 16 - 1)
    assert hold(data, quiet=True) is data


def test_nothing_to_hold():
    with pytest.raises(ValueError, match=r"^validation: there are no images$"):
        hold(open_data("plain", "val", 16, 0), title="validation")
