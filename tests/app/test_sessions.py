"""Which sessions are dropped, with Gradio's own holder of sessions."""

import pytest

from cutslots.app.sessions import bound_sessions

pytestmark = pytest.mark.usefixtures("gradio")


class Session:
    """What Gradio stores of a visitor."""

    def __init__(self):
        self.state_data, self.is_closed = {}, False


@pytest.fixture
def holder(monkeypatch):
    from gradio import state_holder

    monkeypatch.setattr(state_holder, "SessionState", lambda blocks: Session())
    holder = state_holder.StateHolder()
    holder.blocks = None
    bound_sessions(holder, capacity=3)
    return holder


def use(holder, *names, state="view"):
    for name in names:
        holder[name].state_data[1] = state
        holder[name]  # sessions are dropped at the next request


def test_least_recently_used_session_is_dropped(holder):
    use(holder, "a", "b", "c", "a", "d")
    assert list(holder.session_data) == ["c", "a", "d"] and set(holder.time_last_used) == {"a", "c", "d"}


def test_closed_pages_are_dropped_first(holder):
    use(holder, "a", "b", "c")
    holder.session_data["b"].is_closed = True
    use(holder, "d")
    assert list(holder.session_data) == ["a", "c", "d"]


def test_page_that_connects_again_is_open(holder):
    use(holder, "a", "b", "c")
    holder.session_data["b"].is_closed = True
    use(holder, "b", "d")
    assert list(holder.session_data) == ["c", "b", "d"]


def test_sessions_without_a_state_drop_no_other(holder):
    use(holder, "a", "b", "c")
    for k in range(10):
        use(holder, f"dropped{k}", state=None)
    assert [name for name in holder.session_data if len(name) == 1] == ["a", "b", "c"]
    assert len(holder.session_data) == 6
