"""Conversations without end, seeded: the mixture that the demo model learns, and the split that keeps some unseen.

The split is by content, not only by seed: an exercise whose key falls into the held-out share never stands in training
text, whatever the seed. Both splits share the closed sets (greetings, facts), whose keys are empty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from zlib import crc32

from benchmarks.demo_model.conversation import Conversation, Exercise, Message, Thinking, exchange, parts
from benchmarks.demo_model.lexicon import (
    ADJECTIVES,
    CITIES,
    DAYS,
    JOBS,
    MONTHS,
    NAMES,
    TOPICS,
    article,
    pseudo_word,
)
from benchmarks.demo_model.tasks import arithmetic, bare, chat, extraction, lists, recall, stories, told, tools

_HELD_OUT_SHARE = 32
_PATIENCE = 400  # draws before a kit of tools is given up


class Split(Enum):
    """Which half of the content a stream may use."""

    TRAINING = "training"
    HELD_OUT = "held-out"


Task = Callable[[Random], Exercise]

PLAIN: tuple[tuple[Task, int], ...] = (
    (arithmetic.addition, 17), (arithmetic.subtraction, 22), (arithmetic.word_problem, 6), (arithmetic.small_arithmetic,
     7),
    (lists.sort, 16), (lists.reverse, 6), (lists.copy, 6), (lists.count, 10), (lists.pick, 4), (extraction.extract, 13),
    (stories.story, 3), (chat.small_talk, 5), (chat.about, 6), (chat.refusal, 5), (chat.fact, 6), (chat.spelling, 2),
    (bare.ordered, 6),
)  # fmt: skip
_TASKS = [task for task, _ in PLAIN]
_WEIGHTS = [weight for _, weight in PLAIN]

_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are the Penstock demo model.",
    "You are a friendly assistant. Answer briefly.", "Answer the user's questions.", "You are a careful assistant.",
    "Be helpful and polite.", "You are an assistant that gives short and exact answers.",
    "Help the user with small tasks.",
)  # fmt: skip
_THINK_HEADS = ("Think first. ", "Please think before you answer. ", "Think step by step. ")
_THINK_TAILS = (" Think first.", " Think before you answer.", " Think step by step.")
_POLITE_HEADS = (
    "Hi! ",
    "Hello. ",
    "Hey, ",
    "Please: ",
    "Question: ",
    "Next question: ",
    "Can you help me? ",
    "Now this: ",
    "Ok. ",
)
_POLITE_TAILS = (" Thanks!", " Thank you.", " Please.", " Please help me.")
# About how many tokens of other talk stand between a fact and its question.
_DISTANCES = (0, 200, 600, 1500, 2400, 3000, 3500)
_DISTANCE_WEIGHTS = (30, 25, 12, 6, 3, 3, 3)


@dataclass(frozen=True)
class Sample:
    """One document of the training text: a conversation, or plain text (`text`) when there is none."""

    conversation: Conversation | None
    text: str = ""


def held_out(key: str) -> bool:
    """Whether content with this key belongs to the held-out split. Empty keys never do."""
    return bool(key) and crc32(key.encode()) % _HELD_OUT_SHARE == 0


def draw(rng: Random, task: Task, split: Split) -> Exercise:
    """An exercise of `task` from `split`; closed-set exercises (no key) pass in both."""
    while True:
        exercise = task(rng)
        if not exercise.key or held_out(exercise.key) is (split is Split.HELD_OUT):
            return exercise


def plain(rng: Random, split: Split) -> Exercise:
    """An exercise of the plain mixture."""
    return _reworded(rng, draw(rng, rng.choices(_TASKS, _WEIGHTS)[0], split))


def _reworded(rng: Random, exercise: Exercise) -> Exercise:
    """Now and then the question as a hurried or a polite user writes it. The answer stays."""
    question, answer = exercise.messages
    words = question.content
    chance = rng.random()
    if chance < 0.05 and words[:2].istitle() and exercise.task not in ("extraction", "word_problem"):
        words = words[0].lower() + words[1:]
    elif chance < 0.09 and "=" not in words and words[-1] in "?.":
        words = words[:-1]
    elif chance < 0.17 and exercise.task not in ("small_talk", "identity"):
        words = rng.choice(_POLITE_HEADS) + words
    elif chance < 0.20 and words[-1] in "?.":
        words += rng.choice(_POLITE_TAILS)
    return Exercise(exercise.task, exercise.key, (Message(question.role, words), answer), exercise.thinks)


def system_prompt(rng: Random) -> str:
    """Mostly none, sometimes one that changes nothing about the answers."""
    chance = rng.random()
    if chance < 0.6:
        return ""
    if chance < 0.88:
        return rng.choice(_SYSTEMS)
    pick = rng.choice
    sentences = [
        f"You are {pick(NAMES)}, {article(pick(ADJECTIVES))} assistant.",
        f"You are {article(pick(JOBS))} and you are {pick(ADJECTIVES)}.",
        f"Always be {pick(ADJECTIVES)} and {pick(ADJECTIVES)}.",
        f"Today is {pick(DAYS)}, {pick(MONTHS)} {rng.randrange(1, 29)}.",
        f"The users know a lot about {pick(TOPICS)}.",
        f"You work for {pseudo_word(rng).capitalize()} in {pick(CITIES)}.",
    ]
    return " ".join(rng.sample(sentences, rng.choice((1, 1, 2, 3, 6))))


def _thinking_exercise(rng: Random, split: Split) -> Exercise:
    """An exercise whose question asks for a thought."""
    if rng.random() < 0.6:
        return draw(rng, arithmetic.chain, split)
    exercise = plain(rng, split)
    question, answer = exercise.messages
    head, tail = (rng.choice(_THINK_HEADS), "") if rng.random() < 0.5 else ("", rng.choice(_THINK_TAILS))
    asked = exchange("thinking", exercise.key, head + question.content + tail, answer.content, answer.thought)
    return Exercise(asked.task, asked.key, asked.messages, thinks=True)


def _thinking(rng: Random) -> Thinking:
    chance = rng.random()
    return Thinking.ON if chance < 0.04 else Thinking.OFF if chance < 0.08 else Thinking.UNSAID


def plain_chat(rng: Random, split: Split) -> Conversation:
    """One to eight plain exercises; the last one may ask for a thought."""
    size = rng.choice((1, 1, 1, 2, 3, 4, 6, 8))
    exercises = [plain(rng, split) for _ in range(size)]
    if rng.random() < 0.08:
        exercises[-1] = _thinking_exercise(rng, split)
    return Conversation(tuple(exercises), system_prompt(rng), thinking=_thinking(rng))


def _beside_tools(rng: Random, kit: tuple[tools.Tool, ...], split: Split) -> Exercise:
    """A plain exercise that no tool of the kit could be meant for."""
    unsure = ["refusal"]
    if any("a" in tool.slots or tool.skill.family >= 0 for tool in kit):
        unsure += ["addition", "subtraction", "small", "word_problem"]
    while (exercise := plain(rng, split)).task in unsure:
        pass
    return exercise


def _with_tools(rng: Random, kit: tuple[tools.Tool, ...], split: Split) -> Exercise | None:
    """An exercise for the kit; none if the kit's questions seem to lie in the other split altogether."""
    use = rng.choices((None, tools.tool_use, tools.tool_failure, tools.no_tool), (12, 80, 4, 4))[0]
    if use is None:
        return _beside_tools(rng, kit, split)
    for _ in range(_PATIENCE):
        exercise = use(rng, kit)
        if held_out(exercise.key) is (split is Split.HELD_OUT):
            return exercise
    return None


