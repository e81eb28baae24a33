"""Built-in videos as data: single frames and clips, rendered, in memory or from a cache."""

import pytest
import torch

from cutslots.data.memory import load_to_memory
from cutslots.data.open import open_dataset
from cutslots.data.video import Clips, VideoFrames
from cutslots.scenes import Scenes
from cutslots.scenes.dataset import DEFAULT_COUNT

FRAMES = 24  # of every video of `moving`
pytestmark = pytest.mark.usefixtures("simulate_once")


@pytest.fixture(scope="module")
def videos():
    return Scenes("moving", "train", 16, count=3)


@pytest.fixture(scope="module")
def rendered(videos):
    """All of them: images (3, 24, 3, 16, 16) and masks."""
    return videos.get_batch(range(3))


@pytest.fixture(scope="module", params=["rendered", "in memory", "cached in memory", "cached on disk"])
def source(request, videos, tmp_path_factory):
    """The same videos, from four sources."""
    if request.param == "rendered":
        return videos
    if request.param == "in memory":
        return load_to_memory(videos, quiet=True)
    return videos.cache(tmp_path_factory.mktemp("cache") if request.param == "cached on disk" else None, quiet=True)


def test_frames_are_the_same_from_every_source(source, rendered):
    assert len(source) == 3 and source.frames == FRAMES
    at = [2, 0, 2, 1, 2], [23, 0, 5, 7, 5]
    image, mask = source.get_frames(*at)
    assert torch.equal(image, rendered.image[at]) and torch.equal(mask, rendered.mask[at])
    for videos, frames in (([3], [0]), ([0], [FRAMES]), ([-1], [0])):
        with pytest.raises(IndexError, match="is out of range"):
            source.get_frames(videos, frames)


@pytest.mark.parametrize("kind", ["rendered", "in memory", "cached"])
def test_images_are_videos_of_one_frame(kind):
    scenes = Scenes("plain", size=16, count=4)
    data = {
        "rendered": lambda: scenes,
        "in memory": lambda: load_to_memory(scenes, quiet=True),
        "cached": lambda: scenes.cache(quiet=True),
    }
    image, mask = data[kind]().get_frames([3, 1, 3], [0, 0, 0])
    expected = scenes.get_batch([3, 1, 3])
    assert torch.equal(image, expected.image) and torch.equal(mask, expected.mask)


@pytest.mark.parametrize("length", [1, 2, 5, FRAMES])
def test_clips_are_all_runs_of_consecutive_frames(source, rendered, length):
    starts = FRAMES - length + 1
    data = Clips(source, length)
    assert len(data) == 3 * starts
    indices = [0, starts - 1, starts % len(data), len(data) - 1, 0]
    image, mask = data.get_batch(indices)
    assert image.shape == (5, length, 3, 16, 16) and mask.shape == (5, length, 16, 16)
    for row, i in enumerate(indices):
        run = i // starts, slice(i % starts, i % starts + length)
        assert torch.equal(image[row], rendered.image[run]) and torch.equal(mask[row], rendered.mask[run])
    with pytest.raises(IndexError, match=f"index {len(data)} is out of range"):
        data.get_batch([len(data)])


def test_videos_that_are_too_short(videos):
    with pytest.raises(ValueError, match=r"^the videos have 24 frames; expected at least 25 \(--data moving"):
        Clips(videos, FRAMES + 1)
    with pytest.raises(ValueError, match=r"^the videos have 1 frames; expected at least 2"):
        Clips(Scenes("plain", size=16, count=2), 2)


def test_frames_of_videos_are_images(source, rendered):
    data = VideoFrames(source)
    assert len(data) == 3 * FRAMES
    assert [data.name(i) for i in (0, 23, 24, 71)] == ["000000-00", "000000-23", "000001-00", "000002-23"]
    chosen = [71, 0, 24, 23, 24]
    image, mask = data.get_batch(chosen)
    assert torch.equal(image, rendered.image.flatten(0, 1)[chosen]) and torch.equal(
        mask, rendered.mask.flatten(0, 1)[chosen]
    )
    assert len(VideoFrames(source, 30)) == 30 and len(VideoFrames(source, 1000)) == 3 * FRAMES
    with pytest.raises(IndexError, match="index 30 is out of range"):
        VideoFrames(source, 30).get_batch([30])


def test_moving_scenes_are_opened_as_frames(rendered):
    data = open_dataset("moving", "train", 16, 30)
    assert isinstance(data, VideoFrames) and len(data) == 30 and len(data.videos) == 2
    assert torch.equal(data.get_batch([29, 0]).image, rendered.image[[1, 0], [5, 0]])
    assert len(open_dataset("moving", "val", 16)) == DEFAULT_COUNT["val"] * FRAMES
    assert open_dataset("moving:2-3", "val", 16).videos.num_objects == (2, 3)


@pytest.mark.parametrize("frames, count", [(1, 1), (24, 1), (25, 2), (48, 2), (49, 3), (None, DEFAULT_COUNT["train"])])
def test_the_number_of_videos_follows_from_the_number_of_frames(frames, count):
    assert len(open_dataset("moving", "train", 16, frames).as_videos()) == count
    assert len(open_dataset("plain", "train", 16, frames).as_videos()) == (frames or count)
