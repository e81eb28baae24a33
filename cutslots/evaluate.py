"""How well a model finds objects: scores for every image of a dataset, of the decoder's masks, of those read from them
with slots joined, of those read eagerly, and of the partition's.

Processes take batches in turn and the scores are put in order before any mean is taken, so that any number of
processes gives the same numbers.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots import metrics
from cutslots.data import Frames, Images, Sample, open_data, open_films
from cutslots.disk import progress, write_atomically
from cutslots.model import Discovery, Found, PairDiscovery, VolumeDiscovery, as_floats, load, weights_file
from cutslots.reading import eager, read, read_film
from cutslots.report import KINDS, FilmPictures, Pictures, paper_rows, table_text, write_evaluation
from cutslots.track import Join, follow

if TYPE_CHECKING:
    from lightning_fabric import Fabric

BATCH, FILMS = 32, 16  # images, or films, at once
SHOWN = 8  # images in a report
SHOWN_FILMS = 3
APART = (5, 20)  # the frames that the paper matches across a film


def labels(found: Found, image: Tensor | None = None) -> dict[str, Tensor]:
    """The slot of every pixel, (B, S, S): by the decoder's masks, by the partition's, brought to the same size, and, of
    an `image`, by masks that are read from the decoder's, and read eagerly (see cutslots.reading)."""
    partition = F.interpolate(found.partition.float(), found.masks.shape[-2:], mode="bilinear", align_corners=False)
    found_by = {"decoder": found.masks.argmax(1), "partition": partition.argmax(1)}
    if image is None:
        return found_by
    masks = read(found, image)
    return found_by | {"joined": masks.argmax(1), "eager": eager(masks).argmax(1)}


@torch.no_grad()
def judge(
    model: Discovery,
    data: Images,
    fabric: Fabric,
    count: int | None = None,
    title: str = "",
    join: Join = "area",
) -> metrics.Scores:
    """The scores of the first `count` images or films, gathered from all processes. Names of the partition's begin with
    it. Where there are no true masks, the error alone."""
    films = getattr(data, "frames", 1) > 1
    size = (1 if isinstance(model, VolumeDiscovery) else FILMS) if films else BATCH  # a volume is decoded whole
    scores, truth = metrics.Scores(), getattr(data, "has_masks", True)
    numbers = np.arange(len(data) if count is None else min(count, len(data)))
    batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    mine = range(fabric.global_rank, len(batches), fabric.world_size)
    was_training = model.training
    model.eval()
    with progress(not title or fabric.global_rank > 0) as bar:
        for b in bar.track(mine, description=title):
            sample = data.render(batches[b], fabric.device)
            torch.manual_seed(b)  # Slot Attention draws its slots
            with fabric.autocast():
                if films:
                    columns = _film_columns(sample, follow(model, sample.image, join))
                else:
                    columns = _columns(sample, model(sample.image), truth)
            scores.add(batches[b], columns)
    model.train(was_training)
    scores.gather()
    return scores


def _columns(sample: Sample, found: Found, truth: bool) -> dict[str, Tensor]:
    columns: dict[str, Tensor] = {}
    if truth:
        columns["objects"] = torch.tensor([int((mask.unique() > 0).sum()) for mask in sample.mask])
    for kind, label in labels(found, sample.image).items() if truth else ():
        columns |= {KINDS[kind] + name: value for name, value in metrics.score(sample.mask, label).items()}
    columns["mse"] = metrics.squared_error(as_floats(sample.image), found.reconstruction)
    return columns


def film_labels(found: list[Found], image: Tensor) -> dict[str, Tensor]:
    """The track of every pixel of films, (B, T, S, S), by the same masks."""
    frames = [labels(each) for each in found]
    for frame, masks in zip(frames, read_film(found, image), strict=True):
        frame["joined"] = masks.argmax(1)
    return {kind: torch.stack([frame[kind] for frame in frames], 1) for kind in frames[0]}


def _film_columns(sample: Sample, found: list[Found]) -> dict[str, Tensor]:
    columns = {"objects": torch.tensor([int((mask.unique() > 0).sum()) for mask in sample.mask])}
    for kind, label in film_labels(found, sample.image).items():
        columns |= {KINDS[kind] + name: value for name, value in metrics.score_films(sample.mask, label).items()}
    errors = [metrics.squared_error(as_floats(sample.image[:, t]), each.reconstruction) for t, each in enumerate(found)]
    return columns | {"mse": torch.stack(errors).mean(0)}


