"""Servers in processes of their own, for experiments and tests: started by the same command that a user types."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from diffkv_repro.kvserve.link import LinkError

_LISTENING = "listening on "


class ServerProcess:
    """``diffkv-repro serve ARGUMENTS`` until the block ends: ``endpoint`` is where it listens, ``said`` its lines.

    Raises LinkError where it does not listen within ``within`` seconds, with the last that it said.
    """

    def __init__(self, arguments: Sequence[str], *, keys: Path | None, within: float = 180.0) -> None:
        given = ["--keys", str(keys)] if keys is not None else ["--insecure"]
        command = [sys.executable, "-m", "diffkv_repro.cli", "serve", *arguments, *given]
        command += [] if "--endpoint" in arguments else ["--endpoint", "tcp://127.0.0.1:*"]
        command.append("--with-parent")  # it ends with this process, however that ends
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.said: list[str] = []
        self._found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.endpoint = self._endpoint(within)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if line.startswith(_LISTENING):
                self._found.put(line.removeprefix(_LISTENING).split(",")[0].strip())
        self._found.put(None)

    def _endpoint(self, within: float) -> str:
        try:
            found = self._found.get(timeout=within)
        except queue.Empty:
            found = None
        if found is None:
            self.stop()
            raise LinkError(f"no server came up within {within:g} s: {' | '.join(self.said[-4:]) or 'it said nothing'}")
        return found

    def kill(self) -> None:
        """As a crash: nothing is tidied up."""
        self.process.kill()
        self.process.wait()

    def stop(self, within: float = 10.0) -> int:
        """Ask it to end, wait, and return its exit status."""
        self.process.terminate()
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(timeout=2)
        self.process.stdout.close()
        self.process.stdin.close()
        return self.process.returncode

    def wait_for(self, text: str, within: float = 10.0) -> bool:
        """Whether it prints a line with ``text`` in time."""
        until = time.monotonic() + within
        while time.monotonic() < until:
            if any(text in line for line in self.said):
                return True
            time.sleep(0.02)
        return False

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
