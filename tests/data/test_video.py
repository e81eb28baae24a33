"""`Clips` and `VideoFrames` on videos that are not square; those of built-in scenes are in test_scene_videos.py."""

import pytest
import torch

from cutslots.data.video import Clips, VideoFrames
from tests.data.arrays import Arrays


def test_frames_of_videos_are_images():
    videos = Arrays(3, 4)
    data = VideoFrames(videos)
    assert len(data) == 12 and data.frames == 1 and data.image_size == (6, 10) and data.as_videos() is videos
    assert [data.name(i) for i in (0, 3, 4, 11)] == ["000000-00", "000000-03", "000001-00", "000002-03"]
    sample = data.get_batch([11, 0, 4])
    assert torch.equal(sample.image, videos.image.flatten(0, 1)[[11, 0, 4]])
    assert torch.equal(sample.mask, videos.mask.flatten(0, 1)[[11, 0, 4]])
    assert len(VideoFrames(videos, 5)) == 5 and len(VideoFrames(videos, 99)) == 12


def test_clips_are_runs_of_consecutive_frames():
    videos = Arrays(3, 4)
    data = Clips(videos, 3)
    assert len(data) == 6 and data.frames == 3 and data.image_size == (6, 10)
    sample = data.get_batch([5, 2])
    assert torch.equal(sample.image, torch.stack([videos.image[2, 1:4], videos.image[1, 0:3]]))
    assert torch.equal(sample.mask, torch.stack([videos.mask[2, 1:4], videos.mask[1, 0:3]]))
    with pytest.raises(
        ValueError, match=r"^the videos have 4 frames; expected at least 5 \(--data moving, movi-a:DIR\)$"
    ):
        Clips(videos, 5)


def test_clips_of_frames_further_apart():
    videos = Arrays(2, 5)
    data = Clips(videos, 2, max_gap=3)
    expected = [(v, t, t + gap) for v in range(2) for gap in (1, 2, 3) for t in range(5 - gap)]
    assert len(data) == len(expected) == 2 * (4 + 3 + 2)
    sample = data.get_batch(range(len(data)))
    for clip, (video, first, second) in zip(sample.image, expected, strict=True):
        assert torch.equal(clip, videos.image[video, [first, second]])
    with pytest.raises(
        ValueError, match=r"^the videos have 5 frames; expected at least 7 with max_frame_gap 3 \(--data moving"
    ):
        Clips(videos, 3, max_gap=3)


@pytest.mark.parametrize("has_masks", [True, False])
def test_has_masks_is_that_of_the_videos(has_masks):
    videos = Arrays(2, 4)
    videos.has_masks = has_masks
    assert VideoFrames(videos).has_masks is Clips(videos, 2).has_masks is has_masks
