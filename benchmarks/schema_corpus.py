"""The project's own schemas, in the shapes that people send: `python -m benchmarks.schema_corpus` writes them to
`benchmarks/schemas/FAMILY.json`, each with instances that jsonschema calls valid and others that it calls invalid.

A family is one way of writing schemas (tool arguments, Kubernetes manifests, pydantic's output, ...) applied to
entities of everyday software. Instances are drawn from the schema, and spoiled one step at a time; the validator has
the last word."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.schema_instances import instances

FOLDER = Path(__file__).with_name("schemas")
Schema = dict[str, object]
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"

FIELDS: dict[str, Schema] = {
    "id": {"type": "string", "format": "uuid", "examples": ["3f2c7f0e-6b0a-4c58-9a59-0d8d6c9d1a11"]},
    "name": {"type": "string", "minLength": 1, "maxLength": 80},
    "title": {"type": "string"},
    "email": {"type": "string", "format": "email", "examples": ["ada@example.org"]},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "price": {"type": "number", "minimum": 0},
    "amount": {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.01},
    "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
    "currency": {"type": "string", "enum": ["EUR", "USD", "GBP", "JPY"]},
    "country": {"type": "string", "pattern": "^[A-Z]{2}$", "examples": ["FR", "BR"]},
    "phone": {"type": "string", "pattern": "^\\+?[0-9]{6,14}$", "examples": ["+33123456789"]},
    "created_at": {"type": "string", "format": "date-time", "examples": ["2024-05-01T12:00:00Z"]},
    "due": {"type": "string", "format": "date", "examples": ["2024-05-31"]},
    "active": {"type": "boolean"},
    "status": {"type": "string", "enum": ["draft", "open", "closed"]},
    "priority": {"enum": ["low", "normal", "high", 1, 2, 3]},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 10},
    "scores": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 1},
    "notes": {"type": ["string", "null"]},
    "rating": {"type": "number", "minimum": 0, "maximum": 5},
    "sku": {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$", "examples": ["ABC-1234"]},
    "url": {"type": "string", "format": "uri", "examples": ["https://example.org/a?b=c"]},
    "ip": {"type": "string", "format": "ipv4", "examples": ["10.0.0.7"]},
    "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
    "position": {
        "type": "object",
        "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}, "lon": {"type": "number"}},
        "required": ["lat", "lon"],
    },
    "version": {"type": "string", "pattern": "^(0|[1-9]\\d*)\\.(0|[1-9]\\d*)\\.(0|[1-9]\\d*)$", "examples": ["1.20.3"]},
}  # fmt: skip
ENTITIES: dict[str, tuple[str, ...]] = {
    "user": ("id", "name", "email", "age", "active"),
    "product": ("sku", "title", "price", "currency", "tags"),
    "order": ("id", "status", "amount", "currency", "created_at"),
    "ticket": ("id", "title", "priority", "status", "notes"),
    "event": ("id", "name", "created_at", "position", "metadata"),
    "review": ("rating", "title", "notes", "created_at"),
    "contact": ("name", "email", "phone", "country"),
    "task": ("title", "due", "priority", "tags", "active"),
    "host": ("name", "ip", "version", "metadata"),
    "payment": ("id", "amount", "currency", "status", "notes"),
    "article": ("title", "url", "tags", "created_at", "rating"),
    "device": ("id", "version", "ip", "position", "active"),
    "subscription": ("id", "email", "price", "due", "active"),
    "measurement": ("name", "scores", "created_at", "position"),
    "shipment": ("id", "sku", "quantity", "country", "status"),
}


def fields(entity: str) -> dict[str, Schema]:
    return {name: FIELDS[name] for name in ENTITIES[entity]}


def plain(entity: str, required: int = 2, closed: bool = False) -> Schema:
    """An object with the entity's fields, the first few of them required."""
    out: Schema = {"type": "object", "properties": fields(entity), "required": list(ENTITIES[entity][:required])}
    return {**out, "additionalProperties": False} if closed else out


