"""Pieces of an output: what parsers make, and what the deltas of a choice are made of."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.protocol.messages import Piece, PieceKind


def content(text: str) -> list[Piece]:
    """Text as it is; no piece for none."""
    return [Piece(PieceKind.CONTENT, text)] if text else []


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same with neighbours of a kind as one; each call begins a piece of its own."""
    kinds: list[int] = []
    texts: list[list[str]] = []
    for piece in pieces:
        if kinds and kinds[-1] == piece.kind != PieceKind.CALL:
            texts[-1].append(piece.text)
        else:
            kinds.append(piece.kind)
            texts.append([piece.text])
    return tuple(Piece(kind, "".join(parts)) for kind, parts in zip(kinds, texts, strict=True))


def leading_text(pieces: list[Piece]) -> tuple[str, tuple[Piece, ...]]:
    """The content that comes first, and what follows it."""
    count = next((n for n, piece in enumerate(pieces) if piece.kind != PieceKind.CONTENT), len(pieces))
    return "".join([piece.text for piece in pieces[:count]]), tuple(pieces[count:])