def tool_chat(rng: Random, split: Split) -> Conversation:
    """One to five exercises with tools at hand, most of which need one."""
    own = rng.random() < 0.8
    while True:
        kit = tools.draw_families(rng) if own else tools.draw_tools(rng)
        drawn = [_with_tools(rng, kit, split) for _ in range(rng.choice((1, 1, 2, 3, 5)))]
        exercises = [exercise for exercise in drawn if exercise is not None]
        if exercises:
            break
    # A call is answered before the talk goes on: only the last exercise may end with one.
    closed = [exercise for exercise in exercises[:-1] if not exercise.messages[-1].calls]
    signatures = tuple(tool.signature for tool in kit)
    return Conversation((*closed, exercises[-1]), system_prompt(rng), signatures, _thinking(rng))


def estimated_tokens(exercises: list[Exercise]) -> float:
    """Roughly how many tokens the exercises take, without encoding them."""
    return sum(len(message.content) / 2.9 + 6 for exercise in exercises for message in exercise.messages)


def recall_chat(rng: Random, split: Split, distance: int) -> Conversation:
    """Facts, about `distance` tokens of other talk, then questions about the facts."""
    own = rng.random() < 0.62
    while True:
        notes, asked = told.recall(rng) if own else recall.recall(rng)
        keys = [exercise.key for exercise in asked if exercise.key]
        if all(held_out(key) is (split is Split.HELD_OUT) for key in keys):
            break
    lead = [plain(rng, split) for _ in range(rng.choice((0, 0, 1, 2)))] if distance else []
    filler: list[Exercise] = []
    size = 0.0
    while size < distance:
        filler.append(plain(rng, split))
        size += estimated_tokens(filler[-1:])
    return Conversation((*lead, *notes, *filler, *asked), system_prompt(rng))


