from typing import get_args

import torch

from cutslots.evaluation.labels import EVALUATED_MASKS, hard_labels, video_hard_labels
from cutslots.models.mask_kinds import DEFAULT_MASK_KIND, MASK_KINDS, MaskKind
from cutslots.models.refinement import refine_video_masks, select_masks
from cutslots.models.tracker import track_clip
from tests.evaluation.small_models import small_model


def test_kinds_of_masks_are_listed_once():
    assert set(get_args(MaskKind)) == set(MASK_KINDS) and DEFAULT_MASK_KIND in MASK_KINDS
    assert {kind: info.prefix for kind, info in EVALUATED_MASKS.items()} == {
        "decoder": "",
        "refined": "refined_",
        "high-recall": "high_recall_",
        "partition": "partition_",
    }


@torch.no_grad()
def test_labels_of_images():
    model, image = small_model("images"), torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    output = model(image)
    labels = hard_labels(output, image)
    assert set(labels) == set(EVALUATED_MASKS) and set(hard_labels(output)) == {"decoder", "partition"}
    for kind in MASK_KINDS:
        assert torch.equal(labels[kind], select_masks(kind, output, image).argmax(1)), kind
    resized = torch.nn.Upsample(scale_factor=2, mode="bilinear")(output.partition_masks)
    assert torch.equal(labels["partition"], resized.argmax(1))


@torch.no_grad()
def test_labels_without_slot_reconstructions():
    model, image = small_model("images"), torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    output = model(image)._replace(slot_reconstructions=None)
    assert set(hard_labels(output, image)) == {"decoder", "partition"}


def test_labels_of_videos_are_those_of_their_frames():
    model, image = small_model("images"), torch.randint(0, 256, (2, 3, 3, 16, 16), dtype=torch.uint8)
    outputs = track_clip(model, image)
    labels = video_hard_labels(outputs, image)
    assert set(labels) == {"decoder", "partition", "refined"}
    for t in range(3):
        assert torch.equal(labels["decoder"][:, t], outputs[t].masks.argmax(1))
        resized = torch.nn.Upsample(scale_factor=2, mode="bilinear")(outputs[t].partition_masks)
        assert torch.equal(labels["partition"][:, t], resized.argmax(1))
        assert torch.equal(labels["refined"][:, t], refine_video_masks(outputs, image)[t].argmax(1))
