r"""What the validation of structured output generates by: schemas, patterns and grammars, each with its own judge.

Judges are independent of the automata: jsonschema for schemas, the `regex` package for patterns (its classes are those
of UTS #18, as the automata's are; `re` leaves combining marks out of \w), lark's Earley parser for grammars, which are
given to it in its own spelling.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import lark
import regex
from jsonschema.validators import validator_for

from penstock.protocol.messages import Grammar

SCHEMAS = Path(__file__).with_name("schemas")
SMALL = 80  # schemas that are made by chance, besides those of the folder

REGEXES = (
    "[a-z]{3,8}", "[A-Z][a-z]+( [A-Z][a-z]+){0,2}", r"\d{4}-\d{2}-\d{2}", r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
    "(yes|no|maybe)", r"[a-z0-9]+@[a-z]+\.(com|org|net)", r"\+?[0-9]{6,14}", "#[0-9a-fA-F]{6}", "(a|b)*abb",
    "(ab|cd|ef){2,6}", r"-?(0|[1-9]\d*)(\.\d+)?", "[01]{8}", r"v?\d+\.\d+\.\d+", "(foo|bar)(baz)?", "x{2,5}y?z*",
    "[^aeiou\\s]{4,9}", r"https?://[a-z]+(\.[a-z]+)+(/[a-z0-9_-]*)*", r"\w{1,12}", r"[a-zA-Z_]\w{0,15}",
    r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}", "(Mon|Tue|Wed|Thu|Fri|Sat|Sun)", "([01][0-9]|2[0-3]):[0-5][0-9]",
    "[A-Z]{2}[0-9]{2}( [0-9]{4}){3}", "a?b?c?d?e?f", r"(?:red|green|blue)(?:, (?:red|green|blue))*",
    r"\$[0-9]{1,3}(,[0-9]{3})*\.[0-9]{2}", "[a-f0-9]{8}-[a-f0-9]{4}", r"(?i)hello( world)?!", "([a-z])([0-9])([A-Z])",
    r"\[(\d+(, \d+)*)?\]", r"<b>[a-z ]{1,20}</b>", "[\\t ]{1,3}end", r"key=[a-z]+(&[a-z]+=[0-9]+){1,3}",
    "(0|1(01*0)*1)+", "M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{1,3})", r"\d{1,2}/\d{1,2}/\d{2,4}",
    "[αβγδ]{2,6}", "(é|è|ê){3}", "[一二三四五六七八九十]{1,4}", "(😀|😃){1,3}", "[!-/]{2,5}", r"[^\n]{5,20}",
    r"(.{2}\n){2}",
    r"\"[^\"\\]*\"", r"\s?[a-z]+\s?", "(one|two|three)-(one|two|three)", "[a-z]+[0-9]+[a-z]+",
    r"\*{1,3}[a-z]+\*{1,3}", "(aa|aaa)+b", "[a-c]{1,3}|[x-z]{2}", "(([a-z]{2}):){5}[a-z]{2}",
    r"[+\-*/]( [+\-*/]){0,3}", r"\{[a-z]+\}", "(true|false)( (and|or) (true|false)){0,3}", "[0-9a-z]{32}",
    "(ha){2,8}!", "[A-Za-z0-9+/]{8}={0,2}", r"line [0-9]+: [a-z ]+\.", "q[^u]", "[a-z]{1,4}(-[a-z]{1,4}){3}",
)  # fmt: skip

# In EBNF or Lark, and the same language for lark's parser.
GRAMMARS = (
    ('root ::= "(" root ")" | [xy]{1,3}', 'start: "(" start ")" | /[xy]{1,3}/'),
    ('root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"',
     'start: expr\nexpr: term (("+"|"-") term)*\nterm: /[0-9]+/ | "(" expr ")"'),
    ('root ::= "a" root "b" | "ab"', 'start: "a" start "b" | "ab"'),
    ('root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]{1,3}', 'start: item ("," item)*\nitem: /[a-z]+=[0-9]{1,3}/'),
    ('root ::= "[" (root ("," root)*)? "]"', 'start: "[" (start ("," start)*)? "]"'),
    ('root ::= "yes" | "no" | "perhaps"', 'start: "yes" | "no" | "perhaps"'),
    ('root ::= s\ns ::= "(" s ")" s | "[" s "]" s |', 'start: s\ns: "(" s ")" s | "[" s "]" s |'),
    ('root ::= [a-z]+ "b" "."', 'start: /[a-z]+b\\./'),
    ('root ::= palindrome "!"\npalindrome ::= "a" palindrome "a" | "b" palindrome "b" | "c"',
     'start: p "!"\np: "a" p "a" | "b" p "b" | "c"'),
    ('root ::= "let " name " = " value ";"\nname ::= [a-z] [a-z0-9]{0,5}\nvalue ::= [0-9]+ | name | "{" value "}"',
     'start: "let " name " = " value ";"\nname: /[a-z][a-z0-9]{0,5}/\nvalue: /[0-9]+/ | name | "{" value "}"'),
    ('root ::= line{1,3}\nline ::= "- " [^\\n]{1,20} "\\n"', 'start: line~1..3\nline: "- " /[^\\n]{1,20}/ "\\n"'),
    ('root ::= "<" tag ">" (root | [a-z]{1,5}) "</" tag ">"\ntag ::= "a" | "b"',
     'start: "<" tag ">" (start | /[a-z]{1,5}/) "</" tag ">"\ntag: "a" | "b"'),
    ('start: "SELECT " names " FROM " NAME (" WHERE " NAME " = " NUMBER)?\n'
     'names: NAME (", " NAME)*\n'
     'NAME: /[a-z]{1,6}/\nNUMBER: /[0-9]{1,3}/', None),
    ('start: sum\nsum: product ("+" product)*\nproduct: atom ("*" atom)*\n'
     'atom: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/', None),
    ('start: "{" pair ("; " pair)* "}"\npair: KEY ": " VALUE\nKEY: /[a-z]{1,5}/\nVALUE: /[0-9]{1,4}/', None),
    ('start: (WORD " ")* WORD "."\nWORD: /[a-z]{1,7}/', None),
    ('start: block\nblock: "begin " (stmt | block)* "end "\nstmt: "x" /[0-9]/ "; "', None),
    ('start: "1" | "0" start', None),
    ('start: DATE " " TIME\nDATE: /[0-9]{4}-[01][0-9]-[0-3][0-9]/\nTIME: /[0-2][0-9]:[0-5][0-9]/', None),
    ('start: not_ (" and " not_)*\nnot_: "not " not_ | VAR | "(" start ")"\nVAR: /[pqr]/', None),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One grammar and who says whether an output follows it."""

    name: str
    grammar: Grammar
    judge: jsonschema.protocols.Validator | regex.Pattern[str] | lark.Lark

    def wrong(self, text: str) -> str:
        """Why the text does not follow; empty if it does."""
        if isinstance(self.judge, regex.Pattern):
            return "" if self.judge.fullmatch(text) else "no match"
        try:
            if isinstance(self.judge, lark.Lark):
                self.judge.parse(text)
            else:
                self.judge.validate(json.loads(text))
        except (ValueError, lark.exceptions.LarkError, jsonschema.ValidationError) as error:
            return str(error).splitlines()[0]
        return ""


