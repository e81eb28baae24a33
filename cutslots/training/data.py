"""The datasets of a training run: images to train on, images to validate on, and scenes for the curriculum."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from lightning_fabric import Fabric

from cutslots.data.builtin import SceneConfig, TexturedSceneConfig
from cutslots.data.memory import load_to_memory
from cutslots.data.open import open_dataset
from cutslots.data.text import data_text, parse_data
from cutslots.data.video import Clips, VideoFrames
from cutslots.dataset import Dataset, VideoDataset
from cutslots.scenes import Scenes
from cutslots.scenes.dataset import Textures
from cutslots.training.config import MIX_FRACTION, RunConfig
from cutslots.training.teacher import with_labels

MAX_RAMP_SCENES, MAX_LOW_CONTRAST_SCENES, MAX_MIXED_SCENES = 12_000, 16_000, 16_000


class Curriculum(NamedTuple):
    """Scenes that replace those of the dataset for some steps or some images (see `TexturedSceneConfig`)."""

    options: TexturedSceneConfig
    ramp: Dataset | None  # sorted by the strength of their textures
    low_contrast: Dataset | None


def open_split(config: RunConfig, split: str, count: int | None) -> Any:
    """Open a split: images, or videos for a model of clips. Models, not encoders, are validated on videos as such."""
    data = open_dataset(config.data, split, config.image_size, count, masks=split != "train")
    if config.frames == 1 and (split == "train" or not config.validates_on_videos):
        return data
    data = data.as_videos()
    if config.frames > 1 and data.frames == 1:
        raise ValueError(
            f"data is {data_text(config.data)!r}, which holds images; a model of {config.frames} frames expects "
            "videos, such as moving or movi-a:DIR"
        )
    return data


def open_training_data(config: RunConfig, fabric: Fabric) -> Dataset:
    """Open the images, or videos, of the training split; say how many of them are used."""
    assert config.num_images != "endless"  # which has a loader of its own
    data = open_split(config, "train", config.num_images)
    total = len(data) if config.num_images is None else len(open_split(config, "train", None))
    if len(data) < total and fabric.global_rank == 0:
        kind = "images" if data.frames == 1 else "videos"
        print(f"training on the first {len(data):,} of {total:,} {kind} (--num-images)")
    return data


def training_data(config: RunConfig, fabric: Fabric) -> Dataset:
    """Return the images, or clips, of the training split, in memory if they fit."""
    data, title = open_training_data(config, fabric), f"{data_text(config.data)}, train"
    loaded, flat = _load(data, config, fabric, title), _flat_scenes(data, config)
    return training_samples(with_labels(loaded, config, fabric, title, (flat or data).fingerprint(), flat), config)


def _flat_scenes(data: Any, config: RunConfig) -> Scenes | None:
    """Return what a teacher sees in the place of built-in scenes: the same with flat textures, if the data say so."""
    if not (isinstance(config.data, TexturedSceneConfig) and config.data.flat_teacher):
        return None
    size = (data.image_size, data.seed, len(data))
    return Scenes(data.family, "train", *size, data.num_objects, "flat", data.variation)


def training_samples(data: Dataset, config: RunConfig) -> Dataset:
    """Return what a model trains on: the images, or the clips of videos."""
    if config.frames == 1:
        return data
    return Clips(cast(VideoDataset, data), config.frames, config.max_frame_gap)


def open_mixed_data(config: RunConfig) -> Dataset | None:
    """Open the second dataset of a run, if it has one."""
    if config.mix_data is None:
        if config.mix_fraction != MIX_FRACTION:
            raise ValueError(f"mix_fraction is {config.mix_fraction}, but mix_data is not given; expected both")
        return None
    if config.frames > 1:
        raise ValueError(f"mix_data is {config.mix_data!r}; a model of {config.frames} frames expects none")
    try:
        dataset = parse_data(config.mix_data)
        count = MAX_MIXED_SCENES if isinstance(dataset, SceneConfig) else None
        return open_dataset(dataset, "train", config.image_size, count, masks=False)
    except ValueError as error:
        raise ValueError(f"mix_data: {error}") from None


def mixed_data(config: RunConfig, fabric: Fabric) -> Dataset | None:
    """Return the images of the second dataset of a run, if it has one, in memory if they fit."""
    data, title = open_mixed_data(config), f"{config.mix_data}, train"
    if data is None:
        return None
    return with_labels(_load(data, config, fabric, title), config, fabric, title, data.fingerprint())


def validation_data(config: RunConfig, fabric: Fabric) -> Dataset:
    """Return the images, or videos, that a run is validated on."""
    data = open_split(config, "val", config.num_eval_images)
    return _load(data, config, fabric, f"{data_text(config.data)}, val")


def curriculum(config: RunConfig, fabric: Fabric, count: int, step: int) -> Curriculum | None:
    """Return the scenes of the curriculum that the rest of the run needs after this step, if it has one."""
    options = config.data
    if not isinstance(options, TexturedSceneConfig) or config.frames > 1 or step >= config.max_steps:
        return None
    ramp_end = options.texture_ramp_end
    if ramp_end >= config.max_steps and fabric.global_rank == 0:
        print(f"textures reach full strength at step {ramp_end:,} (--data.texture-ramp-end); this run ends before")
    needs_ramp = step < ramp_end
    needs_low_contrast = options.low_contrast > 0 and max(options.low_contrast_start, ramp_end) < config.max_steps
    return Curriculum(
        options,
        _variant("ramp", min(count, MAX_RAMP_SCENES), 1, config, fabric) if needs_ramp else None,
        _variant("low-contrast", min(count, MAX_LOW_CONTRAST_SCENES), 2, config, fabric)
        if needs_low_contrast
        else None,
    )


def _variant(textures: Textures, count: int, seed: int, config: RunConfig, fabric: Fabric) -> Dataset:
    """Return as many scenes of the run's family with other textures. Their seed differs from the run's scenes, 0."""
    like: Scenes = open_split(config, "train", count)
    size = (like.image_size, seed, len(like))
    scenes = Scenes(like.family, "train", *size, like.num_objects, textures, like.variation)
    return _load(scenes, config, fabric, f"{data_text(config.data)}, {textures}")


def _load(data: Any, config: RunConfig, fabric: Fabric, title: str) -> Dataset:
    """Return a dataset in memory; built-in scenes from the cache folder, if there is one."""
    if isinstance(data, VideoFrames):
        return VideoFrames(cast(VideoDataset, _load(data.videos, config, fabric, title)), data.count)
    if config.cache_dir is not None and isinstance(data, Scenes):  # one process renders, the others wait and read
        with fabric.rank_zero_first(local=True):
            data = data.cache(config.cache_dir / data.cache_name, fabric.device, quiet=fabric.local_rank > 0)
    return load_to_memory(data, fabric.device, fabric.global_rank > 0, title)
