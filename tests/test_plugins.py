"""Parts of a plugin, of every kind at once, from the command line: train, kill, resume, evaluate, predict."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.small_runs import Command

PLUGIN = Path(__file__).parent / "plugins" / "own_parts.py"
PARTS = ["--encoder", "patches", "--slots", "means", "--slots.partition", "stripes", "--decoder", "linear"]
OPTIONS = ["--encoder.channels", "10", "--slots.num-slots", "3", "--slots.slot-dim", "8", "--decoder.hidden", "6"]
OPTIONS += ["--slots.partition.sharpness", "2", "--loss.scale", "0.5", "--data.side", "6", "--image-size", "20", "28"]
RUN = ["--max-steps", "40", "--batch-size", "4", "--eval-every", "20", "--num-eval-images", "8"]
RUN += ["--checkpoint-minutes", "0", "--accelerator", "cpu"]


def cutslots(log, *words):
    """Return the exit status of a command, in a process without the plugin, and what it prints."""
    command = Command([*map(str, words)], log)
    return command.end(), command.said()


def train_words(out):
    parts = [*PARTS, "--loss", "absolute", "--data", "squares"]
    return ["train", "tiny", "--plugin", str(PLUGIN), *parts, *OPTIONS, *RUN, "--out", str(out)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of parts of the plugin alone, killed once and resumed."""
    out = tmp_path_factory.mktemp("plugin") / "run"
    command = Command(train_words(out), out.parent / "log")
    command.wait_for((out / "state.pt").exists)
    command.signal(signal.SIGKILL)
    assert command.end() == -signal.SIGKILL
    status, said = cutslots(out.parent / "log", *train_words(out))
    assert status == 0, said
    assert "resuming after step" in said
    return out


def test_configs_name_the_parts_and_the_plugin(run):
    config, values = json.loads((run / "config.json").read_text()), json.loads((run / "run.json").read_text())
    assert config["plugins"] == values["plugins"] == ["own_parts.py"]
    assert config["encoder"] == {"name": "patches", "channels": 10} and config["image_size"] == [20, 28]
    assert config["slots"]["partition"] == {"name": "stripes", "sharpness": 2.0}
    assert values["loss"] == {"name": "absolute", "scale": 0.5} and values["data"] == {"name": "squares", "side": 6}


def test_a_killed_run_resumes_to_the_same_weights(run, tmp_path):
    status, said = cutslots(tmp_path / "log", *train_words(tmp_path / "whole"))
    assert status == 0, said
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_evaluate(run, tmp_path):
    words = ["evaluate", run, "--data", "squares:side=6", "--num-images", "6", "--out", tmp_path, "--plugin", PLUGIN]
    status, said = cutslots(tmp_path / "log", *words)
    assert status == 0, said
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert set(results) == {"squares:side=6"} and "ari_fg" in results["squares:side=6"]


def test_predict(run, tmp_path):
    Image.fromarray(np.zeros((31, 47, 3), np.uint8)).save(tmp_path / "a.png")
    words = ["predict", run, tmp_path / "a.png", "-o", tmp_path / "out", "--plugin", PLUGIN]
    status, said = cutslots(tmp_path / "log", *words)
    assert status == 0, said
    with Image.open(tmp_path / "out" / "a" / "labels.png") as labels:
        assert labels.size == (47, 31)


@pytest.mark.parametrize("command", ["evaluate", "predict", "track"])
def test_without_the_plugin_one_sentence_names_it(run, tmp_path, command):
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    words = {"evaluate": ["--data", "plain"], "predict": [tmp_path / "a.png", "-o", tmp_path / "out"]}
    words["track"] = words["predict"]
    status, said = cutslots(tmp_path / "log", command, run, *words[command])
    assert status != 0 and not (tmp_path / "out").exists()
    assert said.startswith("cutslots: ") and said.count("\n") == 1
    assert "own_parts.py" in said and "--plugin" in said


def test_parts_lists_the_plugin(tmp_path):
    _, listed = cutslots(tmp_path / "log", "parts", "--plugin", PLUGIN)
    for name in ("patches", "means", "stripes", "linear", "absolute", "squares", "plain-128", "ours-video"):
        assert any(line.split()[:1] == [name] for line in listed.splitlines()), name
    assert "(plugin own_parts.py)" in listed


def test_a_plugin_that_fails_is_one_sentence(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    status, said = cutslots(tmp_path / "log", "train", "tiny", "--plugin", tmp_path / "broken.py")
    assert status != 0 and "broken.py cannot be imported: ModuleNotFoundError" in said
