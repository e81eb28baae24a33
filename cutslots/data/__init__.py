"""Datasets: opened by name, by path or by config, all through the protocol of `cutslots.dataset`.

In reading order:

    registry.py                       the registry of datasets and how to add yours
    open.py, text.py                  `open_dataset`; the text of --data and back
    builtin.py, prepared.py, folder.py, images.py
                                      the registered datasets: scenes, prepared caches, folders of images
    video.py, memory.py               frames and clips of videos; datasets in memory
    prepare.py                        `cutslots prepare`: published files to a cache
    published.py, source.py, resize.py, clevr.py, clevrtex.py, movi.py, archives.py, tfrecord.py
                                      the published datasets and their file formats
    coco.py, voc.py, davis.py, ytvis.py, photographs.py, annotations.py
                                      photographs and real videos
    inspect.py                        `cutslots inspect`
"""

from cutslots.data import builtin, prepared, folder  # noqa: F401, I001  the order of the registry, in help and messages
from cutslots.data.open import open_dataset
from cutslots.data.registry import DATASETS, DatasetConfig
from cutslots.data.text import data_text, parse_data

__all__ = ["DATASETS", "DatasetConfig", "data_text", "open_dataset", "parse_data"]
