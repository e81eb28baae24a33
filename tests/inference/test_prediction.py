"""`Discovery.predict` and `Discovery.track`, and the result that they return."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import cutslots
from cutslots import Prediction, Scenes, build, load, refine_masks, refine_video_masks, to_coco, track_clip
from cutslots.inference.predict import predict
from cutslots.inference.predictor import find_background
from cutslots.inference.track import track
from cutslots.models.refinement import finish_masks, merge_posterior
from tests.models.configs import ATTENTION, PAIRS, SPACETIME

SIZE = 64


@pytest.fixture(scope="module")
def model():
    return load("tiny-64")


@pytest.fixture(scope="module")
def scenes():
    return Scenes("plain", "test", SIZE, count=8, num_objects=(2, 5)).get_batch(range(8))


@pytest.fixture(scope="module")
def clip():
    """Frames (T, 3, H, W) of a moving scene, for which refinement merges slots."""
    return Scenes("moving", "test", SIZE, count=1, num_objects=(3, 3)).get_batch([0]).image[0, :5]


def as_image(tensor):
    return Image.fromarray(tensor.permute(1, 2, 0).numpy())


def read(path):
    return np.asarray(Image.open(path))


# -------------------------------------------------------------------------------------------------------------- images


def test_labels_are_those_of_the_refined_masks(model, scenes):
    with torch.no_grad():
        masks = refine_masks(model(scenes.image), scenes.image)
    predictions = model.predict(scenes.image)
    assert len(predictions) == 8 and all(isinstance(each, Prediction) for each in predictions)
    assert [each.name for each in predictions] == [f"image_{i}" for i in range(8)]
    for prediction, mask, image in zip(predictions, masks, scenes.image, strict=True):
        assert np.array_equal(prediction.labels, mask.argmax(0))
        assert np.array_equal(prediction.image, as_image(image))
        assert torch.allclose(prediction.soft_masks, mask, atol=1e-5)


@pytest.mark.parametrize("kind", ["refined", "decoder"])
def test_rows_are_objects(kind, model, scenes):
    with torch.no_grad():
        output = model(scenes.image)
    _, posterior = finish_masks(output, merge_posterior(output, scenes.image), scenes.image)
    values = output.masks if kind == "decoder" else posterior
    for prediction, value in zip(model.predict(scenes.image, masks=kind), values.numpy(), strict=True):
        assert prediction.background not in prediction.slots and len(prediction) == len(prediction.slots) > 0
        assert prediction.masks.shape == (len(prediction), SIZE, SIZE) and prediction.masks.dtype == bool
        together = prediction.masks.sum(0) + prediction.background_mask
        assert (together == 1).all(), "every pixel is in one mask"
        rows = (prediction.slots, prediction.masks, prediction.boxes, prediction.scores)
        for slot, mask, (left, top, right, bottom), score in zip(*rows, strict=True):
            assert np.array_equal(mask, prediction.labels == slot)
            inside = mask[top:bottom, left:right]
            assert inside.sum() == mask.sum() and inside[[0, -1]].any(1).all() and inside[:, [0, -1]].any(0).all()
            assert score == pytest.approx(value[slot][mask].mean() * (prediction.familiarity or 1), abs=1e-4)


def test_an_image_without_objects(model):
    labels = np.zeros((4, 5), np.uint8)
    found = Prediction("a", Image.new("RGB", (5, 4)), labels, 0, np.ones(3), torch.ones(3, 4, 5), None, None)
    assert (
        len(found) == 0
        and found.masks.shape == (0, 4, 5)
        and found.boxes.shape == (0, 4)
        and found.scores.shape == (0,)
    )


@pytest.mark.parametrize("kind", ["path", "PIL", "array", "tensor"])
def test_every_kind_of_image_gives_the_same(model, scenes, tmp_path, kind):
    image = as_image(scenes.image[0])
    image.save(tmp_path / "a.png")
    given = {"path": tmp_path / "a.png", "PIL": image, "array": np.asarray(image), "tensor": scenes.image[0]}[kind]
    (found,) = model.predict(given)
    assert np.array_equal(found.labels, model.predict([image])[0].labels)
    assert found.name == ("a.png" if kind == "path" else "image_0")


def test_files_are_those_of_the_command(model, scenes, tmp_path):
    as_image(scenes.image[0]).resize((90, 50)).save(tmp_path / "a.png")
    (found,) = model.predict(tmp_path / "a.png", masks="high-recall", resize="stretch")
    found.save(tmp_path / "saved" / "deep")
    predict("tiny-64", tmp_path / "a.png", tmp_path / "out", "cpu", masks="high-recall", resize="stretch")
    saved, written = tmp_path / "saved" / "deep", tmp_path / "out" / "a"
    assert sorted(p.name for p in saved.iterdir()) == sorted(p.name for p in written.iterdir())
    assert all((written / p.name).read_bytes() == p.read_bytes() for p in saved.iterdir())
    assert to_coco([found]) == json.loads((tmp_path / "out" / "coco.json").read_text())


def test_random_numbers_of_the_caller_are_not_touched():
    attention = build(ATTENTION)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    image = np.zeros((16, 16, 3), np.uint8)
    first, second = (attention.predict(image)[0].output.slots for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.rand(3), expected)


def test_models_of_clips_are_refused_and_those_of_pairs_are_not():
    image = np.zeros((16, 16, 3), np.uint8)
    with pytest.raises(ValueError, match=r"\Amodel partitions clips, not images; see cutslots track and Discovery.t"):
        build(SPACETIME).predict(image)
    (prediction,) = build(PAIRS).predict(image)
    assert prediction.labels.shape == (16, 16)


# ---------------------------------------------------------------------------------------------------------- background


def test_background_is_the_slot_with_the_most_border_pixels():
    labels = np.full((6, 9), 4, np.uint8)  # most pixels, none of them on the border
    labels[0], labels[-1], labels[1:-1, 0], labels[1:-1, -1] = 2, 2, 7, 7
    assert find_background(labels) == 2
    labels[0, :6] = 7
    assert find_background(labels) == 7
    assert find_background(np.array([[3]], np.uint8)) == 3


def test_background_of_scenes_is_the_true_one(scenes):
    """Of five checkpoints, for refined masks: the slot that holds most of the true background."""
    for name in ("tiny-64", "plain-128", "plain-paper-128", "textured-128", "textured-paper-128"):
        model = load(name)
        family = "textured" if name.startswith("textured") else "plain"
        sample = Scenes(family, "val", model.image_size[0], count=8, num_objects=(2, 5)).get_batch(range(8))
        for prediction, mask in zip(model.predict(sample.image), sample.mask, strict=True):
            assert prediction.background == np.bincount(prediction.labels[mask.numpy() == 0]).argmax()


def test_background_keeps_its_colors_in_overlays(model, scenes):
    (found,) = model.predict(scenes.image[0])
    overlay, image = np.asarray(found.overlay()), np.asarray(found.image)
    assert np.array_equal(overlay[found.background_mask], image[found.background_mask])
    assert (overlay != image).any(-1)[found.masks.any(0)].mean() > 0.99
    assert np.array_equal(found.image, as_image(scenes.image[0])), "the image itself is not painted"


def test_background_has_its_own_category(model, scenes):
    predictions = model.predict(scenes.image)
    coco = to_coco(predictions)
    assert [(c["id"], c["name"], c["isthing"]) for c in coco["categories"]] == [(1, "object", 1), (2, "background", 0)]
    for number, prediction in enumerate(predictions, 1):
        mine = [each for each in coco["annotations"] if each["image_id"] == number]
        by_slot = {each["slot"] - 1: each["category_id"] for each in mine}
        assert by_slot == {prediction.background: 2} | dict.fromkeys(prediction.slots.tolist(), 1)


def test_background_can_be_left_out(model, scenes, tmp_path):
    as_image(scenes.image[0]).save(tmp_path / "a.png")
    predict("tiny-64", tmp_path / "a.png", tmp_path / "out", "cpu", background=False)
    (found,) = model.predict(tmp_path / "a.png")
    labels, slot = read(tmp_path / "out" / "a" / "labels.png"), found.background + 1
    assert np.array_equal(labels == 0, found.background_mask) and slot not in labels
    assert not (tmp_path / "out" / "a" / f"slot_{slot:02d}.png").exists()
    record = json.loads((tmp_path / "out" / "coco.json").read_text())
    assert {each["category_id"] for each in record["annotations"]} == {1}
    assert [each["slot"] - 1 for each in record["annotations"]] == found.slots.tolist()
    with pytest.raises(ValueError, match=r"another prediction \(differing in background\)"):
        predict("tiny-64", tmp_path / "a.png", tmp_path / "out", "cpu")


# -------------------------------------------------------------------------------------------------------------- videos


def write_frames(clip, folder):
    folder.mkdir()
    for t, frame in enumerate(clip):
        as_image(frame).save(folder / f"{t}.png")
    return folder


def test_refined_masks_of_videos_are_those_that_are_evaluated(model, clip):
    """The two passes over single frames give what `refine_video_masks` computes from all frames at once."""
    expected = refine_video_masks(track_clip(model, clip[None]), clip[None])
    tracked = list(model.track(clip))
    assert [each.name for each in tracked] == [f"frame_{t}" for t in range(5)]
    for prediction, masks in zip(tracked, expected, strict=True):
        assert torch.allclose(prediction.soft_masks, masks[0], atol=1e-5)
        assert np.array_equal(prediction.labels, masks[0].argmax(0))
    decoder = list(model.track(clip, masks="decoder"))
    assert any(not np.array_equal(a.labels, b.labels) for a, b in zip(tracked, decoder, strict=True))
    merged = {k for k in range(model.num_slots) if all((each.soft_masks[k] == 0).all() for each in tracked)}
    assert merged, "the test needs slots that are merged"
    assert len({each.background for each in tracked}) == 1


@pytest.mark.parametrize("masks", ["refined", "decoder"])
def test_files_of_a_video_are_those_of_track(model, clip, tmp_path, masks):
    frames = write_frames(clip, tmp_path / "frames")
    track("tiny-64", frames, tmp_path / "out", "cpu", overlay="none", masks=masks)
    record = json.loads((tmp_path / "out" / "tracks.json").read_text())
    for t, (prediction, tracks) in enumerate(zip(model.track(frames, masks), record["frames"], strict=True)):
        assert np.array_equal(read(tmp_path / "out" / "masks" / f"{t:06d}.png"), prediction.labels + 1)
        assert record["background"] == prediction.background + 1
        scores = {each["track"] - 1: each["score"] for each in tracks}
        assert set(scores) == set(np.unique(prediction.labels).tolist())
        assert all(score == pytest.approx(prediction.slot_scores[k], abs=1e-4) for k, score in scores.items())


def test_background_of_a_video_can_be_left_out(model, clip, tmp_path):
    frames = write_frames(clip[:2], tmp_path / "frames")
    track("tiny-64", frames, tmp_path / "out", "cpu", overlay="none", background=False)
    record = json.loads((tmp_path / "out" / "tracks.json").read_text())
    assert record["background"] is None
    for t, prediction in enumerate(model.track(frames)):
        assert np.array_equal(read(tmp_path / "out" / "masks" / f"{t:06d}.png") == 0, prediction.background_mask)
        assert [each["track"] - 1 for each in record["frames"][t]] == prediction.slots.tolist()


def test_videos_have_no_high_recall_masks(model, clip, tmp_path):
    said = r"\Amasks is 'high-recall'; expected one of refined, decoder for videos\Z"
    with pytest.raises(ValueError, match=said):
        model.track(clip, masks="high-recall")
    with pytest.raises(ValueError, match=said):
        track("tiny-64", write_frames(clip[:1], tmp_path / "frames"), tmp_path / "out", "cpu", masks="high-recall")
    with pytest.raises(ValueError, match="association is 'learned'"):
        model.track(clip, association="learned")
    with pytest.raises(TypeError, match="images are a generator; expected"):
        list(model.track(frame for frame in clip))


def test_refined_masks_of_slot_attention_take_the_same_tracks_in_both_passes():
    """Its initial slots are sampled: the passes must sample the same."""
    attention, clip = build(ATTENTION), torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    first, second = (list(attention.track(clip)) for _ in range(2))
    assert all(torch.equal(a.output.slots, b.output.slots) for a, b in zip(first, second, strict=True))


def test_public_names():
    names = "Prediction Tracker high_recall_masks posterior_masks predict_images prepare_images refine_masks"
    for name in f"{names} refine_video_masks to_coco track_clip track_video".split():
        assert name in cutslots.__all__ and getattr(cutslots, name)
