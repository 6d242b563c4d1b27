"""JSON schemas at random, from a seed: of every kind that a grammar can hold a model to.

Owns the generator. What it makes can be satisfied, and by an answer of bounded length.
"""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "age", "the city", "tags", "is_open", "größe", 'quo"te', "x", "id-1", "list")
_STRINGS = ("red", "green", "", "a b", "naïve", 'say "no"', "back\\slash", "tab\there", "日本")
_PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^[a-f0-9]{1,8}$", "^\\d{2}:\\d{2}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(seed: int, max_depth: int = 3) -> Schema:
    """An object or an array at the top, up to ``max_depth`` levels below it."""
    random = Random(seed)
    maker = _Maker(random)
    top = random.choice((maker.object, maker.object, maker.array))
    schema = top(max_depth)
    if maker.definitions:
        schema["$defs"] = maker.definitions
    return schema


class _Maker:
    def __init__(self, random: Random) -> None:
        self._random = random
        self.definitions: dict[str, Schema] = {}

    def any(self, depth: int) -> Schema:
        leaves = (self.string, self.text, self.integer, self.number, self.boolean, self.null,
                  self.constant, self.enum, self.nullable)  # fmt: skip
        branches = (self.object, self.array, self.any_of, self.reference, self.tuple)
        makers = leaves if depth == 0 else (*leaves, *branches, *branches)
        return self._random.choice(makers)(max(depth - 1, 0))

    def string(self, depth: int) -> Schema:
        low = self._random.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randrange(6)}

    def text(self, depth: int) -> Schema:
        if self._random.random() < 0.5:
            return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
        return {"type": "string", "format": self._random.choice(_FORMATS)}

    def integer(self, depth: int) -> Schema:
        low = self._random.randrange(-500, 500)
        if self._random.random() < 0.3:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 40}
        return {"type": "integer", "minimum": low, "maximum": low + self._random.randrange(2000)}

    def number(self, depth: int) -> Schema:
        low = round(self._random.uniform(-9, 9), 2)
        return {"type": "number", "minimum": low, "maximum": low + 2.5}

    def boolean(self, depth: int) -> Schema:
        return {"type": "boolean"}

    def null(self, depth: int) -> Schema:
        return {"type": "null"}

    def nullable(self, depth: int) -> Schema:
        return {"type": ["boolean", "null"]}

    def constant(self, depth: int) -> Schema:
        values = (*_STRINGS, 7, -2.5, True, None, [1, "a"], {"k": "v"})
        return {"const": self._random.choice(values)}

    def enum(self, depth: int) -> Schema:
        return {"enum": self._random.sample((*_STRINGS, 1, 2.5, None, False), k=3)}

    def object(self, depth: int) -> Schema:
        names = self._random.sample(_WORDS, k=self._random.randrange(1, 5))
        return {
            "type": "object",
            "properties": {name: self.any(depth) for name in names},
            "required": [name for name in names if self._random.random() < 0.7],
            "additionalProperties": False,
        }

    def array(self, depth: int) -> Schema:
        low = self._random.randrange(3)
        most = low + self._random.randrange(3)
        return {"type": "array", "items": self.any(depth), "minItems": low, "maxItems": most}

    def tuple(self, depth: int) -> Schema:
        parts = [self.any(depth) for _ in range(self._random.randrange(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth) for _ in range(self._random.randrange(2, 4))]}

    def reference(self, depth: int) -> Schema:
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}  # so that what is made below it has another name
        self.definitions[name] = self.any(depth)
        return {"$ref": f"#/$defs/{name}"}
