import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from cutslots.data import DATASETS, DatasetConfig, data_text, open_dataset, parse_data
from cutslots.data.builtin import CamoConfig, MovingConfig, OodConfig, PlainConfig, TexturedConfig
from cutslots.data.folder import Folder, FolderConfig
from cutslots.data.prepare import prepare
from cutslots.data.prepared import ClevrConfig, ClevrtexConfig, MoviAConfig, Prepared
from cutslots.data.video import VideoFrames
from cutslots.registry import Range, plugins_of
from cutslots.scenes import Scenes
from tests.data.arrays import Arrays
from tests.data.small_files import clevrtex_files, write_files, write_movi
from tests.small_runs import Command

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_dataset.py"
BUILT_IN = ["plain", "textured", "ood", "camo", "moving"]
CLEVRTEX = ["clevrtex", "clevrtex-ood", "clevrtex-camo", "clevrtex-pbg", "clevrtex-vbg", "clevrtex-grassbg"]
PREPARED = ["clevr", *CLEVRTEX, "movi-a", "movi-c", "movi-e", "coco", "voc", "davis", "ytvis"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine" / "images").mkdir(parents=True)
    for i in range(25):
        Image.new("RGB", (2, 2), (i, i, i)).save(tmp_path / "mine" / "images" / f"{i:03d}.png")
    return tmp_path / "mine"


@pytest.fixture
def plugin(monkeypatch):
    """Register a dataset of videos as a plugin does."""
    monkeypatch.setattr(DATASETS, "parts", dict(DATASETS.parts))

    @dataclass(frozen=True)
    class NoiseConfig(DatasetConfig):
        frames: Annotated[int, Range(1, 9)] = 1
        scale: float = 1.0
        bright: bool = False
        kind: Literal["a", "b"] = "a"
        label: str | None = None
        levels: tuple[float, ...] = ()

    @DATASETS.register("noise", NoiseConfig)
    def open_noise(split, image_size, count, frames, **options):
        """Random bytes."""
        assert split == "val" and image_size == (6, 10)
        return Arrays(7 if count is None else min(count, 7), frames)

    return NoiseConfig


# ------------------------------------------------------------------------------------------------------------ registry


def test_names_and_summaries():
    names = [*BUILT_IN, *PREPARED, "folder"]
    assert DATASETS.names()[: len(names)] == names
    assert all(part.summary.endswith(".") for part in DATASETS.parts.values())


@pytest.mark.parametrize("name", [*BUILT_IN, *PREPARED, "folder"])
def test_configs_round_trip_through_json(name):
    values = {"name": name} | ({} if name in BUILT_IN else {"path": "some/where"})
    config = DATASETS.from_dict(values)
    assert DATASETS.from_dict(DATASETS.to_dict(config)) == config and plugins_of(config) == []


@pytest.mark.parametrize("family", BUILT_IN)
def test_built_in_scenes(family):
    data = open_dataset(DATASETS.from_dict({"name": family, "num_objects": (2, 3)}), "val", 16, 2)
    expected = Scenes(family, "val", 16, 0, 2, (2, 3)).get_batch([0]).image
    assert np.array_equal(data.get_batch([0]).image, expected if family != "moving" else expected[:, 0])
    assert len(data) == 2 and data.image_size == (16, 16)


@pytest.mark.parametrize("config", [TexturedConfig, OodConfig, CamoConfig])
def test_training_options_do_not_change_the_scenes(config):
    name = DATASETS.part_of(config()).name
    changed = config(texture_ramp_start=10, texture_ramp_end=10**9, low_contrast_start=7)
    one, other = (open_dataset(each, "train", 16, 1).get_batch([0]).image for each in (config(), changed))
    assert np.array_equal(one, other) and data_text(changed) == name


@pytest.mark.parametrize(
    "config, values, message",
    [
        (PlainConfig, {"num_objects": (5, 2)}, r"num_objects is \(5, 2\); expected a range between 1 and 10"),
        (MovingConfig, {"num_objects": (0, 3)}, r"num_objects is \(0, 3\); expected a range between 1 and 10"),
        (PlainConfig, {"num_objects": (3, 11)}, r"num_objects is \(3, 11\); expected a range between 1 and 10"),
        (PlainConfig, {"num_objects": 3}, "num_objects is 3; expected 2 values"),
        (ClevrConfig, {"path": "a", "num_objects": (5, 2)}, r"num_objects is \(5, 2\); expected the smaller number"),
        (ClevrConfig, {"path": "a", "num_objects": (0, 256)}, "num_objects is .*; expected 2 values, each an integer"),
        (ClevrConfig, {"path": 3}, "path is 3; expected a str"),
        (TexturedConfig, {"low_contrast": 1.5}, "low_contrast is 1.5; expected a number from 0 to 1"),
        (TexturedConfig, {"texture_ramp_end": 10**9 + 1}, "texture_ramp_end is .*; expected an integer from 0 to"),
        (
            TexturedConfig,
            {"texture_ramp_start": 5, "texture_ramp_end": 4},
            "texture_ramp_start is 5; expected at most texture_ramp_end, 4",
        ),
        (CamoConfig, {"low_contrast": 0.1}, "low_contrast is 0.1; expected 0 for camo, whose objects already have"),
        (FolderConfig, {"path": "a", "resize": "pad"}, "resize is 'pad'; expected one of stretch, crop"),
    ],
)
def test_options_are_checked(config, values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        config(**values)


def test_plugin_dataset(plugin):
    images = open_dataset("noise", "val", (6, 10))
    assert len(images) == 7 and images.frames == 1 and images.image_size == (6, 10)
    frames = open_dataset("noise:frames=3", "val", (6, 10), 5)
    assert isinstance(frames, VideoFrames) and len(frames) == 5 and len(frames.as_videos()) == 2
    videos = open_dataset(plugin(frames=3), "val", (6, 10), 5, videos=True)
    assert isinstance(videos, Arrays) and len(videos) == 5 and videos.frames == 3


def test_example_dataset_from_the_command_line(tmp_path):
    words = ["--data", "discs:max_discs=3", "--plugin", str(EXAMPLE), "--num-images", "2", "--out", str(tmp_path)]
    command = Command(["evaluate", "tiny-64", *words, "--accelerator", "cpu"], tmp_path / "log")
    assert command.end() == 0, command.said()
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results["discs:max_discs=3"]["num_images"] == 2


# ---------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    "text, config",
    [
        ("plain", PlainConfig()),
        ("plain:2-5", PlainConfig((2, 5))),
        ("clevr:data/clevr", ClevrConfig("data/clevr")),
        ("clevr:data/clevr:0-6", ClevrConfig("data/clevr", (0, 6))),
        ("movi-a:2-5", MoviAConfig("2-5")),
        ("clevrtex:a:b:c", ClevrtexConfig("a:b:c")),
        ("clevr:path=run=3/cache", ClevrConfig("run=3/cache")),
        ("clevr:path=a:2-5", ClevrConfig("a:2-5")),
        ("folder:some/where", FolderConfig("some/where")),
        ("folder:a,b,resize=crop", FolderConfig("a,b", "crop")),
        ('folder:path="a,resize=crop"', FolderConfig("a,resize=crop")),
    ],
)
def test_text_and_config(text, config):
    assert parse_data(text) == config and data_text(config) == text


@pytest.mark.parametrize(
    "text, config",
    [
        ("plain:num_objects=2-5", PlainConfig((2, 5))),
        ("plain:num_objects=[2, 5]", PlainConfig((2, 5))),
        ("clevr:num_objects=none,path=a", ClevrConfig("a")),
        ("folder:resize=stretch,path=a", FolderConfig("a")),
        ("folder:path=a,resize=crop", FolderConfig("a", "crop")),
        ("textured:2-5,low_contrast=0.25", TexturedConfig((2, 5), low_contrast=0.25)),
        ("clevr:a,num_objects=2-5", ClevrConfig("a", (2, 5))),
        ("textured:low_contrast=0.25,texture_ramp_end=2000", TexturedConfig(low_contrast=0.25, texture_ramp_end=2000)),
    ],
)
def test_other_texts_of_a_config(text, config):
    assert parse_data(text) == config


BOUNDS = st.tuples(st.integers(1, 10), st.integers(1, 10)).map(sorted).map(tuple)
PATHS = st.text(max_size=12) | st.sampled_from(
    ["2-5", "a:2-5", "path=a", ",resize=crop", '"', '"a"', "none", "a\n", "\\"]
)


@given(BOUNDS)
def test_round_trip_of_scenes(bounds):
    assert parse_data(data_text(PlainConfig(bounds))) == PlainConfig(bounds)


@given(PATHS, st.none() | BOUNDS)
@example("", None)
def test_round_trip_of_caches(path, bounds):
    config = ClevrConfig(path, bounds)
    assert parse_data(data_text(config)) == config


@given(PATHS, st.sampled_from(["stretch", "crop"]))
def test_round_trip_of_folders(path, resize):
    config = FolderConfig(path, resize)
    assert parse_data(data_text(config)) == config


def test_values_of_every_type(plugin):
    for config in (
        plugin(),
        plugin(3, 0.5, True, "b", "text", (0.5, -1.0)),
        plugin(label="none"),
        plugin(label="a,kind=b"),
        plugin(levels=(1.0, 2.0), label=""),
        plugin(scale=-1e-05),
    ):
        assert parse_data(data_text(config)) == config
    assert parse_data("noise:label=none").label is None and parse_data('noise:label="none"').label == "none"
    assert data_text(plugin(2, bright=True)) == "noise:frames=2,bright=true"


@pytest.mark.parametrize(
    "text, message",
    [
        ("nothing", "data is 'nothing'; expected one of plain, textured, ood, camo, moving, clevr:DIR, .*, folder:DIR"),
        ("", "data is ''; expected one of plain, "),
        ("clevr", "data is 'clevr'; expected one of plain, "),
        ("clevr:", "data is 'clevr:'; expected clevr:DIR$"),
        ("plain:", "data is 'plain:'; expected numbers of objects as in plain:2-5"),
        ("plain:x", "data is 'plain:x'; expected numbers of objects as in plain:2-5"),
        ("plain:5-2", r"num_objects is \(5, 2\); expected a range between 1 and 10"),
        ("plain:size=3", "dataset 'plain' has no option 'size'; its options are num_objects, variation$"),
        ("plain:num_objects=x", "data is 'plain:num_objects=x', where num_objects is 'x'; expected MIN-MAX"),
        ("folder:resize=crop", "dataset 'folder' lacks path$"),
        ("folder:resize=pad,path=a", "data is .*, where resize is 'pad'; expected one of stretch, crop$"),
        ("clevr:size=3", "dataset 'clevr' has no option 'size'; its options are path, num_objects$"),
        ("textured:low_contrast=much", "data is .*, where low_contrast is 'much'; expected a number$"),
        ("noise:3", "data is 'noise:3'; expected options as in noise:frames=...$"),
        ("noise:frames=10", "frames is 10; expected an integer from 1 to 9$"),
        ("noise:bright=1", "data is .*, where bright is '1'; expected true or false$"),
    ],
)
def test_wrong_texts(plugin, text, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        parse_data(text)
    assert "\n" not in str(caught.value)


def test_path_of_a_folder(folder, monkeypatch):
    assert parse_data(str(folder)) == FolderConfig(str(folder))
    monkeypatch.chdir(folder.parent)
    assert parse_data("mine") == FolderConfig("mine")
    folder.rename("clevr")
    assert parse_data("clevr") == FolderConfig("clevr"), "a name that needs a path is one itself"
    (folder.parent / "clevr").rename("plain")
    assert parse_data("plain") == PlainConfig() and parse_data("./plain") == FolderConfig("./plain")
    (folder.parent / "a=b").mkdir()
    assert parse_data("clevr:a=b") == ClevrConfig("a=b")


def test_path_of_a_cache(tmp_path):
    source = write_files(tmp_path / "source", clevrtex_files("full", (1,) * 4))
    prepare("clevrtex", source, tmp_path / "out", 16, quiet=True)
    config = parse_data(str(tmp_path / "out"))
    assert config == ClevrtexConfig(str(tmp_path / "out")) and data_text(config) == f"clevrtex:{tmp_path / 'out'}"
    data = open_dataset(config, "train")
    assert isinstance(data, Prepared) and data.image_size == (16, 16) and data.memory_mapped
    with pytest.raises(ValueError, match=r"is prepared at 16x16 and 24x32 is wanted; prepared datasets are square$"):
        open_dataset(config, "train", (32, 24))


# ---------------------------------------------------------------------------------------------------------------- open


def test_image_size_is_128_by_default(folder):
    assert open_dataset("plain", "val").image_size == open_dataset(str(folder), "val").image_size == (128, 128)


def test_scenes_of_any_image_size():
    data = open_dataset("plain", "val", (16, 32), 1)
    assert data.image_size == (16, 32) and data[0].image.shape == (3, 16, 32)


def test_split_is_checked(plugin):
    with pytest.raises(ValueError, match=r"^split is 'dev'; expected one of train, val, test$"):
        open_dataset("noise", "dev")


def test_folders(folder):
    data = open_dataset(str(folder), "val", 16, 2)
    assert isinstance(data, Folder) and [data.name(i) for i in range(2)] == ["000", "010"]
    data = open_dataset(f"folder:path={folder},resize=crop", "test", (4, 6))
    assert len(data) == 25 and data[0].image.shape == (3, 4, 6)


def test_masks_are_not_read_without_need(folder):
    (folder / "masks").mkdir()
    (folder / "masks" / "000.png").write_text("not an image")
    data = open_dataset(str(folder), "test", 4, 1, masks=False)
    assert not data.has_masks and not data[0].mask.any()
    with pytest.raises(ValueError, match=re.escape(f"{folder / 'masks' / '000.png'} cannot be read as an image")):
        open_dataset(str(folder), "test", 4, 1)[0]


@pytest.mark.parametrize("count, videos", [(1, 1), (24, 1), (25, 2), (49, 2), (None, 2)])
def test_videos_as_frames_and_as_videos(tmp_path_factory, count, videos):
    root = tmp_path_factory.mktemp("movi")
    prepare("movi-a", write_movi(root / "source", {"train": [2], "validation": [1]}, 32), root / "out", 16, quiet=True)
    frames = open_dataset(f"movi-a:{root / 'out'}", "train", count=count)
    assert isinstance(frames, VideoFrames) and len(frames) == min(count or 48, 48)
    assert len(frames.as_videos()) == videos and frames.as_videos().frames == 24
    assert len(open_dataset(f"movi-a:{root / 'out'}", "train", count=count, videos=True)) == min(count or 2, 2)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PlainConfig().num_objects = (1, 2)