def evaluate(
    weights: str,
    data: tuple[str, ...],
    out: Path | None,
    split: str,
    images: int | None,
    fabric: Fabric,
    join: Join = "area",
) -> dict[str, Any]:
    """Scores a model on datasets, prints the table, writes results.json, per_image.csv and report.html to `out`."""
    model = load(weights, fabric.device)
    folder = out or (Path(weights) / "evaluation" if Path(weights).is_dir() else Path("evaluation"))
    if not data:
        raise ValueError("data is empty; expected names of scenes or folders")
    opened = {name: _with_masks(name, split, model.config.size, images) for name in data}
    for name, dataset in opened.items():
        if model.config.frames > 1 and getattr(dataset, "frames", 1) == 1:
            raise ValueError(f"data is {name!r}, images; {weights} learned from films: expected moving or movi-a:DIR")
    if fabric.global_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    pictures: dict[str, Any] = {}
    for name, dataset in opened.items():
        scores = judge(model, dataset, fabric, title=f"{name}, {split}", join=join)
        results[name] = {"split": split, "images": len(scores.rows), **scores.means()}
        rows += [{"data": name, "image": _name(dataset, i), **row} for i, row in scores.table()]
        films = getattr(dataset, "frames", 1) > 1
        pictures[name] = watch(model, dataset, fabric, join=join) if films else look(model, dataset, SHOWN, fabric)
    if fabric.global_rank == 0:
        record: dict[str, Any] = {"weights": str(weights), "model": vars(model.config), "results": results}
        if any("switches" in means for means in results.values()):
            record["join"] = join
        write_atomically(folder / "results.json", json.dumps(record, indent=1).encode())
        write_atomically(folder / "per_image.csv", _as_csv(rows))
        write_evaluation(folder / "report.html", record, pictures, _history(weights))
        print(table_text(results, paper_rows(results)))
        print(f"wrote {folder / 'results.json'}, per_image.csv and {folder / 'report.html'}")
    return results


def _with_masks(name: str, split: str, size: int, images: int | None) -> Any:
    dataset: Any = open_data(name, split, size, images)
    if isinstance(dataset, Frames):  # films are judged as films, each as one
        dataset = open_films(name, split, size, images)
    if not getattr(dataset, "has_masks", True):
        raise ValueError(f"{name} holds no masks/, without which there is nothing to judge by; see cutslots predict")
    return dataset


def _name(dataset: Any, index: int) -> str:
    return dataset.name(index) if hasattr(dataset, "name") else f"{index:06d}"


@torch.no_grad()
def look(model: Discovery, data: Images, count: int, fabric: Fabric) -> Pictures:
    """The first images, or frames of the first film, with what the model makes of them, for people to look at."""
    if getattr(data, "frames", 1) > 1:
        return watch(model, data, fabric, 1).films[0].some(count)
    sample = data.render(np.arange(min(count, len(data))), fabric.device)
    was_training = model.training
    model.eval()
    torch.manual_seed(0)
    with fabric.autocast():
        found = model(sample.image)
    model.train(was_training)
    return Pictures.of(sample, found, labels(found, sample.image))


@torch.no_grad()
def watch(
    model: Discovery, data: Images, fabric: Fabric, count: int = SHOWN_FILMS, join: Join = "area"
) -> FilmPictures:
    """The first films with what the model follows in them; and, if it matches, two frames far apart as one pair."""
    sample = data.render(np.arange(min(count, len(data))), fabric.device)
    was_training = model.training
    model.eval()
    torch.manual_seed(0)
    with fabric.autocast():
        found = follow(model, sample.image, join)
        films, label = [], film_labels(found, sample.image)
        for b in range(len(sample.image)):
            frames = Found(*(torch.stack([part[b] for part in parts]) for parts in zip(*found, strict=True)))
            one = {kind: value[b] for kind, value in label.items()}
            films.append(Pictures.of(Sample(sample.image[b], sample.mask[b]), frames, one, together=True))
        pair = None
        if isinstance(model, PairDiscovery) and sample.image.shape[1] > max(APART):
            apart = Sample(*(x[0, list(APART)] for x in sample))
            both = Found(*(x[0] for x in model(apart.image[None])))
            pair = Pictures.of(apart, both, labels(both), together=True)
    model.train(was_training)
    return FilmPictures(films, pair)


def _as_csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["data"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _history(weights: str) -> Path | None:
    """The run folder the weights lie in, if they do."""
    folder = weights_file(weights).parent
    return folder if (folder / "metrics.jsonl").is_file() else None
