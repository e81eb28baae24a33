import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cutslots import cli
from cutslots import train as training
from cutslots.devices import make_fabric
from cutslots.evaluate import evaluate
from cutslots.model import Discovery, load, save
from cutslots.presets import PRESETS
from cutslots.scenes import Scenes
from cutslots.scenes.files import generate
from cutslots.train import Batches, blur, blurred, price, rate, textures, train
from tests.conftest import needs_cuda
from tests.small_runs import Command, lines, sentence, small, train_command, two, weights
from tests.test_model import Code

SENTENCE = r"\A[^\n]+\Z"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing has disturbed. Not to be written to."""
    return train(small(tmp_path_factory.mktemp("runs") / "whole"))


@pytest.fixture
def run(tmp_path):
    """A short run, to be gone on with."""
    return train(small(tmp_path / "run", steps=8))


def state(folder):
    return torch.load(folder / "state.pt", weights_only=True)


def curves(folder):
    """What TensorBoard shows: {name: [(step, value)]}."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def expected_curves(folder):
    """The same from metrics.jsonl."""
    out = {}
    for line in lines(folder):
        named = {f"val/{k}": v for k, v in line["val"].items()} if "val" in line else {}
        named |= {f"train/{k}": line[k] for k in ("loss", "gradient", "lr", "images_per_second") if k in line}
        for name, value in named.items():
            out.setdefault(name, []).append((line["step"], float(np.float32(value))))
    return out


def kinds(folder):
    """(step, what) of every line."""
    return [(line["step"], "val" if "val" in line else "loss") for line in lines(folder)]


# ------------------------------------------------------------------------------------------------------ the run folder


def test_what_a_run_leaves(whole):
    names = {"run.json", "config.json", "metrics.jsonl", "model.safetensors", "state.pt", "report.html"}
    assert {p.name for p in whole.iterdir()} == names | {"tensorboard", "pictures", ".lock"}
    config = small(whole)
    run = json.loads((whole / "run.json").read_text())
    assert run["steps"] == 48 and run["lr"] == 1e-3 and run["out"] == str(whole)
    assert json.loads((whole / "config.json").read_text()) == run["model"]
    assert kinds(whole) == sorted([(s, "loss") for s in (20, 40, 48)] + [(s, "val") for s in range(8, 49, 8)])
    for line in lines(whole):
        if "val" in line:
            assert {"ari", "ari_fg", "miou", "mse", "partition_ari_fg"} <= set(line["val"])
        else:
            assert line["lr"] == rate(config, line["step"] - 1)
            assert line["images_per_second"] > 0 and line["seconds"] > 0 and line["gradient"] > 0
    pictures = sorted((whole / "pictures").iterdir())
    assert [p.name for p in pictures] == [f"step_{s:07d}.png" for s in range(8, 49, 8)]
    assert Image.open(pictures[-1]).height == 4 * 18 - 2
    assert "cutslots: tiny on plain:2-5" in (whole / "report.html").read_text()
    assert state(whole)["step"] == 48


def test_tensorboard_shows_the_same_curves(whole):
    assert curves(whole) == expected_curves(whole)


def test_the_weights_load(whole):
    model = load(whole)
    assert model.config == small(whole).model
    tensors = model.state_dict()
    for name, value in state(whole)["model"].items():
        assert torch.equal(value, tensors[name])


def test_the_last_scores_are_those_of_evaluate(whole, tmp_path):
    results = evaluate(str(whole), ("plain:2-5",), tmp_path, "val", 8, make_fabric("cpu"))
    del results["plain:2-5"]["split"], results["plain:2-5"]["images"]
    assert results["plain:2-5"] == lines(whole)[-1]["val"]


def test_the_loss_goes_down(whole):
    losses = [line["loss"] for line in lines(whole) if "loss" in line]
    assert losses[0] > 1.3 * losses[-1] > 0


def test_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(train(small(None, steps=1, seed=3))) == "runs/tiny-plain-2-5-3"
    assert (tmp_path / "runs" / "tiny-plain-2-5-3" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------------------- the order of things


def test_rate():
    config = dataclasses.replace(PRESETS["clevr"], lr=2.0, warmup=4, decay=0.5, decay_steps=10)
    assert [rate(config, s) for s in (0, 1, 3)] == pytest.approx([0.5, 2**-0.1, 2 * 2**-0.3])
    assert [rate(config, s) for s in (10, 20, 35)] == pytest.approx([1.0, 0.5, 2 * 2**-3.5])
    assert rate(dataclasses.replace(config, warmup=0), 0) == 2.0


def test_every_epoch_takes_every_image_once():
    """By one process or by several: the same images at every step, in another order each epoch."""
    images, config = Scenes("plain", size=16, count=10), small(None, batch=4)
    shares = [
        Batches(images, config, types.SimpleNamespace(world_size=n, global_rank=r), 0)
        for n, r in ((1, 0), (2, 0), (2, 1))
    ]
    one, first, second = ([list(b.numbers(step)) for step in range(10)] for b in shares)
    assert one == [a + b for a, b in zip(first, second, strict=True)]
    flat = np.concatenate(one).tolist()
    epochs = [flat[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len(set(map(tuple, epochs))) == 4
    assert list(shares[0].numbers(7)) == one[7]


def test_the_price_of_presets():
    movi11 = PRESETS["movi11"]
    steps = {0: 0, 2_999: 0, 3_000: 7e-4 / 3_000, 4_499: 3.5e-4, 5_999: 7e-4, 6_000: 7e-4, 23_999: 7e-4}
    assert [price(movi11, step) for step in steps] == pytest.approx(list(steps.values()))
    others = [config for name, config in PRESETS.items() if name != "movi11"]
    assert not any(price(config, step) for config in others for step in (0, 10**6))


def test_the_blur_clears():
    config = small(None, blur=4.0, blur_steps=8)
    assert [blur(config, step) for step in (0, 2, 6, 8, 999)] == [4, 3, 1, 0, 0]
    assert not any(blur(PRESETS["clevr"], step) for step in (0, 10**6))


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.5, 7.0])  # the last is wider than the picture
@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 2, 3, 12, 20)])
def test_blurred_is_scipys_gaussian(shape, spread):
    x = torch.randn(shape, dtype=torch.float64)
    axes = (len(shape) - 2, len(shape) - 1)
    expected = ndimage.gaussian_filter(x, spread, mode="nearest", radius=math.ceil(3 * spread), axes=axes)
    assert torch.allclose(blurred(x, spread), torch.from_numpy(expected), atol=1e-12)


