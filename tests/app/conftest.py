"""Fixtures of the tests of the app: a scene, a model's output on it, and a short video."""

import pytest
from PIL import Image

from cutslots.app import discovery_tab
from cutslots.app.sources import generate_scene

CHECKPOINT = "tiny-64"


@pytest.fixture(scope="package")
def source():
    return generate_scene("plain", seed=1, objects=4, image_size=(64, 64))


@pytest.fixture(scope="package")
def view(source):
    return discovery_tab.discover(discovery_tab.load_cached(CHECKPOINT), source)


@pytest.fixture(scope="package")
def video(tmp_path_factory):
    """A GIF of 20 frames with a moving square, 60 by 40 pixels."""
    path = tmp_path_factory.mktemp("videos") / "square.gif"
    frames = []
    for t in range(20):
        frame = Image.new("RGB", (60, 40), "grey")
        frame.paste((200, 30, 30), (2 * t, 10, 2 * t + 14, 24))
        frames.append(frame)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80)
    return path
