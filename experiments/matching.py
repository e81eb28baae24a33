"""What makes learned matching carry the identity of objects: models of pairs of frames, from one of single frames.

    python -m experiments.matching --runs runs/matching --jobs 8        # trains and evaluates what is missing
    python -m experiments.matching ... --stop-after 9                   # for nine minutes
    python -m experiments.matching ... --quick                          # a few steps on a few small images
    python -m experiments.matching ... --match none --no-write --figure areas-0      # draws matched frames of videos
    python -m experiments.matching ... --match none --no-write --tracks-figure movi-taught-tracks-0    # tracked frames

Runs begin with the encoder, slots and decoder of a checkpoint that finds objects in frames (`--initial`). What is
learned is how slots of two frames are paired. Runs of the paper's preset `movi` begin with random weights, and with
single frames:

    movi-quarter, movi-self, movi-areas    a decoder of a quarter of the resolution (docs/progressive.md), self-training
                                           with the paper's decoder (docs/self_training.md), then pairs
    movi-half, movi-labeled                longer, with a decoder of half of the resolution, then pairs of adjacent
                                           frames, as in the paper, with the labels of movi-half
    movi-tracks                            pairs with labels that are tracks, up to 3 frames apart, and more weight on
                                           the background
    movi-taught, movi-taught-tracks        single frames with the labels of `--initial`, then pairs with its tracks
    movi-eleven, movi-eleven-tracks        the same with 11 slots
    movi-brief-half, movi-brief            tracks, in small batches on a CPU, first with half of the resolution

Every run on pairs is evaluated on whole videos with three associations: learned matching, the Hungarian algorithm on
inner products of the same slots (the paper's baseline), and areas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import tyro
from lightning_fabric import Fabric

from cutslots.devices import make_fabric
from cutslots.evaluation.visualize import visualize_pair, visualize_videos
from cutslots.files import write_atomically
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery
from cutslots.scenes import Scenes
from cutslots.training.config import TrainConfig
from cutslots.viz.images import encode_png, image_grid
from experiments.progressive import PLAIN_SELF, at_full_resolution
from experiments.self_training import without_labels
from experiments.study import SEEDS, Group, Options, Study, join_curves, make_quick, make_table, run_study
from experiments.table import parse

INITIAL = "moving-128"
PAIRS = (
    "ours --model pair-discovery --data moving --num-images 15360 --batch-size 16 --loss.blur 0 "
    "--loss.mask-consistency-start 0 --loss.foreground-penalty 7e-4 --warmup-steps 100 --lr 5e-4 --lr-decay-steps 750 "
    "--max-steps 2000 --eval-every 1000 --num-eval-images 240"
)
FAR = "--max-frame-gap 8"
AREAS = f"{FAR} --match-half-area 0.03 --match-temperature 0.1"
CHANGES = {
    "near": "",
    "far": FAR,
    "far-shared": f"{FAR} --pairing shared",
    "far-projection": f"{FAR} --match-dim 32",
    "areas": AREAS,
    "areas-projection": f"{AREAS} --match-dim 32",
}
# The paper's preset: single frames, with a decoder of a quarter of the resolution, then with labels; then pairs.
# Labels merge more slots into the background than predictions do, as in experiments/progressive.py.
FRAMES = "movi --model discovery --num-images 24000 --eval-every 1000 --num-eval-images 240 --warmup-steps 200"
MOVI_PAIRS = (
    "movi --num-images 24000 --batch-size 16 --max-steps 1500 --lr 2e-4 --lr-decay-steps 500 --warmup-steps 100 "
    "--eval-every 1500 --num-eval-images 240"
)
# Longer; pairs keep learning the labels of their frames, and areas count up to a larger one.
TAUGHT = "--loss.label-weight 0.03 --label-merge-threshold 0.1 --label-background-threshold 1.2"
LABELS = f"{TAUGHT} --label-pixel-sigma 1"
HALF = "--decoder.skipped-doublings 1"
LONG_PAIRS = (
    "movi --num-images 14400 --batch-size 16 --max-steps 5000 --lr-decay-steps 1250 --warmup-steps 100 "
    "--eval-every 2500 --num-eval-images 240 --match-half-area 0.1 --match-temperature 0.1"
)
TRACKS = "--loss.label-tracks"
NARROW_PAIRS = f"{LONG_PAIRS} --max-frame-gap 3 --loss.label-background-weight 2.5"
TAUGHT_PAIRS = f"{NARROW_PAIRS} {TAUGHT}"
TAUGHT_FRAMES = (
    f"{FRAMES} --num-images 14400 --batch-size 32 --max-steps 6000 --lr-decay-steps 3000 --eval-every 3000 "
    f"{TAUGHT} {HALF}"
)
TAUGHT_TRACKS = f"{TAUGHT_PAIRS} {TRACKS} --num-images 24000 --max-steps 8000 --lr-decay-steps 2000"
ELEVEN = "--slots.num-slots 11"
# For two CPU cores.
BRIEF = f"{TAUGHT_PAIRS} {TRACKS} --num-images 2880 --batch-size 4 --lr 2e-4 --warmup-steps 50 --precision bf16-mixed"
MOVI = {
    "movi-quarter": f"{FRAMES} --batch-size 32 --max-steps 6000 --lr-decay-steps 9000 --decoder.skipped-doublings 2 "
    "--loss.blur 5 --loss.blur-steps 2000",
    "movi-self": f"{FRAMES} {PLAIN_SELF} --label-background-threshold 1.2",
    "movi-areas": f"{MOVI_PAIRS} {AREAS}",
    "movi-half": f"{FRAMES} --num-images 36000 --batch-size 32 --max-steps 12539 "  # where it was stopped
    f"--lr-decay-steps 6000 --eval-every 4000 {HALF}",
    "movi-labeled": f"{LONG_PAIRS} {LABELS}",
    "movi-tracks": f"{NARROW_PAIRS} {LABELS} {TRACKS}",
    "movi-taught": TAUGHT_FRAMES,
    "movi-taught-tracks": TAUGHT_TRACKS,
    "movi-eleven": f"{TAUGHT_FRAMES} {ELEVEN}",
    "movi-eleven-tracks": f"{TAUGHT_TRACKS} {ELEVEN}",
    "movi-brief-half": f"{BRIEF} --max-steps 1200 --lr-decay-steps 1200 --eval-every 600 {HALF}",
    "movi-brief": f"{BRIEF} --max-steps 1000 --lr-decay-steps 300 --eval-every 1000",
}
BEFORE = {
    "movi-self": "movi-quarter",
    "movi-areas": "movi-self",
    "movi-labeled": "movi-half",
    "movi-tracks": "movi-half",
    "movi-taught-tracks": "movi-taught",
    "movi-eleven-tracks": "movi-eleven",
    "movi-brief-half": "movi-taught",
    "movi-brief": "movi-brief-half",
}
NAMES = {
    "near": "neighbouring frames, joint pairing (the paper)",
    "far": "frames up to 8 apart",
    "far-shared": "up to 8 apart, shared pairing",
    "far-projection": "up to 8 apart, learned projection",
    "areas": "up to 8 apart, areas, temperature 0.1",
    "areas-projection": "up to 8 apart, areas, temperature 0.1, learned projection",
    "movi-areas": "preset `movi`, up to 8 apart, areas, temperature 0.1",
    "movi-labeled": "preset `movi`, neighbouring frames with labels, areas, temperature 0.1",
    "movi-tracks": "preset `movi`, up to 3 apart with tracks, areas, temperature 0.1",
    "movi-taught-tracks": "preset `movi`, up to 3 apart with tracks of our network, areas, temperature 0.1",
    "movi-eleven-tracks": "the same with 11 slots",
    "movi-brief": "preset `movi`, briefly, with tracks of our network, areas, temperature 0.1",
}
CURVES = ("movi-taught-tracks", "movi-eleven-tracks", "movi-labeled")
ASSOCIATIONS = ("learned", "hungarian", "area")
METRICS = {
    "ari_fg": "ARI-FG",
    "ari": "ARI",
    "frame_ari_fg": "ARI-FG per frame",
    "refined_ari_fg": "ARI-FG, refined",
    "refined_ari": "ARI, refined",
}


@dataclass
class MatchingOptions(Options):
    initial: str = INITIAL
    """The checkpoint that runs begin with."""
    figure: str | None = None
    """Draw this run: frames 5 and 20 of test videos as matched pairs, as in the paper's appendix."""
    tracks_figure: str | None = None
    """Draw this run: frames of test videos that are tracked by learned matching."""


