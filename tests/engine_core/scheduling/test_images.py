"""Requests with images: who waits for what, where prompts are cut, what is shared, and how failures end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from penstock.engine_core.kv.prefix_index import extend, root_of
from penstock.engine_core.scheduling.encoder_cache import NOWHERE
from penstock.engine_core.scheduling.lifecycle import KILLER, preempt
from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.engine_core.scheduling.request_queue import PATIENCE
from penstock.engine_core.scheduling.scheduler import TOO_FEW_ROWS
from penstock.engine_core.scheduling.validation import POISONED
from penstock.protocol.images import Image, ImageEncoded
from penstock.protocol.messages import Automaton, Finish, Pooling, Sampling
from tests.sim.adapters import GROUP
from tests.sim.executor import ints
from tests.sim.idle import is_idle
from tests.sim.images import PLACEHOLDER, REASON, Illustrated, picture
from tests.sim.model import Nature, rollout
from tests.sim.server import ROOMY, Server, chunks

WORLD = replace(ROOMY, encoder_rows=32)
TEXT = [3, 4, 5]


def server(**world: object) -> Server:
    return Server(replace(WORLD, **world))  # type: ignore[arg-type]


def prompt(*parts: int | tuple[int, int], lines: bool = False) -> Illustrated:
    """Tokens, and images as (number, rows)."""
    found = Illustrated([], ())
    for part in parts:
        if isinstance(part, int):
            found = Illustrated([*found.tokens, part], found.images)
        else:
            found = found.with_picture(*part, lines=lines)
    return found


def submit(made: Server, *parts: int | tuple[int, int], lines: bool = False, **fields: object) -> int:
    found = prompt(*parts, lines=lines)
    return made.submit(found.tokens, images=found.images, **fields)  # type: ignore[arg-type]


def statistics(made: Server):  # type: ignore[no-untyped-def]
    return made.scheduler.statistics().encoder


def finish(made: Server, *numbers: int) -> None:
    while not all(made.seen(number).finish for number in numbers):
        made.encode()
        made.step()


def tables(plan) -> list[list[list[int]]]:  # type: ignore[no-untyped-def]
    return [np.frombuffer(start.images, np.int32).reshape(-1, 5).tolist() for start in plan.starts]


def restarted(made: Server, **fields: int) -> None:
    made.scheduler.restart(made.scheduler.epoch + 1, made.now, **fields)
    made.world = replace(made.world, **fields)
    made.executor, made.results = made.new_executor(made.scheduler.epoch), type(made.results)()


def test_a_prompt_runs_up_to_its_image_and_goes_on_when_that_is_encoded() -> None:
    made = server()
    number = submit(made, *TEXT, (1, 4), 6, 7, (2, 2), 8)
    plan = made.step()
    assert plan is not None
    assert chunks(plan) == [(0, 0, 3, 0)]
    assert tables(plan) == [[[3, 4, 0, 3, 1], [9, 2, 4, 3, 1]]]
    assert made.step() is None
    encoders = made.executor.encoders
    assert made.step() is None, "nobody has it"
    encoders.say(made.scheduler, 0.0)
    plan = made.step()
    assert chunks(plan) == [(0, 3, 6, 0)]
    assert plan is not None
    assert ints(plan.images, 3) == [[0, 0, 4]], "the other executor receives it"
    made.encode()
    assert chunks(made.step()) == [(0, 9, 3, 1)]
    made.run()
    assert made.seen(number).finish == Finish.LENGTH


def test_an_image_that_is_encoded_delays_nobody() -> None:
    made = server()
    first, cold, text = submit(made, *TEXT, (1, 4)), submit(made, (2, 4), 6), made.submit(TEXT)
    made.step()
    assert made.seen(text).tokens
    assert made.scheduler.statistics().reasons == {"image": 1}, "the one that begins with its image has no slot"
    late = made.submit([7, 8])
    made.step()
    assert made.seen(late).tokens
    assert not made.seen(first).tokens
    assert not made.seen(cold).tokens
    finish(made, first, cold)
    made.run()


def test_hundreds_whose_images_are_encoded_delay_no_other_client() -> None:
    made = server(slots=4)
    for number in range(300):
        submit(made, (number, 1), 6, client="images")
    text = made.submit(TEXT, client="text")
    made.step()
    assert made.seen(text).tokens
    made.scheduler.forget(0)


def test_a_plan_hashes_few_prompts_that_wait_for_their_images() -> None:
    made = server(block_size=1, blocks=1 << 15, max_model_len=1 << 12)
    numbers = [submit(made, (at, 1), *[5] * 1500) for at in range(6)]
    sequences = [made.scheduler._state.requests[number].sequences[0] for number in numbers]
    for plans in (1, 2, 3):
        assert made.step() is None
        assert sum(bool(sequence.block_hashes) for sequence in sequences) == 2 * plans
    made.scheduler.forget(0)


def test_a_large_image_is_served_though_small_ones_never_end() -> None:
    made = server(encoder_rows=8, slots=16)
    small = [submit(made, *TEXT, (at, 3), 6, at) for at in range(2)]
    made.step()
    large = submit(made, *TEXT, (9, 8), 7)
    for at in range(40):
        small.append(submit(made, *TEXT, (at + 10, 3), 6, at))
        made.step()
        for _ in range(GROUP):  # one image of two that are asked for: rows are held all the time
            made.executor.encoders.say(made.scheduler, made.now)
    assert made.seen(large).finish
    finish(made, *small)
    made.run()


def test_a_sequence_enters_when_all_its_images_have_rows() -> None:
    made = server(encoder_rows=8)
    running = submit(made, *TEXT, (1, 4), max_tokens=1)
    made.step()
    waiting, behind, text = submit(made, 6, (2, 3), 6, (3, 3)), submit(made, 7, (2, 3)), made.submit([9])
    plan = made.step()
    assert plan is not None
    assert len(plan.starts) == 1, "the text goes past"
    assert made.scheduler.statistics().reasons == {"image": 2}
    finish(made, running, waiting, behind, text)
    made.run()


def test_rows_are_released_behind_the_image_and_not_before_its_step_was_applied() -> None:
    made = server(encoder_rows=4, depth=2)
    first = submit(made, *TEXT, (1, 4), 6, max_tokens=8)
    made.step()
    made.encode()
    assert made.plan() is not None
    second = submit(made, *TEXT[:2], (2, 4))
    made.plan()
    assert statistics(made).held == 4
    made.apply()
    assert statistics(made).held == 0, "though the sequence runs on"
    assert not made.seen(first).finish
    finish(made, second)
    while made.results:
        made.apply()
    made.run()


def test_a_table_has_no_rows_for_images_that_are_computed_already() -> None:
    made = server()
    shared = (*TEXT, (1, 5), 6, 6, 6, 6)
    finish(made, submit(made, *shared, 7))
    number = submit(made, *shared, 9, (2, 4), 8)
    plan = made.step()
    assert plan is not None
    ((one, two),) = tables(plan)
    assert one[:3] == [3, 5, NOWHERE]
    assert two[2] >= 0
    finish(made, number)
    assert made.executor.encoders.encoded == [picture(1, 5).pixels, picture(2, 4).pixels]
    assert made.seen(number).cached == 12


def test_a_hit_that_ends_within_an_image_needs_its_rows() -> None:
    made = server()
    shared = (*TEXT, (1, 8))
    finish(made, submit(made, *shared, 6, 7, 8))
    number = submit(made, *shared, 9)
    made.encode()
    plan = made.step()
    assert plan is not None
    assert plan.starts[0].computed == 8
    finish(made, number)
    assert statistics(made).encoded == 1, "they are there still"
    assert statistics(made).hits == 1


@pytest.mark.parametrize("same", [True, False])
def test_a_prefix_is_found_by_the_same_picture_alone(same: bool) -> None:
    made = server()
    finish(made, submit(made, *TEXT, (1, 5), 6, 7, 8, 9))
    finish(made, submit(made, *TEXT, (1 if same else 2, 5), 6, 7, 8, 9))
    assert made.scheduler.statistics().reused_tokens == (8 if same else 0)


def test_who_waits_for_a_prefix_has_its_image_encoded_once() -> None:
    made = server(budget=16)
    numbers = [submit(made, *TEXT, (1, 9), 6, 7, at) for at in range(4)]
    finish(made, *numbers)
    assert statistics(made).encoded == 1
    made.run()


def test_choices_share_an_image() -> None:
    made = server()
    number = submit(made, *TEXT, (1, 6), n=4)
    finish(made, number)
    made.run()
    assert [made.seen(number, choice).finish for choice in range(4)] == [Finish.LENGTH] * 4
    assert statistics(made).encoded == 1


def test_every_scheduler_and_tokenizer_has_the_same_chain() -> None:
    made = server()
    number = submit(made, *TEXT, (1, 6), 6, (2, 3), 7, 8)
    request = made.scheduler._state.requests[number]
    made.step()
    tokens, expected = request.sequences[0].tokens, []
    extend(expected, root_of(request.message), tokens, len(tokens) // 4, 4, request.message.images)
    assert request.sequences[0].block_hashes == expected
    without: list[bytes] = []
    extend(without, root_of(request.message), tokens, len(tokens) // 4, 4)
    assert without[0] != expected[0]
    finish(made, number)


def test_a_failed_image_ends_the_requests_that_need_it_and_no_others() -> None:
    made = server()
    bad = picture(1, 4, 3, bad=True)
    tokens = [*TEXT, *[PLACEHOLDER] * 4, 7]
    running = made.submit(tokens, images=(bad,), n=2)
    waiting = made.submit(tokens[3:], images=(msgspec.structs.replace(bad, position=0),))
    good = submit(made, *TEXT, (2, 4))
    made.step()
    made.encode()
    made.deliver()
    told = f"an image of the request cannot be encoded: {REASON}"
    assert [(made.seen(running, at).finish, made.seen(running, at).error) for at in range(2)] == [(4, told)] * 2
    rejected = made.record.rejected[waiting]
    assert (rejected.status, rejected.message, rejected.code) == (500, told, "image_failed")
    finish(made, good)
    made.run()
    assert (statistics(made).failures, statistics(made).held) == (1, 0)


def test_aborted_while_it_is_encoded() -> None:
    made = server(encoder_rows=4)
    running, waiting = submit(made, *TEXT, (1, 4)), submit(made, (2, 4), 6)
    made.step()
    made.scheduler.abort(running)
    made.step()
    assert statistics(made).held == 0
    assert statistics(made).encoding == 1, "its rows are not free"
    made.scheduler.abort(waiting)
    assert is_idle(made.scheduler)
    made.encode()
    finish(made, submit(made, (2, 4), 6))
    made.run()


def test_a_preempted_sequence_asks_for_its_rows_again() -> None:
    made = server(encoder_rows=4, budget=8)
    number = submit(made, *TEXT, (1, 4), 6, (1, 4), 7)
    made.step()
    made.encode()
    made.step()
    sequence = made.scheduler._state.slots.sequences[0]
    assert sequence is not None
    preempt(made.scheduler._state, sequence)
    assert statistics(made).held == 0
    plan = made.step()
    assert plan is not None
    (((_, _, one, _, _), (_, _, two, _, _)),) = tables(plan)
    assert (one, two) == (NOWHERE, 0), "the first one is computed"
    finish(made, number)
    made.run()


def test_a_starved_client_takes_no_slot_that_is_of_no_use_to_it() -> None:
    """It would wait for rows there, and a sequence would be computed again for nothing."""
    made = server(encoder_rows=4, slots=2)
    others = [submit(made, *TEXT, (1, 4), at, client="one", tenant="one", max_tokens=8) for at in range(2)]
    made.step()
    starved = submit(made, *TEXT, (2, 4), client="two", tenant="two")
    made.now += 2 * PATIENCE
    made.step()
    assert made.scheduler.statistics().yielded == 0
    made.encode()
    for _ in range(2):
        made.step()
    made.now += 2 * PATIENCE
    made.step()
    assert made.scheduler.statistics().yielded == 1, "they have computed theirs"
    finish(made, starved, *others)
    made.run()


def test_a_new_group_encodes_anew() -> None:
    made = server()
    number = submit(made, *TEXT, (1, 4), 7, max_tokens=6)
    made.step()
    restarted(made)
    made.scheduler.image_encoded(ImageEncoded(1), 0.0)  # of the old one, which came late
    assert chunks(made.step()) == [(0, 0, 3, 0)]
    assert made.step() is None, "nobody of the new group has encoded it"
    finish(made, number)
    made.run()
    assert statistics(made).encoded == 1


def test_a_new_group_with_fewer_rows_ends_what_no_longer_fits() -> None:
    made = server()
    number, other = submit(made, *TEXT, (1, 4), (2, 4)), submit(made, *TEXT, (1, 4), 7)
    made.step()
    restarted(made, encoder_rows=7)
    assert made.seen(number).error == TOO_FEW_ROWS
    finish(made, other)
    made.run()


def test_a_picture_that_kills_executors_is_found_and_refused_and_another_is_not() -> None:
    made = server()
    killer, other = submit(made, (1, 4), 7), submit(made, *TEXT, (2, 4))
    for _ in range(3):
        made.step()
        assert any(b"000001" in message.pixels for message in made.executor.encoders.encoding.values())
        restarted(made)
    made.deliver()
    seen = made.seen(killer)
    assert (seen.finish, seen.error) == (Finish.ERROR, KILLER)
    finish(made, other)
    made.deliver()
    again = submit(made, (1, 4), 7, seed=5)
    made.deliver()
    assert made.record.rejected[again].message == POISONED
    finish(made, submit(made, (3, 4), 7))
    made.run()


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ((picture(1, 8), picture(2, 8, 8), picture(3, 17, 16)), "33 tokens; the encoder cache has 32 (--mm-encoder-c"),
        ((picture(1, 8, 33),), "ends behind the prompt's 40 tokens"),
        ((picture(1, 8, 8), picture(2, 8)), "out of order"),
        ((picture(1, 8), picture(2, 8, 7)), "out of order"),
        ((picture(1, 0),), "misshapen"),
        ((picture(1, 8, lines=True),), "a placeholder for each"),
        ((msgspec.structs.replace(picture(1, 8), rows=9),), "misshapen"),
        ((msgspec.structs.replace(picture(1, 8), width=1),), "misshapen"),
        ((msgspec.structs.replace(picture(1, 8), width=0, pixels=b""),), "misshapen"),
        ((msgspec.structs.replace(picture(1, 8), digest=b"short"),), "misshapen"),
    ],
)
def test_refused(images: tuple[Image, ...], words: str) -> None:
    made = server()
    number = made.submit([PLACEHOLDER] * 40, images=images)
    made.deliver()
    rejected = made.record.rejected[number]
    assert (rejected.status, rejected.param) == (400, "messages")
    assert words in rejected.message


def test_equal_images_count_once() -> None:
    made = server(encoder_rows=8)
    number = submit(made, (1, 8), 6, (1, 8), 7)
    finish(made, number)
    made.run()


def test_a_server_without_an_encoder_and_requests_for_vectors_refuse() -> None:
    made, without = server(), Server()
    numbers = submit(made, (1, 4), pooling=Pooling(kind="last", param="messages")), submit(without, (1, 4))
    for one in (made, without):
        one.deliver()
    assert "no vector is made" in made.record.rejected[numbers[0]].message
    assert "--limit-mm-per-prompt" in without.record.rejected[numbers[1]].message


def test_prompt_logprobs_compute_every_image() -> None:
    made = server()
    shared = (*TEXT, (1, 5), 6, 7, 8, 9)
    finish(made, submit(made, *shared))
    number = submit(made, *shared, prompt_logprobs=0)
    finish(made, number)
    scores = made.seen(number).prompt_scores
    assert scores is not None
    assert len(scores) == 11
    assert statistics(made).hits == 1


def test_no_draft_has_a_placeholder() -> None:
    made = server(speculation=SpeculationOptions(method="ngram", num_speculative_tokens=8, prompt_lookup_min=1))
    known = prompt(*TEXT, 7, (1, 4), 8)
    given = Sampling(max_tokens=24, ignore_eos=True, seed=1)
    output, _ = rollout(known.tokens, given, 1, Nature(images=known.images, period=3), 10**6)
    told = [*output[:3], PLACEHOLDER, *output[4:]]
    number = made.submit(known.tokens, images=known.images, prediction=told, max_tokens=24, seed=1, period=3)
    made.encode()
    drafted = []
    while not made.seen(number).finish:
        made.encode()
        plan = made.step()
        drafted += [] if plan is None else np.frombuffer(plan.draft_ids, np.int32).tolist()
    assert drafted
    assert PLACEHOLDER not in drafted
    made.run()


# One step computes all tokens of an image.


def mutual(**world: object) -> Server:
    return server(mutual=True, **world)


def test_a_chunk_stops_in_front_of_an_image_that_it_does_not_hold_whole() -> None:
    made = mutual(budget=8, slots=2)
    number = submit(made, *TEXT, (1, 5), 6, (2, 7))
    made.step()
    made.encode()
    found = [chunks(made.step())[0] for _ in range(2)]
    assert found == [(0, 3, 6, 0), (0, 9, 7, 1)]
    finish(made, number)
    made.run()


def test_a_hit_that_ends_within_an_image_begins_in_front_of_it_and_of_one_before_it() -> None:
    made = mutual()
    shared = (3, 4, 5, (1, 4), (2, 4))  # blocks end at 4 and 8, within an image each
    finish(made, submit(made, *shared, 6, 7))
    number = submit(made, *shared, 9, 7)
    made.encode()
    plan = made.step()
    assert plan is not None
    assert plan.starts[0].computed == 0
    finish(made, number)
    finish(made, submit(made, *shared, 9, 7, 7))
    made.run()


def test_nobody_waits_for_a_prefix_that_it_could_not_begin_behind() -> None:
    made = mutual()
    first = submit(made, 3, 4, 5, 6, 7, (1, 8), 6, *[5] * 20)
    made.step()
    second = submit(made, 3, 4, 5, 6, 7, (1, 8), 9)
    plan = made.step()
    assert plan is not None
    assert [start.computed for start in plan.starts] == [4]
    finish(made, first, second)
    made.run()


def test_an_image_that_a_step_has_no_room_for_beside_all_others_is_refused() -> None:
    made = mutual(budget=10, slots=4)
    refused, served = submit(made, (1, 8)), submit(made, (1, 7), 6)
    made.deliver()
    assert "8 tokens, which one step computes; it has room for 7" in made.record.rejected[refused].message
    finish(made, served)
    made.run()


@pytest.mark.parametrize("stages", [1, 2])
def test_drafts_leave_room_for_an_image(stages: int) -> None:
    """Else rows with many drafts would keep it out for as long as they run."""
    made = mutual(
        budget=16, slots=3, stages=stages, depth=stages, piece=2, max_model_len=128,
        speculation=SpeculationOptions(method="draft_model", num_speculative_tokens=7), skill=1.0,
    )  # fmt: skip
    running = [made.submit([at, 4], max_tokens=100) for at in range(2)]
    for _ in range(4):
        made.step()
    number = submit(made, (1, 14), max_tokens=1)
    made.plan()
    made.encode()
    for _ in range(6):
        while made.results:
            made.apply()
        made.plan()
    assert made.seen(number).finish
    assert not any(made.seen(other).finish for other in running)
    while made.results:
        made.apply()
    made.run(stages)


@pytest.mark.parametrize("encoded", [False, True])
def test_a_prompt_that_ends_with_an_image_waits_for_its_mask_in_front_of_it(encoded: bool) -> None:
    """Else it would stop a position short of its end."""
    made = mutual()
    if encoded:
        finish(made, submit(made, *TEXT, (1, 6)))
    automaton = Automaton(source="1 5 0 10")
    running = [made.submit([at, 4], max_tokens=12) for at in range(2)]
    number = submit(made, *TEXT, (1, 6), automaton=automaton)
    finish(made, number, *running)
    made.run()