def tool_calls() -> Iterator[Schema]:
    """Arguments of functions, as strict tools have them."""
    for entity in ENTITIES:
        described = {name: {"description": f"The {name} of the {entity}.", **FIELDS[name]} for name in ENTITIES[entity]}
        yield {"type": "object", "properties": described, "required": list(described), "additionalProperties": False}
    for entity in ("user", "product", "ticket", "host", "order"):
        names = list(ENTITIES[entity])
        condition = {
            "type": "object",
            "properties": {
                "field": {"enum": names},
                "operator": {"enum": ["eq", "ne", "lt", "gt", "in"]},
                "value": {
                    "anyOf": [{"type": "string"}, {"type": "number"}, {"type": "array", "items": {"type": "string"}}]
                },
            },
            "required": ["field", "operator", "value"],
            "additionalProperties": False,
        }
        page = {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}
        query = {"where": {"type": "array", "items": condition}, "limit": page, "order_by": {"enum": [*names, None]}}
        yield {"type": "object", "properties": query, "required": ["where"], "additionalProperties": False}


def api_payloads() -> Iterator[Schema]:
    """Responses and requests of web APIs; objects stay open, as most of them are."""
    for entity in ENTITIES:
        yield plain(entity)
    for entity in ("order", "article", "device", "review"):
        listing = {
            "items": {"type": "array", "items": plain(entity)},
            "next": {"anyOf": [{"type": "string", "format": "uri-reference"}, {"type": "null"}]},
            "total": {"type": "integer", "format": "int64", "minimum": 0},
        }
        yield {"type": "object", "properties": listing, "required": ["items", "total"]}
        problem = {"code": {"type": "integer", "minimum": 400, "maximum": 599}, "detail": {"type": "string"}}
        failed = {
            "type": "object",
            "properties": {"error": {"type": "object", "properties": problem}},
            "required": ["error"],
        }
        made = {"type": "object", "properties": {"data": plain(entity), "error": False}, "required": ["data"]}
        yield {"oneOf": [made, failed]}
        yield {"type": "object", "properties": fields(entity), "minProperties": 1, "additionalProperties": False}


