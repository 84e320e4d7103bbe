"""What is scored: one suite per ability, each a stream of held-out conversations that end in the answer to check."""

from collections.abc import Callable
from random import Random

from benchmarks.demo_model import generator
from benchmarks.demo_model.conversation import Conversation, Exercise, exchange
from benchmarks.demo_model.generator import Split, draw
from benchmarks.demo_model.tasks import (
    arithmetic,
    bare,
    chat,
    extraction,
    families,
    lists,
    stories,
    told,
    tools,
    weather,
)

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


def _choice(rng: Random) -> Conversation:
    """One of two or three tools, all of a list that no training text holds."""
    count = len(families.families(families.HELD_OUT))
    skills = [families.known(rng, index, families.HELD_OUT) for index in rng.sample(range(count), rng.choice((2, 3)))]
    kit = tuple(tools.signed(rng, skill, skill.names[0]) for skill in skills)
    question = tools.tool_use(rng, kit)
    call = Exercise(question.task, "", question.messages[:2])
    return Conversation((call,), generator.system_prompt(rng), tuple(tool.signature for tool in kit))


def _own_words(rng: Random) -> Conversation:
    """One to three facts in wordings that no training text holds, other talk, and a question for one of them."""
    facts = [told.worded(rng, one) for one in rng.sample(told.wordings(told.HELD_OUT), rng.choice((1, 2, 3)))]
    notes = [exchange("note", "", one.said, f"Noted: {told.lowered(one.answer)}") for one in facts]
    between = [generator.plain(rng, Split.HELD_OUT) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
    asked = rng.choice(facts)
    last = exchange("recall", "", asked.question, asked.answer)
    return Conversation((*notes, *between, last), generator.system_prompt(rng))


_WEATHER_ASKED = (
    "What's the weather like in {} today?", "What is the weather like in {}?", "Could you check the weather in {}?",
    "How's the weather looking in {}?", "I'm in {}. What's the weather like today?",
    "Please tell me the weather in {}.",
    "What's the weather in {} right now?", "Is the weather nice in {} today?", "Weather report for {}, please.",
)  # fmt: skip


def _documented(rng: Random) -> Conversation:
    """The weather tool as OpenAI's documentation has it, in one of its editions."""
    skill = weather.documented(rng, _WEATHER_ASKED)
    tool = tools.signed(rng, skill, skill.names[0])
    question = tools.tool_use(rng, (tool,))
    call = Exercise(question.task, "", question.messages[:2])
    return Conversation((call,), "", (tool.signature,))


_GREETED = (
    ("Hi there!", 0), ("Hello, Penstock!", 0), ("Hey, good to see you!", 0), ("hello there", 0), ("HELLO", 0),
    ("Hi :)", 0),
    ("Hello, how are you?", 1), ("Hey! How are you doing today?", 1), ("Hi, how is it going?", 1),
    ("Good morning, assistant!", 2), ("good morning everyone", 2), ("Good evening!", 3), ("Good evening, my friend.",
    3),
    ("Hey hey!", 0), ("hi!!", 0), ("Hello hello", 0), ("Hi, nice to meet you!", 0), ("Well hello!", 0),
    ("Hello dear model", 0),
)  # fmt: skip
_GREETINGS = (
    "Hello! How can I help you?", "I am fine, thank you. How can I help you?", "Good morning! How can I help you?",
    "Good evening! How can I help you?",
)  # fmt: skip
_NAMED = (
    "Can you say who you are?", "Please tell me your name.", "And what's your name?", "Hello, what are you called?",
    "Which model do I talk to?", "What's the name of the model I'm talking to?", "Would you introduce yourself to me?",
    "Hi there, who are you?", "Tell me, who are you?", "What should I call you, by the way?", "Who exactly are you?",
    "what model are you running?", "Hey, what AI is this?", "May I ask your name?", "Please say what you are.",
)  # fmt: skip


def _greeting(rng: Random) -> Conversation:
    question, answer = rng.choice(_GREETED)
    return Conversation((exchange("small_talk", "", question, _GREETINGS[answer]),), generator.system_prompt(rng))


def _named(rng: Random) -> Conversation:
    return Conversation((exchange("identity", "", rng.choice(_NAMED), chat.IDENTITY),), generator.system_prompt(rng))


def _bare(rng: Random) -> Conversation:
    while True:
        exercise = draw(rng, bare.bare, Split.HELD_OUT)
        if exercise.task == "bare":
            return Conversation((exercise,), generator.system_prompt(rng))


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
    "tool choice": (0.90, _choice),
    "weather tool": (0.95, _documented),
    "own words": (0.95, _own_words),
    "greeting": (0.95, _greeting),
    "own name": (0.95, _named),
}
BARE = _bare  # the values of JSON of which a grammar writes the keys
STORY = _alone(stories.story)


def conversations(suite: str, rng: Random, count: int) -> list[Conversation]:
    """`count` held-out conversations of a suite."""
    make = SUITES[suite][1]
    return [make(rng) for _ in range(count)]
