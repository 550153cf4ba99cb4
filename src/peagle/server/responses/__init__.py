"""`POST /v1/responses`: OpenAI's Responses API, as a translation of chat completions.

| module | what it holds |
|---|---|
| `body` | the request |
| `tools` | its tools as functions, and their names on both sides |
| `conversation` | its items as messages: the request as a chat completion's |
| `items` | what a model says as output items, and the events of each |
| `route` | the response around them |

Nothing is kept between requests: a client sends all items of a conversation each time.
"""
