"""Random life histories: what arrives, and what happens to it from outside."""

from __future__ import annotations

import random
from dataclasses import dataclass
from dataclasses import replace as replace_fields

import numpy as np
from msgspec.structs import replace

from penstock.engine_core.scheduling.options import UNBOUNDED, SchedulingOptions, SpeculationOptions
from penstock.protocol.messages import Automaton, Client, Pooling, Sampling, SubmitTokens, Written
from penstock.protocol.steps import choice_seed
from tests.sim.adapters import GROUP, adapter
from tests.sim.grammar import FakeGuide
from tests.sim.images import PLACEHOLDER, Illustrated, random_prompt
from tests.sim.model import EOS, VOCAB, Nature, rollout, root_of

PLAIN = SpeculationOptions()


@dataclass(frozen=True, slots=True)
class World:
    """The server of one run."""

    blocks: int
    block_size: int
    slots: int
    budget: int
    max_model_len: int
    depth: int
    prefix_caching: bool = True
    policy: str = "fcfs"
    sources: int = 1
    restarts: float = 0.0  # chance of a new epoch in one turn
    leaves: float = 0.0  # chance that a source goes away in one turn; another comes under the same number
    lazy: float = 0.0  # chance that an outbox is not emptied in one turn
    expected_share: float = 1.0
    growing: bool = False  # short prompts, long outputs
    speculation: SpeculationOptions = PLAIN
    guided: float = 0.0  # share of lives that follow a grammar
    pace: float = 0.0  # of the executor, seconds for each sampled token
    skill: float = 0.5  # how many of the executor's own drafts are right
    resumed: float = 0.0  # share of lives that another scheduler had begun
    pooled: float = 0.0  # share of lives that want a vector
    stages: int = 1  # of the pipeline
    piece: int = 512
    fairness: bool = True
    tenants: int = 1  # each of them has as many clients
    recurrent: bool = False  # the model has recurrent layers
    places: int = 0  # for snapshots of their states
    host_places: int = 0  # the same in the host's memory
    state_piece: int = 8
    windows: tuple[int, ...] = (0,)  # of the KV groups
    host_blocks: int = 0  # KV blocks in the host's memory
    disk_blocks: int = 0  # and on disk
    kv_store: bool = False  # in place of disks is a shared store
    storage_trouble: float = 0.0  # how often a block cannot be written, is spoilt, or cannot be read
    adapters: tuple[str, ...] = ()  # that lives ask for, beside the model itself
    adapter_places: int = 0
    adapter_memory: int = 0
    encoder_rows: int = 0  # of the encoder cache
    most_rows: int = 8  # of an image
    lines: bool = False  # images have tokens that no row stands for
    mutual: bool = False  # one step computes all tokens of an image
    careless: bool = False  # the forecast expects nothing and never learns, so rows are preempted all the time

    @property
    def ahead(self) -> int:
        """Steps that a sequence has in flight, at most."""
        return max(1, self.depth - self.stages + 1) if self.stages > 1 else UNBOUNDED


def scheduling_options(world: World) -> SchedulingOptions:
    """Of the scheduler of a world."""
    return SchedulingOptions(
        blocks=world.blocks,
        block_size=world.block_size,
        max_model_len=world.max_model_len,
        max_num_seqs=world.slots,
        max_num_batched_tokens=world.budget,
        vocab_size=VOCAB,
        prefix_caching=world.prefix_caching,
        policy=world.policy,
        fairness=world.fairness,
        expected_share=world.expected_share,
        speculation=world.speculation,
        windows=world.windows,
        depth=world.depth,
        stages=world.stages,
        ahead=world.ahead,
        piece=world.piece,
        recurrent=world.recurrent,
        state_places=world.places,
        state_host_places=world.host_places,
        state_piece=world.state_piece,
        host_blocks=world.host_blocks,
        disk_blocks=world.disk_blocks,
        kv_store=world.kv_store,
        copiers=GROUP,
        adapter_places=world.adapter_places,
        adapter_memory=world.adapter_memory,
        executors=GROUP,
        encoder_rows=world.encoder_rows,
        encoders=GROUP,
        image_token=PLACEHOLDER if world.encoder_rows else -1,
        mutual=world.mutual,
    )


@dataclass(frozen=True, slots=True)
class Life:
    """One request and its fate."""

    message: SubmitTokens
    source: int
    nature: Nature
    arrival: float = 0.0  # seconds
    abort_after: float | None = None  # seconds after its arrival
    stop_at: int | None = None  # the client finds a stop string in choice 0 after so many tokens
    invalid: bool = False

    def written(self, choice: int) -> list[int]:
        """What the choice had said before it came to this scheduler."""
        found = self.message.written
        return np.frombuffer(found[choice].token_ids, np.int32).tolist() if found else []

    def over(self, choice: int) -> bool:
        """Whether the choice had ended before it came to this scheduler."""
        return bool(self.message.written) and self.message.written[choice].ended

    @property
    def prompt(self) -> list[int]:
        return np.frombuffer(self.message.token_ids, np.int32).tolist()


