import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cutslots.models.checkpoints import load
from cutslots.training import loop, pretrain
from cutslots.training.config import PretrainConfig, TrainConfig
from experiments import pretraining
from experiments.pretraining import KINDS, METHODS, SEEDS, TEST_DATA, Options, all_runs, main, table
from tests.experiments.test_table import differences
from tests.small_runs import state

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command writes for one method, its encoder included."""
    folder = tmp_path_factory.mktemp("pretraining")
    (folder / "docs").mkdir()
    shutil.copy(DOCS / "pretraining.md", folder / "docs")
    main(quick(folder))
    return folder


def quick(folder):
    return Options(folder / "runs", folder / "docs", quick=True, num_images=2, match="simclr-cut-1")


STEPS = {kind: 0.001 * (i + 1) for i, kind in enumerate(KINDS)}  # seconds


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Steps of different durations, as `--measure` would write them."""
    read = pretraining.read_steps
    monkeypatch.setattr(pretraining, "read_steps", lambda options: read(options) if options.quick else STEPS)


def runs(**changes):
    return all_runs(Options(Path("runs"), **changes))


def test_every_method_has_three_seeds_and_encoders_come_first():
    found = runs()
    encoders = [name for name, config in found.items() if isinstance(config, PretrainConfig)]
    assert list(found)[: len(encoders)] == encoders and len(encoders) == 2 * len(SEEDS)
    assert len(found) - len(encoders) == len(METHODS) * len(SEEDS) == 18
    assert all(config.seed == int(name[-1]) and config.num_images == 24_000 for name, config in found.items())


def test_methods_have_equal_time_with_pretraining():
    found = runs(max_minutes=10.0, pretraining_share=0.3)
    for method, (target, _) in METHODS.items():
        for seed in SEEDS:
            seconds = found[f"{method}-{seed}"].max_steps * STEPS[pretraining.kind_of(method)]
            if target != "pixels":
                seconds += found[f"encoder-{target}-{seed}"].max_steps * STEPS[f"encoder-{target}"]
            assert seconds == pytest.approx(600, abs=0.01)


def test_methods_differ_in_what_is_compared_alone():
    found = runs()
    pixels = found["pixels-cut-0"]
    attention = {"model.slots", "lr", "warmup_steps", "max_steps"}  # the rate of the reference
    features = {"model.encoder", "model.decoder", "loss", "max_steps"}
    for name, config in found.items():
        if isinstance(config, TrainConfig):
            expected = (attention if "slot-attention" in name else set()) | (
                features if "pixels" not in name else set()
            )
            assert differences(config, pixels) - {"seed"} == expected, name
    assert found["simclr-cut-2"].model.encoder.checkpoint == "runs/encoder-simclr-2"
    assert differences(found["encoder-simclr-0"], found["encoder-simmim-0"]) == {"objective", "max_steps"}


def test_encoders_of_chosen_runs_alone():
    assert list(runs(match="simmim-cut-*")) == [
        *(f"encoder-simmim-{seed}" for seed in SEEDS),
        *(f"simmim-cut-{seed}" for seed in SEEDS),
    ]
    assert list(runs(match="pixels-*-0")) == ["pixels-cut-0", "pixels-slot-attention-0"]


def test_every_config_is_valid(tmp_path):
    """Of quick runs without a checkpoint: those of encoders and of pixels."""
    for name, config in all_runs(Options(tmp_path, quick=True, match="*-0")).items():
        if isinstance(config, PretrainConfig):
            pretrain.Pretrain(config).validate()
        elif name.startswith("pixels"):
            loop.validate(config)


def test_runs_and_records(written):
    model = load(written / "runs" / "simclr-cut-1")
    assert model.encoder.checkpoint == str(written / "runs" / "encoder-simclr-1") and model.reconstructs_features
    record = json.loads((written / "docs" / "pretraining.json").read_text())
    assert record.keys() == {"encoder-simclr-1", "simclr-cut-1"}
    assert record["simclr-cut-1"]["steps"] == 4 and record["simclr-cut-1"]["test"].keys() == set(TEST_DATA)
    assert "accuracy" in record["encoder-simclr-1"]["val"] and record["encoder-simclr-1"]["date"]


