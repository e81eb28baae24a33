"""The data of a run: scenes, folders, caches, videos, and the scenes of the curriculum."""

import shutil

import pytest

from cutslots.data.video import Clips, VideoFrames
from cutslots.devices import make_fabric
from cutslots.scenes import Scenes
from cutslots.scenes.export import generate
from cutslots.training import data as training_data
from cutslots.training.data import curriculum, open_split
from cutslots.training.loop import train
from tests.small_runs import lines, sentence, small, train_command, weights

pytestmark = pytest.mark.usefixtures("simulate_once")


def write_scenes(folder, count, split="train"):
    generate(Scenes("plain", split, size=16, count=count, num_objects=(2, 5)), folder, quiet=True)
    return folder


# -------------------------------------------------------------------------------------------------------------- folders


def test_masks_are_not_trained_on(tmp_path):
    """Images with their masks, with others, with broken ones and with none give the same weights."""
    write_scenes(tmp_path / "true", 20)
    for name in ("other", "none"):
        shutil.copytree(tmp_path / "true", tmp_path / name)
    masks = sorted((tmp_path / "other" / "masks").iterdir())
    for mask, content in zip(masks, [m.read_bytes() for m in masks[1:] + masks[:1]], strict=True):
        mask.write_bytes(content)
    (tmp_path / "other" / "masks" / "000003.png").write_bytes(b"broken")  # not of a validation image
    shutil.rmtree(tmp_path / "none" / "masks")
    runs = {
        name: train(small(tmp_path / f"run-{name}", data=tmp_path / name, num_images=None, max_steps=12))
        for name in ("true", "other", "none")
    }
    assert weights(runs["true"]) == weights(runs["other"]) == weights(runs["none"])
    metrics = {name: [line["val"] for line in lines(folder) if "val" in line] for name, folder in runs.items()}
    assert len(metrics["true"]) == len(metrics["other"]) == 2 and metrics["true"] != metrics["other"]
    assert [list(x) for x in metrics["none"]] == [["mse"], ["mse"]], "without masks there is only the error"
    assert (runs["none"] / "report.html").exists() and len(list((runs["none"] / "visualizations").iterdir())) == 2


def test_a_folder_gives_the_weights_of_its_scenes(tmp_path, monkeypatch):
    """From files or rendered, in memory or read for every batch, with a cache or without."""
    write_scenes(tmp_path / "data", 9)
    for kind in ("images", "masks"):  # every tenth image, the first among them, is for validation
        shutil.copy(tmp_path / "data" / kind / "000008.png", tmp_path / "data" / kind / "-1.png")
    files = {"data": tmp_path / "data", "num_images": None, "max_steps": 6}
    expected = weights(train(small(tmp_path / "scenes", num_images=9, max_steps=6)))
    cached = small(tmp_path / "cached", num_images=9, max_steps=6, cache_dir=tmp_path / "cache")
    assert weights(train(cached)) == expected
    assert weights(train(small(tmp_path / "files", **files))) == expected
    monkeypatch.setattr(training_data, "load_to_memory", lambda data, *_: data)
    assert weights(train(small(tmp_path / "not in memory", **files))) == expected


def test_a_folder_with_splits_gives_the_run_of_its_scenes(tmp_path):
    for split, count in (("train", 9), ("val", 8)):
        write_scenes(tmp_path / "data" / split, count, split)
    scenes = train(small(tmp_path / "scenes", num_images=9, max_steps=6))
    files = train(small(tmp_path / "files", data=tmp_path / "data", num_images=None, max_steps=6))
    assert weights(files) == weights(scenes)
    assert lines(files)[-1]["val"] == lines(scenes)[-1]["val"]


def test_an_image_that_cannot_be_read(tmp_path, monkeypatch):
    write_scenes(tmp_path / "data", 3)
    (tmp_path / "data" / "images" / "000001.png").write_bytes(b"no image")
    said = sentence(monkeypatch, train_command(tmp_path / "run", data=tmp_path / "data", max_steps=1))
    assert "000001.png cannot be read as an image" in said


def test_images_of_a_folder_are_mixed_in_and_resumed(tmp_path):
    """With a fraction of 0 the second dataset changes nothing; resuming gives the same images again."""
    write_scenes(tmp_path / "data" / "train", 9)
    options = {"data": "textured:1-2", "num_images": 6, "max_steps": 6, "eval_every": 99, "num_eval_images": 2}
    mixed = {"mix_data": str(tmp_path / "data"), "mix_fraction": 0.5}
    found = weights(train(small(tmp_path / "one", **options, **mixed)))
    for steps in (3, 6):
        train(small(tmp_path / "resumed", **options | {"max_steps": steps}, **mixed))
    assert weights(tmp_path / "resumed") == found
    assert weights(train(small(tmp_path / "none", **options))) != found
    none = weights(train(small(tmp_path / "zero", **options, **mixed | {"mix_fraction": 0.0})))
    assert none == weights(tmp_path / "none")


