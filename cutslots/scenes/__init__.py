"""Built-in scenes: images and videos of textured 3-D objects with exact masks, generated on demand.

Reading order:

    sample         decides what a scene contains (sample_triton: random numbers on CUDA)
    variation      what varied scenes vary; their lights and sensor
    scene_batch    the contents of a batch of scenes as arrays; the camera
    physics        moves the objects of videos
    shapes         intersects rays with objects
    materials      color patterns and reliefs of surfaces
    render         casts the rays: images and masks (render_triton, shapes_triton, materials_triton: CUDA kernels)
    dataset        scenes by index, by batch, or from a cache
    export         scenes as files
"""

from cutslots.dataset import MemmapDataset, Sample
from cutslots.scenes.dataset import Scenes
from cutslots.scenes.sample import FAMILIES, SPLITS

__all__ = ["FAMILIES", "SPLITS", "MemmapDataset", "Sample", "Scenes"]
