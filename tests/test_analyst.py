"""Why a request missed: every reason in twenty variants, with the exact field and token."""

from __future__ import annotations

import uuid

import pytest

from model_worker.protocol import EvictedPrefix
from service.diagnostics.explanation import Departed, Kind, Reason
from service.tokenizer import ModelTokenizer
from tests.diagnostics_kit import (
    Asker,
    first_difference,
    lines,
    said,
    system,
    tool,
    user,
)
from tests.gateway_kit import BLOCK_SIZE, make_card, make_tokenizer

VARIANTS = range(20)


def field_start(asker: Asker, text: str, number: int = -1) -> int:
    """The index of the token that ``text`` begins with in a prompt."""
    whole = asker.tokenizer.decode_exactly(asker.ids[number])
    return len(asker.tokenizer.encode(whole[: whole.index(text)], add_special_tokens=False))


# ------------------------------------------------------------ no miss


@pytest.mark.parametrize("seed", VARIANTS)
def test_new_text_behind_a_shared_prefix_is_no_miss(seed: int) -> None:
    asker = Asker()
    asker.ask([system(lines(seed)), user(lines(seed + 100, 2))], answer=lines(seed + 300, 1))
    told = asker.ask([system(lines(seed)), user(lines(seed + 200, 2))])
    assert (told.reason, told.token_index, told.num_lost_tokens) == (Reason.HIT, None, 0)
    again = asker.ask([system(lines(seed)), user(lines(seed + 200, 2))])
    assert again.reason is Reason.HIT


@pytest.mark.parametrize("seed", VARIANTS)
def test_a_prompt_whose_logprobs_are_asked_for(seed: int) -> None:
    asker = Asker()
    asker.ask([user(lines(seed))])
    told = asker.ask([user(lines(seed))], cached=0, is_scored=True)
    assert told.reason is Reason.COMPUTED_WHOLE


# ------------------------------------------------------------ cold, and elsewhere


@pytest.mark.parametrize("seed", VARIANTS)
def test_cold(seed: int) -> None:
    asker = Asker()
    first = asker.ask([system(lines(seed)), user("hello there")])
    other = asker.ask([system(lines(seed + 50)), user("hello there")])
    for told in (first, other):
        assert (told.reason, told.num_lost_tokens, told.compared_with) == (Reason.COLD, 0, "")
        assert told.reason_of_all is None


@pytest.mark.parametrize("seed", VARIANTS)
def test_another_salt(seed: int) -> None:
    asker = Asker()
    asker.ask([system(lines(seed)), user("one")], cache_salt=f"a{seed}")
    told = asker.ask([system(lines(seed)), user("two")], cache_salt=f"b{seed}")
    assert told.reason is Reason.SALT_DIFFERS
    assert (told.token_index, told.num_matched_tokens, told.compared_with) == (0, 0, "r0")
    assert told.num_lost_tokens == first_difference(*asker.ids)
    assert told.field == "template"


@pytest.mark.parametrize("seed", VARIANTS)
def test_another_tenant_is_told_to_operators_alone(seed: int) -> None:
    asker = Asker()
    asker.ask([system(lines(seed)), user("one")], tenant="globex")
    told = asker.ask([system(lines(seed)), user("two")], tenant="acme")
    assert (told.reason, told.for_operator.reason) == (Reason.COLD, Reason.TENANT_DIFFERS)
    assert (told.compared_with, told.num_lost_tokens) == ("", 0)


@pytest.mark.parametrize("seed", VARIANTS)
def test_another_model(seed: int) -> None:
    asker = Asker()
    asker.ask([system(lines(seed)), user("one")], fingerprint="old")
    told = asker.ask([system(lines(seed)), user("two")])
    assert (told.reason, told.token_index, told.compared_with) == (Reason.MODEL_CHANGED, 0, "r0")
    assert told.num_lost_tokens == first_difference(*asker.ids)


