"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, as a translation of chat
completions.

| module | what it holds |
|---|---|
| `body` | the request, and its blocks as messages: the request as a chat completion's |
| `blocks` | what a model says as content blocks, and the events of each |
| `route` | the message around them |
"""