def test_what_is_hardly_blurred_stays():
    x = torch.randn(2, 3, 8, 8)
    assert blurred(x, 0.0) is x and blurred(x, 0.29) is x


def test_learning_through_a_blur(tmp_path):
    """The loss that is told is of the whole error; the weights that are learned are other ones."""
    runs = [train(small(tmp_path / f"{b}", steps=1, blur=b, blur_steps=9)) for b in (0.0, 3.0)]
    assert len({line["loss"] for folder in runs for line in lines(folder) if "loss" in line}) == 1
    assert len(set(map(weights, runs))) == 2
    for wrong in ({"blur": -1.0}, {"blur": float("nan")}, {"blur_steps": -1}, {"blur": 1e9}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; expected"):
            train(small(tmp_path / "wrong", **wrong))
    assert not (tmp_path / "wrong").exists()


class Lopsided:
    """Images, or clips, that are not their own mirror images."""

    def __init__(self, *shape):
        self.image = torch.randint(0, 256, shape, dtype=torch.uint8)

    def __len__(self):
        return len(self.image)

    def render(self, indices, device="cpu"):
        return types.SimpleNamespace(image=self.image[torch.as_tensor(indices)])


def mirrored(batches, step):
    """Which images of a step were; the others are as they are."""
    plain = batches.images.render(batches.numbers(step)).image
    made = batches._make(step)
    found = []
    for one, other in zip(made, plain, strict=True):
        assert torch.equal(one, other) != torch.equal(one, other.flip(-1))
        found.append(not torch.equal(one, other))
    return found


def batches_of(images, step=0, rank=0, **changes):
    config = small(None, batch=8, **({"flips": True} | changes))
    return Batches(images, config, types.SimpleNamespace(world_size=1, global_rank=rank, device="cpu"), step)


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 4, 4)], ids=["images", "clips"])
def test_flips(shape):
    images = Lopsided(20, *shape)
    found = [mirrored(batches_of(images), step) for step in range(50)]
    assert 160 < sum(map(sum, found)) < 240, "of 400"
    assert len(set(map(tuple, found))) > 40, "not the same ones at every step"
    assert [mirrored(batches_of(images, step=30), step) for step in range(50)] == found, "by the step alone"
    assert [mirrored(batches_of(images, seed=1), step) for step in range(50)] != found
    assert not any(map(any, (mirrored(batches_of(images, flips=False), step) for step in range(5))))


def test_flips_in_order():
    """What the thread makes ready is what each step is to have."""
    batches = batches_of(Lopsided(20, 3, 4, 4), step=3)
    with batches:
        made = [next(batches) for _ in range(4)]
    for step, image in enumerate(made, start=3):
        assert torch.equal(image, batches._make(step))


def test_flips_are_the_same_on_going_on(tmp_path):
    flipped = weights(train(small(tmp_path / "whole", steps=12, flips=True)))
    for steps in (5, 12):
        train(small(tmp_path / "parts", steps=steps, flips=True))
    assert weights(tmp_path / "parts") == flipped
    assert weights(train(small(tmp_path / "plain", steps=12))) != flipped
    with pytest.raises(ValueError, match=r"holds another run \(its flips differ\)"):
        train(small(tmp_path / "parts", steps=13))


# ------------------------------------------------------------------------------------------------- textures that rise


def test_textures_by_hand():
    config = small(None, flat_until=10, whole_from=30)
    seen = [textures(config, step) for step in (0, 10, 20, 29)]
    assert seen[:3] == [pytest.approx(x) for x in ((0, 0.15), (0, 0.15), (0.275, 0.575))]
    assert seen[3] == pytest.approx((0.6575, 0.9575))
    assert textures(small(None, flat_until=5, whole_from=5), 4) == (0, 0.15), "flat, then whole at once"


class Numbered:
    """Images that are their own number, beginning with one."""

    def __init__(self, count, first):
        self.numbers = torch.arange(first, first + count)

    def __len__(self):
        return len(self.numbers)

    def render(self, indices, device="cpu"):
        return types.SimpleNamespace(image=self.numbers[torch.as_tensor(indices)].view(-1, 1, 1, 1))


