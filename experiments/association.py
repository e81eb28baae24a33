"""Evaluate associations of slots over time on the same slots, for docs/matching.md.

    python -m experiments.association moving-paper-128 moving-128

The associations are those of `Tracker`, and two of the true masks. One to one, objects and slots of a frame are
assigned so that they share the most pixels; a tracker is one to one as well. Many to one, every slot of a frame goes to
the object that it covers most, so several slots may be one object. These two are references, not bounds: they decide in
each frame alone. They have the masks of single frames, as all associations but the learned one, which decodes pairs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import tyro
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from cutslots.devices import make_fabric
from cutslots.evaluation.metrics import adjusted_rand_index, contingency
from cutslots.files import progress, write_atomically
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery
from cutslots.models.tracker import track_clip
from cutslots.scenes import Scenes
from experiments.study import facts_of_device, write_table

COLUMNS = {
    "hungarian": "Hungarian",
    "learned": "learned",
    "learned_ahead": "learned - Hungarian",
    "area": "area",
    "one_to_one": "by true masks, one to one",
    "many_to_one": "by true masks, many to one",
}


@torch.no_grad()
def video_scores(model: Discovery, video: Tensor, truth: Tensor) -> dict[str, float]:
    """Return the ARI-FG of a video (T, 3, H, W) with true masks (T, H, W) for each association."""
    found = {name: _labels(model, video, name) for name in model.associations}
    slots = found["hungarian"]  # in another order those of all others, but for the learned one
    scores = {name: _ari_fg(_tables(truth, labels)) for name, labels in found.items()}
    return scores | {
        "learned_ahead": scores["learned"] - scores["hungarian"],
        "one_to_one": ari_fg_by_true_masks(truth, slots, one_to_one=True),
        "many_to_one": ari_fg_by_true_masks(truth, slots),
    }


def _labels(model: Discovery, video: Tensor, association: str) -> Tensor:
    return torch.cat([output.masks.argmax(1) for output in track_clip(model, video[None], association)])


def ari_fg_by_true_masks(truth: Tensor, labels: Tensor, one_to_one: bool = False) -> float:
    """Return the ARI-FG of the frames (T, H, W) of a video if the labels of a frame are renamed to the objects.

    >>> truth = torch.tensor([[[0, 1, 1, 2]], [[0, 1, 1, 2]]])
    >>> ari_fg_by_true_masks(truth, torch.tensor([[[3, 4, 4, 5]], [[3, 5, 5, 4]]]))  # right in each frame
    1.0
    """
    tables = _tables(truth, labels)
    objects, count = tables.shape[1:]
    names = torch.stack([_best_names(table) for table in tables]) if one_to_one else tables.argmax(1)
    return _ari_fg(tables @ torch.nn.functional.one_hot(names, objects + count).double())


def _best_names(table: Tensor) -> Tensor:
    """Return a name for each label: an object's, or one of its own for a label without one."""
    objects, count = table.shape
    names = torch.arange(objects, objects + count)
    rows, columns = map(torch.from_numpy, linear_sum_assignment(table.numpy(), maximize=True))
    covers = table[rows, columns] > 0
    names[columns[covers]] = rows[covers]
    return names


def _tables(truth: Tensor, labels: Tensor) -> Tensor:
    """Return how many pixels objects and labels share in each frame: (T, objects, labels)."""
    return contingency(truth.cpu().long(), labels.cpu())[:, 1:].double()


def _ari_fg(tables: Tensor) -> float:
    return float(adjusted_rand_index(tables.sum(0)[None]))


def evaluate(checkpoint: str, num_videos: int) -> dict[str, Any]:
    """Return the ARI-FG of test videos for each association, and facts of the evaluation."""
    device = make_fabric("auto", 1, 1, "32-true").device
    model = load(checkpoint, device)
    if "learned" not in model.associations:
        raise SystemExit(f"{checkpoint} has no learned matching: it is a {type(model).__name__}, not a PairDiscovery")
    data = Scenes("moving", "test", model.image_size, count=num_videos)
    scores = []
    with progress() as bar:
        for index in bar.track(range(num_videos), description=checkpoint):
            image, truth = data.get_batch([index], device)
            scores.append(video_scores(model, image[0], truth[0]))
    found = {"checkpoint": checkpoint, "num_slots": model.num_slots, "num_videos": num_videos, **facts_of_device()}
    return found | {"ari_fg": {name: mean_and_error([score[name] for score in scores]) for name in COLUMNS}}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values of several videos and its standard error.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    return mean(values), stdev(values) / len(values) ** 0.5


def table(results: dict[str, Any]) -> str:
    """Return a row for each evaluation: means in percent and their standard errors."""
    rows = [f"| checkpoint | slots | videos | {' | '.join(COLUMNS.values())} |", "|" + "---|" * (3 + len(COLUMNS))]
    for result in results.values():
        pairs = (result["ari_fg"][column] for column in COLUMNS)
        cells = " | ".join(f"{100 * middle:.1f} ± {100 * error:.1f}" for middle, error in pairs)
        rows.append(f"| `{result['checkpoint']}` | {result['num_slots']} | {result['num_videos']} | {cells} |")
    return "\n".join(rows) + "\n"


def main(
    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional], num_videos: int = 64, docs: Path = Path("docs")
) -> None:
    """Write docs/association.json and the table of docs/matching.md, of checkpoints of pairs of frames."""
    if num_videos < 2:
        raise SystemExit(f"--num-videos is {num_videos}; a standard error needs at least 2")
    record = docs / "association.json"
    results = json.loads(record.read_text()) if record.is_file() else {}
    for checkpoint in checkpoints:
        results[f"{checkpoint}, {num_videos} videos"] = evaluate(checkpoint, num_videos)
        write_atomically(record, json.dumps(results, indent=1).encode())
    write_table(docs / "matching.md", table(results), "associations")


if __name__ == "__main__":
    tyro.cli(main)