def manifests() -> Iterator[Schema]:
    """Kubernetes resources."""
    label = {"type": "object", "additionalProperties": {"type": "string"}}
    meta = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, "labels": label},
        "required": ["name"],
    }
    meta["properties"]["name"]["examples"] = ["web-1"]  # type: ignore[index]
    port = {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, {"type": "string", "pattern": "^[a-z-]+$"}]}
    port["oneOf"][1]["examples"] = ["http"]  # type: ignore[index]
    variable = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": {"type": "object"}},
        "required": ["name"],
        "not": {"required": ["value", "valueFrom"]},
    }
    amount = {"type": "string", "pattern": "^[0-9]+(m|Mi|Gi)?$", "examples": ["250m", "2Gi"]}
    container = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "image": {"type": "string"},
            "ports": {"type": "array", "items": {"type": "object", "properties": {"containerPort": port}}},
            "env": {"type": "array", "items": variable},
            "resources": {"type": "object", "propertyNames": {"enum": ["limits", "requests"]}, "additionalProperties": {
                "type": "object", "properties": {"cpu": amount, "memory": amount}, "additionalProperties": False}},
        },
        "required": ["name", "image"],
    }  # fmt: skip
    pod = {"type": "object", "properties": {"containers": {"type": "array", "items": container, "minItems": 1}}}
    pod["required"] = ["containers"]
    specs: dict[str, Schema] = {
        "Deployment": {"replicas": {"type": "integer", "minimum": 0}, "template": {"type": "object", "properties": {
            "metadata": meta, "spec": pod}, "required": ["spec"]}},
        "Service": {"ports": {"type": "array", "items": {"type": "object", "properties": {"port": port}, "required": [
            "port"]}, "minItems": 1}, "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}},
        "CronJob": {"schedule": {"type": "string"}, "suspend": {"type": "boolean"}, "jobTemplate": {"type": "object"}},
        "Pod": {"containers": pod["properties"]["containers"], "restartPolicy": {"enum": ["Always", "Never"]}},  # type: ignore[index]
        "Autoscaler": {"minReplicas": {"type": "integer", "minimum": 1}, "maxReplicas": {"type": "integer"}},
        "PersistentVolumeClaim": {"accessModes": {"type": "array", "items": {"enum": [
            "ReadWriteOnce", "ReadOnlyMany"]}, "uniqueItems": True}, "storage": amount},
        "NetworkPolicy": {"podSelector": {"type": "object", "properties": {"matchLabels": label}}},
    }  # fmt: skip
    for kind, spec in specs.items():
        whole = {"apiVersion": {"type": "string"}, "kind": {"const": kind}, "metadata": meta}
        for closed in (True, False):
            body: Schema = {"type": "object", "properties": spec, "required": [next(iter(spec))]}
            body |= {"additionalProperties": False} if closed else {}
            yield {"type": "object", "properties": {**whole, "spec": body}, "required": ["apiVersion", "kind", "spec"]}
    data = {
        "type": "object",
        "patternProperties": {"^[-._a-zA-Z0-9]+$": {"type": "string"}},
        "additionalProperties": False,
    }
    yield {"type": "object", "properties": {"kind": {"const": "ConfigMap"}, "data": data}, "required": ["kind"]}


def pipelines() -> Iterator[Schema]:
    """Files of continuous integration and of compose."""
    label = {"type": "object", "additionalProperties": {"type": "string"}}
    step = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "run": {"type": "string"},
            "uses": {"type": "string"},
            "with": label,
        },
        "oneOf": [{"required": ["run"]}, {"required": ["uses"]}],
        "dependentRequired": {"with": ["uses"]},
        "additionalProperties": False,
    }
    one_or_many = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
    job = {"type": "object", "properties": {"runs-on": one_or_many, "needs": one_or_many, "steps": {
        "type": "array", "items": step}}, "required": ["runs-on", "steps"]}  # fmt: skip
    jobs = {"type": "object", "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": job}, "additionalProperties": False}
    yield {"type": "object", "properties": {"name": {"type": "string"}, "jobs": jobs}, "required": ["jobs"]}
    build = {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"context": {"type": "string"}}}]}
    service = {
        "type": "object",
        "properties": {"image": {"type": "string"}, "build": build, "command": one_or_many, "environment": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}},
                      {"type": "array", "items": {"type": "string"}}]}},
        "anyOf": [{"required": ["image"]}, {"required": ["build"]}],
        "patternProperties": {"^x-": {}},
        "additionalProperties": False,
    }  # fmt: skip
    yield {"$schema": DRAFT_7, "type": "object", "properties": {"services": {
        "type": "object", "additionalProperties": service}}, "required": ["services"]}  # fmt: skip


def forms() -> Iterator[Schema]:
    """Forms in which one answer decides about others: if/then/else, dependencies, formats."""
    for entity, names in ENTITIES.items():
        first, second, last = names[0], names[1], names[-1]
        base = plain(entity, 1)
        yield {"$schema": DRAFT_7, **base, "dependencies": {last: [second]}, "additionalProperties": False}
        kinds = {"kind": {"enum": ["private", "business", "public"]}, **fields(entity)}
        yield {
            "type": "object",
            "properties": {**kinds, "company": {"type": "string"}, "tax_id": {"type": "string"}},
            "required": ["kind", first],
            "if": {"properties": {"kind": {"const": "business"}}, "required": ["kind"]},
            "then": {"required": ["company", "tax_id"]},
            "else": {"properties": {"tax_id": False}},
        }
    for entity in ("user", "order", "contact"):
        states = ("new", "paid", "void")
        rules = [
            {"if": {"properties": {"state": {"const": state}}}, "then": {"required": [name]}}
            for state, name in zip(states, ENTITIES[entity], strict=False)
        ]
        properties = {"state": {"enum": list(states)}, **fields(entity)}
        yield {"type": "object", "properties": properties, "required": ["state"], "allOf": rules}
        yield {
            "$schema": DRAFT_2019,
            "type": "object",
            "properties": {
                **fields(entity),
                "billing": {"type": "string"},
                "card": {"type": "string", "minLength": 12},
            },
            "dependentRequired": {"card": ["billing"]},
            "dependentSchemas": {"billing": {"required": [ENTITIES[entity][0]]}},
        }


