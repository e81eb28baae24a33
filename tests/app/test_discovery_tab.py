"""The functions behind the first tab, without a browser: they show the output of `predict`."""

import gc
import io
import json
import os
import re
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from cutslots.app import discovery_tab as tab
from cutslots.app import segment_tab
from cutslots.app.figures import boundaries
from cutslots.app.sources import MAX_FRAMES, Source, open_source
from cutslots.inference.predict import predict
from cutslots.inference.predictor import predict_image
from cutslots.models.checkpoints import SHIPPED, load
from tests.app.conftest import CHECKPOINT

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools


def unzip(view):
    """The COCO record and the label images, by name, of a download."""
    with zipfile.ZipFile(io.BytesIO(tab.zip_masks(view))) as out:
        assert out.testzip() is None
        images = {
            name: np.asarray(Image.open(io.BytesIO(out.read(name)))) for name in out.namelist() if name.endswith(".png")
        }
        return json.loads(out.read("coco.json")), images


# -------------------------------------------------------------------------------------------------------------- models


def test_choices_are_the_given_and_the_shipped_checkpoints():
    assert tab.checkpoint_choices(["runs/a", CHECKPOINT])[:2] == ["runs/a", CHECKPOINT]
    assert tab.checkpoint_choices()[0] == "plain-128", "the scenes that the page begins with are plain"
    assert set(tab.checkpoint_choices()) == {path.name for path in SHIPPED.iterdir() if path.is_dir()}
    with pytest.raises(ValueError, match="there is no"):
        tab.load_cached("/nowhere/at/all")


def test_model_cache_is_bounded_and_reloads_changed_files(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        for file in (SHIPPED / CHECKPOINT).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        tab.load_cached(f" {tmp_path / name} ")
    assert tab._load_version.cache_info().currsize == tab.MAX_MODELS
    before = tab.load_cached(str(tmp_path / "c"))
    assert tab.load_cached(str(tmp_path / "c" / "model.safetensors")) is before
    os.utime(tmp_path / "c" / "model.safetensors", (1, 1))
    assert tab.load_cached(str(tmp_path / "c")) is not before


# --------------------------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("masks", ["refined", "high-recall", "decoder"])
def test_discover_matches_predict(source, masks):
    prediction = predict_image(load(CHECKPOINT), source.frames[0], masks)
    view = tab.discover(tab.load_cached(CHECKPOINT), source, masks)
    segmentation = tab.segment(view)
    assert (segmentation.labels == prediction.labels).all() and (segmentation.scores == prediction.slot_scores).all()
    assert tab.background(view) == prediction.background
    assert segmentation.areas.sum() == pytest.approx(1)
    small = Image.fromarray(tab.reconstruction_image(view))
    assert (
        np.asarray(small.resize(source.frames[0].size, Image.Resampling.BICUBIC)) == prediction.reconstruction
    ).all()


@pytest.mark.parametrize("masks", ["refined", "decoder"])
def test_discover_tracks_videos_as_track_does(video, masks):
    source, model = open_source(video), tab.load_cached(CHECKPOINT)
    view = tab.discover(model, source, masks, frames=3)
    assert len(view.masks) == len(view.slot_reconstructions) == len(view.reconstructions) == 3
    tracked = list(model.track(source.frames[:3], masks))
    assert torch.equal(view.masks, torch.stack([prediction.soft_masks for prediction in tracked]))
    assert view.background == tracked[0].background
    if masks == "refined":
        assert torch.equal(view.masks, tab.discover(model, source, "high-recall", frames=3).masks)
    assert len(tab.discover(model, source, frames=1000).masks) == MAX_FRAMES
    assert len(tab.discover(model, source, frames=1000, seconds=0).masks) == 1


def test_merge_adds_masks_and_unmerge_restores_them(view):
    first, second, *_ = tab.nonempty_slots(view)
    merged = tab.merge(view, [second, first])
    assert merged.merged_into[second] == merged.merged_into[first] == first
    before, after = tab.segment(view).labels, tab.segment(merged).labels
    assert (after[np.isin(before, [first, second])] == first).all() and second not in tab.nonempty_slots(merged)
    expected = tab.slot_image(view, first).astype(int) + tab.slot_image(view, second) - 255
    assert abs(tab.slot_image(merged, first).astype(int) - expected.clip(0)).max() <= 1
    assert tab.unmerge(merged).merged_into == view.merged_into


def test_merging_a_merged_slot_merges_the_whole_group(view):
    first, second, *_ = tab.nonempty_slots(view)
    third = next(k for k in range(len(view.merged_into)) if k not in (first, second))
    merged = tab.merge(tab.merge(view, [second, first]), [second, third])
    assert {merged.merged_into[k] for k in (first, second, third)} == {min(first, third)}


@pytest.mark.parametrize("slots", [[], [1], [1, 1], [0, 99], [-1, 0]])
def test_merge_requires_two_existing_slots(view, slots):
    with pytest.raises(ValueError, match="at least two slots"):
        tab.merge(view, slots)


def test_slot_at_returns_the_slot_under_its_number(view):
    segmentation = tab.segment(view)
    height, width = segmentation.labels.shape
    for k, (x, y) in tab.label_positions(segmentation.labels).items():
        assert tab.slot_at(segmentation, int(x * width), int(y * height)) == k
    assert tab.slot_at(segmentation, -5, 10_000) == segmentation.labels[-1, 0]


# -------------------------------------------------------------------------------------------------------------- images


def test_hidden_slots_are_neither_colored_nor_reconstructed(view):
    segmentation = tab.segment(view)
    slot = tab.nonempty_slots(view)[1]
    inside, image = segmentation.labels == slot, np.asarray(view.source.frames[0])
    shown, hidden = tab.overlay_image(view, segmentation), tab.overlay_image(view._replace(hidden=[slot]), segmentation)
    assert (hidden[inside] == image[inside]).all() and (shown[inside] != hidden[inside]).any()
    assert (shown[~inside] == hidden[~inside]).all()
    for all_slots in (range(len(view.merged_into)), range(-1, 999)):
        assert (tab.reconstruction_image(view._replace(hidden=all_slots)) == 255).all()


def test_boundaries_are_where_the_pixel_above_or_to_the_left_differs():
    labels = np.array([[7, 7, 7, 7], [7, 9, 9, 7], [7, 9, 3, 7]], dtype=np.uint8)
    assert (boundaries(labels) == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]]).all()


