"""A prefill worker that damages every frame but the first: ``python damaging_server.py KEYS``. Run by test_faults."""

import random
import sys
from pathlib import Path

import torch

from diffkv_repro.kvserve import NAMED
from diffkv_repro.kvserve.disagg import PrefillWorker
from diffkv_repro.kvserve.keys import load_keys
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.server import KVServer
from diffkv_repro.kvserve.sources import MadeUpSource

LAYOUT = KVLayout(3, 1, 8, torch.float16, model="made up")


class Damaging(PrefillWorker):
    """Changes a byte, cuts off, repeats, leaves out or appends, at a random place."""

    served_frames = 0

    def offer(self, request, bandwidth):
        offer = super().offer(request, bandwidth)
        draw, pieces = random.Random(self.served_frames), list(offer.pieces)
        if self.served_frames:
            where = draw.randrange(len(pieces))
            piece = bytearray(pieces[where])
            match draw.randrange(6):
                case 0 | 1:
                    piece[draw.randrange(len(piece))] ^= draw.randrange(1, 256)
                    pieces[where] = bytes(piece)
                case 2:
                    pieces = [*pieces[:where], bytes(piece[: draw.randrange(len(piece))])]
                case 3:
                    pieces.insert(where, pieces[where])
                case 4:
                    del pieces[where]
                case _:
                    pieces.append(draw.randbytes(draw.randrange(1, 40)))
        self.served_frames += 1
        offer.pieces = pieces
        return offer


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker = Damaging(MadeUpSource(LAYOUT), {"int4": NAMED["int4"]}, [MeasuredProfile.from_speed("int4", 3, 1e9)])
    server = KVServer(
        worker, keys=load_keys(Path(sys.argv[1]), "server"), endpoint="tcp://127.0.0.1:*", experiment=True
    )
    print(f"listening on {server.endpoint}", flush=True)  # noqa: T201
    server.run()