@pytest.mark.parametrize("seed", VARIANTS)
def test_a_session_of_another_model(seed: int) -> None:
    asker = Asker()
    told = asker.ask([system(lines(seed)), user("two")], session="s", had_other_model=True)
    assert (told.reason, told.token_index, told.num_lost_tokens) == (Reason.MODEL_CHANGED, 0, 0)


@pytest.mark.parametrize("seed", VARIANTS)
def test_below_one_block(seed: int) -> None:
    asker = Asker()
    text = lines(seed)[:6]
    asker.ask([user(text + "b")], session="s")
    told = asker.ask([user(text + "d")], session="s", cached=0)
    assert told.reason is Reason.BELOW_ONE_BLOCK
    assert told.token_index == first_difference(*asker.ids) < BLOCK_SIZE
    assert told.field == "messages[0].content"
    assert told.num_lost_tokens == 0


# ------------------------------------------------------------ what was there and is not


@pytest.mark.parametrize("seed", VARIANTS)
def test_evicted(seed: int) -> None:
    asker = Asker()
    asker.ask([system(lines(seed)), user("one")])
    tier = ("device", "host", "disk")[seed % 3]
    cause = ("capacity", "tenant_cap", "reset", "lost")[seed % 4]
    cached = (2 + seed % 5) * BLOCK_SIZE
    evicted = EvictedPrefix(num_tokens=3 * BLOCK_SIZE, ago_s=4.0, tier=tier, cause=cause)
    told = asker.ask([system(lines(seed)), user("two")], cached=cached, evicted=evicted)
    assert told.reason is Reason.EVICTED
    assert told.departed == Departed(cause, tier, 1016.0)
    assert (told.token_index, told.field) == (cached, "messages[0].content")
    common = first_difference(*asker.ids) // BLOCK_SIZE * BLOCK_SIZE
    assert told.num_lost_tokens == max(common - cached, 3 * BLOCK_SIZE)


@pytest.mark.parametrize("seed", VARIANTS)
def test_what_the_worker_says_is_enough(seed: int) -> None:
    asker = Asker()
    evicted = EvictedPrefix(num_tokens=70, ago_s=1.0, tier="host", cause="capacity")
    told = asker.ask([system(lines(seed)), user("two")], cached=seed, evicted=evicted)
    assert (told.reason, told.token_index) == (Reason.EVICTED, seed)
    assert (told.num_lost_tokens, told.compared_with) == (70, "")


@pytest.mark.parametrize("seed", VARIANTS)
def test_expired(seed: int) -> None:
    asker = Asker()
    evicted = EvictedPrefix(num_tokens=64, ago_s=2.0, tier="disk", cause="dropped")
    told = asker.ask([system(lines(seed)), user("two")], cached=32, evicted=evicted)
    assert (told.reason, told.token_index) == (Reason.EXPIRED, 32)
    assert (told.departed, told.num_lost_tokens) == (Departed("dropped", "disk", 1008.0), 64)
    assert told.field == "messages[0].content"


@pytest.mark.parametrize("seed", VARIANTS)
def test_lost_with_the_worker_or_with_another(seed: int) -> None:
    asker = Asker()
    messages = [system(lines(seed)), user("one")]
    asker.ask(messages, worker=("w", 1))
    cached = seed % 3 * BLOCK_SIZE
    restarted = asker.ask([messages[0], user("two")], cached=cached, worker=("w", 2))
    expected = first_difference(*asker.ids) // BLOCK_SIZE * BLOCK_SIZE
    assert (restarted.reason, restarted.departed) == (Reason.EVICTED, Departed("restart"))
    assert (restarted.token_index, restarted.num_lost_tokens) == (cached, expected - cached)
    elsewhere = asker.ask([messages[0], user("two")], cached=0, worker=("v", 1))
    assert (elsewhere.reason, elsewhere.departed) == (Reason.OTHER_WORKER, None)


# ------------------------------------------------------------ diverged