def invoices() -> Iterator[Schema]:
    """Documents with line items, totals and parties, through $defs and allOf."""
    for draft, place in ((DRAFT_7, "definitions"), (DRAFT_2020, "$defs")):
        for buyer in ("user", "contact", "subscription"):
            line = {
                "type": "object",
                "properties": {"sku": FIELDS["sku"], "quantity": FIELDS["quantity"], "unit_price": FIELDS["amount"]},
                "required": ["sku", "quantity", "unit_price"],
                "additionalProperties": False,
            }
            head: Schema = {
                "number": {"type": "string", "pattern": "^INV-[0-9]{4,}$", "examples": ["INV-2024001"]},
                "issued": FIELDS["due"],
                "currency": FIELDS["currency"],
                "buyer": {"$ref": f"#/{place}/buyer"},
                "lines": {"type": "array", "items": {"$ref": f"#/{place}/line"}, "minItems": 1, "maxItems": 200},
                "total": {"type": "number", "minimum": 0},
            }
            base = {"$schema": draft, place: {"line": line, "buyer": plain(buyer)}}
            body = {"type": "object", "properties": head, "required": list(head)}
            yield {**base, **body, "additionalProperties": False}
            credit = {"properties": {"reason": {"enum": ["return", "error"]}}, "required": ["reason"]}
            yield {**base, place: {**base[place], "invoice": body}, "allOf": [{"$ref": f"#/{place}/invoice"}, credit]}  # type: ignore[dict-item]
            tax = {"type": "object", "properties": {"rate": {"enum": [0, 0.05, 0.1, 0.2]}}, "required": ["rate"]}
            yield {**base, "type": "object", "properties": {**head, "tax": {"anyOf": [tax, {"type": "null"}]}}}


def unions() -> Iterator[Schema]:
    """oneOf and anyOf, with and without a discriminator, inside one another."""
    names = list(ENTITIES)
    for at in range(len(names)):
        chosen = [names[(at + step) % len(names)] for step in (0, 3, 7)]
        options = []
        for name in chosen:
            body = plain(name, 1, closed=at % 2 == 0)
            body["properties"] = {"type": {"const": name}, **fields(name)}
            body["required"] = ["type", *ENTITIES[name][:1]]
            options.append(body)
        yield {"type": "object", "properties": {"event": {"oneOf": options}}, "required": ["event"]}
        listed = {"$defs": dict(zip(chosen, options, strict=True)), "type": "array", "maxItems": 20}
        yield {**listed, "items": {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in chosen]}}
    # fmt: off
    yield {"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "array", "items": {"oneOf": [
        {"type": "string"}, {"type": "object", "properties": {"ref": {"type": "string"}}, "required": ["ref"]}]}}]}
    # fmt: on
    yield {"oneOf": [{"type": "integer", "maximum": 0}, {"type": "integer", "minimum": 100}, {"const": "auto"}]}
    yield {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 6}]}
    yield {"type": ["string", "integer"], "not": {"enum": ["", "none", 0]}}


