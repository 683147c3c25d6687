"""`pp serve`: a pipeline behind an HTTP API that OpenAI's clients speak, with a page and metrics.

command.py          the command: a cluster, a socket, a server, until Ctrl-C
server.py           uvicorn on a thread of its own
app.py              create_app(state): which path is served by what
state.py            what all handlers share
answers.py          the handlers of both completion endpoints: a body in, pieces out
exchange.py         the requests of one HTTP request, while they run
openai_errors.py    pure: errors as OpenAI's clients read them
openai_params.py    pure: which parameters there are, and which values of them are refused
openai_ask.py       pure: a request's body -> Ask
openai_reply.py     pure: Ask and pieces -> the response's JSON, whole or as events
body.py             a request's body, bounded before it is read
auth.py             who may ask: key, Host header, other web pages
health.py           whether the pipeline serves
pipeline.py, metrics.py, page/    what people see
"""
