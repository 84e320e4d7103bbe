"""Sums and differences up to four digits, small products, comparisons, word problems."""

from random import Random

from benchmarks.demo_model.conversation import Exercise, exchange
from benchmarks.demo_model.lexicon import FOODS, OBJECTS, given_name, plural

TOO_HARD = "I can only add and subtract numbers of up to four digits."

# A phrasing decides the form of its answer, so that every question has exactly one right answer.
_FULL = "{a} {op} {b} = {c}"
_WITH_A_POINT = (
    "What is {q}?", "What's {q}?", "How much is {q}?", "Calculate {q}.", "Compute {q}.", "Please work out {q}.",
    "Solve {q}.",
    "Can you tell me what {q} is?", "Tell me {q}.", "What does {q} give?", "What is the result of {q}?",
    "Evaluate {q}.",
    "I need to know {q}.", "Do you know {q}?", "Find {q}.", "Work out {q} for me.", "What do you get for {q}?",
)  # fmt: skip
_BARE = ("{q}", "{q} = ?", "{q} =?", "{q}?", "Sum: {q}")
_NUMBER_ONLY = (
    "{q} =",
    "{q}=",
    "What is {q}? Answer with the number only.",
    "Give me just the number: {q}",
    "{q}. Only the number.",
)
_SPACINGS = ("{a} {op} {b}", "{a} {op} {b}", "{a} {op} {b}", "{a}{op}{b}")


def _symbolic(rng: Random) -> tuple[str, str]:
    """A question with signs, and the form of its answer."""
    chance = rng.random()
    sum_ = rng.choice(_SPACINGS)
    if chance < 0.6:
        frame = "What is {q}?" if chance < 0.15 else rng.choice(_WITH_A_POINT)
        return frame.replace("{q}", sum_), _FULL + "."
    if chance < 0.8:
        return rng.choice(_BARE).replace("{q}", sum_), _FULL
    return rng.choice(_NUMBER_ONLY).replace("{q}", sum_), "{c}"


_ADDED = (
    ("Add {a} and {b}.", _FULL + "."),
    ("Can you add {a} and {b} for me?", _FULL + "."),
    ("Add {b} to {a}.", _FULL + "."),
    ("Sum up {a} and {b}.", _FULL + "."),
    ("What is {a} plus {b}?", "{a} plus {b} is {c}."),
    ("How much is {a} plus {b}?", "{a} plus {b} is {c}."),
    ("{a} plus {b}", "{a} plus {b} is {c}."),
    ("What is the sum of {a} and {b}?", "The sum of {a} and {b} is {c}."),
    ("How much do {a} and {b} make together?", "{a} and {b} make {c}."),
)
_SUBTRACTED = (
    ("Subtract {b} from {a}.", _FULL + "."),
    ("Can you subtract {b} from {a}?", _FULL + "."),
    ("What is {a} minus {b}?", "{a} minus {b} is {c}."),
    ("How much is {a} minus {b}?", "{a} minus {b} is {c}."),
    ("{a} minus {b}", "{a} minus {b} is {c}."),
    ("What is the difference between {a} and {b}?", "The difference between {a} and {b} is {d}."),
    ("Take {b} away from {a}.", _FULL + "."),
)
_ADDING_STORIES = (
    ("{who} has {a} {things} and buys {b} more. How many {things} does {who} have now?", "{who} now has {c} {things}."),
    ("There are {a} {things} in one box and {b} in another. How many {things} are there?", "There are {c} {things}."),
    ("{who} counted {a} {things} on Monday and {b} on Tuesday. How many in all?", "{who} counted {c} {things} in all."),
)
_SUBTRACTING_STORIES = (
    ("{who} has {a} {things} and gives away {b}. How many {things} are left?", "{who} has {c} {things} left."),
    ("A shop had {a} {things} and sold {b}. How many {things} remain?", "{c} {things} remain."),
    ("Of {a} {things}, {b} are broken. How many {things} are whole?", "{c} {things} are whole."),
)


def operand(rng: Random) -> int:
    """A number of one to four digits, longer ones more often."""
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 4)))


def _key(op: str, a: int, b: int) -> str:
    """Sums of two numbers under 100 are common knowledge and never held out."""
    return "" if a < 100 and b < 100 else f"{a}{op}{b}"


def _thought(op: str, a: int, b: int) -> str:
    return f"The user wants {'the sum of' if op == '+' else 'the difference of'} {a} and {b}."


def addition(rng: Random) -> Exercise:
    """a + b."""
    a, b = operand(rng), operand(rng)
    question, answer = _symbolic(rng) if rng.random() < 0.7 else rng.choice(_ADDED)
    values = {"a": a, "b": b, "c": a + b, "op": "+"}
    return exchange(
        "addition", _key("+", a, b), question.format(**values), answer.format(**values), _thought("+", a, b)
    )


def subtraction(rng: Random) -> Exercise:
    """a - b, negative results too; a "difference between" is never negative."""
    a, b = operand(rng), operand(rng)
    if a < b and rng.random() < 0.5:
        a, b = b, a
    question, answer = _symbolic(rng) if rng.random() < 0.7 else rng.choice(_SUBTRACTED)
    values = {"a": a, "b": b, "c": a - b, "d": abs(a - b), "op": "-"}
    return exchange(
        "subtraction", _key("-", a, b), question.format(**values), answer.format(**values), _thought("-", a, b)
    )