def run_config(name: str, options: MatchingOptions) -> TrainConfig:
    change, seed = name.rsplit("-", 1)
    config = replace(parse(MOVI[change] if change in MOVI else f"{PAIRS} {CHANGES[change]}"), seed=int(seed))
    if options.quick:
        return make_quick(at_full_resolution(without_labels(config)))
    before = str(options.runs.resolve() / f"{BEFORE[change]}-{seed}") if change in BEFORE else options.initial
    teacher = options.initial if change.startswith(("movi-taught", "movi-eleven", "movi-brief")) else before
    config = replace(config, teacher=teacher if cast(Any, config.loss).label_weight else None)
    return replace(config, init_from=None if change in MOVI and change not in BEFORE else before)


def test_data(name: str, options: Options) -> dict[str, str]:
    """Return the test videos for each association; none for models of single frames."""
    return dict.fromkeys(ASSOCIATIONS, "moving") if name.rsplit("-", 1)[0] in NAMES else {}


def table(results: dict[str, Any]) -> str:
    groups = [Group((NAMES[c],), tuple(f"{c}-{s}" for s in SEEDS), ASSOCIATIONS) for c in NAMES]
    groups = [group for group in groups if any(name in results for name in group.runs)]
    return make_table(("pairs",), groups, METRICS, results, "association")


