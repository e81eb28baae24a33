"""Images to work on: built-in scenes, uploaded images and videos."""

import re

import numpy as np
import pytest
from PIL import Image

from cutslots.app.sources import MAX_FRAMES, MAX_PHOTOGRAPH, generate_scene, open_photograph, open_source
from cutslots.scenes import Scenes
from tests.inference.conftest import with_display_matrix


@pytest.mark.parametrize(
    "family, image_size, expected",
    [
        ("plain", (64, 64), 192),
        ("textured", (16, 16), 192),
        ("ood", (128, 128), 128),
        ("camo", (256, 256), 256),
        ("plain", (64, 128), 192),
        ("plain", (128, 96), 192),
    ],
)
def test_scene_size_is_a_multiple_of_the_shorter_side_of_the_model(family, image_size, expected):
    (frame,) = generate_scene(family, 3, 2, image_size).frames
    assert frame.size == (expected, expected) and frame.mode == "RGB"


def test_scene_matches_the_dataset():
    first, again, other = (np.asarray(generate_scene("plain", seed, 3, (64, 64)).frames[0]) for seed in (5, 5, 6))
    assert (first == again).all() and (first != other).any()
    expected = Scenes("plain", "test", 192, seed=5, count=1, num_objects=(3, 3))[0].image
    assert (first == expected.permute(1, 2, 0).numpy()).all()


@pytest.mark.parametrize(
    "family, seed, objects, message",
    [
        ("moving", 0, 3, "family is 'moving'"),
        ("plain", -1, 3, "seed is -1"),
        ("plain", 0, 0, "objects is"),
        ("plain", 0, 99, "objects is"),
    ],
)
def test_invalid_scene_options_are_named(family, seed, objects, message):
    with pytest.raises(ValueError, match=message):
        generate_scene(family, seed, objects, (64, 64))


def test_large_images_are_downscaled(tmp_path):
    Image.new("RGB", (300, 200), "red").save(tmp_path / "small.name.png")
    small = open_source(tmp_path / "small.name.png")
    assert [frame.size for frame in small.frames] == [(300, 200)] and small.name == "small_name" and not small.note
    Image.new("L", (3000, 1500)).save(tmp_path / "large.jpg")
    large = open_source(tmp_path / "large.jpg")
    assert large.frames[0].size == (768, 384) and "from 3000x1500 to 768x384" in large.note
    assert large.frames[0].mode == "RGB"


def test_photographs_keep_their_size_up_to_a_number_of_pixels(tmp_path, video):
    Image.new("L", (3000, 1500)).save(tmp_path / "large.jpg")
    large = open_photograph(tmp_path / "large.jpg")
    assert large.frames[0].size == (3000, 1500) and large.frames[0].mode == "RGB" and not large.note
    Image.new("L", (6000, 4000)).save(tmp_path / "huge.jpg")
    huge = open_photograph(tmp_path / "huge.jpg")
    width, height = huge.frames[0].size
    assert width * height == pytest.approx(MAX_PHOTOGRAPH, rel=1e-3)
    assert huge.note == f"Downscaled from 6000x4000 to {width}x{height}; the command segment keeps the full size."
    assert [frame.size for frame in open_photograph(video).frames] == [(60, 40)]


def test_video_has_at_most_max_frames(video, tmp_path):
    source = open_source(video)
    assert len(source.frames) == MAX_FRAMES and source.frames[0].size == (60, 40)
    still = tmp_path / "still.gif"
    Image.new("RGB", (30, 20)).save(still)
    assert len(open_source(still).frames) == 1


def test_videos_of_phones_are_upright(tmp_path):
    clip = np.zeros((2, 48, 64, 3), dtype=np.uint8)
    clip[:, :24] = 250  # the upper half; clockwise it becomes the right one
    with_display_matrix(tmp_path / "phone.mp4", clip, (0, 1, -1, 0))
    frame = np.asarray(open_source(tmp_path / "phone.mp4").frames[0])
    assert frame.shape == (64, 48, 3) and frame[:, :20].max() < 20 and frame[:, 28:].min() > 230


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("notes.png", b"these are not pixels", "notes.png cannot be read as a"),
        ("empty.jpg", b"", "empty.jpg cannot be read as a"),
        ("notes.gif", b"GIF89a but no more", "notes.gif cannot be read"),
        ("notes.txt", b"text", "notes.txt cannot be opened; expected a file that ends with .png"),
        ("video.mp4", b"\0no video", "video.mp4 cannot be"),
        (
            "list.mp4",
            b"ffconcat version 1.0\n# \1\nfile /etc/hosts",
            "list.mp4 is damaged or in a format that is not acc",
        ),
    ],
)
def test_unreadable_file_error_is_one_sentence_without_the_folder(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    for opener in (open_source, open_photograph):
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            opener(tmp_path / name)
        assert str(tmp_path) not in str(raised.value) and "\n" not in str(raised.value)