def random_world(rng: random.Random) -> World:
    size = rng.choice((1, 2, 4, 8, 16))
    longest = rng.choice((24, 40, 64))
    least = -(-longest // size)
    slots = 1 if rng.random() < 0.03 else rng.choice((4, 12, 24, 24))
    return World(
        blocks=least + rng.choice((0, least // 2, 2 * least, 3 * least, 4 * least, 12 * least)),
        block_size=size,
        slots=slots,
        budget=max(slots, rng.choice((1, 7, 16, 64, 512))),
        max_model_len=longest,
        depth=rng.choice((1, 2, 2, 3)),
        prefix_caching=rng.random() < 0.75,
        policy=rng.choice(("fcfs", "priority")),
        sources=rng.choice((1, 1, 3)),
        restarts=rng.choice((0.0, 0.0, 0.004)),
        leaves=rng.choice((0.0, 0.0, 0.01)),
        lazy=rng.choice((0.0, 0.3, 0.9)),
        expected_share=rng.choice((0.0, 0.2, 1.0)),
        growing=rng.random() < 0.12,
        careless=rng.random() < 0.4,
        speculation=SpeculationOptions(
            method=rng.choice(("none", "ngram", "draft_model")),
            num_speculative_tokens=rng.choice((1, 3, 8)),
            prompt_lookup_min=rng.choice((1, 2)),
            max_step_drafts=rng.choice((2, 1000)),
        ),
        guided=rng.choice((0.0, 0.3, 1.0)),
        pace=rng.choice((0.0, 0.0001, 0.01)),
        skill=rng.choice((0.0, 0.5, 0.9, 1.0)),
        resumed=rng.choice((0.0, 0.2, 1.0)),
        pooled=rng.choice((0.0, 0.0, 0.3)),
        fairness=rng.random() < 0.8,
        tenants=rng.choice((1, 2, 4)),
    )


def random_lives(rng: random.Random, world: World, count: int) -> list[Life]:
    """Lives in order of arrival. Prompts come from few stems, so that many share a prefix."""
    stems = [Illustrated([rng.randrange(VOCAB) for _ in range(world.max_model_len)], ()) for _ in range(4)]
    if world.encoder_rows:
        stems = [illustrated(rng, world, Illustrated([], ()), world.max_model_len) for _ in range(4)]
    pace = rng.choice((0.0, 0.05, 0.3))
    lives, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(1.0) * pace
        lives.append(random_life(rng, world, stems, number, now))
    return lives


def illustrated(rng: random.Random, world: World, start: Illustrated, length: int) -> Illustrated:
    """A prompt of so many tokens."""
    return random_prompt(rng, start, length, world.most_rows, lines=world.lines)


def random_life(rng: random.Random, world: World, stems: list[Illustrated], number: int, arrival: float) -> Life:
    most = world.max_model_len - 1
    length = rng.randint(1, min(most, rng.choice((3, 8, 40))))
    if world.encoder_rows:
        length = rng.randint(1, most)
    shared = rng.randint(0, length)
    start, images = rng.choice(stems).until(shared), ()
    if world.encoder_rows:
        found = illustrated(rng, world, start, length)
        prompt, images = found.tokens, found.images
    else:
        prompt = start.tokens + [rng.randrange(VOCAB) for _ in range(length - shared)]
    max_tokens = min(rng.choice((1, 2, 6, 12, 24)), world.max_model_len - length + rng.choice((0, 0, 3)))
    stops = rng.choice((0, 3, 12))
    if world.growing:
        length, max_tokens, stops = min(length, 5), rng.choice((4, world.max_model_len - 5)), rng.choice((0, 12))
        prompt, images = prompt[:length], Illustrated(prompt, images).until(length).images
    salt = rng.choice(("", "", "", "tenant"))
    invalid = rng.random() < 0.01
    if invalid:
        prompt, images = rng.choice(([], [VOCAB], [-1], [0] * world.max_model_len)), ()
    sampling = Sampling(
        temperature=rng.choice((0.0, 1.0)),
        seed=number + 1,
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 0, 3)),
        eos_token_ids=(EOS,),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(VOCAB), stops)),
        logprobs=rng.choice((-1, -1, -1, -1, 0)),
        prompt_logprobs=rng.choice((-1,) * 6 + (0,)),
    )
    name = rng.choice(("", *world.adapters)) if world.adapters else ""
    nature = Nature(
        root_of(salt, name),
        adapter=name,
        fails_at=rng.choice((0, 1, 4)) if rng.random() < 0.02 else -1,
        period=rng.choice((0, 0, 3, 5)),
        images=images,
    )
    automaton = random_automaton(rng) if rng.random() < world.guided else None
    if automaton is not None:
        sampling = replace(sampling, min_tokens=0)
    prediction: list[int] = []
    if rng.random() < 0.5 and not invalid:
        guide = None if automaton is None else FakeGuide(automaton)
        output, _ = rollout(prompt, sampling, sampling.seed, nature, world.max_model_len, guide)
        prediction = misremembered(rng, output)
    fate = rng.random()
    life = Life(
        message=SubmitTokens(
            id=(5 << 56) + number,
            token_ids=np.array(prompt, np.int32).tobytes(),
            sampling=sampling,
            n=rng.choice((1,) * 12 + (2, 5)),
            priority=rng.choice((0, 0, -3, 7)),
            cache_salt=salt,
            adapter=adapter(name) if name else None,
            images=images,
            turns=ends_of_turns(number, len(prompt)) if world.recurrent else (),
            automaton=automaton,
            prediction=np.array(prediction, np.int32).tobytes(),
            speculate=rng.random() < 0.9,
            stop_strings=0.15 < fate < 0.3,
            client=Client(f"tenant-{rng.randrange(world.tenants)}", f"client-{rng.randrange(world.tenants)}"),
        ),
        source=rng.randrange(world.sources),
        nature=nature,
        arrival=arrival,
        abort_after=rng.expovariate(0.2) if fate < 0.15 else None,
        stop_at=rng.randint(1, 6) if 0.15 < fate < 0.3 else None,
        invalid=invalid,
    )
    if sum({image.digest: image.rows for image in images}.values()) > world.encoder_rows:
        return replace_fields(life, invalid=True)
    if world.pooled and not (invalid or images) and rng.random() < world.pooled:
        return pooled_life(rng, life)
    if invalid or life.stop_at is not None or rng.random() >= world.resumed:
        return life
    return replace_fields(life, message=replace(life.message, written=random_written(rng, world, life)))


