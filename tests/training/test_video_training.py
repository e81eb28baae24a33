"""Training on videos: pairs, clips and single frames."""

import numpy as np
import pytest
import torch

from cutslots.data.open import open_dataset
from cutslots.devices import make_fabric
from cutslots.evaluation.evaluate import evaluate
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery, build
from cutslots.models.pair_discovery import PairDiscovery
from cutslots.models.spacetime_discovery import SpacetimeDiscovery
from cutslots.training.loop import train
from tests.small_runs import lines, small, weights

FRAMES = 24  # of every video of `moving`
SPACETIME = {"model": "spacetime-discovery", "slots__partition": "spacetime-cut"}
KINDS = {
    "pairs": {},
    "pairs with slot attention": {"slots": "slot-attention"},
    "spacetime": SPACETIME,
    "longer clips": SPACETIME | {"num_frames": 3},
    "images": {"model": "discovery"},
}
pytestmark = pytest.mark.usefixtures("simulate_once")
TYPES = {"spacetime": SpacetimeDiscovery, "longer clips": SpacetimeDiscovery, "images": Discovery}


def video_run(out, **changes):
    """Return the config of a small run of `movi`: two videos to train on and two to validate on."""
    counts = {"num_images": 2 * FRAMES, "num_eval_images": 2 * FRAMES, "max_steps": 4, "eval_every": 4}
    return small(out, "movi", **(counts | changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function that returns the folder of a run of a kind. Read only."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run(kind):
        if kind not in made:
            made[kind] = train(video_run(folder / kind, **KINDS[kind]))
        return made[kind]

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_those_of_videos(kind, runs):
    run = runs(kind)
    assert type(load(run)) is TYPES.get(kind, PairDiscovery)
    assert [line["step"] for line in lines(run)] == [4, 4]
    for line in lines(run):
        if "val" in line:
            assert {"ari_fg", "frame_ari_fg", "id_switches", "partition_ari", "mse"} <= set(line["val"])
        else:
            assert np.isfinite([line["loss"], line["grad_norm"]]).all() and line["grad_norm"] > 0
    assert "moving" in (run / "report.html").read_text() and len(list((run / "visualizations").iterdir())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_all_parameters_are_trained(kind, runs):
    torch.manual_seed(0)
    before = build(video_run(None, **KINDS[kind]).model).state_dict()
    model = load(runs(kind))
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert moved == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("kind, steps", [("pairs", 1), ("pairs with slot attention", 3)])
def test_a_resumed_run_ends_with_the_same_bytes(kind, steps, runs, tmp_path):
    train(video_run(tmp_path / "run", **KINDS[kind], max_steps=steps))
    train(video_run(tmp_path / "run", **KINDS[kind], cache_dir=tmp_path / "cache"))
    assert weights(tmp_path / "run") == weights(runs(kind))
    assert lines(tmp_path / "run")[-1]["val"] == lines(runs(kind))[-1]["val"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_validation_equals_evaluate(kind, runs, tmp_path):
    results = evaluate(str(runs(kind)), ("moving",), tmp_path, "val", 2, make_fabric("cpu"))["moving"]
    last = lines(runs(kind))[-1]["val"]
    assert {name: results[name] for name in last} == last


def test_the_penalty_leaves_more_to_the_background_slot(runs, tmp_path):
    free, penalized = runs("pairs"), train(video_run(tmp_path / "penalized", loss__foreground_penalty=10.0))
    image = open_dataset("moving", "train", 16, 1, videos=True).get_batch([0]).image[:, :2]
    with torch.no_grad():
        share = [load(run)(image).masks[:, :, 0].mean() for run in (free, penalized)]
    assert share[1] > share[0]


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"slots": "slot-attention", "loss__foreground_penalty": 0.1},
            "loss.foreground_penalty is 0.1, but no slot of this model is the background; expected 0",
        ),
        (SPACETIME | {"num_frames": 25}, "the videos have 24 frames; expected at least 25"),
        (SPACETIME | {"num_frames": 1}, "num_frames is 1; expected an integer from 2 to 1,024"),
        (
            {"model": "spacetime-discovery"},
            "slots partition images; expected clips: --slots cut-slots --slots.partition",
        ),
        ({"slots__partition": "spacetime-cut"}, "slots partition clips; expected a slot module for images"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, changes, message):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        train(video_run(tmp_path / "run", **changes))
    assert str(caught.value).startswith(message) and not (tmp_path / "run").exists()
