"""Prepared caches as datasets, for training and for evaluation."""

import hashlib
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cutslots.data.open import open_dataset
from cutslots.data.prepare import prepare
from cutslots.data.prepared import Prepared
from cutslots.data.video import VideoFrames
from cutslots.devices import make_fabric
from cutslots.evaluation.evaluate import evaluate
from cutslots.training.loop import train
from tests.data.prepare_helpers import TEX, arrays, failing, go
from tests.data.small_files import (
    clevrtex_files,
    write_files,
)
from tests.small_runs import FORKED, lines, small, train_command, two


@pytest.mark.parametrize("split, rows", [("test", range(3)), ("val", range(3, 6)), ("train", range(6, 30))])
def test_dataset_returns_the_rows_of_the_cache(caches, split, rows):
    images, masks, _ = arrays(caches / "clevrtex")
    for name in (f"clevrtex:{caches / 'clevrtex'}", str(caches / "clevrtex")):
        data = open_dataset(name, split)
        assert (
            isinstance(data, Prepared) and len(data) == len(rows) and data.image_size == (16, 16) and data.frames == 1
        )
        chosen = np.random.default_rng(0).permutation(len(rows))
        sample = data.get_batch(chosen)
        assert sample.image.dtype == sample.mask.dtype == torch.uint8
        assert np.array_equal(sample.image, images[rows.start + chosen, 0])
        assert np.array_equal(sample.mask, masks[rows.start + chosen, 0])
        for i in range(len(data)):
            assert np.array_equal(data[i].image, images[rows[i], 0]) and np.array_equal(data[i].mask, masks[rows[i], 0])
            assert data.name(i) == f"{rows[i]:06d}"
        with pytest.raises(IndexError, match=f"{len(rows)} is out of range"):
            data.get_batch([len(rows)])


def test_count_takes_the_first(caches):
    name = f"clevrtex:{caches / 'clevrtex'}"
    assert open_dataset(name, "train", count=5).rows.tolist() == list(range(6, 11))
    assert open_dataset(f"{name}:2-4", "train", count=4).rows.tolist() == [13, 14, 15, 24], "the first that match"
    assert len(open_dataset(name, "train", count=1000)) == 24 and len(open_dataset(name, "train", count=0)) == 0


def test_fingerprint_is_that_of_images_and_rows(caches):
    name = f"clevrtex:{caches / 'clevrtex'}"
    same = [open_dataset(name, "train").fingerprint(), open_dataset(f"{name}:0-255", "train", count=24).fingerprint()]
    others = [(name, "val", None), (name, "train", 5), (f"{name}:2-4", "train", None)]
    others += [(f"movi-a:{caches / 'movi-a'}", "train", count) for count in (None, 5)]
    found = [open_dataset(text, split, count=count).fingerprint() for text, split, count in others]
    assert same[0] == same[1] and len({*same, *found}) == 6
    sha256 = hashlib.sha256((caches / "clevrtex" / "images.npy").read_bytes()).hexdigest()
    assert sha256 in same[0]


def test_other_image_size_is_refused(caches):
    assert len(open_dataset(f"clevrtex:{caches / 'clevrtex'}", "train", 16)) == 24
    for name in (f"clevrtex:{caches / 'clevrtex'}", str(caches / "clevrtex")):
        with pytest.raises(
            ValueError, match=r"is prepared at 16x16 and 32x32 is wanted; prepare it again with --size 32"
        ):
            open_dataset(name, "train", 32)


def test_cache_of_another_dataset_is_refused(caches):
    folder = caches / "clevrtex"
    with pytest.raises(ValueError, match=rf"^{folder} holds clevrtex; expected clevr, or --data clevrtex:{folder}$"):
        open_dataset(f"clevr:{folder}", "train")
    with pytest.raises(
        ValueError, match=rf"^{folder} holds clevrtex; expected clevrtex-ood, or --data clevrtex:{folder}$"
    ):
        open_dataset(f"clevrtex-ood:{folder}:0-3", "train")


def test_missing_cache_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=rf"^{tmp_path} holds no manifest.json; expected a folder written by cutslots prepare"
    ):
        open_dataset(f"clevrtex:{tmp_path}", "train")
    with pytest.raises(ValueError, match=r"gone holds no manifest.json; expected a folder written by cutslots prepare"):
        open_dataset(f"clevrtex:{tmp_path / 'gone'}", "train")
    with pytest.raises(ValueError, match=r"split is 'dev'; expected one of train, val, test$"):
        Prepared(tmp_path, "dev")


