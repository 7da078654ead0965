"""The HTTP service: one or more runs behind one address. Needs the extra `serve`.

settings.py   what can be set, and what a public address asks for
protocol.py   what requests and answers look like
problems.py   errors as application/problem+json, without a word of the input
limits.py     what is refused before it is read; time-outs; draining
keys.py       who may ask
batching.py   requests that arrive together are answered together
runs.py       a named run: its predictors, its threads, the versions of its labels
following.py  what changes in a run folder is taken up
service.py    what the endpoints share
predicting, embedding, labels, status, annif: the endpoints
metrics.py    Prometheus
headers.py    the content security policy, request ids
page/         what a person sees
description.py  OpenAPI
app.py        create_app: all of it
server.py     uvicorn, signals, the port
"""
