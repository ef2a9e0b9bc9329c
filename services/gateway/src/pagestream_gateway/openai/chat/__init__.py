"""POST /v1/chat/completions: body, route and answer, tools, and answers in parts."""