def lessons(rank=0, size=1, **changes):
    fabric = types.SimpleNamespace(world_size=size, global_rank=rank, device="cpu")
    config = small(None, batch=8, flat_until=10, whole_from=30, near=0.25, near_from=40, **changes)
    return Batches(Numbered(100, 0), config, fabric, 0, Numbered(1000, 1000), Numbered(50, 5000))


def test_what_is_learned_from_at_which_step():
    """First scenes as strong in texture as the step asks for, then whole ones, then a share that is near."""
    seen = [lessons()._make(step).flatten().tolist() for step in range(240)]
    for step in range(30):
        low, high = textures(lessons().config, step)
        assert all(1000 * low - 1 < number - 1000 <= 1000 * high for number in seen[step]), step
    assert [set(seen[step]) == set(lessons().numbers(step)) for step in range(30, 40)] == [True] * 10
    near = [sum(number >= 5000 for number in numbers) for numbers in seen[40:]]
    assert 340 < sum(near) < 460 and max(near) < 8, "of 1,600"
    for numbers, step in zip(seen[40:], range(40, 240), strict=True):
        pairs = zip(numbers, lessons().numbers(step), strict=True)
        assert all(number == own for number, own in pairs if number < 5000), "the others are as they would be"
    assert len({tuple(numbers) for numbers in seen}) == 240, "others at every step"
    assert lessons()._make(55).flatten().tolist() == seen[55], "by the step alone"
    assert [lessons(seed=1)._make(step).flatten().tolist() for step in range(240)] != seen


def test_processes_share_what_is_learned_from():
    for step in (5, 25, 35, 60):
        parts = [lessons(rank, 2)._make(step) for rank in (0, 1)]
        assert torch.equal(torch.cat(parts), lessons()._make(step)), step


def test_textures_that_rise_are_the_same_on_going_on(tmp_path):
    course = {"data": "textured:1-2", "flat_until": 2, "whole_from": 6, "near": 0.5, "near_from": 8}
    whole = weights(train(small(tmp_path / "whole", steps=12, **course)))
    for steps in (3, 7, 12):
        train(small(tmp_path / "parts", steps=steps, cache=tmp_path / "cache", **course))
    assert weights(tmp_path / "parts") == whole
    kinds = {path.name.split("-")[3] for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    assert kinds == {"train", "rising", "near", "val"}
    assert weights(train(small(tmp_path / "none", steps=12, data="textured:1-2"))) != whole
    with pytest.raises(ValueError, match=r"holds another run \(its flat_until, whole_from, near, near_from differ\)"):
        train(small(tmp_path / "parts", steps=13, data="textured:1-2"))


def test_a_run_that_ends_before_textures_are_whole_says_so(tmp_path, capsys):
    told = "textures are whole from step 20 on (--whole-from); this run ends before\n"
    for steps, data, expected in ((2, "textured:1-2", True), (2, "plain:1-2", False), (21, "textured:1-2", False)):
        train(small(tmp_path / f"{steps}-{data[0]}", steps=steps, data=data, whole_from=20, eval_every=99))
        assert (told in capsys.readouterr().out) == expected, (steps, data)


def test_only_what_is_left_of_a_run_is_made(tmp_path):
    """Rising scenes are for its beginning, near ones for after that."""
    course = {"data": "textured:1-2", "whole_from": 3, "near": 0.5, "near_from": 6, "cache": tmp_path / "cache"}
    kinds = []
    for steps in (2, 5, 7):
        train(small(tmp_path / "run", steps=steps, **course))
        kinds.append({path.name.split("-")[3] for path in (tmp_path / "cache").iterdir() if path.is_dir()})
        shutil.rmtree(tmp_path / "cache")
    assert [found - {"train", "val"} for found in kinds] == [{"rising"}, {"rising"}, {"near"}]
    train(small(tmp_path / "whole", steps=1, **(course | {"whole_from": 0, "flat_until": 9})))
    assert not list((tmp_path / "cache").glob("*rising*")), "0 is for whole ones always"


def test_what_has_no_textures_is_learned_from_as_it_is(tmp_path):
    """A preset that lets them rise is for any pictures."""
    asked = {"flat_until": 2, "whole_from": 4}
    assert weights(train(small(tmp_path / "a", steps=6, **asked))) == weights(train(small(tmp_path / "b", steps=6)))


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"flat_until": 5, "whole_from": 4}, "flat_until is 5; expected at most whole_from, 4"),
        ({"whole_from": -1}, "whole_from is -1; expected zero or more"),
        ({"near": 1.5, "data": "textured"}, "near is 1.5; expected a share from 0 to 1"),
        ({"near": float("nan")}, "near is nan; expected zero or more"),
        ({"near": 0.5}, "near is 0.5 and data 'plain:2-5'; expected built-in scenes that have textures"),
        (
            {"near": 0.5, "data": "camo:1-2"},
            "near is 0.5 and data 'camo:1-2', whose objects are as near as can be; expected 0",
        ),
    ],
)
def test_textures_that_cannot_be(tmp_path, wrong, sentence):
    with pytest.raises(ValueError, match=SENTENCE) as caught:
        train(small(tmp_path / "run", **wrong))
    assert str(caught.value) == sentence and not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------ learned elsewhere


def unmoved(folder, start, **changes):
    """A run whose one step goes nowhere: its weights are those it began with."""
    made = load(train(small(folder, steps=1, lr=1e-30, start=str(start), **changes))).state_dict()
    expected = load(start).state_dict()
    assert made.keys() == expected.keys()
    for name, value in made.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-20, msg=name)


