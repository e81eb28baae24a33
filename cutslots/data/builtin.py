"""Built-in scenes as datasets: plain, textured, ood, camo, moving."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from cutslots.data.registry import DATASETS, DatasetConfig
from cutslots.registry import Range, Steps
from cutslots.scenes import Scenes
from cutslots.scenes.sample import MAX_OBJECTS, MIN_OBJECTS
from cutslots.scenes.variation import Variation

TRAINING = {"training": True}  # metadata of options that only training reads: they do not change the images


@dataclass(frozen=True)
class SceneConfig(DatasetConfig):
    """Options of all families of built-in scenes."""

    num_objects: Annotated[tuple[int, int], Range(0, 255)] = (MIN_OBJECTS, MAX_OBJECTS)
    """Smallest and largest number of objects in a scene."""
    variation: Variation = "none"
    """With v1, scenes vary more: light from any side, other cameras, surfaces and exposures."""

    def validate(self) -> None:
        super().validate()
        low, high = self.num_objects
        if not 1 <= low <= high <= MAX_OBJECTS:
            raise ValueError(
                f"num_objects is {self.num_objects}; expected a range between 1 and {MAX_OBJECTS}, as in (3, 10)"
            )


@dataclass(frozen=True)
class TexturedSceneConfig(SceneConfig):
    """Options of families with textures. Training can start with weak textures and add objects of low contrast."""

    texture_ramp_start: Steps = field(default=0, metadata=TRAINING)
    """Training step at which textures start to grow from almost none..."""
    texture_ramp_end: Steps = field(default=0, metadata=TRAINING)
    """...and at which they reach full strength. 0: full strength from the first step."""
    num_flat_scenes: Annotated[int, Range(0, 2**31)] = field(default=0, metadata=TRAINING)
    """With --num-images endless: scenes that repeat until textures start to grow. 0: none repeats."""
    low_contrast: Annotated[float, Range(0, 1)] = field(default=0.0, metadata=TRAINING)
    """Fraction of training images whose objects take on some of the background's colors."""
    low_contrast_start: Steps = field(default=0, metadata=TRAINING)
    """Training step of the first such images, which never come before textures have full strength."""
    flat_teacher: bool = field(default=False, metadata=TRAINING)
    """The teacher (--teacher) labels the scenes with flat textures; the model sees the full ones."""

    def validate(self) -> None:
        super().validate()
        if self.texture_ramp_end and self.texture_ramp_start > self.texture_ramp_end:
            raise ValueError(
                f"texture_ramp_start is {self.texture_ramp_start}; expected at most texture_ramp_end, "
                f"{self.texture_ramp_end}"
            )


@dataclass(frozen=True)
class PlainConfig(SceneConfig):
    pass


@dataclass(frozen=True)
class TexturedConfig(TexturedSceneConfig):
    pass


@dataclass(frozen=True)
class OodConfig(TexturedSceneConfig):
    pass


@dataclass(frozen=True)
class CamoConfig(TexturedSceneConfig):
    def validate(self) -> None:
        super().validate()
        if self.low_contrast:
            raise ValueError(
                f"low_contrast is {self.low_contrast}; expected 0 for camo, whose objects already have the "
                "background's material"
            )


@dataclass(frozen=True)
class MovingConfig(SceneConfig):
    pass


def register_family(family: str, config: type[SceneConfig], summary: str) -> None:
    def open_scenes(
        split: str,
        image_size: tuple[int, int],
        count: int | None,
        num_objects: tuple[int, int],
        variation: Variation,
        **training: float,
    ) -> Scenes:
        return Scenes(family, split, image_size, 0, count, num_objects, variation=variation)

    open_scenes.__doc__ = summary
    DATASETS.register(family, config)(open_scenes)


register_family("plain", PlainConfig, "Built-in scenes of objects of one color each, as in CLEVR.")
register_family("textured", TexturedConfig, "Built-in scenes with textures, as in CLEVRTEX.")
register_family("ood", OodConfig, "Built-in scenes with other shapes and textures than textured.")
register_family("camo", CamoConfig, "Built-in scenes whose objects have the background's material.")
register_family("moving", MovingConfig, "Built-in videos of objects that move and collide, as in MOVi-A.")