def test_not_all_built_in_scenes_are_mixed_in():
    assert len(training_data.open_mixed_data(small(None, mix_data="textured"))) == training_data.MAX_MIXED_SCENES


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"mix_data": "no/such/folder"}, "no/such/folder"),
        ({"mix_data": "plain:0-99"}, "mix_data: "),
        ({"mix_data": "plain", "mix_fraction": 1.5}, "mix_fraction is 1.5; expected"),
        ({"mix_fraction": 0.5}, "mix_fraction is 0.5, but mix_data is not given; expected both"),
        ({"mix_data": "plain", "model": "pair-discovery", "data": "moving"}, "a model of 2 frames expects none"),
    ],
)
def test_what_cannot_be_mixed_in(changes, said, tmp_path, monkeypatch):
    assert said in sentence(monkeypatch, train_command(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_num_images_is_printed(tmp_path, capsys):
    write_scenes(tmp_path / "data", 5)
    for count, expected in ((3, True), (99, False), (None, False)):
        train(small(tmp_path / f"{count}", data=tmp_path / "data", num_images=count, max_steps=1))
        assert ("training on the first 3 of 4 images (--num-images)" in capsys.readouterr().out) is expected


# ----------------------------------------------------------------------------------------------------------- curriculum

CURRICULUM = {"data": "textured:1-2", "data__texture_ramp_end": 3, "data__low_contrast": 0.5}
CURRICULUM |= {"data__low_contrast_start": 6}


def variants(scenes):
    """Return which scenes of a curriculum there are."""
    return set() if scenes is None else {name for name in ("ramp", "low_contrast") if getattr(scenes, name) is not None}


@pytest.mark.parametrize(
    "step, max_steps, expected",
    [
        (0, 2, {"ramp"}),
        (2, 5, {"ramp", "low_contrast"}),
        (3, 7, {"low_contrast"}),
        (3, 6, set()),
        (7, 7, set()),
    ],
)
def test_only_scenes_that_the_rest_of_a_run_needs_are_rendered(step, max_steps, expected):
    options = CURRICULUM | {"data__low_contrast_start": 4 if max_steps == 5 else 6}
    assert variants(curriculum(small(None, max_steps=max_steps, **options), make_fabric("cpu"), 4, step)) == expected


def test_without_a_ramp_textures_have_full_strength():
    options = CURRICULUM | {"data__texture_ramp_start": 9, "data__texture_ramp_end": 0}
    assert "ramp" not in variants(curriculum(small(None, max_steps=1, **options), make_fabric("cpu"), 4, 0))


def test_scenes_without_textures_have_no_curriculum():
    """A preset with a texture ramp can be trained on any images."""
    config = small(None, "ours", data="plain:1-2", encoder__kernel_sizes=(3, 3))
    assert curriculum(config, make_fabric("cpu"), 4, 0) is None


def test_scenes_of_the_curriculum_are_others_of_the_same_kind():
    config = small(None, max_steps=9, **CURRICULUM)
    scenes, own = curriculum(config, make_fabric("cpu"), 4, 0), open_split(config, "train", 4)
    images = [own.get_batch(range(4)).image] + [each.get_batch(range(4)).image for each in scenes[1:]]
    assert [image.shape for image in images] == [(4, 3, 16, 16)] * 3
    assert len({image.numpy().tobytes() for image in images}) == 3


def test_scenes_of_the_curriculum_are_cached(tmp_path):
    train(small(tmp_path / "run", max_steps=7, num_images=4, num_eval_images=2, cache_dir=tmp_path, **CURRICULUM))
    names = {path.name for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("textured")}
    kinds = ["textured-1-2-train-16x16-4", "textured-1-2-val-16x16-2"]
    kinds += ["textured-1-2-train-16x16-4-ramp-seed1", "textured-1-2-train-16x16-4-low-contrast-seed2"]
    assert names == set(kinds)


@pytest.mark.parametrize("max_steps, data, expected", [(2, "textured:1-2", True), (21, "textured:1-2", False)])
def test_a_run_that_ends_during_the_ramp_says_so(max_steps, data, expected, capsys):
    config = small(None, max_steps=max_steps, data=data, data__texture_ramp_end=20)
    curriculum(config, make_fabric("cpu"), 4, 0)
    message = "textures reach full strength at step 20 (--data.texture-ramp-end); this run ends before\n"
    assert (message in capsys.readouterr().out) is expected


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"data": "textured", "data__texture_ramp_start": 5, "data__texture_ramp_end": 4},
            "data.texture_ramp_start is 5; expected at most texture_ramp_end, 4",
        ),
        (
            {"data": "textured", "data__texture_ramp_end": -1},
            "data.texture_ramp_end is -1; expected an integer from 0 to 1,000,000,000",
        ),
        (
            {"data": "textured", "data__low_contrast": 1.5},
            "data.low_contrast is 1.5; expected a number from 0 to 1",
        ),
        (
            {"data": "textured", "data__low_contrast": "nan"},
            "data.low_contrast is nan; expected a number from 0 to 1",
        ),
        (
            {"data": "camo:1-2", "data__low_contrast": 0.5},
            "data.low_contrast is 0.5; expected 0 for camo, whose objects already have the background's material",
        ),
    ],
)
def test_bad_options_of_the_curriculum_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        train(small(tmp_path / "run", **changes))
    assert str(caught.value) == message and not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------------- videos


def test_image_models_train_on_frames_and_are_validated_on_videos():
    config = small(None, data="moving:1-2")
    assert isinstance(open_split(config, "train", 30), VideoFrames) and len(open_split(config, "train", 30)) == 30
    validation = open_split(config, "val", 30)
    assert validation.frames == 24 and len(validation) == 2


def test_models_of_clips_train_on_clips(monkeypatch):
    monkeypatch.setattr(training_data, "load_to_memory", lambda data, *_: data)
    config = small(None, "movi", num_images=30)
    data = training_data.training_data(config, make_fabric("cpu"))
    assert isinstance(data, Clips) and data.frames == 2 and len(data) == 2 * 23


def test_a_model_of_clips_does_not_train_on_images(tmp_path, monkeypatch):
    write_scenes(tmp_path / "files", 3)
    for data, name in (("plain", "plain"), (tmp_path / "files", f"folder:{tmp_path / 'files'}")):
        said = sentence(monkeypatch, train_command(tmp_path / "run", "movi", data=data))
        expected = "which holds images; a model of 2 frames expects videos, such as moving or movi-a:DIR"
        assert said == f"cutslots: data is {name!r}, {expected}"
    assert not (tmp_path / "run").exists()
