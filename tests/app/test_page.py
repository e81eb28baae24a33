"""The Gradio page without a browser: private, bounded to the listed checkpoints, and errors are shown in it."""

import json
import re

import pytest

from cutslots.app import sources
from cutslots.app.discovery_tab import require_session
from cutslots.app.events import import_gradio, show_errors
from cutslots.app.page import build_page
from cutslots.models.checkpoints import SHIPPED
from tests.app.conftest import CHECKPOINT

pytestmark = pytest.mark.usefixtures("gradio")


def components(page):
    return page.get_config_file()["components"]


def test_page_has_no_public_api_and_names_no_other_host():
    page = build_page([CHECKPOINT], allow_paths=False)
    config = page.get_config_file()
    assert not page.analytics_enabled
    assert all(each["api_visibility"] == "private" for each in config["dependencies"])
    text = re.sub(r"data:image/[^\"]*", "", json.dumps(config, default=str))
    assert "googleapis" not in text and "cdn" not in text


@pytest.mark.parametrize("allow_paths", [False, True])
def test_checkpoint_field_accepts_paths_only_if_allowed(allow_paths):
    page = build_page([CHECKPOINT], allow_paths)
    field = next(each for each in components(page) if each["props"].get("label") == "Checkpoint")
    assert field["props"]["allow_custom_value"] is allow_paths


def test_paths_of_remote_visitors_are_rejected(tmp_path):
    """The page does not offer paths to them; requests made without the page are rejected by the handler."""
    page = build_page([CHECKPOINT], allow_paths=False)
    handlers = {each.name: each.fn for each in page.fns.values()}
    for path in (str(SHIPPED / CHECKPOINT), str(tmp_path), "", None):
        with pytest.warns(UserWarning, match=f"checkpoint is .*; expected one of {CHECKPOINT}"):
            handlers["show_scene"](path, "plain", 0, 3, "refined")
    with pytest.warns(UserWarning, match=f"checkpoint is .*; expected one of {CHECKPOINT}"):
        handlers["rerun"](None, str(SHIPPED / CHECKPOINT), "refined", 1)


@pytest.mark.parametrize("suffixes, kinds", [((".mp4",), "image, GIF or video"), ((), "image or GIF")])
def test_upload_label_names_the_accepted_kinds(monkeypatch, suffixes, kinds):
    monkeypatch.setattr(sources, "VIDEO_SUFFIXES", suffixes)
    labels = [each["props"].get("label") for each in components(build_page([CHECKPOINT]))]
    assert f"Or upload an {kinds}, up to 20 MB" in labels


def test_first_checkpoint_is_loaded_before_the_page_is_built():
    with pytest.raises(ValueError, match="there is no"):
        build_page(["/no/such/checkpoint"])


def test_errors_are_shown_escaped_and_leave_the_page_unchanged():
    gr = import_gradio()

    def handler(value):
        raise ValueError(f"value is {value};\nexpected <b>")

    with pytest.warns(UserWarning, match=r"value is 3;\\nexpected &lt;b&gt;"):  # gr.Warning warns outside a page
        assert show_errors(handler)(3) == gr.skip()


def test_dropped_state_asks_to_reload():
    with pytest.raises(ValueError, match="reload the page"):
        require_session(None)


def test_old_gradio_is_rejected(monkeypatch):
    monkeypatch.setattr(import_gradio(), "__version__", "6.4.0")
    with pytest.raises(ValueError, match=r"Gradio 6\.31 or later"):
        import_gradio()
