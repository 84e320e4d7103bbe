"""Facts that a user states and asks for later, after as much other talk as fits."""

from random import Random

from benchmarks.demo_model.conversation import Exercise, exchange
from benchmarks.demo_model.lexicon import (
    ANIMALS,
    COLOURS,
    DAYS,
    FOODS,
    JOBS,
    MONTHS,
    OBJECTS,
    article,
    code,
    given_name,
    place,
    pseudo_word,
)

# What can be known: how it is said, asked and answered, and the values.
_FACTS = (
    ("My name is {}.", "What is my name?", "Your name is {}.", given_name),
    ("I live in {}.", "Where do I live?", "You live in {}.", place),
    ("My favourite colour is {}.", "What is my favourite colour?", "Your favourite colour is {}.",
     lambda rng: rng.choice(COLOURS)),
    ("My favourite food is {}.", "What is my favourite food?", "Your favourite food is {}.",
     lambda rng: rng.choice(FOODS)),
    ("My favourite animal is the {}.", "What is my favourite animal?", "Your favourite animal is the {}.",
     lambda rng: rng.choice(ANIMALS)),
    ("My favourite number is {}.", "What is my favourite number?", "Your favourite number is {}.",
     lambda rng: rng.randrange(10000)),
    ("My dog is called {}.", "What is my dog called?", "Your dog is called {}.", given_name),
    ("My cat is called {}.", "What is my cat called?", "Your cat is called {}.", given_name),
    ("My sister is called {}.", "What is my sister called?", "Your sister is called {}.", given_name),
    ("My brother is called {}.", "What is my brother called?", "Your brother is called {}.", given_name),
    ("I work as {}.", "What is my job?", "You work as {}.", lambda rng: article(rng.choice(JOBS))),
    ("I am {} years old.", "How old am I?", "You are {} years old.", lambda rng: rng.randrange(5, 100)),
    ("My birthday is on {}.", "When is my birthday?", "Your birthday is on {}.",
     lambda rng: f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}"),
    ("My appointment is on {}.", "When is my appointment?", "Your appointment is on {}.", lambda rng: rng.choice(DAYS)),
    ("My locker code is {}.", "What is my locker code?", "Your locker code is {}.", code),
    ("The password is {}.", "What is the password?", "The password is {}.", pseudo_word),
    ("The secret word is {}.", "What is the secret word?", "The secret word is {}.",
     lambda rng: pseudo_word(rng) if rng.random() < 0.5 else rng.choice(OBJECTS)),
    ("My room number is {}.", "What is my room number?", "Your room number is {}.", lambda rng: rng.randrange(1, 1000)),
    ("My order number is {}.", "What is my order number?", "Your order number is {}.", code),
    ("The meeting is in room {}.", "Which room is the meeting in?", "The meeting is in room {}.", code),
)  # fmt: skip

_HEADS = (
    "",
    "",
    "Hi! ",
    "Hello. ",
    "Please remember this: ",
    "Remember: ",
    "Just so you know: ",
    "By the way: ",
    "Remember that ",
    "Please remember that ",
    "Please note that ",
    "You should know that ",
)
_TAILS = ("", "", " Please remember that.", " Keep that in mind.")
_QUESTION_HEADS = ("", "", "", "Do you remember? ", "I forgot. ", "Tell me: ", "One more question. ")
_NOTED = "Noted: {}"
UNKNOWN = "You have not told me that."


def _second_person(fact: str) -> str:
    for first, second in (("My ", "your "), ("I am ", "you are "), ("I ", "you "), ("The ", "the ")):
        if fact.startswith(first):
            return second + fact[len(first) :]
    return fact


def _belonging(rng: Random, thing: str) -> tuple[str, str, str]:
    """A fact about a thing of the user's, as (said, question, answer)."""
    value, kind = code(rng), rng.randrange(5)
    if kind == 0:
        name = given_name(rng)
        return f"My {thing} is called {name}.", f"What is my {thing} called?", f"Your {thing} is called {name}."
    if kind == 1:
        where = rng.choice(("in the ", "under the ", "behind the ", "next to the ")) + rng.choice(OBJECTS)
        return f"My {thing} is {where}.", f"Where is my {thing}?", f"Your {thing} is {where}."
    if kind == 2:
        fact = f"The code of the {thing} is {value}."
        return fact, f"What is the code of the {thing}?", fact
    if kind == 3:
        colour = rng.choice(COLOURS)
        return f"My {thing} is {colour}.", f"What colour is my {thing}?", f"Your {thing} is {colour}."
    return f"My {thing} number is {value}.", f"What is my {thing} number?", f"Your {thing} number is {value}."


