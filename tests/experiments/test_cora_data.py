import pickle
from collections import defaultdict

import numpy as np
import pytest
from scipy import sparse

from experiments import cora_data

WORDS = 12


@pytest.fixture
def citations():
    """A small citation graph: papers that share a topic cite each other."""
    rng = np.random.default_rng(0)
    topic = np.repeat(np.arange(4), 15)
    words = (rng.random((60, WORDS)) < 0.2 + 0.5 * (np.arange(WORDS) % 4 == topic[:, None])).astype(np.uint8)
    cites = [(a, b) for a in range(60) for b in range(a) if rng.random() < (0.3 if topic[a] == topic[b] else 0.02)]
    return words, np.array(sorted((b, a) for a, b in cites))


def write_linqs(folder, words, cites):
    rows = [f"id{i}\t" + "\t".join(map(str, row)) + "\tTopic" for i, row in enumerate(words)]
    (folder / "cora.content").write_text("\n".join(rows) + "\n")
    (folder / "cora.cites").write_text("".join(f"id{a}\tid{b}\n" for a, b in cites) + "id1\tnobody\nid2\tid2\n")


def write_planetoid(folder, words, cites, test):
    graph = defaultdict(list)
    for a, b in cites:
        graph[int(a)].append(int(b))
        graph[int(b)].append(int(a))
    for i in range(len(words)):
        graph[i] += []
    first = len(words) - len(test)
    for name, value in (("allx", words[:first]), ("tx", words[test])):
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(sparse.csr_matrix(value.astype(np.float32)), protocol=4))
    (folder / "ind.cora.graph").write_bytes(pickle.dumps(graph, protocol=4))
    (folder / "ind.cora.test.index").write_text("\n".join(map(str, test)))


def test_both_distributions_read_the_same(tmp_path, citations):
    words, cites = citations
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_linqs(tmp_path / "a", words, cites)
    write_planetoid(tmp_path / "b", words, cites, test=[55, 51, 59, 50, 52, 58, 57, 53, 54, 56])
    for folder in ("a", "b"):
        read = cora_data.read_public(tmp_path / folder)
        assert np.array_equal(read[0], words) and np.array_equal(read[1], cites), folder


def test_instances_hold_disjoint_papers_and_their_citations(citations):
    pytest.importorskip("pymetis")
    words, cites = citations
    words = np.arange(60, dtype=np.uint8)[:, None] * np.ones(
        WORDS, dtype=np.uint8
    )  # the words of a paper are its index
    built = cora_data.build(words, cites, parts=4, papers=14)
    left, right = built.left[..., 0], built.right[..., 0]
    assert left.shape == right.shape == (4, 7)
    assert len(np.unique(np.concatenate([left, right]))) == 56
    pairs = {tuple(pair) for pair in cites}
    for i in range(4):
        for a, b in np.ndindex(7, 7):
            one, other = sorted((left[i, a], right[i, b]))
            assert built.cites[i, a, b] == ((one, other) in pairs)
    again = cora_data.build(words, cites, parts=4, papers=14)
    assert all(np.array_equal(x, y) for x, y in zip(built, again, strict=True))


def test_largest_cut_is_found_on_a_bipartite_graph():
    rng = np.random.default_rng(1)
    side = np.zeros(20, dtype=bool)
    side[rng.permutation(20)[:10]] = True
    graph = (side[:, None] != side[None]).astype(int)
    found = cora_data.largest_cut(graph, rng)
    assert found.sum() == 10 and graph[found][:, ~found].sum() == 100


def test_parts_get_equal_sizes_by_citations(citations):
    cites = citations[1]
    graph = sparse.coo_matrix((np.ones(len(cites)), cites.T), shape=(60, 60)).tocsr()
    graph = ((graph + graph.T) > 0).astype(np.int64)
    labels = np.repeat([0, 1, 2], [30, 18, 12])
    groups = cora_data.equalize(graph, labels, 18)
    assert [len(g) for g in groups] == [18, 18, 18] and len(np.unique(np.concatenate(groups))) == 54
    inner = np.asarray(graph[:30][:, :30].sum(1)).ravel()
    assert inner[groups[0]].min() >= np.delete(inner, groups[0]).max()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["allx", "tx", "graph"])
def test_malicious_pickle_is_refused_and_not_run(tmp_path, citations, name):
    words, cites = citations
    write_planetoid(tmp_path, words, cites, test=[58, 59])
    (tmp_path / f"ind.cora.{name}").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(ValueError, match=rf"ind\.cora\.{name} is not a pickle of arrays: it contains .*open"):
        cora_data.load(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("call", ["os.system", "builtins.eval", "numpy.load", "numpy.core.multiarray.scalar"])
def test_other_classes_in_pickles_are_refused(tmp_path, call):
    module, _, name = call.rpartition(".")
    (tmp_path / "x").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(ValueError, match="which is not an array"):
        cora_data.read_pickle(tmp_path / "x")


def test_round_trip_and_bad_files(tmp_path, citations):
    instances = cora_data.Instances(*(np.zeros(s, np.uint8) for s in ((3, 5, 4), (3, 5, 4), (3, 5, 5))))
    cora_data.save(instances, tmp_path / "a.npz")
    assert all(np.array_equal(x, y) for x, y in zip(cora_data.load(tmp_path / "a.npz"), instances, strict=True))
    (tmp_path / "b.npz").write_bytes(b"nothing")
    np.savez(tmp_path / "c.npz", Xl=np.zeros((3, 5, 4)), Xr=np.zeros((3, 5, 4)), Y=np.zeros((3, 5, 4)))
    for name, message in (
        ("b.npz", "holds no instances"),
        ("c.npz", "has arrays of shapes"),
        ("d.txt", "neither a folder nor"),
        (".", "holds neither cora.content"),
    ):
        with pytest.raises(ValueError, match=message):
            cora_data.load(tmp_path / name)
    with pytest.raises(ValueError, match="there are 60 papers; expected at least 27 x 100"):
        cora_data.build(*citations)
