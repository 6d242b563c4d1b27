"""What the grammars of calls allow, token by token, and that their calls are read."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from service.conversation import Conversation
from service.errors import InvalidRequest
from service.shapes.base import Choice
from service.tokenizer import ModelTokenizer
from service.tools.dialect import DIALECTS, dialect_in
from service.tools.frame import CallFrame, frame_of
from service.tools.grammar import BoundFunction, CallGrammar, arguments_schema
from service.tools.reader import CallReader
from service.tools.support import ToolSupport
from tests import models
from tests.gateway_kit import make_tokenizer
from tests.small_tokenizers import wrapped

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Cork", "Lund"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS = [
    BoundFunction("get_weather", arguments_schema(SCHEMA, is_lenient=False)),
    BoundFunction("clock", arguments_schema({"type": "object", "maxProperties": 0},
                                            is_lenient=True)),
]  # fmt: skip
GOOD = '{"city": "Cork", "days": 3}'
MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")

LLAMA_TEMPLATE = (
    "{{ bos_token }}"
    '{% if tools %}{{ \'Respond in the format {"name": function name, "parameters"\' }}'
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role != 'assistant' %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>assistant' }}"
    "{% if message.content %}{{ '\\n' + message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}{% elif message.tool_calls %}"
    "{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ ', \"id\": \"' + call.id + '\"}' }}{% endfor %}"
    "{{ ']</s>' }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def made() -> ModelTokenizer:
    """The tiny one with further special tokens, which mark calls."""
    built = models.build_tokenizer()
    built.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    return wrapped(built)


@pytest.fixture(scope="module")
def guide(made: ModelTokenizer) -> LLTokenizer:
    return LLTokenizer(made._backend.to_str(), eos_token=models.EOS_TOKEN_ID)


def grammar_of(dialect: str, frame: CallFrame | None = None, *markers: str) -> CallGrammar:
    found = frame or frame_of(DIALECTS[dialect], "", refusing, ["<|im_end|>"])
    ids = {
        text: len(models.build_tokenizer().get_vocab()) + MARKERS.index(text) for text in markers
    }
    return CallGrammar(DIALECTS[dialect], found, ids)


def refusing(conversation: Conversation) -> str:
    raise InvalidRequest("no")


def allows(guide: LLTokenizer, made: ModelTokenizer, lark: str, text: str) -> bool:
    matcher = LLMatcher(guide, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = made.encode(text, add_special_tokens=False).tolist()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(dialect: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    reader, choice = CallReader(DIALECTS[dialect], {"get_weather", "clock"}), Choice()
    for delta in (*reader.push(text, ()), *reader.finish()):
        choice.take(delta)
    return choice.text, [(call.name, call.arguments) for call in choice.calls]


KINDS = [
    ("hermes", ()), ("llama3-json", ("<|python_tag|>",)), ("llama3-json", ()),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")), ("mistral", ()),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "markers"), KINDS)
def test_forced_calls_are_all_that_is_allowed(
    guide: LLTokenizer, made: ModelTokenizer, dialect: str, markers: tuple[str, ...]
) -> None:
    if not markers and dialect == "mistral":
        made = make_tokenizer()  # has no token of that name
        guide = LLTokenizer(made._backend.to_str(), eos_token=models.EOS_TOKEN_ID)
    grammar = grammar_of(dialect, None, *markers)
    good = ("get_weather", GOOD)
    one, two = (grammar.frame.text([good] * count) for count in (1, 2))
    several = grammar.forced(FUNCTIONS, is_parallel=True)
    single = grammar.forced(FUNCTIONS, is_parallel=False)
    assert read(dialect, two) == ("", [good, good])
    assert [allows(guide, made, several, text) for text in (one, two)] == [True, True]
    assert [allows(guide, made, single, text) for text in (one, two)] == [True, False]
    bad = [
        "", "Hello", one + "!", "Hello" + one, one.replace("Cork", "Oslo"), one.replace("3", '"3"'),
        one.replace(": 3", ":3"), one.replace("get_weather", "get_rain"), one[:-1],
        grammar.frame.text([("clock", GOOD)]),
    ]  # fmt: skip
    for text in bad:
        if text != one[:-1] or grammar.frame.last:
            assert not allows(guide, made, several, text), text


@pytest.mark.parametrize(("dialect", "markers"), KINDS[:4])
def test_calls_beside_text_are_good_ones(
    guide: LLTokenizer, made: ModelTokenizer, dialect: str, markers: tuple[str, ...]
) -> None:
    grammar = grammar_of(dialect, None, *markers)
    call = grammar.frame.text([("get_weather", GOOD)])
    lark = grammar.beside_text(FUNCTIONS, is_parallel=True)
    single = grammar.beside_text(FUNCTIONS, is_parallel=False)
    for text in ("", "Hello.", "Hello {", call):
        assert allows(guide, made, lark, text), text
        assert allows(guide, made, single, text), text
    assert not allows(guide, made, lark, call.replace("Cork", "Oslo"))
    assert not allows(guide, made, single, call + call)
    if dialect == "llama3-json":
        assert not allows(guide, made, lark, ' {"a": 1}')
    else:
        assert allows(guide, made, lark, "Let me see.\n" + call)
        assert allows(guide, made, lark, call + call)
        assert not allows(guide, made, lark, "So " + call.replace("Cork", "Oslo"))


def test_an_answer_of_a_schema_or_calls(guide: LLTokenizer, made: ModelTokenizer) -> None:
    grammar = grammar_of("hermes")
    lark = grammar.beside_answer(FUNCTIONS, {"type": "object"}, is_parallel=True)
    call = grammar.frame.text([("get_weather", GOOD)])
    assert [allows(guide, made, lark, text) for text in ('{"a": 1}', call, "Hi", call + "{}")] == [
        True, True, False, False,
    ]  # fmt: skip


def spoken(guide: LLTokenizer, lark: str, dice: random.Random) -> list[int]:
    """What a model says that draws among what is allowed, with a bound on how long."""
    matcher = LLMatcher(guide, LLMatcher.grammar_from_lark(lark), log_level=0)
    masks = np.zeros((1, -(-guide.vocab_size // 32)), dtype=np.uint32)
    said: list[int] = []
    while not matcher.is_stopped():
        matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token != 1]
        if not allowed or (len(said) > 150 and matcher.is_accepting()):
            break
        said.append(dice.choice(allowed))
        assert matcher.consume_token(said[-1])
    assert matcher.is_accepting()
    return said


@pytest.mark.parametrize(("dialect", "markers"), KINDS[:4])
def test_whatever_is_drawn_is_calls(
    guide: LLTokenizer, made: ModelTokenizer, dialect: str, markers: tuple[str, ...]
) -> None:
    grammar = grammar_of(dialect, None, *markers)
    decode = made.decode_keeping(grammar.special_ids.values())
    for seed in range(5):
        forced = grammar.forced(FUNCTIONS, is_parallel=bool(seed % 2))
        text = decode(spoken(guide, forced, random.Random(seed)))
        content, calls = read(dialect, text)
        assert content == ""
        assert calls
        for name, arguments in calls:
            given = json.loads(arguments)
            assert given == {} if name == "clock" else sorted(given) == ["city", "days"]


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "dialect", "frame"),
    [
        (models.TOOL_CHAT_TEMPLATE, "hermes", CallFrame(
            '<tool_call>{"name": "', '", "arguments": ', '}</tool_call><tool_call>{"name": "',
            "}</tool_call>")),
        (QWEN_TEMPLATE, "hermes", CallFrame(
            '<tool_call>\n{"name": "', '", "arguments": ',
            '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>")),
        (LLAMA_TEMPLATE, "llama3-json", CallFrame(
            '{"name": "', '", "parameters": ', '}; {"name": "', "}")),
        (MISTRAL_TEMPLATE, "mistral", CallFrame(
            '[TOOL_CALLS][{"name": "', '", "arguments": ', '}, {"name": "', "}]")),
        (MISTRAL_TEMPLATE.replace("[TOOL_CALLS] [", "[TOOL_CALLS][ARGS]"), "mistral", CallFrame(
            "[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "")),
    ],
)  # fmt: skip
def test_calls_are_framed_as_the_template_frames_them(
    template: str, dialect: str, frame: CallFrame
) -> None:
    made = make_tokenizer(template)
    found = dialect_in(template)
    assert found is DIALECTS[dialect]
    assert frame_of(found, template, made.chat_template.apply, ["<|im_end|>", "</s>"]) == frame


@pytest.mark.parametrize("template", [models.CHAT_TEMPLATE, "<tool_call><function=", ""])
def test_other_templates_show_no_dialect(template: str) -> None:
    assert dialect_in(template) is None


def test_markers_that_are_special_tokens_are_read(made: ModelTokenizer) -> None:
    ids: Mapping[str, int] = made.special_ids
    support = ToolSupport.of(
        "mistral", made.chat_template, ids, made.decode_keeping, ["<|im_end|>"]
    )
    assert support is not None
    assert sorted(support.grammar.special_ids) == ["[ARGS]", "[TOOL_CALLS]"]
    said: Sequence[int] = [
        ids["[TOOL_CALLS]"], *made.encode("f", add_special_tokens=False).tolist(), ids["[ARGS]"],
        *made.encode("{}", add_special_tokens=False).tolist(), ids["<|im_end|>"],
    ]  # fmt: skip
    assert made.decode(said) == "f{}"
    assert support.decode(said) == "[TOOL_CALLS]f[ARGS]{}"


def test_text_keeps_its_other_special_tokens_out(made: ModelTokenizer) -> None:
    any_text: Any = made.decode_keeping(())
    assert any_text == made.decode
