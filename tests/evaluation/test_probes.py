"""Probes of slots against scikit-learn, on slots that hold the answer and on slots that do not."""

import functools
import json

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score, r2_score

from cutslots.evaluation import probes
from cutslots.evaluation.probes import (
    Objects,
    collect_objects,
    majority_scores,
    match_objects,
    object_properties,
    probe,
    score_probe,
    train_probe,
)
from cutslots.models.checkpoints import save
from cutslots.scenes import Scenes
from tests.evaluation.small_models import small_model


def objects(slots, **properties):
    return Objects(slots, properties)


def halves(slots, **properties):
    """Return the first and the second half of objects."""
    middle = len(slots) // 2
    return [
        objects(slots[part], **{name: values[part] for name, values in properties.items()})
        for part in (slice(middle), slice(middle, None))
    ]


def noisy(seed, count=2000):
    """Return slots whose first entries give a class and a value, up to noise."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randn(count, 8, generator=generator) * 3 + 1
    noise = torch.randn(count, 3, generator=generator)
    return slots, (slots[:, :3] + noise).argmax(1), 10 * slots[:, 3:5] + 20 * noise[:, :2] - 7


def test_linear_probe_equals_sklearn():
    """Adam and the solvers of scikit-learn minimize the same losses."""
    slots, shape, position = noisy(0)
    train, test = halves(slots, shape=shape, position=position)
    scores = score_probe(train_probe(train, "linear"), test)
    regression = LinearRegression().fit(train.slots, train.properties["position"])
    theirs = r2_score(test.properties["position"], regression.predict(test.slots))
    assert 0.5 < theirs < 0.9 and scores["position"] == pytest.approx(theirs, abs=0.01)
    classifier = LogisticRegression(C=1e6, max_iter=1000).fit(train.slots, train.properties["shape"])
    theirs = accuracy_score(test.properties["shape"], classifier.predict(test.slots))
    assert 0.6 < theirs < 0.95 and scores["shape"] == pytest.approx(theirs, abs=0.01)


def test_scores_equal_sklearn():
    slots, shape, position = noisy(1, 600)
    train, test = halves(slots, shape=shape, position=position)
    trained = train_probe(train, "mlp", steps=50)
    scores, predicted = score_probe(trained, test), trained.predict(test.slots)
    assert scores["shape"] == pytest.approx(accuracy_score(test.properties["shape"], predicted["shape"]))
    theirs = r2_score(test.properties["position"], predicted["position"].detach())
    assert scores["position"] == pytest.approx(theirs, abs=1e-6)


def test_only_the_mlp_solves_exclusive_or():
    generator = torch.Generator().manual_seed(0)
    slots = torch.randn(2000, 4, generator=generator)
    train, test = halves(slots, shape=((slots[:, 0] > 0) ^ (slots[:, 1] > 0)).long())
    assert score_probe(train_probe(train, "linear", 500), test)["shape"] < 0.6
    assert score_probe(train_probe(train, "mlp", 1000), test)["shape"] > 0.95


def test_slots_without_information_score_as_the_majority():
    generator = torch.Generator().manual_seed(0)
    shape = (torch.rand(4000, generator=generator) < 0.3).long()
    train, test = halves(
        torch.randn(4000, 4, generator=generator), shape=shape, position=torch.randn(4000, 2, generator=generator)
    )
    majority, scores = majority_scores(train, test), score_probe(train_probe(train, "linear", 1500), test)
    assert majority["shape"] == (test.properties["shape"] == 0).double().mean() and abs(majority["position"]) < 0.01
    assert abs(scores["shape"] - majority["shape"]) < 0.01 and abs(scores["position"]) < 0.02


def test_the_seed_decides():
    slots, shape, position = noisy(0, 100)
    train, test = halves(slots, shape=shape, position=position)
    one, same, other = (score_probe(train_probe(train, "mlp", 20, seed), test) for seed in (0, 0, 1))
    assert one == same != other


def test_constant_slots_do_not_divide_by_zero():
    train, test = halves(torch.ones(20, 3), shape=torch.arange(20) % 2, position=torch.ones(20, 2))
    assert all(np.isfinite(value) for value in score_probe(train_probe(train, "linear", 5), test).values())


# ------------------------------------------------------------------------------------------------------------- matching


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_slots", [3, 7])
def test_matching_by_cosine_similarity(seed, num_slots):
    rng = np.random.default_rng(seed)
    true, masks = rng.integers(0, 6, (2, 9, 8)), rng.random((2, num_slots, 9, 8))
    got = set(zip(*(x.tolist() for x in match_objects(torch.from_numpy(true), torch.from_numpy(masks))), strict=True))
    expected = set()
    for b in range(2):
        cost = np.zeros((5, num_slots))
        for o in range(5):
            for k in range(num_slots):
                mask = (true[b] == o + 1).astype(float)
                norms = np.sqrt((mask**2).sum()) * np.sqrt((masks[b, k] ** 2).sum())
                cost[o, k] = 1 - (mask * masks[b, k]).sum() / norms
        expected |= {(b, o + 1, k) for o, k in zip(*linear_sum_assignment(cost), strict=True)}
    assert got == expected


def test_objects_without_pixels_are_left_out():
    rows, labels, slots = match_objects(
        torch.tensor([[[0, 4, 4]], [[0, 0, 0]]]), torch.eye(3)[None, :, None].repeat(2, 1, 1, 1)
    )
    assert rows.tolist() == [0] and labels.tolist() == [4] and slots.item() in (1, 2)


@pytest.mark.parametrize("family", ["plain", "textured", "camo"])
def test_properties_are_those_of_the_ground_truth(family):
    scenes = Scenes(family, "val", 32, count=6)
    properties, truths = object_properties(scenes, scenes.sample(range(6))), scenes.describe(range(6))[1]
    sizes: dict[float, int] = {}
    for b, truth in enumerate(truths):
        for k, each in enumerate(truth["objects"]):
            assert sizes.setdefault(each["size"], int(properties["size"][b, k])) == properties["size"][b, k]
            assert properties["position"][b, k].abs().max() < 1.2
            assert (properties["color"].ndim == 2) == (each["color"] is not None)
    assert len(set(sizes.values())) == len(sizes) > 1


def test_position_is_near_the_mask():
    """The projected center lies within the mean position of the visible pixels, up to the size of an object."""
    scenes = Scenes("plain", "val", 64, count=8)
    masks, position = scenes.get_batch(range(8)).mask, object_properties(scenes, scenes.sample(range(8)))["position"]
    for b in range(8):
        for label in range(1, int(masks[b].max()) + 1):
            y, x = torch.nonzero(masks[b] == label, as_tuple=True)
            seen = torch.stack([x.float().mean(), y.float().mean()]) / 32 - 1
            assert (seen - position[b, label - 1]).abs().max() < 0.25


class Oracle(torch.nn.Module):
    """A model whose masks are true masks in some order and whose slots hold the properties of the objects."""

    def __init__(self, scenes):
        super().__init__()
        self.scenes, self.start = scenes, 0

    def forward(self, image):
        indices = np.arange(self.start, self.start + len(image))
        self.start += len(image)
        labels = self.scenes.get_batch(indices).mask.long()
        masks = torch.nn.functional.one_hot(labels, 11).permute(0, 3, 1, 2).float()
        slots = torch.zeros(len(image), 11, 20)
        properties = object_properties(self.scenes, self.scenes.sample(indices))
        for name, at in (("shape", 0), ("color", 3), ("size", 11)):
            slots[:, 1:, at:] += torch.nn.functional.one_hot(properties[name].clamp(min=0), 20 - at)
        slots[:, 1:, 18:] = properties["position"]
        order = torch.randperm(11)
        output = small_output(masks[:, order], image)
        return output._replace(slots=slots[:, order])


def small_output(masks, image):
    from cutslots.models.discovery import DiscoveryOutput

    return DiscoveryOutput(masks, masks, masks, image.float(), image[:, None].float())


def test_an_oracle_is_probed_perfectly():
    train, test = (
        collect_objects(Oracle(scenes), scenes, torch.device("cpu"))
        for scenes in (Scenes("plain", split, 32, count=150) for split in ("val", "test"))
    )
    assert len(train.slots) > 700
    for kind in ("linear", "mlp"):
        scores = score_probe(train_probe(train, kind, 2000), test)
        assert min(scores[name] for name in ("shape", "color", "size")) == 1 and scores["position"] > 0.995, kind


# -------------------------------------------------------------------------------------------------------------- command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save(small_model("images"), folder)
    return str(folder)


def test_command(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probes, "train_probe", functools.partial(train_probe, steps=50))
    result = probe(checkpoint, "plain:3-4", tmp_path / "new" / "probes.json", 40, 20, "cpu")
    assert json.loads((tmp_path / "new" / "probes.json").read_text()) == result
    assert set(result["scores"]) == {"majority", "linear", "mlp"}
    assert result["measure"] == {"shape": "accuracy", "color": "accuracy", "size": "accuracy", "position": "R2"}
    assert 40 * 2 <= result["num_train"] <= 40 * 3, "three slots, of which some match"
    lines = [line for line in capsys.readouterr().out.splitlines() if "slots," not in line]
    assert lines[0].split()[:3] == ["probe", "shape", "(accuracy)"] and lines[-1].split()[0] == "mlp"


def test_bad_arguments(checkpoint, tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match=r"^data is 'moving'; expected built-in scenes that are images, and a model f"):
        probe(checkpoint, "moving", quiet=True)
    with pytest.raises(ValueError, match=r"^the number of scenes is 1; expected at least 2$"):
        probe(checkpoint, "plain", num_test=1, quiet=True)
    with pytest.raises(ValueError, match=r"^probe is 'cubic'; expected one of linear, mlp$"):
        train_probe(objects(torch.zeros(2, 2), shape=torch.zeros(2, dtype=torch.long)), "cubic")
    with pytest.raises(ValueError, match=r"^no object was matched to a slot"):
        train_probe(objects(torch.zeros(0, 2), shape=torch.zeros(0, dtype=torch.long)), "mlp")