def ends_of_turns(number: int, length: int) -> tuple[int, ...]:
    """Of every other prompt, where states may be kept. They change nothing else of a life."""
    rng = random.Random(number)
    most = min(length, 7) if number % 2 else 0
    return tuple(sorted(rng.sample(range(1, length), rng.randrange(most)))) if most > 1 else ()


def pooled_life(rng: random.Random, life: Life) -> Life:
    """The same prompt and fate, for its vector."""
    message = replace(
        life.message,
        sampling=Sampling(seed=life.message.sampling.seed, max_tokens=1),
        pooling=Pooling(kind=rng.choice(("mean", "last", "cls"))),
        n=1,
        automaton=None,
        prediction=b"",
        speculate=False,
        stop_strings=False,
    )
    return replace_fields(life, message=message, stop_at=None)


def random_written(rng: random.Random, world: World, life: Life) -> tuple[Written, ...]:
    """Each choice was cut somewhere before its end, or has ended, except one at least."""
    message, found = life.message, []
    goes_on = rng.randrange(message.n)
    for index in range(message.n):
        guide = None if message.automaton is None else FakeGuide(message.automaton)
        seed = choice_seed(message.sampling.seed, index)
        output, _ = rollout(life.prompt, message.sampling, seed, life.nature, world.max_model_len, guide)
        if index != goes_on and rng.random() < 0.2:
            found.append(Written(np.array(output, np.int32).tobytes(), ended=True))
            continue
        cut = rng.choice((0, rng.randint(0, max(0, len(output) - 1)), max(0, len(output) - 1)))
        found.append(Written(np.array(output[:cut], np.int32).tobytes()))
    return tuple(found)


def random_automaton(rng: random.Random) -> Automaton:
    """Some begin in the middle of the output, few fail."""
    after = rng.randrange(VOCAB).to_bytes(4, "little") if rng.random() < 0.2 else b""
    fails_at = rng.choice((1, 3, 9)) if rng.random() < 0.03 else 0
    slow = rng.choice((0, 3, 10))
    return Automaton(source=f"{rng.randrange(1000)} {rng.choice((1, 5, 30))} {fails_at} {slow}", after=after)


def misremembered(rng: random.Random, output: list[int]) -> list[int]:
    """The output with some of its tokens changed, left out or put in."""
    share, found = rng.choice((0.0, 0.1, 0.5, 1.0)), []
    for token in output:
        if rng.random() >= share:
            found.append(token)
        elif rng.random() < 0.7:
            found += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))]
    return found
