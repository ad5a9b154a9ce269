"""Processes that do not outlive the one that started them."""

import os
import threading
import time


def die_with(parent: int) -> None:
    """End this process soon after ``parent`` has ended, however that came about; watched by a thread of its own."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
