"""The prefix index: block identity → block. An entry outlives its holders until the block is given to another sequence.

A full block's identity is a chained hash, H(parent, token ids), whose root covers the extras (cache salt, adapter id).
Of a block that images touch it covers each one's digest as well, and where the block begins in it. So it covers
everything that determines the block's KV. BLAKE2b with 128 bits (RFC 7693) is cryptographic, so that no
tenant can make a block that passes for another's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from penstock.engine_core.kv.block_layout import BlockLayout, first_column
from penstock.protocol.images import Image
from penstock.protocol.messages import SubmitTokens

SHARDS = 256  # by an identity's first byte: a dictionary that grows stops the world for one shard, not for all blocks
IDENTITY_BYTES = 16
TOKEN_BYTES = 4
Find = Callable[[bytes, int], int | None]  # by a column's identity and the group


class PrefixIndex:
    """Owner of block identities. At most one block per identity: a later twin stays anonymous."""

    def __init__(self, total: int) -> None:
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._identities: list[bytes | None] = [None] * (total + 1)  # by block
        self.copying: dict[int, int] = {}  # blocks that are copied, until their content changes: number of the copy
        self.evicted = 0  # since start

    def cache(self, identities: Sequence[bytes], blocks: Sequence[int], group: int = 0) -> None:
        """Let later plans find these blocks of a KV group. A step that writes their content must be planned already:
        steps run in order, so every later one reads it complete."""
        shards, names = self._blocks, self._identities
        if group:  # that of the first is the identity itself
            identities = [in_group(identity, group) for identity in identities]
        for identity, block in zip(identities, blocks, strict=True):
            if shards[identity[0]].setdefault(identity, block) == block:
                assert names[block] in (None, identity), "a block is sealed once between two takes"
                names[block] = identity

    def match(self, chain: Sequence[bytes], most: int) -> list[int]:
        """Blocks of the longest known prefix of `chain`, at most `most` of them."""
        found: list[int] = []
        for identity in chain[:most]:
            block = self._blocks[identity[0]].get(identity)
            if block is None:
                break
            found.append(block)
        return found

    def match_groups(
        self, chain: Sequence[bytes], most: int, layout: BlockLayout, find: Find | None = None, known: int = 0
    ) -> list[int]:
        """Blocks of the longest prefix that every KV group has, column by column, 0 where nothing reads a block.

        A group that holds everything must have all of them; one with a window those that the next position reads. find:
        what finds a group's block, other than the index. known: columns that are known to be found by it.
        """
        size, groups = layout.block_size, layout.groups
        if find is None and groups == 1 and layout.full:
            return self.match(chain, most)
        find, length = find or self.find, most
        for group, window in enumerate(layout.windows):
            if not window:
                length = next((at for at in range(known, length) if find(chain[at], group) is None), length)
        lowest = dict.fromkeys((at for at, window in enumerate(layout.windows) if window), length)
        again = True  # a group lacks a block: every other one is asked about the shorter prefix
        while again and length:
            again = False
            for group in lowest:
                first = first_column(length * size, layout.windows[group], size)
                at = min(lowest[group], length)
                while at > first and find(chain[at - 1], group) is not None:
                    at -= 1
                lowest[group] = at
                if at > first:
                    length, again = at - 1, True
                    lowest[group] = length
        found = [0] * (length * groups)
        for group, window in enumerate(layout.windows):
            for column in range(first_column(length * size, window, size), length):
                found[column * groups + group] = find(chain[column], group) or 0
        return found

    def find(self, identity: bytes, group: int) -> int | None:
        """The block of one group."""
        key = in_group(identity, group)
        return self._blocks[key[0]].get(key)

    def key(self, block: int) -> bytes:
        """What a block is found by that can be found."""
        identity = self._identities[block]
        assert identity is not None
        return identity

    def name(self, key: bytes, block: int) -> None:
        """Let a block without an identity, whose content is there, be found by this key, unless another one is."""
        if self._blocks[key[0]].setdefault(key, block) == block:
            assert self._identities[block] is None
            self._identities[block] = key

    def named(self, block: int) -> bool:
        """Whether the block's content can be found."""
        return self._identities[block] is not None

    def forget(self, block: int) -> None:
        """The block's content is about to change, or cannot be trusted."""
        identity = self._identities[block]
        self.copying.pop(block, None)
        if identity is not None:
            self._identities[block] = None
            del self._blocks[identity[0]][identity]
            self.evicted += 1

    def clear(self, total: int) -> None:
        """Forget everything; there are `total` blocks from now on."""
        for shard in self._blocks:
            shard.clear()
        self._identities = [None] * (total + 1)
        self.copying.clear()


def in_group(identity: bytes, group: int) -> bytes:
    """What a column's block in a KV group is found by."""
    return identity + group.to_bytes(1, "little") if group else identity


def root(salt: str, adapter: str = "", private: int = -1) -> bytes:
    """The parent of a chain's first block. `private` >= 0 names one request: its blocks are shared with no other."""
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES, person=b"penstock-kv")
    for part in (salt.encode("utf-8", "surrogatepass"), adapter.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little"))  # lengths first, so that no two extras spell the same bytes
        digest.update(part)
    digest.update(private.to_bytes(9, "little", signed=True))
    return digest.digest()


def root_of(message: SubmitTokens, private: int = -1) -> bytes:
    """The root of a request's blocks."""
    return root(message.cache_salt, "" if message.adapter is None else message.adapter.identity, private)


def extend(
    chain: list[bytes],
    start: bytes,
    tokens: array[int],
    blocks: int,
    block_size: int,
    images: Sequence[Image] = (),
) -> None:
    """Append the identities of full blocks len(chain) .. blocks-1 of `tokens`, among which these images stand,
    ascending. No block is hashed twice."""
    first = len(chain)
    if first >= blocks:
        return
    parent, digest = chain[-1] if chain else start, hashlib.blake2b
    data = tokens[first * block_size : blocks * block_size].tobytes()
    width = block_size * TOKEN_BYTES
    assert len(data) == (blocks - first) * width, "only full blocks have an identity"
    pictures = image_extras(images, first, blocks, block_size) if images else {}
    for block, offset in enumerate(range(0, len(data), width), first):
        content = parent + data[offset : offset + width] + pictures.get(block, b"")
        parent = digest(content, digest_size=IDENTITY_BYTES).digest()
        chain.append(parent)


def image_extras(images: Sequence[Image], first: int, blocks: int, block_size: int) -> dict[int, bytes]:
    """What the identities of blocks first .. blocks-1 cover beside their tokens: of each image that touches one its
    digest and the position in it at which the block begins, below 0 where that is before it."""
    found: dict[int, bytes] = {}
    for image in reversed(images):
        end = image.position + image.length
        if end <= first * block_size:
            break  # and so do all before it
        for block in range(max(first, image.position // block_size), min(blocks, -(-end // block_size))):
            offset = block * block_size - image.position
            found[block] = image.digest + offset.to_bytes(8, "little", signed=True) + found.get(block, b"")
    return found