def trees() -> Iterator[Schema]:
    """Recursive schemas: files, comments, menus, expressions, JSON itself."""
    for entity in list(ENTITIES)[:8]:
        node = plain(entity, 1)
        node["properties"] = {**fields(entity), "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}
        yield {"$schema": DRAFT_2020, "$defs": {"node": node}, "$ref": "#/$defs/node"}
    number = {"type": "object", "properties": {"op": {"const": "num"}, "value": {"type": "number"}}}
    pair = {
        "type": "object",
        "properties": {"op": {"enum": ["+", "-", "*"]}, "left": {"$ref": "#"}, "right": {"$ref": "#"}},
    }
    unary = {"type": "object", "properties": {"op": {"const": "neg"}, "of": {"$ref": "#"}}}
    shapes = [{**s, "required": list(s["properties"]), "additionalProperties": False} for s in (number, pair, unary)]
    yield {"oneOf": shapes}
    yield {"anyOf": shapes}
    linked = {"type": "object", "properties": {"value": {}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    yield {**linked, "required": ["value", "next"], "additionalProperties": False}
    # fmt: off
    data: Schema = {"anyOf": [{"type": ["null", "boolean", "number", "string"]}, {"type": "array", "items": {
        "$ref": "#/definitions/json"}}, {"type": "object", "additionalProperties": {"$ref": "#/definitions/json"}}]}
    # fmt: on
    yield {"$schema": DRAFT_7, "definitions": {"json": data}, "$ref": "#/definitions/json"}
    file = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer", "minimum": 0}}}
    folder = {"type": "object", "properties": {"name": {"type": "string"}, "entries": {"type": "array", "items": {
        "oneOf": [{"$ref": "#file"}, {"$ref": "#folder"}]}}}}  # fmt: skip
    anchored = {
        "file": {"$anchor": "file", **file, "required": ["name", "size"], "additionalProperties": False},
        "folder": {"$anchor": "folder", **folder, "required": ["name", "entries"], "additionalProperties": False},
    }
    yield {"$schema": DRAFT_2020, "$id": "https://example.org/files.json", "$defs": anchored, "$ref": "#folder"}
    # fmt: off
    strict = {"type": "object", "properties": {"name": {"type": "string"}, "reports": {"type": "array", "items": {
        "$ref": "#/$defs/person", "required": ["manager"]}}, "manager": {"type": "string"}}, "required": ["name"]}
    # fmt: on
    yield {"$schema": DRAFT_2020, "$defs": {"person": strict}, "$ref": "#/$defs/person"}
    yield {"$schema": DRAFT_2020, "$defs": {"person": strict}, "$ref": "#/$defs/person", "unevaluatedProperties": False}


def zod() -> Iterator[Schema]:
    """What zod's converters write: draft 7, closed objects, optional as absent, nullable as anyOf or a type list."""
    for entity, names in ENTITIES.items():
        properties: dict[str, object] = dict(fields(entity))
        properties[names[-1]] = {"anyOf": [FIELDS[names[-1]], {"type": "null"}]}
        properties["kind"] = {"type": "string", "const": entity}
        yield {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": properties,
            "required": ["kind", names[0]],
            "additionalProperties": False,
        }
    record = {"type": "object", "propertyNames": {"enum": ["a", "b", "c"]}, "additionalProperties": {"type": "number"}}
    yield {"$schema": DRAFT_7, **record}
    pair = {"type": "array", "minItems": 2, "maxItems": 2, "items": [{"type": "string"}, {"type": "number"}]}
    yield {"$schema": DRAFT_7, "type": "object", "properties": {"entry": pair}, "additionalProperties": False}
    more = {"type": "array", "items": [{"type": "string"}], "additionalItems": {"type": "boolean"}, "minItems": 1}
    yield {"$schema": DRAFT_7, "type": "object", "properties": {"row": more}, "additionalProperties": False}


def openapi() -> Iterator[Schema]:
    """Components of OpenAPI documents: references into components, allOf inheritance, nullable, discriminators."""
    names = list(ENTITIES)
    for at, entity in enumerate(names):
        other = names[(at + 4) % len(names)]
        base: Schema = {
            "type": "object",
            "properties": {"kind": {"type": "string"}, "id": FIELDS["id"]},
            "required": ["kind"],
        }
        own = {"type": "object", "properties": {"kind": {"enum": [entity]}, **fields(entity)}}
        child = {"allOf": [{"$ref": "#/components/schemas/Base"}, own]}
        linked = plain(other)
        linked["properties"] = {**fields(other), "comment": {"type": "string", "nullable": True, "example": "x"}}
        parts = {"Base": {**base, "discriminator": {"propertyName": "kind"}}, "Child": child, "Other": linked}
        root = {"type": "object", "properties": {"main": {"$ref": "#/components/schemas/Child"}, "others": {
            "type": "array", "items": {"$ref": "#/components/schemas/Other"}}}, "required": ["main"]}  # fmt: skip
        yield {"components": {"schemas": parts}, **root}


def rarer() -> Iterator[Schema]:
    """Keywords that few schemas have, where an exact form exists and where none does."""
    colors = {"enum": ["red", "green", "blue"]}
    yield {"type": "array", "items": colors, "uniqueItems": True}
    yield {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1}
    yield {"type": "array", "items": {"enum": list("abcdefghij")}, "uniqueItems": True, "maxItems": 2}
    yield {"type": "array", "items": {"type": "string"}, "contains": {"const": "admin"}, "maxItems": 4}
    yield {"type": "array", "items": {"type": "integer"}, "contains": {"type": "integer"}, "minContains": 2}
    yield {
        "type": "object",
        "properties": fields("user"),
        "minProperties": 2,
        "maxProperties": 4,
        "additionalProperties": False,
    }
    yield {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3}
    yield {"type": "object", "propertyNames": {"pattern": "^[a-z_]{1,12}$"}, "additionalProperties": {"type": "number"}}
    yield {"type": "string", "pattern": "^(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9]{8,20}$", "examples": ["Abcdefg1"]}
    yield {"type": "string", "pattern": "^(?!admin$)[a-z]{3,12}$", "examples": ["ada"]}
    yield {"type": "string", "not": {"pattern": "^tmp-"}, "maxLength": 20}
    yield {"type": "string", "pattern": '^[^"<>|]+$', "examples": ["report.txt"]}
    yield {"type": "integer", "multipleOf": 5, "minimum": -20, "exclusiveMaximum": 100}
    yield {"type": "integer", "not": {"minimum": 10, "maximum": 20}}
    yield {"not": {"type": ["object", "array"]}}
    yield {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^x-": {"type": "string"}}, "type": "object"}
    yield {"type": "array", "prefixItems": [{"const": "v1"}, {"type": "integer"}], "items": False, "minItems": 2}
    yield {"type": "object", "properties": fields("task"), "anyOf": [{"required": ["title"]}, {"required": ["due"]}]}
    merged = {"allOf": [plain("user"), {"properties": {"role": {"enum": ["admin", "guest"]}}, "required": ["role"]}]}
    yield {**merged, "unevaluatedProperties": False}
    yield {"const": {"version": 1, "items": [1, "two", None]}}
    yield {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    yield {
        "type": "array",
        "items": {"type": "object"},
        "contains": {"type": "object", "required": ["main"]},
        "minItems": 1,
    }


FAMILIES: dict[str, Callable[[], Iterator[Schema]]] = {
    "tool_calls": tool_calls,
    "api_payloads": api_payloads,
    "manifests": manifests,
    "pipelines": pipelines,
    "forms": forms,
    "invoices": invoices,
    "unions": unions,
    "trees": trees,
    "zod": zod,
    "openapi": openapi,
    "rarer": rarer,
}


def main() -> None:
    from benchmarks.schema_models import pydantic

    FOLDER.mkdir(exist_ok=True)
    for family, schemas in {**FAMILIES, "pydantic": pydantic}.items():
        cases = []
        for number, schema in enumerate(schemas()):
            valid, invalid = instances(schema, f"{family}/{number}")
            cases.append({"name": f"{family}/{number}", "schema": schema, "valid": valid, "invalid": invalid})
            print(f"{family}/{number}: {len(valid)} valid, {len(invalid)} invalid")
        text = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
        (FOLDER / f"{family}.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
