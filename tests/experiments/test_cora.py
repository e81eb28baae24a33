import json
from pathlib import Path

import numpy as np
import osqp
import pytest
import torch
from scipy import sparse
from torch import nn

from experiments import cora
from experiments.cora_data import Instances


def instances(count=9, side=6, words=20):
    """Instances in which papers with words in common cite each other."""
    rng = np.random.default_rng(0)
    left = (rng.random((count, side, words)) < 0.15).astype(np.uint8)
    right = left[:, rng.permutation(side)].copy()
    right[rng.random(right.shape) < 0.05] ^= 1
    cites = (left.astype(int) @ right.transpose(0, 2, 1).astype(int) >= 2).astype(np.uint8)
    return Instances(left, right, cites)


@pytest.mark.parametrize("seed", range(20))
def test_relaxed_qp_equals_osqp(seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 13))
    c = 1 / (1 + np.exp(-rng.normal(size=(k, k)) * rng.choice([0.1, 1, 4])))
    gamma = float(rng.choice([0.05, 0.1, 1.0]))
    sums = sparse.vstack([sparse.kron(sparse.eye(k), np.ones((1, k))), sparse.kron(np.ones((1, k)), sparse.eye(k))])
    A = sparse.vstack([sums, sparse.eye(k * k)]).tocsc()
    low, high = np.r_[np.full(2 * k, -np.inf), np.zeros(k * k)], np.r_[np.ones(2 * k), np.full(k * k, np.inf)]
    solver = osqp.OSQP()
    P = (2 * gamma * sparse.eye(k * k)).tocsc()
    solver.setup(P, -c.ravel(), A, low, high, eps_abs=1e-9, eps_rel=1e-9, max_iter=100_000, verbose=False)
    expected = solver.solve(raise_error=True).x.reshape(k, k)
    x = cora.relaxed_qp(torch.from_numpy(c), gamma).numpy()
    np.testing.assert_allclose(x, expected, atol=1e-5)


def test_relaxed_qp_gradient():
    c = torch.rand(4, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: cora.relaxed_qp(c, 0.1), c)


def test_relaxed_qp_of_equal_scores_is_uniform():
    x = cora.relaxed_qp(torch.full((5, 5), 0.5), 0.01)
    torch.testing.assert_close(x, torch.full((5, 5), 0.2))


def test_scorer_is_the_protocols_network():
    scorer = cora.PairScorer(7, hidden=11)
    left, right = torch.rand(3, 7), torch.rand(4, 7)
    linear = nn.Linear(14, 11)
    with torch.no_grad():
        linear.weight.copy_(torch.cat([scorer.left, scorer.right], 1))
        linear.bias.copy_(scorer.bias)
    pairs = torch.cat([left[:, None].expand(-1, 4, -1), right[None].expand(3, -1, -1)], -1)
    torch.testing.assert_close(scorer(left, right), scorer.last(linear(pairs).relu()).squeeze(-1).sigmoid())
    assert scorer.left.abs().max() <= 14**-0.5, "initialised as one layer of both papers' words"


def test_gamma_only_scales_the_gradient():
    scores, truth = torch.rand(6, 6, requires_grad=True), (torch.rand(6, 6) < 0.2).float()
    small, large = (torch.autograd.grad(cora.matching_loss(g)(scores, truth), scores)[0] for g in (0.1, 10.0))
    torch.testing.assert_close(small, 100 * large)


@pytest.mark.parametrize("name", cora.METHODS)
def test_every_method_runs(name, monkeypatch):
    monkeypatch.setattr(cora, "NUM_TEST", 2)
    monkeypatch.setattr(cora, "CANDIDATES", {"words": (1.0, 0, 1e-3, 0.0), "rank 4": (0.0, 4, 1e-3, 0.0)})
    line = cora.run(name, 3, instances())
    assert line["method"] == name and line["seed"] == 3 and 0 <= line["objective"] <= 6
    assert line["objective"] == cora.run(name, 3, instances())["objective"], "a seed gives one result"


def test_truth_is_the_upper_bound():
    data = instances()
    best = cora.run("upper bound", 0, data)["objective"]
    assert all(cora.run(name, 0, data)["objective"] <= best for name in ("random", "shared words, untrained"))


def test_ours_does_not_use_test_instances(monkeypatch):
    data = instances()
    order = np.random.default_rng(0).permutation(9)
    changed = Instances(*(x.copy() for x in data))
    for x in changed:
        x[order[: cora.NUM_TEST]] = 1 - x[order[: cora.NUM_TEST]]
    rest = order[cora.NUM_TEST :]
    monkeypatch.setattr(cora, "NUM_VALIDATION", 2)
    weights = []
    for instance in (data, changed):
        torch.manual_seed(0)
        tensors = tuple(torch.from_numpy(x).float() for x in instance)
        weights.append(cora.ours(tensors, rest, epochs=2)[0].state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_summary():
    lines = [{"method": "random", "seed": s, "objective": v} for s, v in enumerate([1.0, 3.0])]
    (row,) = cora.summary(lines, ["random", "ours"])
    assert row["mean"] == 2 and row["std"] == 1 and row["seeds"] == 2
    assert row["low"] == 1 and row["high"] == 3, "with two seeds the bootstrap interval ends at the values themselves"
    assert "| random |  | 2 | 2.00 ± 1.00 | 1.00 to 3.00 |" in cora.table([row])


def test_command_runs_missing_seeds(tmp_path):
    cora.cora_data.save(instances(), tmp_path / "a.npz")
    methods = ("random", "upper bound")
    cora.main(tmp_path / "a.npz", tmp_path / "out", seeds=2, jobs=1, methods=methods)
    file = tmp_path / "out" / "results.jsonl"
    lines = file.read_text().splitlines()
    assert (
        len(lines) == 4 and (tmp_path / "out" / "cora.md").exists() and (tmp_path / "out" / "img" / "cora.png").exists()
    )
    file.write_text("\n".join([*lines[:2], lines[2][:10]]) + "\n")
    cora.main(tmp_path / "a.npz", tmp_path / "out", seeds=2, jobs=1, methods=methods)
    record = json.loads((tmp_path / "out" / "cora.json").read_text())
    assert {name: len(found) for name, found in record["citations_found"].items()} == dict.fromkeys(methods, 2)
    again = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert {(x["method"], x["seed"]) for x in again} == {(m, s) for m in methods for s in (0, 1)}
    with pytest.raises(SystemExit, match="there is no 'nothing'"):
        cora.main(tmp_path / "a.npz", tmp_path / "out", methods=("nothing",))
    with pytest.raises(SystemExit, match=r"source: .*b\.npz holds no instances"):
        cora.main(tmp_path / "b.npz", tmp_path / "out")


def test_page_in_the_repository_is_that_of_its_record():
    docs = Path(__file__).parents[2] / "docs"
    found = json.loads((docs / "cora.json").read_text())["citations_found"]
    lines = [{"method": m, "seed": i, "objective": x} for m, values in found.items() for i, x in enumerate(values)]
    page = (docs / "cora.md").read_text()
    assert list(found) == list(cora.METHODS)
    assert cora.table(cora.summary(lines, found)) in page and "\n".join(cora.differences(lines)) in page
