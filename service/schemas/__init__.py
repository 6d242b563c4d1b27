"""What request and response bodies look like: parsing, checking and the structs of answers."""
