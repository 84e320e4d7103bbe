"""Schemas as pydantic writes them ($defs, anyOf with null, defaults, titles), made from models of everyday payloads."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic as pd


class Color(enum.StrEnum):
    RED = "red"
    GREEN = "green"


class Address(pd.BaseModel):
    street: str
    city: str
    postcode: Annotated[str, pd.Field(pattern=r"^[0-9]{5}$", examples=["75001"])] | None = None


class Person(pd.BaseModel):
    name: str
    age: Annotated[int, pd.Field(ge=0, le=150)]
    address: Address | None = None
    aliases: list[str] = []


class Line(pd.BaseModel):
    model_config = pd.ConfigDict(extra="forbid")
    sku: str
    quantity: pd.PositiveInt
    price: pd.NonNegativeFloat


class Order(pd.BaseModel):
    id: Annotated[uuid.UUID, pd.Field(examples=["3f2c7f0e-6b0a-4c58-9a59-0d8d6c9d1a11"])]
    buyer: Person
    lines: Annotated[list[Line], pd.Field(min_length=1)]
    placed: Annotated[datetime.datetime, pd.Field(examples=["2024-05-01T12:00:00Z"])]
    state: Literal["new", "paid", "sent"] = "new"


class Cat(pd.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pd.Field(ge=0, le=9)]


class Dog(pd.BaseModel):
    kind: Literal["dog"]
    color: Color | None = None


class Owner(pd.BaseModel):
    pets: list[Annotated[Cat | Dog, pd.Field(discriminator="kind")]]


class Loose(pd.BaseModel):
    value: int | str | list[float] | dict[str, bool] | None
    pair: tuple[int, str]
    either: Cat | Dog


class Tree(pd.BaseModel):
    label: str
    children: list[Tree] = []


class Branch(pd.BaseModel):
    left: Branch | int
    right: Branch | int


class Settings(pd.BaseModel):
    model_config = pd.ConfigDict(extra="forbid")
    host: str = "localhost"
    port: Annotated[int, pd.Field(gt=0, lt=65536)] = 80
    retries: Annotated[int, pd.Field(multiple_of=2)] = 0
    flags: dict[str, bool] = {}
    mode: Color = Color.RED


class Day(pd.BaseModel):
    date: Annotated[datetime.date, pd.Field(examples=["2024-05-01"])]
    hours: Annotated[float, pd.Field(ge=0, le=24)]


class Sheet(pd.BaseModel):
    owner: Person
    days: Annotated[list[Day], pd.Field(max_length=7)]
    approver: Person | None


class Money(pd.BaseModel):
    amount: Annotated[decimal.Decimal, pd.Field(ge=0, max_digits=8, decimal_places=2)]
    currency: Literal["EUR", "USD"]


class Step(pd.BaseModel):
    explanation: str
    output: str


class Reasoning(pd.BaseModel):
    steps: list[Step]
    final_answer: str


class Tags(pd.BaseModel):
    names: set[Color]


class Labels(pd.BaseModel):
    names: set[str]
    numbers: frozenset[int] = frozenset()
    days: set[Annotated[datetime.date, pd.Field(examples=["2024-05-01", "2024-05-02", "2024-06-01"])]] | None = None
    codes: set[Annotated[str, pd.Field(pattern=r"^[A-Z]{2}$", examples=["FR", "BR", "DE"])]]


MODELS: tuple[type[pd.BaseModel], ...] = (
    *(Address, Person, Line, Order, Cat, Dog, Owner, Loose, Tree, Branch, Settings, Day, Sheet, Step, Reasoning, Tags),
    *(Money, Labels),
)


def pydantic() -> Iterator[dict[str, object]]:
    """The schemas of all models, in both modes where they differ."""
    for model in MODELS:
        validated = model.model_json_schema(mode="validation")
        yield validated
        serialised = model.model_json_schema(mode="serialization")
        if serialised != validated:
            yield serialised
