"""Videos as images and as clips: `VideoFrames` returns single frames, `Clips` a few frames of one video."""

from __future__ import annotations

import numpy as np
import torch

from cutslots.dataset import Dataset, Indices, Sample, VideoDataset, check_indices


class VideoFrames(Dataset):
    """The frames of videos as images, one video after the other; the first `count` of them, or all."""

    def __init__(self, videos: VideoDataset, count: int | None = None) -> None:
        self.videos, self.image_size, self.has_masks = videos, videos.image_size, videos.has_masks
        self.ignore_label = videos.ignore_label
        total = len(videos) * videos.frames
        self.count = total if count is None else min(count, total)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        video, frame = divmod(index, self.videos.frames)
        return f"{self.videos.name(video)}-{frame:02d}"

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        return self.videos.get_frames(*np.divmod(check_indices(indices, len(self)), self.videos.frames), device)

    def fingerprint(self) -> str | None:
        videos = self.videos.fingerprint()
        return None if videos is None else f"{videos}, frames {self.count}"

    def as_videos(self) -> VideoDataset:
        return self.videos


class Clips(Dataset):
    """All clips of `length` frames that are 1 to `max_gap` frames apart: images (B, length, 3, H, W)."""

    def __init__(self, videos: VideoDataset, length: int, max_gap: int = 1) -> None:
        self.videos, self.frames = videos, length
        self.image_size, self.has_masks = videos.image_size, videos.has_masks
        self.ignore_label = videos.ignore_label
        needed = (length - 1) * max_gap + 1
        if videos.frames < needed:
            gap = f" with max_frame_gap {max_gap}" if max_gap > 1 else ""
            raise ValueError(
                f"the videos have {videos.frames} frames; expected at least {needed}{gap} (--data moving, movi-a:DIR)"
            )
        gaps = range(1, max_gap + 1)
        self.clips = np.array([(i, gap) for gap in gaps for i in range(videos.frames - (length - 1) * gap)])

    def __len__(self) -> int:
        return len(self.videos) * len(self.clips)

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        video, clip = np.divmod(check_indices(indices, len(self)), len(self.clips))
        start, gap = self.clips[clip].T
        frames = start[:, None] + gap[:, None] * np.arange(self.frames)
        sample = self.videos.get_frames(video.repeat(self.frames), frames.reshape(-1), device)
        return Sample(*(x.unflatten(0, (len(video), self.frames)) for x in sample))
