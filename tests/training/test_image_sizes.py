"""Images of any size, from training to evaluation."""

import json

import pytest

from cutslots.cli import evaluate
from cutslots.models.checkpoints import load
from cutslots.modules.decoders import DECODERS
from cutslots.modules.slots import SLOTS
from cutslots.training.loop import train
from tests.modules.small_vits import make_vit
from tests.small_runs import lines, small

SLOT_MODULES = ("cut-slots", "graph-ocl-slots", "slot-attention")
DECODER_NAMES = ("spatial-broadcast", "pixel-shuffle", "graph-ocl-decoder")
FEATURE_DECODERS = ("mlp", "transformer")
TWO_STEPS = {"max_steps": 2, "num_images": 4, "num_eval_images": 2, "batch_size": 2}


def test_all_parts_of_the_package_are_tested():
    own = [[part.name for part in registry.parts.values() if part.plugin is None] for registry in (SLOTS, DECODERS)]
    assert own == [list(SLOT_MODULES), [*DECODER_NAMES, *FEATURE_DECODERS]]


@pytest.mark.parametrize("slots", SLOT_MODULES)
@pytest.mark.parametrize("decoder", DECODER_NAMES)
def test_images_that_are_not_square(slots, decoder, tmp_path):
    train(small(tmp_path / "run", image_size=(20, 28), slots=slots, decoder=decoder, **TWO_STEPS))
    assert load(tmp_path / "run").image_size == (20, 28)
    evaluate(str(tmp_path / "run"), ("plain:2-5",), tmp_path / "out", "val", 2, "cpu")
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]["plain:2-5"]
    last = lines(tmp_path / "run")[-1]["val"]
    assert {name: results[name] for name in last} == last and "partition_ari" in last


@pytest.mark.parametrize("slots", SLOT_MODULES)
@pytest.mark.parametrize("decoder", FEATURE_DECODERS)
def test_features_of_images_that_are_not_square(slots, decoder, tmp_path):
    make_vit(tmp_path / "vit")
    options = {"encoder": "vit", "encoder__checkpoint": tmp_path / "vit", "decoder": decoder, "loss": "feature-mse"}
    train(small(tmp_path / "run", image_size=(20, 28), slots=slots, **options, **TWO_STEPS))
    assert load(tmp_path / "run").image_size == (20, 28)
    evaluate(str(tmp_path / "run"), ("plain:2-5",), tmp_path / "out", "val", 2, "cpu")
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]["plain:2-5"]
    last = lines(tmp_path / "run")[-1]["val"]
    assert {name: results[name] for name in last} == last and "feature_mse" in last


@pytest.mark.parametrize("image_size", [(9, 31), (33, 16)])
@pytest.mark.parametrize("partition", ["cut", "softmax", "graph-ocl-cut"])
def test_odd_sizes(partition, image_size, tmp_path):
    options = {"slots__partition": partition, "image_size": image_size, "encoder__pyramid_levels": 2}
    train(small(tmp_path / "run", **options, **TWO_STEPS))
    assert load(tmp_path / "run").image_size == image_size


@pytest.mark.usefixtures("simulate_once")
def test_pairs_of_frames_that_are_not_square(tmp_path):
    options = TWO_STEPS | {"num_images": 24, "num_eval_images": 24}
    train(small(tmp_path / "run", "movi", image_size=(20, 28), **options))
    assert "frame_ari" in lines(tmp_path / "run")[-1]["val"]


def test_a_size_that_is_too_small(tmp_path):
    with pytest.raises(
        ValueError, match=r"^image_size is \(4, 4\); expected 2 values, each an integer from 8 to 2,048$"
    ):
        train(small(tmp_path / "run", image_size=(4, 4)))
    with pytest.raises(ValueError, match=r"^image_size is \(16, 4096\); expected 2 values, each an integer from 8"):
        train(small(tmp_path / "run", image_size=(16, 4096)))
