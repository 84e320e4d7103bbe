"""Messages about images survive their links."""

from __future__ import annotations

import msgspec

from penstock.protocol.images import EncodeImage, Image, ImageEncoded, ImageFile
from penstock.protocol.links import STEPS, TEXT, TOKENS, decoder
from penstock.protocol.messages import Sampling, SubmitText, SubmitTokens

PIXELS = bytes(range(12))


def test_a_request_keeps_its_images_on_every_link() -> None:
    text = SubmitText(images=(ImageFile(data=b"\x89PNG", param="messages[0].content[1]"),), sampling=Sampling())
    image = Image(position=3, length=2, rows=1, width=2, height=2, digest=bytes(16), pixels=PIXELS)
    tokens = SubmitTokens(id=1, token_ids=bytes(20), sampling=Sampling(), images=(image,))
    for link, message in ((TEXT, text), (TOKENS, tokens)):
        assert decoder(link, at_binder=True).decode(msgspec.msgpack.encode(message)) == message


def test_executors_hear_of_images_and_answer() -> None:
    asked = EncodeImage(number=7, first_row=4, rows=1, width=2, height=2, pixels=PIXELS)
    assert decoder(STEPS, at_binder=False).decode(msgspec.msgpack.encode(asked)) == asked
    done = ImageEncoded(7)
    assert decoder(STEPS, at_binder=True).decode(msgspec.msgpack.encode(done)) == done
