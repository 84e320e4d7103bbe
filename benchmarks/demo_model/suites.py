"""What is scored: one suite per ability, each a stream of held-out conversations that end in the answer to check."""

from collections.abc import Callable
from random import Random

from benchmarks.demo_model import generator
from benchmarks.demo_model.conversation import Conversation
from benchmarks.demo_model.generator import Split, draw
from benchmarks.demo_model.tasks import arithmetic, chat, extraction, lists, stories

RECALL_DISTANCE = 2400  # an estimate; by the tokenizer's count it is over 2,000


def _alone(task: generator.Task) -> Callable[[Random], Conversation]:
    return lambda rng: Conversation((draw(rng, task, Split.HELD_OUT),), generator.system_prompt(rng))


def _unseen(task: generator.Task) -> Callable[[Random], Conversation]:
    def conversation(rng: Random) -> Conversation:
        while True:
            exercise = draw(rng, task, Split.HELD_OUT)
            if exercise.key:
                return Conversation((exercise,), generator.system_prompt(rng))

    return conversation


def _of_kind(task: str, make: Callable[[Random], Conversation]) -> Callable[[Random], Conversation]:
    def conversation(rng: Random) -> Conversation:
        while True:
            made = make(rng)
            last = made.exercises[-1]
            if last.task == task and (last.key == "" or generator.held_out(last.key)):
                return made

    return conversation


def _tools(rng: Random) -> Conversation:
    return generator.tool_chat(rng, Split.HELD_OUT)


def _recall(rng: Random) -> Conversation:
    return generator.recall_chat(rng, Split.HELD_OUT, RECALL_DISTANCE)


def _identity(rng: Random) -> Conversation:
    while True:
        made = _alone(chat.about)(rng)
        if made.answer == chat.IDENTITY:
            return made


# The score that each suite has to reach, and its conversations.
SUITES: dict[str, tuple[float, Callable[[Random], Conversation]]] = {
    "addition": (0.97, _unseen(arithmetic.addition)),
    "subtraction": (0.97, _unseen(arithmetic.subtraction)),
    "word problem": (0.95, _unseen(arithmetic.word_problem)),
    "sort": (0.95, _alone(lists.sort)),
    "count": (0.95, _alone(lists.count)),
    "copy": (0.95, _alone(lists.copy)),
    "reverse": (0.95, _alone(lists.reverse)),
    "extraction": (0.95, _alone(extraction.extract)),
    "tool call": (0.95, _of_kind("tool_call", _tools)),
    "tool answer": (0.95, _of_kind("tool_answer", _tools)),
    "recall": (0.90, _of_kind("recall", _recall)),
    "thinking": (0.95, _alone(arithmetic.chain)),
    "identity": (0.95, _identity),
    "refusal": (0.95, _alone(chat.refusal)),
    "no tool": (0.95, _of_kind("no_tool", _tools)),
    "fact": (0.95, _alone(chat.fact)),
}
STORY = _alone(stories.story)


def conversations(suite: str, rng: Random, count: int) -> list[Conversation]:
    """`count` held-out conversations of a suite."""
    make = SUITES[suite][1]
    return [make(rng) for _ in range(count)]
