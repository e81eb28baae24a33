"""Which images and videos a report shows."""

import math

import numpy as np
import pytest

from cutslots.evaluation.gallery import Gallery
from cutslots.scenes import Scenes


def row(score, refined=None, objects=4):
    values = {"num_objects": objects, "mbo_i": score, "found": 0.25, "refined_found": 0.5}
    return values if refined is None else values | {"refined_mbo_i": refined}


def fill(gallery, rows, batch_size=5):
    """Add images in batches; return which were visualized. The visualization of image i is the number i."""
    made = []
    for start in range(0, len(rows), batch_size):
        indices = np.arange(start, min(start + batch_size, len(rows)))
        gallery.add(indices, [rows[i] for i in indices], lambda chosen, start=start: [start + c for c in chosen])
        made += [i for i in indices if i in gallery.kept]
    return made


def test_worst_and_first_images(rng):
    scores = rng.random(40).tolist()
    gallery = Gallery(3)
    made = fill(gallery, [row(score) for score in scores])
    worst = np.argsort(scores)[:3].tolist()
    assert gallery.worst() == worst and len(made) < 30, "not all are visualized"
    assert set(gallery.kept) == set(gallery.rows) == {0, 1, 2, *worst}
    shown = gallery.examples(Scenes("plain", "test", 16))
    assert [each.visualization for each in shown.worst] == worst
    assert [each.visualization for each in shown.first] == [0, 1, 2]
    first = shown.worst[0]
    assert first.caption == f"{worst[0]:06d}: 1 of 4 objects found, mBO-i {100 * scores[worst[0]]:.1f}"


def test_refined_masks_decide_where_there_are_some():
    gallery = Gallery(1)
    fill(gallery, [row(0.1, 0.9), row(0.5, 0.2), row(0.2, 0.3)])
    assert gallery.worst() == [1]
    assert "2 of 4 objects found, mBO-i 20.0" in gallery.examples(Scenes("plain", "test", 16)).worst[0].caption


def test_images_without_objects_come_last_and_ties_in_order():
    gallery = Gallery(4)
    fill(gallery, [row(math.nan, objects=0), row(0.5), row(0.5), row(0.1)])
    assert gallery.worst() == [3, 1, 2, 0]
    shown = gallery.examples(Scenes("plain", "test", 16))
    assert shown.worst[-1].caption == "000000: no objects" and shown.first == [], "all are among the worst"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_processes_together_show_what_one_shows(monkeypatch, order):
    rows = [row(score) for score in (0.9, 0.4, 0.8, 0.1, 0.3, 0.2, 0.7, 0.6)]
    alone, parts = Gallery(2), [Gallery(2), Gallery(2)]
    fill(alone, rows)
    for start in range(0, 8, 2):
        part = parts[start // 2 % 2]
        part.add([start, start + 1], rows[start : start + 2], lambda chosen, start=start: [start + c for c in chosen])
    gathered = [(parts[i].rows, parts[i].kept) for i in order]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda out, _: out.__setitem__(slice(None), gathered))
    parts[0].gather()
    assert parts[0].worst() == alone.worst() == [3, 5] and parts[0].kept == alone.kept
