"""What can happen to a frame on its way, by accident and by malice."""

import zlib


def mutated(data, others, dice):
    """``data`` with one to four things wrong with it."""
    data = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data)) if data else 0
        kind = dice.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and data:
            data[at] = dice.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            del data[at : at + dice.randint(1, 40)]
        elif kind == 3:
            data[at:at] = dice.randbytes(dice.randint(1, 40))
        elif kind == 4:
            data[at : at + 8] = dice.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]).to_bytes(8, "little")
        elif kind == 5:
            other = dice.choice(others)
            data[at:] = other[min(at, len(other)) :]
        else:
            del data[at:]
    return bytes(data)


def signed(data):
    """With all checksums made right, as far as the frame can still be walked: what a malicious sender could do."""
    data = bytearray(data)
    size = int.from_bytes(data[6:10], "little")
    if not 14 <= size <= len(data):
        return bytes(data)
    head = zlib.crc32(data[: size - 4])
    data[size - 4 : size] = head.to_bytes(4, "little")
    at = size
    while at + 24 <= len(data):
        length = int.from_bytes(data[at + 8 : at + 16], "little")
        body = data[at + 24 : at + 24 + length]
        crc = zlib.crc32(body, zlib.crc32(data[at : at + 4] + data[at + 8 : at + 24], head))
        data[at + 4 : at + 8] = crc.to_bytes(4, "little")
        at += 24 + length
    return bytes(data)
