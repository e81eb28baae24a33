"""Which visitors' states the server stores: those used last, of pages that are open."""

from __future__ import annotations

from typing import Any

MAX_SESSIONS = 8  # visitors whose state is stored


def bound_sessions(holder: Any, capacity: int = MAX_SESSIONS) -> None:
    """Make a `gradio.state_holder.StateHolder` drop sessions in our order, at each request.

    `capacity` sessions with a state are kept. Of more, those whose page is closed are dropped first, then the least
    recently used ones. Gradio itself counts sessions without a state too: a visitor whose state was dropped would cost
    another one's with each click. And it would drop an open page before a closed one."""

    def update(session_id: str) -> None:
        with holder.lock:
            sessions = holder.session_data
            if session_id in sessions:
                sessions.move_to_end(session_id)
                sessions[session_id].is_closed = False  # Gradio does not reset it when a page connects again
            for has_state in (True, False):
                names = [name for name, session in list(sessions.items()) if _has_state(session) is has_state]
                names.sort(key=lambda name: (name == session_id, not sessions[name].is_closed))  # stable: oldest first
                for name in names[: max(len(names) - capacity, 0)]:
                    del sessions[name]
                    holder.time_last_used.pop(name, None)

    holder.update = update


def _has_state(session: Any) -> bool:
    return any(value is not None for value in session.state_data.values())
