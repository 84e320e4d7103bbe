"""Encodes pictures beside the steps: in the order in which they were asked for, and while requests are decoded within a
share of the device's time.

The main thread enqueues one piece of about a layer at a time and looks whether it has ended, so no step waits long.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import torch

from penstock.engine_core.execution.encoder import Encoder, Piece
from penstock.protocol.images import EncodeImage, ImageEncoded
from penstock.services.executor.device import is_device_error
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

AHEAD = 2  # pieces that are enqueued while nothing else runs: the device goes from one to the next


class ImageEncoding:
    """The pictures that the scheduler has asked for. budget: share of the device's time, above 0 and at most 1."""

    def __init__(self, encoder: Encoder, budget: float) -> None:
        self._encoder = encoder
        self._rest = 1 / budget - 1  # seconds for each second of a piece
        self._asked: deque[EncodeImage] = deque()
        self._at_hand: EncodeImage | None = None
        self._pieces: deque[tuple[Piece, float]] = deque()  # enqueued, with the seconds that this took
        self._next = 0.0  # when the next may begin while requests are decoded, in monotonic seconds
        self.answers: deque[ImageEncoded] = deque()

    @property
    def busy(self) -> bool:
        """Whether a picture is to be encoded, or an answer to be sent."""
        return bool(self._asked or self._at_hand or self.answers)

    def ask(self, message: EncodeImage) -> None:
        self._asked.append(message)

    def iterate(self, *, shared: bool) -> None:
        """Take what has ended, and enqueue a piece if it is time. shared: requests are decoded."""
        self._collect()
        if self._at_hand is None and not self._asked:
            return
        if len(self._pieces) >= (1 if shared else AHEAD) or (self._pieces and self._pieces[-1][0].last):
            return
        if shared and time.monotonic() < self._next:
            return
        self._launch()
        self._collect()

    def forget(self) -> None:
        """Everything: a new scheduler has numbers of its own."""
        self._encoder.leave()
        self._at_hand = None
        for kept in (self._asked, self._pieces, self.answers):
            kept.clear()

    def _launch(self) -> None:
        began = time.perf_counter()
        if self._at_hand is None:
            self._at_hand = self._asked.popleft()
            self._encoder.begin(self._at_hand)
        try:
            piece = self._encoder.launch()
        except (RuntimeError, MemoryError) as error:
            if is_device_error(error):
                raise
            logs.exception(log, "image_failed", number=self._at_hand.number)
            memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            self._answer("there is no memory for it" if memory else f"the encoder failed: {type(error).__name__}")
            return
        self._pieces.append((piece, time.perf_counter() - began))

    def _collect(self) -> None:
        while self._pieces and self._pieces[0][0].finished:
            piece, launching = self._pieces.popleft()
            self._next = time.monotonic() + self._rest * (piece.seconds or launching)
            if piece.last:
                self._answer(self._encoder.trouble())

    def _answer(self, error: str) -> None:
        assert self._at_hand is not None, "a picture has begun"
        self.answers.append(ImageEncoded(self._at_hand.number, error))
        self._at_hand = None
        self._encoder.leave()
        self._pieces.clear()
