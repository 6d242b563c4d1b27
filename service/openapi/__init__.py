"""The HTTP API as an OpenAPI document, made from the structs that the routes parse and answer."""