def test_unfinished_cache_is_refused(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, 7, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        go(folder, tmp_path / "out")
    for name in (f"clevrtex:{tmp_path / 'out'}", str(tmp_path / "out")):
        with pytest.raises(ValueError, match=r"out is not finished; run the same cutslots prepare again to resume"):
            open_dataset(name, "train")


def test_clevrtex_ood_has_no_training_split(tmp_path):
    source = write_files(tmp_path / "source", clevrtex_files("outd", TEX[:3]))
    prepare("clevrtex-ood", source, tmp_path / "out", 16, quiet=True)
    assert len(open_dataset(f"clevrtex-ood:{tmp_path / 'out'}", "val")) == 3
    held = r"\(it has train 0, val 3, test 3\): its source held 3 of the published 10,000$"
    with pytest.raises(ValueError, match=rf"out has no rows for train {held}"):
        open_dataset(f"clevrtex-ood:{tmp_path / 'out'}", "train")


def test_videos_as_frames(caches):
    images, masks, _ = arrays(caches / "movi-a")
    name = f"movi-a:{caches / 'movi-a'}"
    data = open_dataset(name, "val")
    assert isinstance(data, VideoFrames) and len(data) == 2 * 24
    assert [data.name(i) for i in (0, 23, 24, 47)] == ["000003-00", "000003-23", "000004-00", "000004-23"]
    chosen = [47, 0, 24, 23, 24]
    sample = data.get_batch(chosen)
    assert np.array_equal(sample.image, images[3:].reshape(-1, 3, 16, 16)[chosen])
    assert np.array_equal(sample.mask, masks[3:].reshape(-1, 16, 16)[chosen])
    assert len(open_dataset(name, "train", count=30)) == 30 and len(open_dataset(name, "train", count=1000)) == 3 * 24
    with pytest.raises(IndexError, match="48 is out of range"):
        data.get_batch([48])


def test_videos_as_videos(caches):
    images, masks, _ = arrays(caches / "movi-a")
    videos = open_dataset(f"movi-a:{caches / 'movi-a'}", "train", videos=True)
    assert isinstance(videos, Prepared) and videos.frames == 24 and len(videos) == 3
    assert np.array_equal(videos.get_batch([2, 0]).image, images[[2, 0]])
    assert np.array_equal(videos[1].mask, masks[1]) and videos[1].image.shape == (24, 3, 16, 16)
    frames = videos.get_frames([2, 2, 0], [5, 23, 0])
    assert np.array_equal(frames.image, images[[2, 2, 0], [5, 23, 0]])
    assert np.array_equal(frames.mask, masks[[2, 2, 0], [5, 23, 0]])
    with pytest.raises(IndexError, match="24 is out of range"):
        videos.get_frames([0], [24])
    assert open_dataset(f"movi-a:{caches / 'movi-a'}:4-5", "train", videos=True).rows.tolist() == [1, 2]


def test_worker_processes_map_the_files_again(caches):
    data = open_dataset(f"clevrtex:{caches / 'clevrtex'}", "train")
    sent = pickle.dumps(data)
    assert len(sent) < 24 * 3 * 16 * 16 / 2, "no images are sent"
    copy = pickle.loads(sent)
    everything = data.get_batch(range(len(data)))
    assert all(torch.equal(*pair) for pair in zip(copy.get_batch(range(len(data))), everything, strict=True))
    loader = DataLoader(data, batch_size=6, num_workers=1, multiprocessing_context=FORKED)
    batches = list(loader)
    assert torch.equal(torch.cat([batch.image for batch in batches]), everything.image)
    assert torch.equal(torch.cat([batch.mask for batch in batches]), everything.mask)


# ---------------------------------------------------------------------------------------------- training and evaluation


def test_training_and_evaluation_from_a_cache(caches, tmp_path):
    name = f"clevrtex:{caches / 'clevrtex'}"
    run = train(small(tmp_path / "run", data=name, max_steps=4, eval_every=2, num_eval_images=3))
    losses = [line["loss"] for line in lines(run) if "loss" in line]
    assert losses and np.isfinite(losses).all() and [line["step"] for line in lines(run) if "val" in line] == [2, 4]
    results = evaluate(str(run), (name,), tmp_path / "one", "val", None, make_fabric("cpu"))
    assert results[name]["num_images"] == 3
    assert {k: v for k, v in results[name].items() if k not in ("split", "num_images")} == lines(run)[-1]["val"]
    words = ["evaluate", str(run), "--data", name, "--split", "val", "--accelerator", "cpu", "--devices", "2"]
    commands = two([*words, "--out", str(tmp_path / "two")], tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    for file in ("results.json", "per_image.csv"):
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_two_processes_train_the_same_from_a_cache(caches, tmp_path):
    changes = {"data": f"clevrtex:{caches / 'clevrtex'}", "max_steps": 4, "eval_every": 4, "num_eval_images": 3}
    one = train(small(tmp_path / "one", **changes))
    commands = two(train_command(tmp_path / "two", **changes, devices=2), tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    a, b = ([line.get("loss") or line["val"]["mse"] for line in lines(run)] for run in (one, tmp_path / "two"))
    assert len(a) == 2 and b == pytest.approx(a, rel=1e-3)


def test_training_on_the_frames_of_videos(caches, tmp_path):
    run = train(
        small(tmp_path / "run", data=f"movi-a:{caches / 'movi-a'}", max_steps=2, eval_every=2, num_eval_images=3)
    )
    assert [line["step"] for line in lines(run) if "val" in line] == [2]


def test_cache_of_another_size_is_refused_before_training(caches, tmp_path):
    with pytest.raises(ValueError, match=r"is prepared at 16x16 and 32x32 is wanted"):
        train(small(tmp_path / "run", data=f"clevrtex:{caches / 'clevrtex'}", image_size=(32, 32)))
    assert not (tmp_path / "run").exists()
