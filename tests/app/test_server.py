"""The server without a browser: ports, uploads, plugins, and the command line in front of it."""

import os
import socket
import subprocess
import sys
import time

import pytest

import cutslots.app
from cutslots.app import server
from cutslots.devices import resolve_device


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


# ------------------------------------------------------------------------------------------------------------ addresses


def test_free_port_returns_a_port_or_names_the_problem():
    assert server.free_port("127.0.0.1", 0) > 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="choose another --host or --port"):
            server.free_port("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ValueError, match="port is 99999"):
        server.free_port("127.0.0.1", 99_999)
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1:0"):
        server.free_port("192.0.2.1", 0)  # reserved for documentation


def test_url_puts_ipv6_hosts_in_brackets():
    assert server.url("::1", 80) == "http://[::1]:80" and server.url("localhost", 80) == "http://localhost:80"


# -------------------------------------------------------------------------------------------------------------- uploads


def test_old_uploads_are_removed(tmp_path):
    for name in ("old/image.png", "half/image.png", "half/new.png", "partial", "new/image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name in ("old/image.png", "half/image.png", "partial", "old", "half", "empty"):
        os.utime(tmp_path / name, (1, 1))
    server.remove_old_files(tmp_path, before=1000)  # removing a file has just modified the folder `old`
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"old", "half", "half/new.png", "new", "new/image.png"}
    server.remove_old_files(tmp_path, before=time.time() + 1000)
    server.remove_old_files(tmp_path, before=time.time() + 1000)
    assert not list(tmp_path.iterdir())
    server.remove_old_files(tmp_path / "nowhere", before=1000)


# ------------------------------------------------------------------------------------------------ serve, command line


def test_package_exports_serve_without_importing_torch():
    assert cutslots.app.serve is server.serve
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cutslots.app.nothing  # noqa: B018
    done = run("import sys, cutslots.app; assert not {'torch', 'gradio'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("gradio")
def test_serve_imports_plugins_before_it_loads_models(tmp_path):
    (tmp_path / "parts.py").write_text("import sys; sys.plugin_imported = True")
    done = run(f"""
import sys
from cutslots.app import server
def build_page(choices, *options):
    assert sys.plugin_imported and choices[0] == "runs/a"
    raise ValueError("stop here")
server.build_page = build_page
try:
    server.serve(["runs/a"], port=0, device="cpu", plugins=[{str(tmp_path / "parts.py")!r}])
except ValueError as error:
    assert str(error) == "stop here", error
else:
    raise AssertionError
""")
    assert done.returncode == 0, done.stderr


def test_missing_plugins_are_named():
    with pytest.raises(ValueError, match=r"there is no /nowhere/parts\.py"):
        server.serve(plugins=["/nowhere/parts.py"])


def test_help_imports_neither_torch_nor_gradio():
    done = run("""
import sys, cutslots.cli
sys.argv = ["cutslots", "app", "--help"]
try:
    cutslots.cli.main()
finally:
    assert not {"torch", "gradio"} & set(sys.modules)
""")
    assert done.returncode == 0 and "--port" in done.stdout, done.stderr


def test_missing_gradio_is_one_sentence():
    done = run("""
import sys, cutslots.cli
sys.modules["gradio"] = None
sys.argv = ["cutslots", "app", "--port", "0"]
cutslots.cli.main()
""")
    assert done.returncode == 1
    assert done.stderr.strip() == "cutslots: the app needs Gradio 6.31 or later: pip install 'cutslots[app]'"


def test_unusable_devices_are_named():
    with pytest.raises(ValueError, match="device is 'cuda:99', which cannot be used here"):
        resolve_device("cuda:99")