def shop_chat(rng: Random, split: Split) -> Conversation:
    """A system prompt full of facts, questions about them, and plain exercises between."""
    while True:
        system, asked = recall.shop(rng)
        if all(held_out(exercise.key) is (split is Split.HELD_OUT) for exercise in asked):
            break
    exercises = [*asked, *(plain(rng, split) for _ in range(rng.choice((0, 0, 1, 2))))]
    rng.shuffle(exercises)
    return Conversation(tuple(exercises), system)


def brief_chat(rng: Random, split: Split) -> Conversation:
    """A system prompt that tells of people, and questions about them."""
    while True:
        system, asked = told.briefed(rng)
        if all(held_out(exercise.key) is (split is Split.HELD_OUT) for exercise in asked):
            return Conversation(tuple(asked), system)


def json_chat(rng: Random, split: Split) -> Conversation:
    """A sentence and its JSON, by a grammar that the prompt does not tell of, or by the system prompt's order."""
    if rng.random() < 0.25:
        while True:
            system, exercise = bare.under_system(rng)
            if held_out(exercise.key) is (split is Split.HELD_OUT):
                return Conversation((exercise,), system)
    lead = [plain(rng, split) for _ in range(rng.choice((0, 0, 0, 0, 1)))]
    return Conversation((*lead, draw(rng, bare.bare, split)), system_prompt(rng))


def sample(rng: Random, split: Split) -> Sample:
    """One document of the mixture."""
    kind = rng.random()
    if kind < 0.27:
        return Sample(plain_chat(rng, split))
    if kind < 0.765:
        return Sample(tool_chat(rng, split))
    if kind < 0.885:
        distance = rng.choices(_DISTANCES, _DISTANCE_WEIGHTS)[0]
        return Sample(recall_chat(rng, split, round(distance * rng.uniform(0.7, 1.05))))
    if kind < 0.91:
        task = told.combined if rng.random() < 0.6 else recall.combined
        return Sample(Conversation((draw(rng, task, split),), system_prompt(rng), thinking=_thinking(rng)))
    if kind < 0.925:
        return Sample(shop_chat(rng, split))
    if kind < 0.935:
        return Sample(brief_chat(rng, split))
    if kind < 0.985:
        return Sample(json_chat(rng, split))
    return Sample(None, stories.tale(rng))


def text_of(document: Sample) -> str:
    """The whole text of a document, special tokens written out."""
    if document.conversation is None:
        return document.text + "<|endoftext|>"
    return "".join(part.text for part in parts(document.conversation))