def _draw(rng: Random, size: int) -> list[tuple[str, str, str]]:
    """`size` different facts as (said, question, answer)."""
    drawn = []
    things = rng.sample(OBJECTS, size)
    for (said, question, answer, draw), thing in zip(rng.sample(_FACTS, size), things, strict=True):
        if rng.random() < 0.35:
            drawn.append(_belonging(rng, thing))
        else:
            value = draw(rng)
            drawn.append((said.format(value), question, answer.format(value)))
    return drawn


def recall(rng: Random) -> tuple[list[Exercise], list[Exercise]]:
    """The turns that state facts, and the turns that ask for one or two of them, or for one that nobody has stated."""
    size = rng.choice((1, 1, 2, 3, 4))
    facts = _draw(rng, size + 1)
    unsaid = facts.pop()
    turns = []
    for said, _, _ in facts:
        head = rng.choice(_HEADS)
        text = said[0].lower() + said[1:] if head.endswith("that ") and not said.startswith("I ") else said
        question = head + text + rng.choice(_TAILS)
        turns.append(exchange("note", "", question, _NOTED.format(_second_person(said)), "The user tells me a fact."))
    asked = []
    for _, question, answer in rng.sample(facts, rng.randrange(1, min(3, size) + 1)):
        asked.append(
            exchange("recall", answer, rng.choice(_QUESTION_HEADS) + question, answer, "The user has told me before.")
        )
    if rng.random() < 0.12:
        question = rng.choice(_QUESTION_HEADS) + unsaid[1]
        asked.insert(
            rng.randrange(len(asked) + 1), exchange("unknown", "", question, UNKNOWN, "The user has not told me.")
        )
    return turns, asked


def combined(rng: Random) -> Exercise:
    """Facts stated and asked for in one message."""
    facts = _draw(rng, rng.choice((1, 2, 3)))
    _, question, answer = rng.choice(facts)
    text = " ".join(said for said, _, _ in facts)
    return exchange("recall", answer, f"{text} {question}", answer, "The message says it.")


_SHOP_FACTS = (
    ("The shop opens at {}.", "When does the shop open?", "The shop opens at {}.",
     lambda rng: f"{rng.randrange(6, 12)}:00"),
    ("The shop closes at {}.", "When does the shop close?", "The shop closes at {}.",
     lambda rng: f"{rng.randrange(13, 24)}:00"),
    ("The owner is {}.", "Who is the owner?", "The owner is {}.", given_name),
    ("The shop is in {}.", "Where is the shop?", "The shop is in {}.", place),
    ("Items can be returned within {} days.", "How long can I return an item?", "Items can be returned within {} days.",
     lambda rng: rng.randrange(3, 100)),
    ("Delivery costs {} dollars.", "How much is delivery?", "Delivery costs {} dollars.", lambda rng: rng.randrange(1,
     50)),
    ("The phone number is 555-{}.", "What is your phone number?", "The phone number is 555-{}.",
     lambda rng: rng.randrange(1000, 10000)),
    ("The discount code is {}.", "Is there a discount code?", "The discount code is {}.", code),
    ("The shop is closed on {}.", "On which day are you closed?", "The shop is closed on {}.",
     lambda rng: rng.choice(DAYS)),
    ("We sell {}.", "What do you sell?", "We sell {}.", lambda rng: f"{rng.choice(FOODS)} and {rng.choice(OBJECTS)}"),
)  # fmt: skip


def shop(rng: Random) -> tuple[str, list[Exercise]]:
    """A system prompt full of facts, and questions about some of them."""
    drawn = []
    for said, question, answer, draw in rng.sample(_SHOP_FACTS, rng.randrange(3, len(_SHOP_FACTS) + 1)):
        value = draw(rng)
        drawn.append((said.format(value), question, answer.format(value)))
    name = pseudo_word(rng).capitalize()
    system = f"You are the assistant of the shop {name}. " + " ".join(said for said, _, _ in drawn)
    asked = rng.sample(drawn, rng.randrange(1, min(4, len(drawn)) + 1))
    return system, [
        exchange("system_recall", answer, question, answer, "The system message says it.")
        for _, question, answer in asked
    ]
