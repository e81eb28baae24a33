"""Built-in scenes: textured 3-D worlds with exact masks, still and moving, made on the spot.

In reading order: `draw` decides what a scene holds, `physics` throws things about, `shapes` and `materials` say where
a ray meets an object and what it looks like there, `render` makes the picture, `dataset` and `files` hand it out.
"""

from cutslots.scenes.dataset import Cached, Sample, Scenes
from cutslots.scenes.draw import FAMILIES, SPLITS

__all__ = ["FAMILIES", "SPLITS", "Cached", "Sample", "Scenes"]