def test_a_run_begins_with_other_weights(run, tmp_path):
    unmoved(tmp_path / "folder", run)
    unmoved(tmp_path / "file", run / "model.safetensors")
    unmoved(tmp_path / "other seed", run, seed=3, data="textured")
    (tmp_path / "half").mkdir()
    save(load(run), tmp_path / "half", half=True)
    unmoved(tmp_path / "from half", tmp_path / "half")
    assert json.loads((tmp_path / "folder" / "run.json").read_text())["start"] == str(run)
    at_random = load(train(small(tmp_path / "at random", steps=1, lr=1e-30))).state_dict()
    assert not torch.equal(at_random["encoder.layers.0.weight"], load(run).state_dict()["encoder.layers.0.weight"])


def test_a_run_begins_with_weights_of_a_name(tmp_path):
    tiny = {"images": 4, "batch": 2, "steps": 1, "lr": 1e-30, "eval_images": 2, "accelerator": "cpu", "compile": "off"}
    made = load(train(dataclasses.replace(PRESETS["tiny"], out=tmp_path / "run", start="tiny", **tiny)))
    torch.testing.assert_close(flat(made), flat(load("tiny")), rtol=0, atol=1e-20)


def test_a_run_begun_elsewhere_is_gone_on_with(run, tmp_path):
    """From its own state, not from the beginning again."""
    start = {"start": str(run), "seed": 1}
    expected = weights(train(small(tmp_path / "whole", steps=8, **start)))
    for steps in (3, 8):
        train(small(tmp_path / "parts", steps=steps, **start))
    assert weights(tmp_path / "parts") == expected and kinds(tmp_path / "parts")[-1] == (8, "val")
    assert state(tmp_path / "parts")["step"] == 8 and state(run)["step"] == 8, "steps are counted anew"
    with pytest.raises(ValueError, match=r"holds another run \(its start differ\)"):
        train(small(tmp_path / "parts", steps=9, seed=1))


def test_weights_that_a_run_cannot_begin_with(run, tmp_path, monkeypatch):
    wrong = {
        "slots": (4, f"start is {run}, whose slots is 3; expected 4, as the run's"),
        "module": ("softmax", f"start is {run}, whose module is cut; expected softmax, as the run's"),
        "decoder_maps": ((4, 4), f"start is {run}, whose decoder_maps is (8,); expected (4, 4), as the run's"),
    }
    for name, (value, message) in wrong.items():
        said = sentence(monkeypatch, train_command(tmp_path / "new", start=run, **{name: value}))
        assert said == f"cutslots: {message}"
    said = sentence(monkeypatch, train_command(tmp_path / "new", start=tmp_path / "nowhere"))
    assert said.startswith(f"cutslots: weights: there is no {tmp_path / 'nowhere'}; expected a run folder")
    (run / "model.safetensors").write_bytes(b"short")
    assert "is not a whole safetensors file" in sentence(monkeypatch, train_command(tmp_path / "new", start=run))
    assert not (tmp_path / "new").exists()


# --------------------------------------------------------------------------------------------- interrupted and resumed


@pytest.mark.parametrize("module, moments", [("cut", (0, 2, 5)), ("attention", (3,))])
def test_killed_at_any_moment(module, moments, tmp_path, whole, rng):
    """SIGKILL after some lines of metrics.jsonl and a while; in the end there are the bytes of an undisturbed run."""
    if module != "cut":
        whole = train(small(tmp_path / "whole", module=module))
    folder = tmp_path / "run"
    words = train_command(folder, module=module, save_minutes=0.002)
    for count in moments:
        command = Command(words, tmp_path / "log")
        command.wait_for(lambda: (folder / "pictures").exists() and len(kinds_so_far(folder)) >= count)  # noqa: B023
        time.sleep(rng.uniform(0, 0.1))
        command.signal(signal.SIGKILL)
        command.end()
    command = Command(words, tmp_path / "log")
    assert command.end() == 0, command.said()
    assert weights(folder) == weights(whole)
    assert kinds(folder) == kinds(whole)
    assert [x for x in lines(folder) if "val" in x] == [x for x in lines(whole) if "val" in x]
    assert not list(folder.rglob("*.part"))


