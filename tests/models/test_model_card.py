"""Model cards, read by the Hub's own library."""

import pytest
from huggingface_hub import ModelCard, metadata_load

from cutslots.models import model_card
from cutslots.models.checkpoints import SHIPPED, checkpoint_names
from cutslots.models.discovery import Discovery, build
from tests.models.configs import PAIRS, SMALL, SPACETIME

LINKS = ("https://openreview.net/forum?id=1J-ZTr7aypY", "https://arxiv.org/abs/2210.02159")
SECTIONS = ("**Training data.**", "**Training.**", "**Metrics", "**Limitations.**", "**Links.**")


def assert_card(path):
    """Check what the Hub reads from a card: the front matter, and the text after it."""
    data, card = metadata_load(path), ModelCard.load(path)
    assert data == card.data.to_dict() and not card.text.startswith("---")
    assert data["license"] == "apache-2.0" and data["library_name"] == "cutslots"
    assert data["pipeline_tag"] == "image-segmentation"
    assert {*model_card.TAGS} <= {*data["tags"]} and len({*data["tags"]}) == len(data["tags"])
    assert all(isinstance(tag, str) for tag in data["tags"])
    for part in (*LINKS, *SECTIONS, "from cutslots import Discovery"):
        assert part in card.text, part
    assert "More Information Needed" not in card.text and "{{" not in card.text
    return data


@pytest.mark.parametrize("name", checkpoint_names())
def test_shipped_cards(name):
    data = assert_card(SHIPPED / name / "README.md")
    assert "graph-cuts" in data["tags"]


@pytest.mark.parametrize("config", [SMALL, PAIRS, SPACETIME], ids=["images", "pairs", "clips"])
def test_save_pretrained_writes_a_card(config, tmp_path):
    build(config).save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    data = assert_card(tmp_path / "README.md")
    assert set(data["tags"]) == {*model_card.TAGS, "model_hub_mixin"}, "the Hub's library adds its own"


def test_cards_link_to_the_repository_and_the_docs_of_the_metadata(tmp_path, monkeypatch):
    model, has_url = build(SMALL), model_card.project_url("Repository") is not None
    assert ("Code: " in str(model.generate_model_card())) == has_url
    (tmp_path / "cutslots-9.dist-info").mkdir()
    urls = "Project-URL: Repository, https://code.test/a, b\nProject-URL: Documentation, https://docs.test\n"
    (tmp_path / "cutslots-9.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cutslots\n{urls}")
    monkeypatch.syspath_prepend(tmp_path)
    assert model_card.project_url("Repository") == "https://code.test/a, b"
    assert model_card.project_url("Documentation") == "https://docs.test" and model_card.project_url("Homepage") is None

    class Linked(Discovery, repo_url=model_card.project_url("Repository"), docs_url="https://docs.test"):
        pass

    Linked(model.encoder, model.slots, model.decoder).generate_model_card().save(tmp_path / "README.md")
    assert_card(tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert "Code: [repository](https://code.test/a, b). Documentation: [docs](https://docs.test)." in text


def test_save_pretrained_keeps_the_card_of_the_folder(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    build(SMALL).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_push_to_hub_uploads_the_card(tmp_path, monkeypatch):
    """Nothing is sent: the upload is replaced, the files are those of `save_pretrained`."""
    sent = {}

    class Hub:
        def __init__(self, **options):
            pass

        def create_repo(self, repo_id, **options):
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, folder_path, **options):
            sent.update({path.name: path.read_text() for path in folder_path.glob("README.md")})

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Hub)
    build(SMALL).push_to_hub("owner/name")
    (tmp_path / "README.md").write_text(sent["README.md"])
    assert_card(tmp_path / "README.md")
