"""Parts of a plugin, of every kind at once, from the command line: train, kill, resume, evaluate, predict."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PLUGIN = Path(__file__).parent / "plugins" / "own_parts.py"
PARTS = ["--encoder", "patches", "--slots", "means", "--slots.partition", "stripes", "--decoder", "linear"]
OPTIONS = ["--encoder.channels", "10", "--slots.num-slots", "3", "--slots.slot-dim", "8", "--decoder.hidden", "6"]
OPTIONS += ["--slots.partition.sharpness", "2", "--loss.scale", "0.5", "--data.side", "6", "--image-size", "20", "28"]
RUN = ["--max-steps", "40", "--batch-size", "4", "--eval-every", "20", "--num-eval-images", "8"]
RUN += ["--checkpoint-minutes", "0", "--accelerator", "cpu"]


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def cutslots(*words):
    command = [sys.executable, "-m", "cutslots", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD)


def train_words(out):
    parts = [*PARTS, "--loss", "absolute", "--data", "squares"]
    return ["train", "tiny", "--plugin", str(PLUGIN), *parts, *OPTIONS, *RUN, "--out", str(out)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of parts of the plugin alone, killed once and resumed."""
    out = tmp_path_factory.mktemp("plugin") / "run"
    words = [sys.executable, "-m", "cutslots", *train_words(out)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ONE_THREAD)
    while process.poll() is None and not (out / "state.pt").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = cutslots(*train_words(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step" in done.stdout
    return out


def test_configs_name_the_parts_and_the_plugin(run):
    config, values = json.loads((run / "config.json").read_text()), json.loads((run / "run.json").read_text())
    assert config["plugins"] == values["plugins"] == ["own_parts.py"]
    assert config["encoder"] == {"name": "patches", "channels": 10} and config["image_size"] == [20, 28]
    assert config["slots"]["partition"] == {"name": "stripes", "sharpness": 2.0}
    assert values["loss"] == {"name": "absolute", "scale": 0.5} and values["data"] == {"name": "squares", "side": 6}


def test_a_killed_run_resumes_to_the_same_weights(run, tmp_path):
    done = cutslots(*train_words(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_evaluate(run, tmp_path):
    words = ["evaluate", run, "--data", "squares:side=6", "--num-images", "6", "--out", tmp_path, "--plugin", PLUGIN]
    done = cutslots(*words)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert set(results) == {"squares:side=6"} and "ari_fg" in results["squares:side=6"]


def test_predict(run, tmp_path):
    Image.fromarray(np.zeros((31, 47, 3), np.uint8)).save(tmp_path / "a.png")
    done = cutslots("predict", run, tmp_path / "a.png", "-o", tmp_path / "out", "--plugin", PLUGIN)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "out" / "a" / "labels.png") as labels:
        assert labels.size == (47, 31)


@pytest.mark.parametrize("command", ["evaluate", "predict", "track"])
def test_without_the_plugin_one_sentence_names_it(run, tmp_path, command):
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    words = {"evaluate": ["--data", "plain"], "predict": [tmp_path / "a.png", "-o", tmp_path / "out"]}
    words["track"] = words["predict"]
    done = cutslots(command, run, *words[command])
    assert done.returncode != 0 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("cutslots: ") and done.stderr.count("\n") == 1
    assert "own_parts.py" in done.stderr and "--plugin" in done.stderr


def test_parts_lists_the_plugin():
    listed = cutslots("parts", "--plugin", PLUGIN).stdout
    for name in ("patches", "means", "stripes", "linear", "absolute", "squares", "plain-128", "ours-video"):
        assert any(line.split()[:1] == [name] for line in listed.splitlines()), name
    assert "(plugin own_parts.py)" in listed


def test_a_plugin_that_fails_is_one_sentence(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    done = cutslots("train", "tiny", "--plugin", tmp_path / "broken.py")
    assert done.returncode != 0 and "broken.py cannot be imported: ModuleNotFoundError" in done.stderr