CLOCKS = (
    ("2026-11-30 12:03:11", "2026-11-30 12:03:47"),
    ("2026-11-30T12:03:11Z", "2026-12-01T08:00:00Z"),
    ("2026-11-30T12:03:11.123+02:00", "2026-11-30T12:03:12.456+02:00"),
    ("12:03", "12:04"),
    ("12:03:11", "12:03:12"),
    ("9:15 am", "9:16 am"),
    ("11 pm", "12 pm"),
    ("3:05 p.m.", "4:05 p.m."),
    ("November 30, 2026", "December 1, 2026"),
    ("30 November 2026", "1 December 2026"),
    ("Nov 30", "Dec 1"),
    ("Mon, 30 Nov 2026 12:03:11 GMT", "Mon, 30 Nov 2026 12:04:11 GMT"),
    ("30.11.2026", "01.12.2026"),
    ("11/30/2026", "12/01/2026"),
    ("2026/11/30", "2026/12/01"),
    ("Monday", "Tuesday"),
    ("Saturday the 3rd", "Sunday the 4th"),
    ("1764504191", "1764504207"),
    ("1764504191123", "1764504207456"),
    ("2026-11-30", "2026-12-01"),
)
IDS = (
    *(
        (str(uuid.uuid5(uuid.NAMESPACE_URL, f"{n}")), str(uuid.uuid5(uuid.NAMESPACE_URL, f"x{n}")))
        for n in range(5)
    ),
    ("17", "18"),
    ("#104", "#105"),
    ("ticket-18", "ticket-19"),
    ("req_8f3a9c1e", "req_0b7d2f4a"),
    ("8f3a9c1e22", "0b7d2f4a91"),
    ("01HF8X9Z3KQ4W7", "01HF8X9Z4MR5V8"),
    ("a1b2c3d4e5f6", "f6e5d4c3b2a1"),
    ("sess4421abzz", "sess9930quzz"),
    ("0xdeadbe11", "0xdeadbe42"),
    ("user-102938", "user-564738"),
    ("3", "4"),
    ("1000001", "1000002"),
    ("trace-9f86d081884c7d65", "trace-60303ae22b998861"),
    ("build 20117", "build 20118"),
    ("V1StGXR8_Z5jdHi6B", "V2StGXR9_Q5jdHi7C"),
)
EDITS = tuple(
    (f"You serve {one}.", f"You serve {other}.")
    for one, other in zip(
        ["Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi", "Ivan", "Judy"] * 2,
        ["Quinn", "Rupert", "Sybil", "Trent", "Uma", "Victor", "Walter", "Xenia", "Yara", "Zoe"]
        * 2,
        strict=True,
    )
)
assert len(CLOCKS) == len(IDS) == len(EDITS) == 20


@pytest.mark.parametrize("seed", VARIANTS)
@pytest.mark.parametrize(
    ("pairs", "kind"),
    [(CLOCKS, Kind.CLOCK), (IDS, Kind.ID), (EDITS, Kind.EDITED_MESSAGE)],
    ids=["clock", "id", "edited"],
)
def test_a_changing_line_in_the_system_prompt(
    pairs: tuple[tuple[str, str], ...], kind: Kind, seed: int
) -> None:
    head, tail = lines(seed, seed % 3 * 4), lines(seed + 500, 14 - seed % 3 * 4)
    asker = Asker()
    earlier, now = pairs[seed]
    for text in (earlier, now):
        told = asker.ask([system(f"{head}\nNow: {text} it is.\n{tail}"), user("hello there")])
    assert (told.reason, told.kind, told.field) == (Reason.DIVERGED, kind, "messages[0].content")
    assert told.token_index == first_difference(*asker.ids)
    common = first_difference(asker.ids[0][::-1], asker.ids[1][::-1])  # all that follows the line
    assert told.num_lost_tokens == common
    assert told.compared_with == "r0"
    assert told.texts is not None
    changed = first_difference(earlier, now)
    assert f"w: {now[: changed + 1]}"[-16:] in told.texts.before + told.texts.now
    assert f"w: {earlier[: changed + 1]}"[-16:] in told.texts.before + told.texts.earlier
    assert told.suggestion.endswith(f": +{common:,} tokens per request")