def kinds_so_far(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().splitlines() if file.exists() else []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal(number, tmp_path, whole):
    folder = tmp_path / "run"
    words = train_command(folder, save_minutes=60)
    command = Command(words, tmp_path / "log")
    command.wait_for(lambda: len(kinds_so_far(folder)) >= 2)
    command.signal(number)
    assert command.end() == 130, command.said()
    said = command.said()
    stopped = re.search(r"^cutslots: stopped after step (\d+).*; all is saved in (.*)$", said, re.M)
    assert stopped and stopped[2] == str(folder) and "Traceback" not in said, said
    assert f"command goes on from there: cutslots {' '.join(words)}\n" in said
    assert state(folder)["step"] == int(stopped[1]) < 48
    train(small(folder))
    assert weights(folder) == weights(whole) and kinds(folder) == kinds(whole)


def test_lines_after_the_state_are_dropped(run, whole):
    """What a killed run logged after its newest state, the last line cut short, is logged again."""
    later = [line for line in (whole / "metrics.jsonl").read_bytes().splitlines() if json.loads(line)["step"] > 8]
    before = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(before + b"\n".join(later[:3]) + b'\n{"step": 2')
    train(small(run))
    assert kinds(run) == sorted([(8, "loss"), *kinds(whole)])
    assert (run / "metrics.jsonl").read_bytes().startswith(before)


def test_more_steps_go_on(run, whole):
    before = state(run)["step"]
    train(small(run, cache=run.parent / "cache"))
    assert before == 8 and state(run)["step"] == 48 and weights(run) == weights(whole)


def test_a_finished_run_is_left_as_it_is(run):
    before, metrics = weights(run), (run / "metrics.jsonl").read_bytes()
    train(small(run, steps=8))
    assert weights(run) == before and (run / "metrics.jsonl").read_bytes() == metrics


def test_minutes_end_a_run(tmp_path):
    folder = train(small(tmp_path / "run", steps=10**6, minutes=1e-9))
    assert 1 <= state(folder)["step"] == lines(folder)[-1]["step"] <= training.LOG_EVERY
    assert "val" in lines(folder)[-1] and (folder / "report.html").exists()
    before = weights(folder)
    train(small(tmp_path / "run", steps=10**6, minutes=1e-9))
    assert weights(folder) == before, "a run whose time is up is over"


@needs_cuda
def test_going_on_on_cuda(tmp_path):
    cuda = {"accelerator": "cuda", "compile": "off", "precision": "32-true"}
    train(small(tmp_path / "whole", **cuda, steps=8))
    train(small(tmp_path / "parts", **cuda, steps=4))
    train(small(tmp_path / "parts", **cuda, steps=8))
    for name, value in load(tmp_path / "whole").state_dict().items():
        torch.testing.assert_close(load(tmp_path / "parts").state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_killed_between_state_and_weights(tmp_path, whole, monkeypatch):
    def killed(model, folder):
        saves.append(original(model, folder) if len(saves) < 47 else None)
        if len(saves) == 48:
            raise InterruptedError

    saves, original = [], training.save
    monkeypatch.setattr(training, "save", killed)
    with pytest.raises(InterruptedError):
        train(small(tmp_path / "run"))
    monkeypatch.undo()
    train(small(tmp_path / "run"))
    assert weights(tmp_path / "run") == weights(whole)


def test_killed_while_the_folder_was_made(tmp_path):
    (tmp_path / "run.json.part").write_text("{")
    train(small(tmp_path, steps=1))


def test_tensorboard_keeps_the_curves_on_resuming(run):
    time.sleep(1.1)  # event files are named by the second
    train(small(run, steps=20))
    assert curves(run) == expected_curves(run)


def test_tensorboard_is_on_disk_when_a_state_is(tmp_path, monkeypatch):
    """A copy of the folder just after a state was saved is what SIGKILL leaves."""

    def saved(self, model, optimizer, state):
        original(self, model, optimizer, state)
        shutil.copytree(self.folder, tmp_path / "copies" / str(state["step"]))

    original = training.Log.save
    monkeypatch.setattr(training.Log, "save", saved)
    train(small(tmp_path / "run", steps=24))
    for step in (9, 17, 21):
        assert curves(tmp_path / "copies" / str(step)) == expected_curves(tmp_path / "copies" / str(step))


def test_going_on_does_not_overwrite(tmp_path, monkeypatch, capsys):
    def interrupted(config):
        raise training.Interrupted("stopped after step 1", tell=True)

    monkeypatch.setattr(training, "train", interrupted)
    monkeypatch.setattr(sys, "argv", ["cutslots", *train_command(tmp_path, overwrite=True)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr().out
    assert caught.value.code == 130 and "goes on" in said and "--overwrite" not in said


# ---------------------------------------------------------------------------------------------------- two processes


def test_two_processes_learn_the_same(tmp_path):
    one = train(small(tmp_path / "one", steps=20))
    command = [sys.executable, "-m", "cutslots", *train_command(tmp_path / "two", steps=20, devices=2)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    two = tmp_path / "two"
    assert kinds(one) == kinds(two)
    for a, b in zip(lines(one), lines(two), strict=True):
        if "loss" in a:
            assert [b["loss"], b["gradient"]] == pytest.approx([a["loss"], a["gradient"]], rel=1e-4)
        else:
            assert b["val"]["mse"] == pytest.approx(a["val"]["mse"], rel=1e-4)
    a, b = (flat(load(folder)) for folder in (one, two))
    torch.manual_seed(0)
    start = flat(Discovery(small(one).model))
    torch.testing.assert_close(b, a, rtol=1e-4, atol=2e-4)
    assert (b - a).norm() < 1e-3 * (a - start).norm()  # Adam makes much of gradients that are rounding errors
    train(small(two, steps=24))  # one process goes on where two were
    assert state(two)["step"] == 24


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters())


def test_two_processes_refuse_in_a_sentence(run, tmp_path):
    command = Command(train_command(run, steps=8, devices=2, lr=0.5), tmp_path / "log")
    assert command.end() == 1 and re.fullmatch(r"cutslots: .*\(its lr differ\).*\n", command.said()), command.said()


def test_two_processes_stop_in_a_sentence(tmp_path):
    commands = two(train_command(tmp_path / "run", devices=2, lr=1e30, clip=0), tmp_path)
    statuses = [command.end() for command in commands]
    said = "".join(command.said() for command in commands)
    assert 0 not in statuses and "at step 2; " in said and "Traceback" not in said


def test_the_second_node_leaves_the_folder_alone(tmp_path, monkeypatch):
    def meet(*_):
        raise ConnectionError

    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setattr(training, "make_fabric", meet)
    with pytest.raises(ConnectionError):
        train(small(tmp_path / "run", nodes=2))
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------------------------- trouble


def test_a_loss_that_is_not_a_number(tmp_path):
    wrong = {"lr": 1e30, "clip": 0.0}
    with pytest.raises(ValueError, match=rf"^the loss is (nan|inf) at step 2; the last good state is {tmp_path}.*--lr"):
        train(small(tmp_path / "saved", **wrong))
    assert state(tmp_path / "saved")["step"] == 1
    for values in state(tmp_path / "saved")["optimizer"]["state"].values():
        assert all(torch.isfinite(v).all() for v in values.values())
    assert all(torch.isfinite(v).all() for v in load(tmp_path / "saved").state_dict().values())
    with pytest.raises(ValueError, match=r"at step 2; no state was saved before; try a lower --lr\Z"):
        train(small(tmp_path / "unsaved", **wrong, save_minutes=60, eval_every=1000))
    assert not (tmp_path / "unsaved" / "state.pt").exists() and kinds(tmp_path / "unsaved") == []


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"lr": 0.5}, "lr"),
        ({"data": "textured"}, "data"),
        ({"seed": 1, "batch": 8}, "batch, seed"),
        ({"slots": 4, "module": "softmax"}, "slots, module"),
        ({"images": 12, "hidden": 8}, "images, hidden"),
    ],
)
def test_another_run_is_refused(tmp_path, changes, named):
    values = json.loads(json.dumps(dataclasses.asdict(training.resolved(small(tmp_path))), default=str))
    (tmp_path / "run.json").write_text(json.dumps(values | {"version": training.cutslots.__version__}))
    (tmp_path / "state.pt").write_bytes(b"of that run")
    before = (tmp_path / "run.json").read_bytes()
    expected = f"{tmp_path} holds another run (its {named} differ); choose another --out or pass --overwrite"
    with pytest.raises(ValueError, match=SENTENCE) as caught:
        train(small(tmp_path, **changes))
    assert str(caught.value) == expected and (tmp_path / "run.json").read_bytes() == before


