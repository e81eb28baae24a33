"""Evaluate the best possible associations of slots over time, for docs/matching.md.

    python -m experiments.association moving-paper-128 moving-128

Slots are associated by the true masks: in every frame each object gets the slot that covers it best, one to one, or
each slot goes to the object that it covers most. What is left to an ARI-FG of 100 over whole videos are errors of the
masks. A tracker is one to one.
"""

from __future__ import annotations

from typing import Annotated

import torch
import tyro
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from cutslots.devices import make_fabric
from cutslots.evaluation.metrics import adjusted_rand_index, contingency
from cutslots.files import progress
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery
from cutslots.scenes import Scenes


@torch.no_grad()
def association_bounds(model: Discovery, video: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the ARI-FG of a video (T, 3, H, W) with true masks (T, H, W): one to one, and each slot on its own."""
    frames = [model.decode_frame(model.encode(frame[None])[0]).masks for frame in video]
    labels = torch.cat(frames).argmax(1)
    return bound_of_labels(truth, labels, one_to_one=True), bound_of_labels(truth, labels)


def bound_of_labels(truth: Tensor, labels: Tensor, one_to_one: bool = False) -> float:
    """Return the ARI-FG of the frames (T, H, W) of a video if every label of a frame is renamed to an object.

    One to one, labels that no object gets keep their names.

    >>> truth = torch.tensor([[[0, 1, 1, 2]], [[0, 1, 1, 2]]])
    >>> bound_of_labels(truth, torch.tensor([[[3, 4, 4, 5]], [[3, 5, 5, 4]]]))  # right in each frame
    1.0
    """
    tables = contingency(truth.cpu().long(), labels.cpu())[:, 1:].double()  # (T, objects, labels)
    objects, count = tables.shape[1:]
    names = tables.argmax(1)  # (T, labels)
    if one_to_one:
        names = torch.arange(objects, objects + count).repeat(len(tables), 1)
        for t, table in enumerate(tables):
            rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
            names[t, columns] = torch.from_numpy(rows)
    renamed = torch.nn.functional.one_hot(names, objects + count).double()  # (T, labels, names)
    return float(adjusted_rand_index((tables @ renamed).sum(0)[None]))


def main(checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional], num_videos: int = 64) -> None:
    """Print the mean ARI-FG of test videos under the best possible associations, for each checkpoint."""
    device = make_fabric("auto", 1, 1, "32-true").device
    for checkpoint in checkpoints:
        model = load(checkpoint, device)
        data = Scenes("moving", "test", model.image_size, count=num_videos)
        values = []
        with progress() as bar:
            for index in bar.track(range(num_videos), description=checkpoint):
                image, truth = data.get_batch([index], device)
                values.append(association_bounds(model, image[0], truth[0]))
        one_to_one, each = (100 * sum(value) / num_videos for value in zip(*values, strict=True))
        print(f"{checkpoint}: ARI-FG {one_to_one:.1f} one to one, {each:.1f} each slot on its own, {num_videos} videos")


if __name__ == "__main__":
    tyro.cli(main)