def test_model_and_image_may_have_any_height_and_width():
    masks = torch.zeros(1, 2, 4, 6)  # slot 0 left, slot 1 right
    masks[0, 0, :, :3] = masks[0, 1, :, 3:] = 1
    source = Source("tall", [Image.new("RGB", (20, 50), "red")])
    slot_reconstructions = np.full((1, 2, 4, 6, 3), 100, dtype=np.uint8)
    labels = np.broadcast_to(np.arange(20, dtype=np.uint8) >= 10, (1, 50, 20)).astype(np.uint8)
    images = (slot_reconstructions, slot_reconstructions[:, 0])
    view = tab.ViewState(source, masks, labels, *images, 0.0, (0, 1), np.ones((1, 2)), selected=1)
    segmentation = tab.segment(view)
    assert (segmentation.labels == (np.arange(20) >= 10)).all() and segmentation.labels.shape == (50, 20)
    assert tab.overlay_image(view, segmentation).shape == (50, 20, 3)
    assert tab.reconstruction_image(view).shape == tab.slot_image(view, 0).shape == (4, 6, 3)
    assert "--ratio:20/50" in tab.view_html(view) and "Slot 2: 50.0% of the pixels" in tab.view_html(view)
    assert unzip(view)[1]["tall/labels.png"].shape == (50, 20)


# ------------------------------------------------------------------------------------------------------------ download


def test_download_matches_predict(source, view, tmp_path):
    source.frames[0].save(tmp_path / f"{source.name}.png")
    out = tmp_path / "out"
    predict(CHECKPOINT, tmp_path / f"{source.name}.png", out, device="cpu")
    record, images = unzip(view)
    written = [p for p in (out / source.name).glob("*.png") if p.name not in ("overlay.png", "reconstruction.png")]
    assert set(images) == {f"{source.name}/{path.name}" for path in written}
    for path in written:
        assert (images[f"{source.name}/{path.name}"] == np.asarray(Image.open(path))).all()
    assert record in [json.loads(path.read_text()) for path in out.glob("*.json")]