def chain(name: str) -> list[str]:
    """Return the runs of preset `movi` that lead to a run, and the run.

    >>> chain("movi-brief-1")
    ['movi-taught-1', 'movi-brief-half-1', 'movi-brief-1']
    """
    change, seed = name.rsplit("-", 1)
    return [*(chain(f"{BEFORE[change]}-{seed}") if change in BEFORE else ()), name]


def curves(results: dict[str, Any]) -> dict[str, Any]:
    """Return the validation curves of runs of preset `movi` over the steps of all stages."""
    names = (f"{kind}-{seed}" for kind in CURVES for seed in SEEDS)
    known = [name for name in names if all(each in results for each in chain(name))]
    return {name: {"curve": join_curves(results, chain(name))} for name in known}


RUN_NAMES = (
    *(f"{change}-{seed}" for seed in SEEDS for change in CHANGES),
    *(f"{stage}-{seed}" for seed in SEEDS for stage in MOVI),
)
STUDY = Study(
    "matching",
    RUN_NAMES,
    run_config,
    test_data,
    METRICS,
    table,
    {name: name for name in ASSOCIATIONS},
    curves=CURVES,
    joined=curves,
)


def draw_pairs(checkpoint: Path, path: Path, num_videos: int = 3) -> None:
    """Draw distant frames of the first test videos; slots that are matched have one color."""
    model, data, fabric = _open(checkpoint, num_videos)
    shown = [visualize_pair(model, data, index, fabric) for index in range(num_videos)]
    rows = [list(pair.panels(i).values())[:4] for pair in shown if pair is not None for i in range(2)]
    write_atomically(path, encode_png(image_grid(rows)))


def draw_tracks(checkpoint: Path, path: Path, num_videos: int = 3, frames: tuple[int, ...] = (5, 20)) -> None:
    """Draw frames of the first test videos, tracked by learned matching; a track has one color."""
    model, data, fabric = _open(checkpoint, num_videos)
    videos = visualize_videos(model, data, fabric, num_videos, "learned").videos
    rows = [list(video.panels(i).values())[:5] for video in videos for i in frames]
    write_atomically(path, encode_png(image_grid(rows)))


def _open(checkpoint: Path, num_videos: int) -> tuple[Discovery, Scenes, Fabric]:
    fabric = make_fabric("auto", 1, 1, "32-true")
    model = load(checkpoint, fabric.device)
    return model, Scenes("moving", "test", model.image_size, count=num_videos), fabric


def main(options: MatchingOptions) -> None:
    run_study(STUDY, options)
    if options.figure is not None:
        draw_pairs(options.runs / options.figure, options.docs / "img" / "matched_pairs.png")
    if options.tracks_figure is not None:
        draw_tracks(options.runs / options.tracks_figure, options.docs / "img" / "matched_tracks.png")


if __name__ == "__main__":
    main(tyro.cli(MatchingOptions))