def cases() -> list[Case]:
    """All of them: more than 300 schemas, 60 patterns, 20 grammars."""
    found = []
    for path in sorted(SCHEMAS.glob("*.json")):
        found += [schema_case(entry["name"], entry["schema"]) for entry in json.loads(path.read_text())]
    rng = random.Random(1)
    found += [schema_case(f"small/{number}", small(rng, 3)) for number in range(SMALL)]
    for number, pattern in enumerate(REGEXES):
        found.append(Case(f"regex/{number}", Grammar(kind="regex", source=pattern), regex.compile(pattern)))
    for number, (source, theirs) in enumerate(GRAMMARS):
        judge = lark.Lark(theirs or source, parser="earley", lexer="dynamic_complete")
        found.append(Case(f"grammar/{number}", Grammar(kind="grammar", source=source), judge))
    return found


def schema_case(name: str, schema: Any) -> Case:
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    return Case(name, Grammar(kind="json_schema", source=json.dumps(schema)), kind(schema))


def small(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema whose values are short, so that even a model of random weights comes to an end."""
    plain: list[dict[str, Any]] = [
        {"type": "integer", "minimum": rng.randrange(-50, 0), "maximum": rng.randrange(1, 500)},
        {"type": "string", "maxLength": rng.randrange(1, 9)},
        {"type": "string", "pattern": "^[a-z]{1,6}$"},
        {"enum": rng.sample(["red", "green", 3, None, True, 'a"b', 2.5], 3)},
        {"type": "boolean"},
        {"const": rng.choice(["fixed", 7, [1, "x"], {"k": None}])},
        {"type": ["null", "boolean"]},
    ]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(plain)
    match rng.randrange(4):
        case 0:
            low, items = rng.randrange(3), small(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(4)}
        case 1:
            return {"anyOf": [small(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}
        case _:
            names = rng.sample(["id", "name", "when", "kind", "größe", "x-y", "a b"], rng.randrange(1, 5))
            required = [name for name in names if rng.random() < 0.6]
            return {
                "type": "object", "properties": {name: small(rng, depth - 1) for name in names}, "required": required,
                "additionalProperties": False,
            }  # fmt: skip