@pytest.mark.parametrize("seed", VARIANTS)
def test_tools_in_another_order(seed: int) -> None:
    tools = [tool(f"tool_{name}_{seed}", lines(seed + n, 1)) for n, name in enumerate("abcd")]
    first = seed % 3
    moved = [*tools[:first], tools[first + 1], tools[first], *tools[first + 2 :]]
    asker = Asker()
    for each in (tools, moved):
        told = asker.ask([system(lines(seed)), user("hello there")], each)
    assert (told.reason, told.kind) == (Reason.DIVERGED, Kind.REORDERED_TOOLS)
    assert (told.field, told.token_index) == (f"tools[{first}]", first_difference(*asker.ids))
    assert told.num_lost_tokens >= len(
        asker.tokenizer.encode(lines(seed), add_special_tokens=False)
    )


@pytest.mark.parametrize("seed", VARIANTS)
def test_a_schema_in_another_order(seed: int) -> None:
    one, other = tool("look", lines(seed, 2)), tool("look", lines(seed, 2))
    parameters = other["function"]["parameters"]
    other["function"]["parameters"] = {name: parameters[name] for name in ("properties", "type")}
    asker = Asker()
    for each in (one, other):
        told = asker.ask([system(lines(seed)), user("hello")], [tool("first"), each])
    assert (told.kind, told.field) == (Kind.REORDERED_TOOLS, "tools[1]")
    assert told.token_index == first_difference(*asker.ids)


@pytest.mark.parametrize("seed", VARIANTS)
def test_other_tools(seed: int) -> None:
    tools = [tool(f"tool_{name}") for name in "abc"]
    number = seed % 3
    changed = [*tools[:number], tool(f"tool_{'abc'[number]}", "other words"), *tools[number + 1 :]]
    asker = Asker()
    for each in (tools, changed):
        told = asker.ask([system(lines(seed)), user("hello")], each)
    assert (told.reason, told.kind) == (Reason.DIVERGED, Kind.EDITED_TOOLS)
    assert (told.field, told.token_index) == (f"tools[{number}]", first_difference(*asker.ids))


@pytest.mark.parametrize("seed", VARIANTS)
def test_an_edited_message_of_a_session(seed: int) -> None:
    turns = [system(lines(seed, 2))]
    for number in range(3):
        turns += [user(lines(seed + 10 * number, 2)), said(lines(seed + 10 * number + 5, 2))]
    place = 1 + seed % 4
    asker = Asker()
    asker.ask([*turns, user("and now?")], session="s")
    edited = [*turns]
    edited[place] = {**turns[place], "content": "~changed " + lines(seed + 99, 1)}
    told = asker.ask([*edited, user("and now?")], session="s")
    assert (told.reason, told.kind) == (Reason.DIVERGED, Kind.EDITED_MESSAGE)
    assert told.field == f"messages[{place}].content"
    assert told.token_index == first_difference(*asker.ids) == field_start(asker, "~changed")
    assert told.num_lost_tokens == first_difference(asker.ids[0][::-1], asker.ids[1][::-1])


@pytest.mark.parametrize("seed", VARIANTS)
def test_an_edited_message_of_a_conversation_without_a_session(seed: int) -> None:
    turns = [system(lines(seed, 2)), user(f"At 12:00:{seed:02} I ask: " + lines(seed + 1, 1))]
    turns += [said(lines(seed + 2, 4)), user("go on")]
    asker = Asker()
    asker.ask(turns)
    changed = [*turns]
    changed[1] = user(f"At 13:00:{seed:02} I ask: " + lines(seed + 1, 1))
    told = asker.ask(changed)
    assert (told.reason, told.kind, told.field) == (
        Reason.DIVERGED,
        Kind.CLOCK,
        "messages[1].content",
    )
    assert told.token_index == first_difference(*asker.ids)


