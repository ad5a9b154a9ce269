"""``diffkv-repro serve``: keys are made, and what cannot work is one line instead of a traceback."""

import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from diffkv_repro.cli import app
from diffkv_repro.kvserve.process import ServerProcess


def run(*arguments):
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


ANYWHERE = ("--insecure", "--endpoint", "tcp://127.0.0.1:*")


def process(*arguments):
    command = [sys.executable, "-m", "diffkv_repro.cli", "serve", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_keys_are_made_once(tmp_path):
    done = run("keys", "--keys", tmp_path / "keys")
    assert done.exit_code == 0
    assert str(tmp_path / "keys" / "client.key_secret") in done.stdout.splitlines()
    again = run("keys", "--keys", tmp_path / "keys")
    assert again.exit_code == 2
    assert "has keys already" in again.output
    assert run("keys", "--keys", tmp_path / "keys", "--replace").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--local"), "give a --prompt or a --file"),
        (("decode", "--prompt", "x", "--keys", "absent"), "diffkv-repro serve keys"),
        (("prefill", *ANYWHERE, "--made-up", "30x3"), "LAYERSxHEADSxDIM"),
        (("prefill", *ANYWHERE, "--made-up", "2x1x8", "--profiles", "zip"), "unknown profile 'zip'"),
        (("prefill", "--made-up", "2x1x8", "--profiles", "int4", "--tokens", "32", "--keys", "absent"), "serve keys"),
    ],
)
def test_what_cannot_work_is_one_line(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("kind", ["prefill", "store", "frames"])
@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        (None, "cannot listen on tcp://127.0.0.1:{port}: Address already in use"),
        ("tcp://127.0.0.1:99999", "port '99999' is none of 1 to 65535"),
        ("127.0.0.1:1", "without keys a server listens on the loopback alone"),
        ("tcp://192.0.2.1:5750", "without keys a server listens on the loopback alone"),
    ],
)
def test_where_nobody_can_listen_is_said_before_anything_is_measured(tmp_path, kind, endpoint, message):
    folder = [tmp_path / "store"] if kind != "prefill" else []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(kind, *folder, "--insecure", "--endpoint", endpoint or f"tcp://127.0.0.1:{port}")
    assert done.exit_code == 2
    assert message.format(port=port) in done.output
    assert "measured" not in done.output


def test_a_server_that_is_interrupted_says_that_it_stops(tmp_path):
    running = process("frames", tmp_path, *ANYWHERE)
    assert running.stdout.readline().startswith("listening on tcp://127.0.0.1:")
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert (said, running.returncode) == ("stopped\n", 0)


def test_what_is_interrupted_before_it_serves_says_so(monkeypatch):
    from diffkv_repro.kvserve import serving

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "open_source", interrupted)
    done = run("prefill", *ANYWHERE)
    assert done.exit_code == 130
    assert done.output == "diffkv-repro: interrupted\n"


def test_a_server_in_a_process_of_its_own_ends_in_good_order_and_with_its_parent(tmp_path):
    with ServerProcess(["frames", str(tmp_path / "frames")], keys=None) as server:
        assert server.stop() == 0, server.said
    with ServerProcess(["frames", str(tmp_path / "frames")], keys=None) as orphan:
        orphan.process.stdin.close()  # as the end of its parent does
        assert orphan.process.wait(timeout=30) == 0