def test_what_may_differ_on_going_on(run):
    train(small(run, steps=9, minutes=5.0, save_minutes=1.0, cache=run.parent / "cache"))
    assert state(run)["step"] == 9 and json.loads((run / "run.json").read_text())["minutes"] == 5.0


def made_older(run):
    """As it was written before there were these options."""
    values = json.loads((run / "run.json").read_text())
    for name in ("flips", "start"):
        del values[name]
    for name in ("context", "placed"):
        del values["model"][name]
    (run / "run.json").write_text(json.dumps(values))


def test_an_older_run_is_gone_on_with(run, whole):
    made_older(run)
    train(small(run))
    assert weights(run) == weights(whole)
    assert json.loads((run / "run.json").read_text())["flips"] is False


def test_an_older_run_is_not_another(run):
    made_older(run)
    before = (run / "run.json").read_bytes()
    for changes, named in (
        ({"flips": True}, "flips"),
        ({"start": str(run)}, "start"),
        ({"seed": 1}, "seed"),
    ):
        with pytest.raises(ValueError, match=rf"holds another run \(its {named} differ\)"):
            train(small(run, **changes))
    config = small(run)
    for name, value in (("context", 1), ("placed", True)):
        with pytest.raises(ValueError, match=rf"holds another run \(its {name} differ\)"):
            train(dataclasses.replace(config, model=dataclasses.replace(config.model, **{name: value})))
    assert (run / "run.json").read_bytes() == before


def test_overwrite_starts_anew(run):
    (run / "evaluation").mkdir()
    train(small(run, steps=2, lr=0.5, overwrite=True))
    assert kinds(run) == [(2, "loss"), (2, "val")] and not (run / "evaluation").exists()
    assert [p.name for p in (run / "pictures").iterdir()] == ["step_0000002.png"]
    assert list(map(len, curves(run).values())) and {s for v in curves(run).values() for s, _ in v} == {2}


def test_overwrite_takes_links_away(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "diary.txt").write_text("mine")
    (run / "evaluation").symlink_to(tmp_path / "elsewhere")
    train(small(run, steps=1, lr=0.5, overwrite=True))
    assert not (run / "evaluation").exists() and (tmp_path / "elsewhere" / "diary.txt").exists()


def test_overwrite_empties_run_folders_only(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "state.pt").write_text("mine")
    with pytest.raises(ValueError, match="mine holds no run: --overwrite empties run folders only"):
        train(small(tmp_path / "mine", overwrite=True))
    (run / "diary.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds diary\.txt, which no run writes: --overwrite empties"):
        train(small(run, lr=0.5, overwrite=True))
    assert (run / "diary.txt").exists() and (run / "state.pt").exists()


@pytest.mark.parametrize("content", [None, "{", "[1]", "3"])
def test_a_folder_with_something_else(tmp_path, content):
    (tmp_path / "diary.txt").write_text("mine")
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=SENTENCE) as caught:
        train(small(tmp_path))
    assert str(caught.value) == f"{tmp_path} is not empty and holds no run; choose another --out"
    assert (tmp_path / "diary.txt").read_text() == "mine"


def test_a_folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    said = sentence(monkeypatch, train_command(tmp_path / "file"))
    assert said == f"cutslots: {tmp_path / 'file'} is a file; expected a folder for the run"
    assert str(tmp_path / "file" / "below") in sentence(monkeypatch, train_command(tmp_path / "file" / "below"))