def word_problem(rng: Random) -> Exercise:
    """A one-step story problem."""
    a, b = operand(rng) + 2, operand(rng) + 2
    things, who = plural(rng.choice(FOODS + OBJECTS)), given_name(rng)
    if rng.random() < 0.5:
        op, c, (question, answer) = "+", a + b, rng.choice(_ADDING_STORIES)
    else:
        a, b = max(a, b) + 1, min(a, b)
        op, c, (question, answer) = "-", a - b, rng.choice(_SUBTRACTING_STORIES)
    values = {"a": a, "b": b, "c": c, "who": who, "things": things}
    return exchange(
        "word_problem", _key(op, a, b), question.format(**values), answer.format(**values), _thought(op, a, b)
    )


def small_arithmetic(rng: Random) -> Exercise:
    """Small products, comparisons, parity, neighbours, sums of three small numbers, and what is too hard."""
    kind = rng.randrange(9)
    a, b = operand(rng), operand(rng)
    key, thought = f"{kind}:{a},{b}", f"I look at {a} and {b}."
    if kind == 0:
        a, b = rng.randrange(13), rng.randrange(13)
        sign = rng.choice(("times", "x", "*"))
        return exchange("small", "", f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {a * b}.", f"{a} groups of {b}.")
    if kind == 1:
        word = rng.choice(("larger", "smaller", "bigger"))
        best = min(a, b) if word == "smaller" else max(a, b)
        answer = f"{best} is {word}." if a != b else "They are equal."
        return exchange("small", key, f"Which is {word}, {a} or {b}?", answer, thought)
    if kind == 2:
        word = rng.choice(("larger", "smaller", "bigger"))
        holds = a < b if word == "smaller" else a > b
        answer = f"Yes, {a} is {word} than {b}." if holds else f"No, {a} is not {word} than {b}."
        return exchange("small", key, f"Is {a} {word} than {b}?", answer, thought)
    if kind == 3:
        parity = "even" if a % 2 == 0 else "odd"
        return exchange(
            "small", key, f"Is {a} even or odd?", f"{a} is {parity}.", f"The last digit of {a} is {a % 10}."
        )
    if kind == 4:
        word = rng.choice(("even", "odd"))
        answer = f"Yes, {a} is {word}." if (a % 2 == 0) == (word == "even") else f"No, {a} is not {word}."
        return exchange("small", key, f"Is {a} {word}?", answer, f"The last digit of {a} is {a % 10}.")
    if kind == 5:
        return exchange(
            "small", key, f"What number comes after {a}?", f"{a + 1} comes after {a}.", f"I add one to {a}."
        )
    if kind == 6:
        a += 1
        return exchange(
            "small", key, f"What number comes before {a}?", f"{a - 1} comes before {a}.", f"I take one from {a}."
        )
    if kind == 7:
        numbers = [rng.randrange(1, 100) for _ in range(3)]
        text = rng.choice((" + ", "+")).join(map(str, numbers))
        spaced = " + ".join(map(str, numbers))
        frame = rng.choice(("What is {q}?", "Calculate {q}.", "How much is {q}?")).replace("{q}", text)
        return exchange("small", spaced, frame, f"{spaced} = {sum(numbers)}.", f"The user wants the sum {spaced}.")
    return _too_hard(rng, a + 2, b + 2)


def _too_hard(rng: Random, a: int, b: int) -> Exercise:
    """Numbers that are too long, products that are too large, quotients, roots, shares: said, not guessed."""
    long = rng.randrange(10_000, 10 ** rng.choice((5, 6, 7, 9)))
    pair = [str(long), str(a)] if rng.random() < 0.5 else [str(long), str(rng.randrange(10_000, 10_000_000))]
    rng.shuffle(pair)
    sum_ = rng.choice((
        f"{pair[0]} {rng.choice('+-*')} {pair[1]}", f"{pair[0]}{rng.choice('+-')}{pair[1]}",
        f"{a + 12} {rng.choice('*x')} {b + 12}",
        f"{a + 12} times {b + 12}", f"{a} / {b}", f"{a} divided by {b}", f"{b}% of {a}", f"the square root of {a}",
        f"{a} squared",
    ))  # fmt: skip
    frame = rng.choice(_WITH_A_POINT).replace("{q}", sum_)
    return exchange("refusal", frame, frame, TOO_HARD, "This is beyond what I have learned.")


_STEPWISE = (
    "Think step by step: what is {sum}?", "Think first: what is {sum}?", "What is {sum}? Think step by step.",
    "Please think before you answer. What is {sum}?", "Let's think step by step. What is {sum}?",
)  # fmt: skip


def chain(rng: Random) -> Exercise:
    """Three or four numbers added and subtracted one after the other, thought through in the open."""
    numbers = [rng.randrange(1, 10 ** rng.choice((1, 2, 2, 3))) for _ in range(rng.choice((3, 3, 4)))]
    text, total, steps = str(numbers[0]), numbers[0], []
    for number in numbers[1:]:
        op = "+" if total < number or rng.random() < 0.6 else "-"
        result = total + number if op == "+" else total - number
        steps.append(f"{total} {op} {number} = {result}.")
        text, total = f"{text} {op} {number}", result
    question = rng.choice(_STEPWISE).format(sum=text)
    exercise = exchange("thinking", text, question, f"{text} = {total}.", " ".join(steps))
    return Exercise(exercise.task, exercise.key, exercise.messages, thinks=True)