def test_finished_runs_are_skipped(written, monkeypatch):
    monkeypatch.setattr(loop, "train", None)
    monkeypatch.setattr(pretrain, "pretrain", None)
    before = (written / "docs" / "pretraining.md").read_bytes()
    main(quick(written))
    assert (written / "docs" / "pretraining.md").read_bytes() == before
    assert state(written / "runs" / "simclr-cut-1")["step"] == 4


@pytest.mark.usefixtures("no_curves")
def test_steps_are_measured(tmp_path):
    runs = tmp_path / "new" / "runs"
    main(Options(runs, quick=True, measure=True))
    record = json.loads((runs / "steps.json").read_text())
    assert set(record["seconds"]) == set(KINDS) and all(value > 0 for value in record["seconds"].values())
    assert record["device"] and [each.name for each in runs.iterdir()] == ["steps.json"]


def test_the_first_steps_are_not_measured():
    lines = [{"step": 20 * i, "seconds": 5 + 0.2 * i, "loss": 1.0} for i in range(1, 13)] + [{"val": {}, "step": 240}]
    assert pretraining.step_seconds(lines) == pytest.approx(0.01)


def test_runs_need_measured_steps(tmp_path, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(SystemExit, match=r"steps\.json is missing; run the command with --measure first"):
        all_runs(Options(tmp_path))


def test_several_runs_at_a_time(tmp_path, monkeypatch):
    """Encoders end before the runs that need them start; a run that fails is reported."""
    started = []

    def start(command, log, jobs):
        name, folder = command[-1], tmp_path / "runs" / command[-1]
        started.append((name, (tmp_path / "runs" / "encoder-simclr-0" / "done").is_file()))
        assert command[:3] == [sys.executable, "-m", "experiments.pretraining"] and command[-2] == "--one" and jobs == 2
        write = f"mkdir -p {folder} && touch {folder}/done" if name != "simclr-slot-attention-0" else "exit 3"
        return subprocess.Popen(["sh", "-c", write])

    monkeypatch.setattr(pretraining, "start_process", start)
    options = quick(tmp_path)
    options.match, options.jobs, options.write = "simclr-*-0", 2, False
    with pytest.raises(SystemExit, match="some runs are not done; run the same command again"):
        main(options)
    assert started == [("encoder-simclr-0", False), ("simclr-cut-0", True), ("simclr-slot-attention-0", True)]


def test_table(written):
    text = (written / "docs" / "pretraining.md").read_text()
    assert text.startswith("# Pre-training") and text.count("| not run |") == 3 * (len(METHODS) - 1)
    record = json.loads((written / "docs" / "pretraining.json").read_text())["simclr-cut-1"]
    scores = [f"{100 * record['test']['camo'][name]:.1f}" for name in pretraining.METRICS]
    assert f"| features, `simclr` | cut | camo | 1 | 4 | {' | '.join(scores)} |" in text


def test_table_has_the_mean_and_the_range():
    values = {"ari_fg": 0.5, "refined_ari_fg": 0.25, "refined_miou": 0.125}
    results = {
        f"pixels-cut-{seed}": {
            "steps": 1000 + seed,
            "test": {data: {k: v + seed / 100 for k, v in values.items()} for data in TEST_DATA},
        }
        for seed in SEEDS
    }
    row = "| pixels | cut | textured | 3 | 1,001 | 51.0 (50.0 to 52.0) | 26.0 (25.0 to 27.0) | 13.5 (12.5 to 14.5) |"
    assert row in table(results)


def test_table_of_the_docs_is_that_of_the_record():
    file = DOCS / "pretraining.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    assert table(results) in (DOCS / "pretraining.md").read_text()
