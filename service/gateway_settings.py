"""The rows of the table of settings that the HTTP side has.

Part of service.settings, where the table is put together; it only describes.
"""

from __future__ import annotations

from service import setting_types as kinds
from service.setting import Setting

__all__ = ["GATEWAY_SETTINGS"]

_GATEWAY = ("serve", "gateway")
_BOTH = ("serve", "gateway", "worker")

GATEWAY_SETTINGS = (
    Setting(
        "host",
        kinds.text,
        "127.0.0.1",
        "Address to listen on. Any other than a loopback address needs keys or --allow-no-auth.",
        _GATEWAY,
        "ADDRESS",
    ),
    Setting(
        "port",
        kinds.integer(0, 65535),
        8000,
        "Port to listen on; 0 picks a free one.",
        _GATEWAY,
        "PORT",
    ),
    Setting(
        "api_key_file",
        kinds.path,
        None,
        "File with the keys clients may use, one a line; "
        "blank lines and lines that begin with # are skipped.",
        _GATEWAY,
        "FILE",
    ),
    Setting(
        "admin_key_file",
        kinds.path,
        None,
        "File with the keys that may also reset the cache "
        "and read the dashboard's data, one a line.",
        _GATEWAY,
        "FILE",
    ),
    Setting(
        "tenant_file",
        kinds.path,
        None,
        "TOML file with the tenants, their keys as digests, limits and caps; read again when it "
        "changes.",
        (*_GATEWAY, "tenants"),
        "FILE",
    ),
    Setting(
        "allow_no_auth",
        kinds.boolean,
        False,
        "Listen on a public address without any key.",
        _GATEWAY,
        "",
        is_flag=True,
    ),
    Setting(
        "allowed_host",
        kinds.text,
        (),
        "Further names that a request's Host header may carry, besides loopback names and --host.",
        _GATEWAY,
        "NAME",
        is_list=True,
    ),
    Setting(
        "cors_origin",
        kinds.origin,
        (),
        "Origin whose web pages may use the API from a browser, such as https://app.example; "
        "localhost for pages of this machine, * for all.",
        _GATEWAY,
        "ORIGIN",
        is_list=True,
    ),
    Setting(
        "max_queue",
        kinds.integer(1),
        256,
        "Requests that may wait for their first token; "
        "beyond it the answer is 429 with Retry-After.",
        _GATEWAY,
        "N",
    ),
    Setting(
        "max_body_size",
        kinds.size,
        8 * 2**20,
        "Largest request body.",
        _GATEWAY,
        "SIZE",
        default_text="8MiB",
    ),
    Setting(
        "drain_timeout",
        kinds.number(0.0),
        30.0,
        "Seconds that running requests get to finish once a shutdown was asked for.",
        _BOTH,
        "SECONDS",
    ),
    Setting(
        "session_ttl",
        kinds.number(1.0),
        86_400.0,
        "Seconds without a request after which a session is over, unless it was created with "
        "another time.",
        _GATEWAY,
        "SECONDS",
    ),
    Setting(
        "session_idle_timeout",
        kinds.number(0.0),
        60.0,
        "Seconds without a request after which a session's blocks leave the device.",
        _GATEWAY,
        "SECONDS",
    ),
    Setting(
        "no_store",
        kinds.boolean,
        False,
        "Keep no response of /v1/responses for later, whatever its request says.",
        _GATEWAY,
        "",
        is_flag=True,
    ),
    Setting(
        "no_request_history",
        kinds.boolean,
        False,
        "Keep no hashes of recent prompts, which headstart simulate and the dashboard read, and "
        "nothing of prompts to explain misses with.",
        _GATEWAY,
        "",
        is_flag=True,
    ),
    Setting(
        "otlp_endpoint",
        kinds.http_url,
        None,
        "OpenTelemetry collector that spans of requests go to, such as http://127.0.0.1:4318; for "
        "the extra otel.",
        _GATEWAY,
        "URL",
    ),
    Setting(
        "show_prompt_text",
        kinds.boolean,
        False,
        "Show how prompts begin on the dashboard, to those with an admin key.",
        _GATEWAY,
        "",
        is_flag=True,
    ),
    Setting(
        "worker",
        kinds.endpoint,
        (),
        "Link endpoint of a worker to use, tcp://address:port or ipc:///path.",
        ("gateway",),
        "ENDPOINT",
        is_list=True,
    ),
)