def test_a_folder_in_use(run):
    with (run / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"^{run} is in use by another run; wait for it or choose another"):
                train(small(run, overwrite=overwrite))
    assert state(run)["step"] == 8
    train(small(run, steps=9))  # the lock goes with its holder


def damaged(run):
    """Bytes that are not this run's state, by what is wrong with them."""
    whole = state(run)
    yield "empty", b""
    yield "cut", (run / "state.pt").read_bytes()[:-1000]
    yield "noise", bytes(range(256)) * 20
    for name, content in (
        ("list", [1, 2]),
        ("no step", {k: v for k, v in whole.items() if k != "step"}),
        ("no moments", whole | {"optimizer": {"state": {}, "param_groups": []}}),
        ("other model", whole | {"model": {k: v[:1] for k, v in whole["model"].items()}}),
    ):
        torch.save(content, run.parent / name)
        yield name, (run.parent / name).read_bytes()


def test_a_damaged_state(run):
    for name, content in damaged(run):
        (run / "state.pt").write_bytes(content)
        with pytest.raises(ValueError, match=SENTENCE) as caught:
            train(small(run, steps=9))
        said = str(caught.value)
        assert said.startswith(f"{run / 'state.pt'} is not a training state of this model ("), name
        assert said.endswith("; delete it to begin again"), name
        assert (run / "state.pt").read_bytes() == content and len(kinds(run)) == 2, name
    (run / "state.pt").unlink()
    train(small(run, steps=8))
    assert state(run)["step"] == 8 and kinds(run) == [(8, "loss"), (8, "val")]


@pytest.mark.parametrize("zipped", [False, True])
def test_code_in_a_state_is_not_run(run, zipped):
    mark = run.parent / "executed"
    torch.save(Code(mark), run / "state.pt") if zipped else (run / "state.pt").write_bytes(pickle.dumps(Code(mark), 2))
    with pytest.raises(ValueError, match=r"state\.pt is not a training state of this model \(.*\); delete it"):
        train(small(run, steps=9))
    assert not mark.exists()


