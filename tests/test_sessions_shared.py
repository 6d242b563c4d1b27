"""Sessions in a real Redis: any gateway goes on with them, and a deletion leaves no trace there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model_worker.protocol import PrefixAction
from tests.gateway_kit import byte_ids_of
from tests.redis_kit import running_server
from tests.session_kit import TURN_END, assistant, talking, user, wait_for

SECRET = "the plum jar code"


def needles() -> list[bytes]:
    """The text, and its ids as they are kept."""
    ids = byte_ids_of(SECRET)
    return [SECRET.encode(), b"".join(token_id.to_bytes(4, "little") for token_id in ids)]


def stored_in(client: Any) -> bytes:
    """All keys and hashes that the server holds."""
    keys = client.keys("*")
    hashes = [client.hgetall(key) for key in keys if client.type(key) == b"hash"]
    return b"\0".join([*keys, *(part for held in hashes for pair in held.items() for part in pair)])


def test_another_gateway_goes_on_with_the_very_ids(tmp_path: Path) -> None:
    with (
        running_server("redis", tmp_path) as server,
        talking("hello", redis_url=server.url) as one,
        talking("fine", redis_url=server.url) as two,
    ):
        one.chat([user("Hi")])
        turn = two.chat([user("Hi"), assistant("hello"), user("More")])
        assert turn.json()["history"] == "exact"
        begun = [*one.prompts[0], *byte_ids_of("hello"), TURN_END]
        assert two.prompts[0][: len(begun)] == begun
        shown = one.client.get("/v1/sessions/s").json()
        assert shown["num_tokens"] == len(two.prompts[0]) + len("fine") + 1
        assert one.client.delete("/v1/sessions/s").is_success
        assert two.client.get("/v1/sessions/s").status_code == 404


def test_a_gateway_that_was_started_again_forgets_nothing(tmp_path: Path) -> None:
    with running_server("redis", tmp_path) as server:
        with talking("hello", redis_url=server.url) as talk:
            talk.chat([user("Hi")])
        with talking(redis_url=server.url) as talk:
            turn = talk.chat([user("Hi"), assistant("hello"), user("More")])
            assert turn.json()["history"] == "exact"


def test_a_deleted_session_is_nowhere_in_redis(tmp_path: Path) -> None:
    with (
        running_server("redis", tmp_path) as server,
        talking(SECRET, redis_url=server.url) as talk,
        server.client() as client,
    ):
        talk.chat([user("Hi")])
        text, ids = needles()
        held = stored_in(client)
        assert ids in held  # the search would find it
        assert text not in held
        talk.client.delete("/v1/sessions/s")
        assert ids not in stored_in(client)
        wait_for(lambda: talk.commands(PrefixAction.DROP))


def test_turns_go_on_while_redis_is_away_and_are_there_afterwards(tmp_path: Path) -> None:
    with (
        running_server("redis", tmp_path) as server,
        talking("hello", "one", "two", redis_url=server.url) as talk,
    ):
        talk.chat([user("Hi")])
        server.kill()
        told = [user("Hi"), assistant("hello"), user("a")]
        assert talk.chat(told).status_code == 200
        told += [assistant("one"), user("b")]
        assert talk.chat(told).json()["history"] == "exact"  # kept in this gateway meanwhile
        assert talk.client.get("/v1/sessions").status_code == 503
