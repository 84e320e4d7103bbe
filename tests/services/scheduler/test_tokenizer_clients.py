"""The scheduler's clients: numbers, rejections that wait for credit, and who is told what."""

from __future__ import annotations

import numpy as np

from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.links import Role
from penstock.protocol.messages import Rejected, Sampling, SubmitTokens
from penstock.services.scheduler.tokenizer_clients import TokenizerClients
from tests.services.scheduler.fakes import FakePort


def test_a_client_has_a_number_of_its_own():
    port = FakePort(Role.TOKENIZER)
    clients, one, two = TokenizerClients(port), port.join(0), port.join(1)
    clients.join(one)
    clients.join(two)
    assert clients.source(one) != clients.source(two)
    gone = clients.source(one)
    assert clients.leave(one, "process ended") == gone
    clients.join(one)
    assert clients.source(one) not in (gone, clients.source(two))


def test_rejections_wait_for_credit_and_end_with_their_client():
    port = FakePort(Role.TOKENIZER)
    clients, one, two = TokenizerClients(port), port.join(0), port.join(1)
    clients.join(one)
    clients.join(two)
    one.credit = 0
    clients.refuse(one, 1, "not now")
    clients.reject(two, Rejected(id=2, status=400, message="never"))
    clients.send_rejections()
    assert [message.id for message in port.take(Rejected)] == [2]
    assert (clients.rejections, clients.refused) == (1, 1)
    clients.leave(one, "process ended")
    clients.send_rejections()
    assert clients.rejections == 0


def test_outputs_stay_in_the_scheduler_without_credit():
    port = FakePort(Role.TOKENIZER)
    clients, peer = TokenizerClients(port), port.join()
    clients.join(peer)
    scheduler = Scheduler(
        SchedulingOptions(
            blocks=4, block_size=16, max_model_len=32, max_num_seqs=1, max_num_batched_tokens=16, vocab_size=10
        )
    )
    refused = SubmitTokens(id=1, token_ids=np.array([99], np.int32).tobytes(), sampling=Sampling(max_tokens=1))
    scheduler.submit(refused, clients.source(peer), 0.0)
    peer.credit = 0
    clients.deliver(scheduler, scheduler.undelivered())
    assert scheduler.undelivered() == (clients.source(peer),)
    peer.credit = 1
    clients.deliver(scheduler, scheduler.undelivered())
    assert [message.id for message in port.take(Rejected, peer)] == [1]
    assert scheduler.undelivered() == ()
