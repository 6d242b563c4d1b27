"""The table of request fields is whole: what acts is parsed, and nothing else passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.dialects.message_fields import COUNTED_FIELDS, MESSAGE_FIELDS
from service.dialects.response_fields import RESPONSE_FIELDS
from service.errors import InvalidRequest
from service.request_fields import (
    REQUEST_FIELDS,
    Endpoint,
    FieldKind,
    FieldTable,
    acting_fields,
    keep_acting,
)
from service.schemas.chat import ChatRequest
from service.schemas.completion import CompletionRequest
from service.schemas.messages import MessagesRequest
from service.schemas.responses import ResponsesRequest

API_PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def test_the_fields_that_act_are_the_fields_that_are_parsed() -> None:
    assert acting_fields(Endpoint.CHAT) == set(ChatRequest.__struct_fields__)
    parsed = set(CompletionRequest.__struct_fields__) - {"prompts"} | {"prompt"}
    assert acting_fields(Endpoint.COMPLETIONS) == parsed


def test_the_fields_of_messages_that_act_are_parsed() -> None:
    parsed = set(MessagesRequest.__struct_fields__)
    assert FieldTable(MESSAGE_FIELDS).acting == parsed
    prompt = {"messages", "model", "system", "tools", "tool_choice", "output_config"}
    assert COUNTED_FIELDS.acting == prompt | {"cache_control"}


def test_the_fields_of_responses_that_act_are_parsed() -> None:
    assert FieldTable(RESPONSE_FIELDS).acting == set(ResponsesRequest.__struct_fields__)


def test_no_field_stands_twice() -> None:
    for endpoint in Endpoint:
        names = [row.name for row in REQUEST_FIELDS if endpoint in row.endpoints]
        assert sorted(names) == sorted(set(names))


def test_null_is_absent_for_every_field() -> None:
    for endpoint in Endpoint:
        nulls = {row.name: None for row in REQUEST_FIELDS if endpoint in row.endpoints}
        assert keep_acting(nulls, endpoint) == {}


def test_harmless_fields_take_any_value() -> None:
    for row in REQUEST_FIELDS:
        if row.kind is FieldKind.HARMLESS:
            for endpoint in row.endpoints:
                assert keep_acting({row.name: {"any": [1]}}, endpoint) == {}


def test_inert_values_of_refused_fields_pass_and_others_do_not() -> None:
    for row in REQUEST_FIELDS:
        if row.kind is not FieldKind.REFUSED:
            continue
        for endpoint in row.endpoints:
            for value in row.inert:
                assert keep_acting({row.name: value}, endpoint) == {}
            with pytest.raises(InvalidRequest) as failure:
                keep_acting({row.name: "something else"}, endpoint)
            assert failure.value.param == row.name


@pytest.mark.parametrize("value", [True, 1.0, "1", 2, 0])
def test_inert_values_are_compared_with_their_type(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        keep_acting({"best_of": value}, Endpoint.CHAT)


def test_an_unknown_field_is_named_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="Did you mean 'temperature'") as failure:
        keep_acting({"temprature": 1}, Endpoint.CHAT)
    assert (failure.value.param, failure.value.code) == ("temprature", "unknown_parameter")


def test_a_field_of_the_other_endpoint_is_not_known() -> None:
    with pytest.raises(InvalidRequest):
        keep_acting({"prompt": "x"}, Endpoint.CHAT)


def test_every_field_is_documented() -> None:
    page = API_PAGE.read_text()
    assert [row.name for row in REQUEST_FIELDS if f"`{row.name}`" not in page] == []
