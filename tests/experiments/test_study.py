"""The studies: their runs, in processes too, and the tables of the docs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from cutslots.evaluation import evaluate
from cutslots.evaluation.visualize import visualize_videos
from cutslots.models.checkpoints import load, save
from cutslots.models.discovery import build
from cutslots.scenes import Scenes
from cutslots.scenes.export import generate
from cutslots.training import loop
from cutslots.training.presets import PRESETS
from cutslots.viz.images import encode_png, image_grid
from experiments import comparison, matching, matching_options, preset, progressive, self_training, study, weights
from experiments.study import SEEDS, Options, collect, flags, is_complete, run_study
from tests.experiments.test_table import differences
from tests.models.configs import PAIRS, TINY
from tests.small_runs import Module

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = {
    "comparison": comparison.STUDY,
    "matching": matching.STUDY,
    "matching_options": matching_options.STUDY,
    "preset": preset.STUDY,
    "progressive": progressive.STUDY,
    "self_training": self_training.STUDY,
    "weights": weights.STUDY,
}


def test_options_of_a_process_are_those_of_its_run():
    given = weights.WeightsOptions(
        Path("runs"), Path("other"), None, Path("renders"), "x*", 7, jobs=3, stop_after=1.0, quick=True
    )
    expected = ["--runs", "runs", "--plain-renders", "renders", "--num-images", "7", "--initial", weights.INITIAL]
    assert flags(given) == [*expected, "--quick"]
    drawn = matching.MatchingOptions(Path("runs"), figure="x", tracks_figure="y")
    assert "x" not in flags(drawn) and "y" not in flags(drawn)


@pytest.mark.parametrize("name", STUDIES)
def test_table_of_the_docs_is_that_of_the_record(name):
    file = DOCS / f"{name}.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    assert STUDIES[name].table(results) in (DOCS / f"{name}.md").read_text()


# -------------------------------------------------------------------------------------------------------------- presets


def test_each_change_is_one_of_options_of_the_loss_the_partition_the_encoder_or_the_scenes():
    options = Options(Path("runs"))
    for family, changes in preset.CHANGES_BY_FAMILY.items():
        base = preset.run_config(f"{family}-base-0", options)
        for change in changes[1:]:
            found = differences(preset.run_config(f"{family}-{change}-0", options), base)
            assert found and {name.partition(".")[0] for name in found} <= {"loss", "model", "data"}, (change, found)


def test_every_seed_has_every_change():
    assert len(set(preset.RUN_NAMES)) == len(preset.RUN_NAMES) == 3 * sum(map(len, preset.CHANGES_BY_FAMILY.values()))
    assert preset.NAMES.keys() == preset.CHANGES.keys()
    assert [name[-1] for name in preset.RUN_NAMES] == sorted(name[-1] for name in preset.RUN_NAMES)


def test_a_study_in_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "start_process", Module.start)
    shutil.copy(DOCS / "preset.md", tmp_path)
    options = Options(tmp_path / "runs", tmp_path, match="plain-free-0", num_images=2, jobs=2, quick=True)
    run_study(preset.STUDY, options)
    record = json.loads((tmp_path / "preset.json").read_text())
    assert record.keys() == {"plain-free-0"} and record["plain-free-0"]["steps"] == 4
    assert record["plain-free-0"]["test"].keys() == {"plain", "varied"}
    assert "| plain | free terminals of the background | plain | 1 |" in (tmp_path / "preset.md").read_text()
    assert is_complete(preset.STUDY, "plain-free-0", options)
    monkeypatch.setattr(study, "DEFAULTS", study.DEFAULTS | {"capacity": 7.0})
    assert not is_complete(preset.STUDY, "plain-free-0", options), "its masks were refined by other settings"
    monkeypatch.undo()
    generate(Scenes("plain", size=16, count=2), tmp_path / "renders", quiet=True)
    assert not is_complete(preset.STUDY, "plain-free-0", replace(options, plain_renders=tmp_path / "renders"))


# ----------------------------------------------------------------------------------------------------------- comparison


def test_methods_differ_in_the_slots_the_losses_of_ours_and_the_learning_rate():
    options = Options(Path("runs"))
    cut, softmax, attention = (comparison.run_config(f"{method}-0", options) for method in comparison.METHODS)
    assert differences(softmax, cut) == {"model.slots.partition"}
    names = ("mask_consistency", "foreground_penalty")
    losses = {f"loss.{name}{end}" for name in names for end in ("", "_start")}
    assert differences(attention, cut) == {"model.slots", "lr"} | losses
    assert all(getattr(cut.loss, name) > 0 == getattr(attention.loss, name) for name in names)
    schedule = {"num_images", "max_steps", "data.num_flat_scenes"}  # the preset got flat scenes later
    assert differences(cut, PRESETS["ours"]) <= schedule | losses, "the network of ours"


def test_every_method_has_every_seed():
    expected = {f"{method}-{seed}" for method in comparison.METHODS for seed in SEEDS}
    assert set(comparison.RUN_NAMES) == expected and len(comparison.RUN_NAMES) == len(expected)
    assert comparison.NAMES.keys() == comparison.METHODS.keys()
    for name in comparison.RUN_NAMES:
        config = comparison.run_config(name, Options(Path("runs")))
        assert config.seed == int(name[-1]) and config.num_images == "endless", name


# -------------------------------------------------------------------------------------------------------------- weights


def test_runs_begin_with_weights_of_the_same_model():
    model = load("textured-128").config
    options = weights.WeightsOptions(Path("runs"), initial="textured-128")
    for name in weights.RUN_NAMES:
        config = weights.run_config(name, options)
        assert config.model == model, name
        assert config.init_from == (None if "scratch" in name else "textured-128")


@pytest.mark.usefixtures("no_curves")
def test_weights_on_renders(tmp_path, monkeypatch):
    """The last renders are left out of the training images."""
    monkeypatch.setattr(study, "NUM_RENDERS", 2)
    monkeypatch.setattr(weights, "NUM_RENDERS", 2)
    shutil.copy(DOCS / "weights.md", tmp_path)
    generate(Scenes("plain", size=16, count=5), tmp_path / "renders", quiet=True)
    begun, train = [], loop.train
    monkeypatch.setattr(loop, "train", lambda config: begun.append(config) or train(config))
    options = weights.WeightsOptions(
        tmp_path / "runs", tmp_path, None, tmp_path / "renders", "*-renders-0", 2, quick=True
    )
    names = weights.possible(weights.RUN_NAMES, options)
    assert all(name.startswith("plain") for name in names if "renders" in name)
    assert {f"plain-renders-{seed}" for seed in SEEDS} <= set(names)
    weights.prepare(options)
    run_study(replace(weights.STUDY, run_names=("plain-renders-0",)), options)
    folder = tmp_path / "runs/training-renders/plain"
    assert sorted(p.name for p in (folder / "train/images").iterdir()) == [f"00000{i}.png" for i in range(3)]
    assert [(config.mix_data, config.mix_fraction) for config in begun] == [(str(folder), 0.3)]
    record = collect(weights.STUDY, tmp_path / "runs")
    assert record.keys() == {"plain-renders-0"}
    assert record["plain-renders-0"]["test"].keys() == {"plain", "varied", "renders"}
    monkeypatch.setattr(weights, "NUM_RENDERS", 9)
    with pytest.raises(ValueError, match=r"renders/images has 5 images; expected more than 9"):
        weights.prepare(options)


def test_videos_are_fewer_than_images(tmp_path, monkeypatch):
    counts = []
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: counts.append(args[4]))
    (tmp_path / "moving-0").mkdir()
    (tmp_path / "moving-0" / "done").write_text("{}")
    study.run_one(weights.STUDY, "moving-0", weights.WeightsOptions(tmp_path, num_images=500))
    assert counts == [study.NUM_VIDEOS]


# ------------------------------------------------------------------------------------------------------------- matching


def test_pairs_begin_with_the_parts_of_the_checkpoint_and_differ_in_their_pairing():
    parts = load(matching.INITIAL).config
    near = matching.run_config("near-0", matching.MatchingOptions(Path("runs")))
    for change in matching.CHANGES:
        config = matching.run_config(f"{change}-0", matching.MatchingOptions(Path("runs")))
        assert all(getattr(config.model, part) == getattr(parts, part) for part in loop.PARTS)
        found = differences(config, near)
        assert all(name == "max_frame_gap" or name.startswith(("model.match", "model.pairing")) for name in found)


def test_a_model_of_pairs_is_evaluated_with_every_association(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: given.append((args[1], args[2].name, args[6])))
    (tmp_path / "near-0").mkdir()
    (tmp_path / "near-0" / "done").write_text("{}")
    study.run_one(matching.STUDY, "near-0", Options(tmp_path))
    assert given == [(("moving",), name, name) for name in ("learned", "hungarian", "area")]


def test_each_option_of_matching_is_changed_alone(tmp_path):
    options = Options(tmp_path)
    assert matching_options.NAMES.keys() == matching_options.OPTIONS.keys()
    near = matching_options.run_config("near-1", options)
    for change in matching_options.OPTIONS:
        config = matching_options.run_config(f"{change}-1", options)
        found = differences(config, near) - {"model.encoder", "init_from"}
        assert len(found) == {"near": 0, "all": 3}.get(change, 1), (change, found)
        assert all(name == "max_frame_gap" or name.startswith(("model.match", "model.pairing")) for name in found)
        first = matching_options.run_config(Path(config.init_from).name, options)
        assert study.needed_runs(config, tmp_path) == [Path(config.init_from)]
        assert first.init_from is None and first.model.frames == 1 and first.seed == config.seed
        assert all(getattr(first.model, part) == getattr(config.model, part) for part in loop.PARTS)


def test_encoders_of_matching_differ_in_batch_normalisation(tmp_path):
    plain, norm = (matching_options.run_config(f"{name}-0", Options(tmp_path)) for name in ("resnet", "norm"))
    assert replace(plain.model.encoder, batch_norm=True) == norm.model.encoder
    assert differences(norm, plain) == {"model.encoder.batch_norm"}


def test_row_of_an_option():
    test = {"learned": 0.5, "hungarian": 0.4, "area": 0.6}
    run = {"test": {name: {"ari_fg": value, "ari": 0.8, "frame_ari_fg": 0.9} for name, value in test.items()}}
    rows = matching_options.table({"far-0": run, "far-2": run}).splitlines()
    names = "frames up to 8 apart"
    one = " | ".join(f"{v} ({v} to {v})" for v in ("50.0", "40.0", "10.0", "60.0", "80.0", "90.0"))
    assert f"| {names} | 2 | {one} |" in rows and sum("not run" in row for row in rows) == len(rows) - 3


def test_average_of_checkpoints(tmp_path):
    models = [build(TINY) for _ in range(3)]
    for i, model in enumerate(models):
        (tmp_path / str(i)).mkdir()
        save(model, tmp_path / str(i))
    found = weights.average([str(tmp_path / str(i)) for i in range(3)])
    values = [dict(model.named_parameters()) for model in models]
    for name, value in found.named_parameters():
        expected = sum(each[name].double() for each in values) / 3
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"^plain-128 has another model than .*0; expected the same configuration$"):
        weights.average([str(tmp_path / "0"), "plain-128"])


def test_self_training_begins_with_the_runs_of_the_first_round(tmp_path):
    options = self_training.SelfTrainingOptions(tmp_path, initial="first", initial_plain="plain")
    options.textured_renders = options.plain_renders = tmp_path
    for name in self_training.RUN_NAMES:
        kind = name.rsplit("-", 1)[0]
        config = self_training.run_config(name, options)
        config.validate()
        known = {str(tmp_path / f"{first}-0") for first in ("textured-1", "textured-flips-1", "plain-1")}
        expected = {"first"} if kind.endswith("-1") else {"plain"} if kind == "plain-renders-2" else known
        assert config.init_from in expected
        assert config.teacher in (expected if kind != "plain-1" else {None})
        assert bool(config.loss.label_weight) == (config.teacher is not None)
        assert (config.mix_data is not None) == ("renders" in name)


def test_a_quick_run_of_self_training(tmp_path):
    for name in ("textured-flips-2-0", "plain-1-0"):
        options = self_training.SelfTrainingOptions(tmp_path, quick=True)
        loop.validate(self_training.run_config(name, options))


def test_the_first_run_of_preset_movi_begins_with_random_weights(tmp_path):
    options = matching.MatchingOptions(tmp_path)
    for stage in matching.MOVI:
        config = matching.run_config(f"{stage}-1", options)
        config.validate()
        before = matching.BEFORE.get(stage)
        assert config.init_from == (None if before is None else str(tmp_path / f"{before}-1")) and config.seed == 1
        on_frames, low = config.model.frames == 1, config.model.decoder.skipped_doublings > 0
        by_ours = any(kind in stage for kind in ("taught", "eleven", "brief"))
        teacher = matching.INITIAL if by_ours else config.init_from
        assert config.teacher == (teacher if config.loss.label_weight else None)
        assert bool(config.loss.label_weight) == (by_ours or stage.endswith(("self", "labeled", "tracks")))
        assert config.loss.label_tracks == ("brief" in stage or stage.endswith("tracks"))
        assert config.loss.label_background_weight == (2.5 if config.max_frame_gap == 3 else 1)
        assert matching.test_data(f"{stage}-1", options) == (
            {} if on_frames or low else dict.fromkeys(matching.ASSOCIATIONS, "moving")
        )
        model = PRESETS["movi"].model
        if "eleven" in stage:
            model = replace(model, slots=replace(model.slots, num_slots=11))
        parts = {"encoder", "slots"} if on_frames or low else {"encoder", "slots", "decoder"}
        assert all(getattr(config.model, part) == getattr(model, part) for part in parts)


def test_curves_of_preset_movi_begin_with_single_frames():
    stages = {"movi-eleven-0": 6, "movi-eleven-tracks-0": 8, "movi-taught-1": 5, "movi-taught-tracks-2": 8}
    results = {name: {"steps": steps, "curve": [[steps, 0.5, 0.6]]} for name, steps in stages.items()}
    found = matching.curves(results)
    assert {name: [step for step, *_ in each["curve"]] for name, each in found.items()} == {
        "movi-eleven-tracks-0": [6, 14]
    }, "the second begins with a run without results"


def test_curves_end_before_a_run_without_results():
    results = {name: {"steps": 3, "curve": [[2, 0.5, 0.6]]} for name in "ac"}
    assert study.join_curves(results, "abc") == [[2, 0.5, 0.6]]
    assert study.join_curves(results, "ac") == [[2, 0.5, 0.6], [5, 0.5, 0.6]]


@pytest.mark.parametrize("draw", [matching.draw_pairs, matching.draw_tracks])
def test_figures_of_matched_frames(tmp_path, draw):
    save(build(PAIRS), tmp_path)
    draw(tmp_path, tmp_path / "figure.png", num_videos=2)
    width, height = Image.open(tmp_path / "figure.png").size
    size = PAIRS.image_size[0]
    assert height // size == 4, "two frames of each video"
    assert width // size == (4 if draw is matching.draw_pairs else 5)


def test_figure_of_tracks_shows_frames_5_and_20_by_learned_matching(tmp_path, monkeypatch):
    found = []

    def visualize(*arguments):
        found.append((arguments[-1], visualize_videos(*arguments)))
        return found[0][1]

    save(build(PAIRS), tmp_path)
    monkeypatch.setattr(matching, "visualize_videos", visualize)
    matching.draw_tracks(tmp_path, tmp_path / "figure.png", num_videos=1)
    [(association, output)] = found
    rows = [list(output.videos[0].panels(i).values())[:5] for i in (5, 20)]
    assert association == "learned"
    assert (tmp_path / "figure.png").read_bytes() == encode_png(image_grid(rows))


# ------------------------------------------------------------------------------------------------- progressive training


BEFORE = {"half": "quarter", "full": "half", "self-1": "full", "self-2": "self-1", "self-3": "self-2"}
ELSEWHERE = {"penalty": "cut-quarter", "plain-light": "plain-full-full"}  # variants that begin with a stage of another


def test_every_stage_begins_with_the_one_before(tmp_path):
    options = Options(tmp_path)
    for name in progressive.RUN_NAMES:
        variant, stage, seed = progressive.split_name(name)
        config = progressive.run_config(name, options)
        config.validate()
        first = stage == progressive.VARIANTS[variant][1][0]
        before = ELSEWHERE.get(variant) if first else f"{variant}-{BEFORE[stage]}"
        if variant in ("plain", "plain-long") and stage == "self-1":
            before = f"{variant}-half"
        expected = [] if before is None else [tmp_path / f"{before}-{seed}"]
        needed = study.needed_runs(config, tmp_path)
        assert needed == (2 * expected if stage.startswith("self") else expected)
        assert (config.teacher == "plain-128") == (variant == "plain-taught")
        assert all(path.name in progressive.RUN_NAMES for path in needed)
        low = stage == "half" or (variant == "plain-long" and stage == "self-1")
        assert config.model.decoder.skipped_doublings == (2 if stage == "quarter" else int(low))
        learns = stage.startswith("self") or variant == "plain-taught"
        assert (config.teacher is not None) == bool(config.loss.label_weight) == learns


def test_stages_are_those_of_the_presets_but_for_the_resolution_of_the_decoder(tmp_path):
    for name in progressive.RUN_NAMES:
        variant, _, _ = progressive.split_name(name)
        model = progressive.run_config(name, Options(tmp_path)).model
        model = replace(model, decoder=replace(model.decoder, skipped_doublings=0))
        if variant == "softmax":
            assert model.slots.partition != PRESETS["clevrtex"].model.slots.partition
            model = replace(model, slots=PRESETS["clevrtex"].model.slots)
        expected = {"plain": "clevr", "graph": "graph-ocl"}.get(variant.partition("-")[0], "clevrtex")
        assert model == PRESETS[expected].model, name


@pytest.mark.parametrize("name", ["cut-quarter-0", "cut-self-2-0", "plain-half-0", "plain-self-3-0"])
def test_a_quick_run_of_a_stage(tmp_path, name):
    loop.validate(progressive.run_config(name, Options(tmp_path, quick=True)))


def test_a_run_waits_for_the_runs_that_it_begins_with(tmp_path, monkeypatch):
    ready = []

    def run_processes(names, start, is_ready, *rest):
        ready.append([name for name in names if is_ready(name)])

    monkeypatch.setattr(study, "run_processes", run_processes)
    options = Options(tmp_path, match="cut-*-0", jobs=2)
    for done, expected in ((None, "cut-quarter-0"), ("cut-quarter-0", "cut-half-0"), ("cut-full-0", "cut-self-1-0")):
        if done is not None:
            (tmp_path / done).mkdir()
            (tmp_path / done / "done").write_text("{}")
        study.run_all(progressive.STUDY, options)
        assert expected in ready[-1] and "cut-self-2-0" not in ready[-1]


def test_curves_of_a_variant_begin_with_the_stages_that_it_shares():
    stages = {"cut-quarter-0": 9, "cut-half-0": 5, "penalty-half-0": 6, "penalty-full-0": 4}
    results = {name: {"steps": steps, "curve": [[steps, 0.5, 0.6]]} for name, steps in stages.items()}
    found = progressive.curves(results)
    assert [step for step, *_ in found["penalty-0"]["curve"]] == [9, 15, 19]
    assert [step for step, *_ in found["cut-0"]["curve"]] == [9, 14] and set(found) == {"cut-0", "penalty-0"}


def test_a_run_that_needs_another_one(tmp_path):
    """The sentence names both, and nothing is written."""
    options = Options(tmp_path, tmp_path, match="penalty-half-0", jobs=2)
    with pytest.raises(SystemExit, match=r"^penalty-half-0 needs .*cut-quarter-0, which is not done; expected --match"):
        run_study(progressive.STUDY, options)
    assert not list(tmp_path.iterdir())