def test_download_leaves_hidden_slots_out(view):
    slot, other = tab.nonempty_slots(view)[:2]
    record, images = unzip(view._replace(hidden=[slot]))
    labels = images[f"{view.source.name}/labels.png"]
    assert ((labels == 0) == (tab.segment(view).labels == slot)).all()
    assert f"{view.source.name}/slot_{slot + 1:02d}.png" not in images
    by_slot = {each["slot"]: each for each in record["annotations"]}
    assert slot + 1 not in by_slot
    assert (coco_mask.decode(by_slot[other + 1]["segmentation"]).astype(bool) == (labels == other + 1)).all()


def test_download_of_a_video_has_every_frame(video):
    record, images = unzip(tab.discover(tab.load_cached(CHECKPOINT), open_source(video), frames=3))
    assert [each["file_name"] for each in record["images"]] == [f"square_{t:03d}.png" for t in range(3)]
    assert all(f"square_{t:03d}/labels.png" in images for t in range(3))


# ---------------------------------------------------------------------------------------------------------------- HTML


def test_every_image_has_alt_text_and_every_slot_its_number(view):
    slots = tab.nonempty_slots(view)
    shown = tab.view_html(view._replace(hidden=[slots[0]], selected=slots[1]))
    images = re.findall(r"<img [^>]*>", shown)
    assert images and all(re.search(r'alt="[^"]{5,}"', each) for each in images)
    assert all(re.search(r'src="data:image/', each) for each in images)
    numbers = re.findall(r'<span style="left:[^>]*>(\d+)<', shown)
    assert set(numbers) == {str(k + 1) for k in slots[1:]}  # for readers who cannot tell the colors apart
    assert shown.count('aria-pressed="true"') == 1 and "hidden" in shown
    assert f"Slot {slots[1] + 1}: " in shown and ", score 0." in shown


def test_background_is_named_and_not_colored(view):
    segmentation, image = tab.segment(view), np.asarray(view.source.frames[0])
    inside = (segmentation.labels == view.background) & ~boundaries(segmentation.labels)
    assert inside.any() and (tab.overlay_image(view, segmentation)[inside] == image[inside]).all()
    assert f"Slot {view.background + 1}, the background: " in tab.view_html(view._replace(selected=view.background))
    other = next(k for k in tab.nonempty_slots(view) if k != view.background)
    assert "the background" not in tab.view_html(view._replace(selected=other))
    merged = tab.merge(view, [view.background, other])
    assert tab.background(merged) == min(view.background, other)
    categories = {each["slot"] - 1: each["category_id"] for each in unzip(view)[0]["annotations"]}
    assert categories.pop(view.background) == 2 and set(categories.values()) == {1}


def test_page_warns_of_an_image_unlike_the_training_data(view):
    photograph = Source("photo", [Image.open(Path(skimage.__file__).parent / "data" / "astronaut.png").convert("RGB")])
    shown = tab.view_html(tab.discover(tab.load_cached(CHECKPOINT), photograph))
    assert "Warning: photo is far from the training data of this checkpoint (rendered scenes of" in shown
    assert "Warning" not in tab.view_html(view)


def test_source_names_are_escaped(view):
    named = view._replace(source=view.source._replace(name="<script>alert(1)</script>"))
    assert "<script>" not in tab.view_html(named)


def test_requests_do_not_leak_memory(source):
    model = tab.load_cached(CHECKPOINT)
    photograph, strokes = segment_tab.example()
    drawn = segment_tab.read_request(None, segment_tab.to_canvas(photograph, strokes), "blue", 40)

    def request():
        view = tab.discover(model, source)
        tab.view_html(view._replace(selected=0)), tab.zip_masks(view)
        segment_tab.segmentation_html(drawn), segment_tab.comparison_html(drawn, 0.5, 0.5, 2, 0.5)

    for _ in range(2):
        request()
    tracemalloc.start()
    request()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(6):
        request()
    gc.collect()
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert growth < 120_000
