"""Seeds of parts of a run, drawn from the run's seed and the part's name."""

import hashlib


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts and on nothing else: not on the process, the order or Python's hash."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