@contextlib.contextmanager
def files_of_at_most(size):
    """As on a disk that is full: the kernel writes no more than so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(run, whole, monkeypatch):
    """A state does not fit: a sentence names it; the one before is whole, and with room again the run goes on."""
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    with files_of_at_most(60_000):
        said = sentence(monkeypatch, train_command(run))
    assert said == f"cutslots: {run / 'state.pt'}: File too large"
    assert (run / "state.pt").read_bytes() == before["state.pt"] and not list(run.rglob("*.part"))
    load(run)
    with files_of_at_most(1_000):
        assert sentence(monkeypatch, train_command(run)).startswith(f"cutslots: {run}/")
    assert state(run)["step"] == 8
    train(small(run))
    assert weights(run) == weights(whole)


def test_a_full_disk_under_tensorboard(tmp_path):
    folder = tmp_path / "run"
    words = train_command(folder, eval_every=1, save_minutes=60, eval_images=4)
    command = Command(words, tmp_path / "log", largest=30_000)
    assert command.end(60) == 1, command.said()
    assert f"cutslots: {folder / 'tensorboard'}" in command.said() and "Traceback" not in command.said()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch": 0}, "batch is 0; expected a positive number"),
        ({"steps": 0}, "steps is 0; expected a positive number"),
        ({"steps": -5}, "steps is -5; expected a positive number"),
        ({"lr": "nan"}, "lr is nan; expected a positive number"),
        ({"decay": 0}, "decay is 0.0; expected a positive number"),
        ({"decay_steps": 0}, "decay_steps is 0; expected a positive number"),
        ({"eval_every": 0}, "eval_every is 0; expected a positive number"),
        ({"eval_images": 0}, "eval_images is 0; expected a positive number"),
        ({"images": 0}, "images is 0; expected at least 1"),
        ({"devices": 0}, "devices is 0 and nodes 1; expected at least 1 of each"),
        ({"data": "marble"}, "data is 'marble'; expected one of plain, textured, ood, camo, moving, clevr:DIR"),
        ({"data": "plain:few"}, "data is 'plain:few'; expected numbers of objects as in plain:2-5"),
        ({"data": "plain:9-2"}, "objects is (9, 2); expected a range between 1 and 10"),
        ({"data": "/"}, "/ holds no folder images/"),
        ({"size": 20}, "size is 20; expected a power of two from 16 on"),
        ({"slots": 1}, "expected at least 2"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, changes, message):
    assert message in sentence(monkeypatch, train_command(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "state.pt").exists()


@pytest.mark.parametrize(
    "name, value",
    [
        ("seed", -1),
        ("seed", 2**32),
        ("clip", -1.0),
        ("clip", math.nan),
        ("lr", math.inf),
        ("encoder_maps", 0),
        ("slot_dim", 0),
        pytest.param("accelerator", "mps", marks=pytest.mark.skipif(torch.mps.is_available(), reason="there is MPS")),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_more_bad_arguments(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value}; "):
        train(small(tmp_path / "run", **({"steps": 2} | {name: value})))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_no_cuda(tmp_path, monkeypatch):
    said = sentence(monkeypatch, train_command(tmp_path / "run", accelerator="cuda"))
    assert said == "cutslots: accelerator is cuda; there is no CUDA device here"


def test_a_batch_that_cannot_be_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "make_fabric", lambda *_: types.SimpleNamespace(world_size=3))
    said = sentence(monkeypatch, train_command(tmp_path / "run", devices=3))
    assert said == "cutslots: batch is 4; expected a multiple of the 3 processes"


@pytest.mark.parametrize(
    "mistake",
    [
        {"data": "plian"},
        {"size": 20},
        *([] if torch.cuda.is_available() else [{"accelerator": "cuda"}]),
    ],
)
def test_a_mistake_does_not_take_the_folder(tmp_path, mistake):
    if torch.cuda.is_available() and "accelerator" in mistake:
        pytest.skip("there is CUDA")
    with pytest.raises(ValueError, match=SENTENCE):
        train(small(tmp_path / "run", **mistake))
    train(small(tmp_path / "run", steps=1))


# ----------------------------------------------------------------------------------------------------------- folders


def test_masks_do_not_take_part_in_learning(tmp_path):
    """The same pictures with their masks, with others, with broken ones and with none give the same weights."""
    generate(Scenes("plain", size=16, count=20, objects=(2, 5)), tmp_path / "true", quiet=True)
    for name in ("other", "none"):
        shutil.copytree(tmp_path / "true", tmp_path / name)
    masks = sorted((tmp_path / "other" / "masks").iterdir())
    for mask, content in zip(masks, [m.read_bytes() for m in masks[1:] + masks[:1]], strict=True):
        mask.write_bytes(content)
    (tmp_path / "other" / "masks" / "000003.png").write_bytes(b"broken")  # not of a validation image
    shutil.rmtree(tmp_path / "none" / "masks")
    runs = {
        name: train(small(tmp_path / f"run-{name}", data=str(tmp_path / name), images=None, steps=12))
        for name in ("true", "other", "none")
    }
    assert weights(runs["true"]) == weights(runs["other"]) == weights(runs["none"])
    scores = {name: [line["val"] for line in lines(folder) if "val" in line] for name, folder in runs.items()}
    assert len(scores["true"]) == len(scores["other"]) == 2 and scores["true"] != scores["other"]
    assert [list(x) for x in scores["none"]] == [["mse"], ["mse"]], "without truth there is the error alone"
    assert (runs["none"] / "report.html").exists() and len(list((runs["none"] / "pictures").iterdir())) == 2


def test_a_folder_gives_the_weights_of_its_scenes(tmp_path, monkeypatch):
    """Files or rendered, held in memory or made for every batch, cached or not: the weights are the same."""
    generate(Scenes("plain", size=16, count=9, objects=(2, 5)), tmp_path / "data", quiet=True)
    for kind in ("images", "masks"):  # every tenth picture, the first among them, is for validation
        shutil.copy(tmp_path / "data" / kind / "000008.png", tmp_path / "data" / kind / "-1.png")
    data = {"data": str(tmp_path / "data"), "images": None, "steps": 6}
    expected = weights(train(small(tmp_path / "scenes", images=9, steps=6)))
    assert weights(train(small(tmp_path / "cached", images=9, steps=6, cache=tmp_path / "cache"))) == expected
    assert weights(train(small(tmp_path / "files", **data))) == expected
    monkeypatch.setattr(training, "hold", lambda data, *_: data)
    assert weights(train(small(tmp_path / "not held", **data))) == expected


def test_a_folder_that_is_parted_gives_the_run_of_its_scenes(tmp_path):
    """It learns from train/ and is judged by val/, all of both."""
    for split, count in (("train", 9), ("val", 8)):
        generate(Scenes("plain", split, size=16, count=count, objects=(2, 5)), tmp_path / "data" / split, quiet=True)
    scenes = train(small(tmp_path / "scenes", images=9, steps=6))
    files = train(small(tmp_path / "files", data=str(tmp_path / "data"), images=None, steps=6))
    assert weights(files) == weights(scenes)
    assert lines(files)[-1]["val"] == lines(scenes)[-1]["val"]


def test_a_picture_that_cannot_be_read(tmp_path, monkeypatch):
    generate(Scenes("plain", size=16, count=3), tmp_path / "data", quiet=True)
    (tmp_path / "data" / "images" / "000001.png").write_bytes(b"no picture")
    said = sentence(monkeypatch, train_command(tmp_path / "run", data=tmp_path / "data", steps=1))
    assert "000001.png cannot be read as a picture" in said


# ------------------------------------------------------------------------------------------------------------- best


@pytest.mark.parametrize("module", ["cut", "softmax", "attention"])
def test_best_learns_at_a_tiny_size(module, tmp_path):
    best = PRESETS["best"]
    assert best.model.placed and best.model.context == 4
    tiny = {"batch": 2, "images": 4, "eval_every": 1, "eval_images": 2, "accelerator": "cpu", "compile": "off"}
    model = dataclasses.replace(best.model, size=16, context=1, reach=None, module=module)
    config = dataclasses.replace(best, model=model, out=tmp_path / "run", steps=2, **tiny)
    train(config)
    for line in lines(tmp_path / "run"):
        assert all(math.isfinite(v) for v in line.get("val", line).values()), line
    made = load(tmp_path / "run")
    torch.manual_seed(0)
    before = Discovery(model)
    for (name, value), start in zip(made.named_parameters(), before.parameters(), strict=True):
        assert value.isfinite().all() and not torch.equal(value, start), name
    assert any(name.startswith("encoder.1.down") for name, _ in made.named_parameters())