@pytest.mark.parametrize("seed", VARIANTS)
def test_a_text_that_changes_in_a_completion(seed: int) -> None:
    asker = Asker()
    words = ["apples", "pears", "plums", "figs", "dates", "limes", "kiwis", "grapes", "mint", "rye"]
    one, other = words[seed % 10], words[(seed + 1) % 10]
    for word in (one, other):
        told = asker.complete(f"All about {word}: {lines(seed)}")
    assert (told.reason, told.kind, told.field) == (
        Reason.DIVERGED,
        Kind.EDITED_PROMPT,
        "prompt",
    )
    assert told.token_index == first_difference(*asker.ids)


FORGETFUL = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ '(earlier) ' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if mood %}{{ '<|im_start|>mood\\n' + mood + '<|im_end|>\\n' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think></think>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def forgetful() -> ModelTokenizer:
    """A model whose template writes an answer otherwise once it is an earlier one."""
    return ModelTokenizer.from_card(make_card(chat_template=FORGETFUL))


@pytest.mark.parametrize("seed", VARIANTS)
def test_a_template_that_writes_earlier_turns_anew(seed: int, forgetful: ModelTokenizer) -> None:
    asker = Asker(forgetful)
    turns = [system(lines(seed, 2)), user(lines(seed + 1, 2)), said(lines(seed + 2, 4))]
    asker.ask([*turns, user("one")], session="s")
    asker.ask([*turns, user("one"), said(lines(seed + 3, 4)), user("two")], session="s")
    asker.traces[-1].outcome = "stop"
    told = asker.ask(
        [*turns, user("one"), said(lines(seed + 3, 4)), user("two")],
        session="s",
        variables={"mood": "brisk"},
    )
    assert told.reason in (Reason.DIVERGED, Reason.HIT)
    one = Asker(forgetful)
    one.ask(turns, session="s")  # the last one is an answer that is gone on with
    told = one.ask([*turns, user("two")], session="s")
    assert (told.reason, told.kind) == (Reason.DIVERGED, Kind.TEMPLATE)
    assert told.token_index == first_difference(*one.ids)
    assert told.num_lost_tokens > 0


# ------------------------------------------------------------ precedence and bounds


def test_what_left_goes_before_what_differs() -> None:
    asker = Asker()
    asker.ask([system("Now: 12:00\n" + lines(1)), user("one")])
    evicted = EvictedPrefix(num_tokens=32, ago_s=1.0, tier="device", cause="capacity")
    told = asker.ask([system("Now: 12:01\n" + lines(1)), user("one")], cached=16, evicted=evicted)
    assert told.reason is Reason.EVICTED


def test_what_is_forgotten_is_compared_with_no_more() -> None:
    asker = Asker()
    asker.ask([system("Now: 12:00\n" + lines(1)), user("one")])
    asker.traces.clear()
    told = asker.ask([system("Now: 12:01\n" + lines(1)), user("one")])
    assert told.reason is Reason.COLD
    assert len(asker.analyst.explanations) == 1


def test_a_request_that_has_not_been_admitted_is_not_explained() -> None:
    asker = Asker()
    asker.ask([user("one")])
    asker.traces[0].first_admission = None
    analyst = Asker().analyst
    analyst.advance(asker.traces)
    assert analyst.explanations == {}


def test_without_a_tokenizer_there_are_reasons_and_no_texts() -> None:
    asker = Asker()
    asker.ask([system(lines(1)), user("one")])
    asker.tokenizer, kept = make_tokenizer(), asker.tokenizer
    assert kept is not None
    told = asker.ask([system(lines(1)), user("two")], cached=0, worker=("w", 2))
    assert told.reason is Reason.EVICTED
