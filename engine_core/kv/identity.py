"""The identity of a full block: a chained hash of everything that determines its KV.

H(parent, token ids), where the parent of the first block is a root that holds the extras (cache salt, adapter id).
BLAKE2b with 128 bits (RFC 7693): cryptographic, so that one tenant cannot make a block that passes for another's.
"""

from __future__ import annotations

import hashlib
from array import array

IDENTITY_BYTES = 16
TOKEN_BYTES = 4


def root(salt: str, adapter: str = "", private: int = -1) -> bytes:
    """The parent of a chain's first block. `private` >= 0 names one request: its blocks are shared with no other."""
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES, person=b"penstock-kv")
    for part in (salt.encode("utf-8", "surrogatepass"), adapter.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little"))  # lengths first, so that no two extras spell the same bytes
        digest.update(part)
    digest.update(private.to_bytes(9, "little", signed=True))
    return digest.digest()


def extend(chain: list[bytes], start: bytes, tokens: array[int], blocks: int, block_size: int) -> None:
    """Append the identities of full blocks len(chain) .. blocks-1 of `tokens`. No block is hashed twice."""
    first = len(chain)
    if first >= blocks:
        return
    parent, digest = chain[-1] if chain else start, hashlib.blake2b
    data = tokens[first * block_size : blocks * block_size].tobytes()
    width = block_size * TOKEN_BYTES
    assert len(data) == (blocks - first) * width, "only full blocks have an identity"
    for offset in range(0, len(data), width):
        parent = digest(parent + data[offset : offset + width], digest_size=IDENTITY_BYTES).digest()
        chain.append(parent)
